"""Makes the program of a plan: parameters, state and optimizer."""

from collections.abc import Callable, Container
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import optax

from zenjax._src.compress import all_reduce as compressed
from zenjax._src.core import arguments
from zenjax._src.core.collectives import Axes
from zenjax._src.gradients import value_and_grad as row_gradients
from zenjax._src.planner import same_training
from zenjax._src.planner.optimizer_facts import Optimizer
from zenjax._src.rows import lazy
from zenjax._src.rows import leaf_util
from zenjax._src.sync import plans
from zenjax._src.sync import sharded_optimizer as owners
from zenjax._src.sync import zen_sync as syncing
from zenjax._src.sync.plans import OF_ARRAYS
from zenjax._src.sync.plans import OF_OWNERS
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.plans import REPLICATED
from zenjax._src.sync.plans import ROWS
from zenjax._src.sync.plans import SHARDED
from zenjax._src.sync.plans import XLA
from zenjax._src.sync.plans import ZERO1
from zenjax._src.tables import sharding
from zenjax._src.tables.sharded_table import is_sharded
from zenjax._src.training import placement

# The remedy for parameters that are already sharded.
_UNSHARDED = (
  "Give arrays, or a function that makes them, because `set_up` shards tables"
  " as planned"
)


class Program(NamedTuple):
  """The parts of a planned training step.

  `zenjax.planner.set_up` makes it for a mesh. The step runs in plain `jit`,
  with the loss of the whole batch. If the plan compresses gradients, it runs
  inside `zenjax.data_parallel`, with the loss of a device's part.

  Attributes:
    params: The parameters, with every table in its planned form.
    opt_state: The state of `tx`.
    tx: The optimizer. Apply its updates with `optax.apply_updates`.
    value_and_grad: Use it in place of `jax.value_and_grad`, and index tables as
      usual.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx, params = optax.sgd(0.1), {"t": jnp.zeros(2)}
    >>> zenjax.planner.Program(
    ...   params, tx.init(params), tx, jax.value_and_grad
    ... ).params
    {'t': Array([0., 0.], dtype=float32)}
  """

  params: Any
  opt_state: Any
  tx: optax.GradientTransformationExtraArgs
  value_and_grad: Callable[..., Any]


def set_up(
  plan: Plan, params: Any, tx: optax.GradientTransformation, mesh: Mesh
) -> Program:
  """Places parameters and optimizer state on a mesh, as planned.

  Your step is then plain `jit` over the mesh, with the loss of a whole batch::

      loss, grads = program.value_and_grad(loss_fn)(params, *batch)
      updates, opt_state = program.tx.update(grads, opt_state, params)
      params = optax.apply_updates(params, updates)

  If the plan compresses gradients (`plan.per_device`), put the same three
  lines into a step for `zenjax.data_parallel`, with the loss of one device's
  part of a batch.

  Args:
    plan: What `zenjax.planner.plan` returned for row gradients and `tx`.
    params: The parameters, or a function without arguments that makes them. The
      function runs inside `jit`, so that no device holds all rows of a sharded
      table.
    tx: The optimizer, as you would write it for one device. Sparse forms apply
      it only to touched rows, as `lazy_rows` does.
    mesh: A mesh with the axes of the plan.

  Returns:
    A `Program`: parameters, state, optimizer and `value_and_grad`.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: The plan was made for other parameters, another mesh or another
      release of JAX, it sends arrays by rows, or with this `tx` its forms would
      train differently.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    >>> params, tx = {"table": jnp.ones((8192, 8))}, optax.adagrad(0.1)
    >>> loss = lambda params, ids: jnp.sum(params["table"][ids] ** 2)
    >>> plan = zenjax.planner.plan(
    ...   zenjax.value_and_grad(loss), params, jnp.arange(4), tx=tx,
    ...   topology=zenjax.planner.Topology.network("1 Gbit/s", mesh.size),
    ...   forms={"table": "sharded"},
    ... )
    >>> program = zenjax.planner.set_up(plan, params, tx, mesh)
    >>> program.params["table"].shape, type(program.params["table"]).__name__
    ((8192, 8), 'ShardedTable')
  """
  if not isinstance(plan, Plan):
    raise TypeError(
      f"`plan` must be a zenjax.planner.Plan, got {type(plan).__name__}. Call"
      " `zenjax.planner.plan(.., tx=tx)`."
    )
  arguments.optimizer("tx", tx)
  if not isinstance(mesh, Mesh):
    raise TypeError(
      f"`mesh` must be a jax.sharding.Mesh, got {type(mesh).__name__}."
    )
  for name, x in leaf_util.named_leaves(params):
    if isinstance(x, jax.ShapeDtypeStruct):
      raise TypeError(
        "`params` must be arrays, or a function that makes them, but"
        f" {name!r} is a shape."
      )
  leaf_util.refuse_sharded(params, "params", "set_up", _UNSHARDED)
  sizes = tuple((axis, mesh.shape.get(axis, 0)) for axis, _ in plan.mesh)
  if sizes != plan.mesh:
    raise ValueError(
      f"`mesh` must have the axes of the plan, {dict(plan.mesh)}, got"
      f" {dict(mesh.shape)}. Use such a mesh, or make a plan for this one. To"
      " keep the choices of this plan, give `dataclasses.replace(plan,"
      " mesh=tuple(mesh.shape.items()))`."
    )
  plans.require_version(plan)
  types = jax.eval_shape(params) if _makes(params) else params
  planned = {leaf.name: (leaf.shape, leaf.dtype) for leaf in plan.leaves}
  got = leaf_util.shapes(leaf_util.named_leaves(types))
  plans.require_same(planned, got, "`params` must be as in the plan")
  for leaf in plan.leaves:
    if leaf.look_ups is None and leaf.form != REPLICATED:
      raise ValueError(
        f"`plan` sends the array of {leaf.name!r} by rows, which plain `jit`"
        " cannot do. Make it with `zenjax.value_and_grad(loss)` and `tx=`."
      )
  _check(plan, Optimizer(tx, types, plan.clip_norm))
  axes = tuple(axis for axis, _ in plan.mesh)
  form_of = {leaf.name: leaf.form for leaf in plan.leaves}
  placed = _placed(params, plan, axes, mesh)
  made = _transformation(plan, axes, mesh, tx, placed)
  if plan.per_device:
    state = placement.init_state(made, placed, mesh, axes)
  else:
    state = _state_placed(made.init(placed), placed, mesh)
  both = jax.value_and_grad
  if not set(form_of.values()) <= set(OF_ARRAYS):
    both = functools.partial(
      row_gradients.value_and_grad,
      tables=lambda name, _: form_of[name] not in OF_ARRAYS,
    )
  return Program(placed, state, made, both)


def _makes(params: Any) -> bool:
  """Returns True for functions that make parameters, but not for modules."""
  return callable(params) and jax.tree.leaves(params) == [params]


def _carriers(plan: Plan) -> list[str]:
  """Returns the forms that have a transformation of their own.

  Replicated arrays are updated by that of replicated rows, which also has the
  compressed gradients, or else by the first other one.
  """
  forms = {leaf.form for leaf in plan.leaves}
  if plan.per_device:
    forms.add(ROWS)
  return [form for form in (ROWS, SHARDED, ZERO1, XLA) if form in forms]


def _state_placed(state: Any, params: Any, mesh: Mesh) -> Any:
  """Returns a state on the mesh, each leaf placed like its parameter."""
  like = dict(leaf_util.named_leaves(params, is_sharded))
  everywhere = NamedSharding(mesh, PartitionSpec())

  def place(name: str, x: Any) -> Any:
    if getattr(getattr(x, "sharding", None), "mesh", None) == mesh:
      return x
    of, where = like.get(_parameter_of(name, like)), everywhere
    if of is not None and not is_sharded(of) and of.shape == jnp.shape(x):
      where = of.sharding
    return jax.device_put(x, where)

  return leaf_util.map_named(place, state)


def _parameter_of(name: str, names: Container[str]) -> str:
  """Returns which of the parameters a leaf of a state belongs to.

  Its name ends with the name of the parameter. If the only parameter has no
  name, every leaf is taken to be its own.
  """
  parts = name.split(".")
  ends = (".".join(parts[i:]) for i in range(len(parts)))
  return next((end for end in ends if end in names), leaf_util.ONLY)


def _check(plan: Plan, optimizer: Optimizer) -> None:
  """Raises ValueError if forms would train differently with an optimizer."""
  forms = {leaf.form for leaf in plan.leaves}
  moved = [
    leaf.name
    for leaf in plan.leaves
    if leaf.look_ups is not None
    and leaf.form in OF_ARRAYS
    and leaf.name not in optimizer.resting
  ]
  carriers = _carriers(plan)
  why = ""
  # A program of arrays alone is the user's plain program: any `tx` is right.
  if moved and not forms <= set(OF_ARRAYS):
    why = f"{same_training.MOVES} (table {moved[0]!r})"
  elif optimizer.sums and not forms.isdisjoint(OF_OWNERS):
    why = same_training.SUMS
  elif len(carriers) > 1 and optimizer.sums_all:
    why = (
      f"it sums over all gradients, but each of the forms {carriers} would sum"
      " over its own tables only"
    )
  if why:
    raise ValueError(
      f"`tx` does not fit the plan, because {why}. Make a new plan with"
      " `zenjax.planner.plan(.., tx=tx)`."
    )


def _placed(params: Any, plan: Plan, axes: Axes, mesh: Mesh) -> Any:
  """Returns parameters with every table placed in its form."""
  planned, copies = plan.by_name, axes[:-1]
  spec_of = {XLA: PartitionSpec(axes), SHARDED: PartitionSpec(axes[-1])}
  sharding_of = lambda name: NamedSharding(
    mesh, spec_of.get(planned[name].form, PartitionSpec())
  )
  by_owners = lambda name, _: planned[name].form == SHARDED

  def put(name: str, x: Any) -> Any:
    return x if by_owners(name, x) else jax.device_put(x, sharding_of(name))

  def place(params: Any) -> Any:
    placed = leaf_util.map_named(put, params)
    if all(leaf.form != SHARDED for leaf in plan.leaves):
      return placed
    sharded = sharding.shard_leaves(
      placed, mesh, axes[-1], tables=by_owners, replicas=copies or None
    )
    return leaf_util.map_named(as_planned, sharded, is_sharded)

  def as_planned(name: str, x: Any) -> Any:
    if not is_sharded(x):
      return x
    # Only copies need a second size, for what they exchange.
    sizes = (planned[name].capacities or ())[: 2 if copies else 1]
    wire = planned[name].wire_dtype
    return dataclasses.replace(
      x, sizes=sizes, wire_dtype=wire and jnp.dtype(wire)
    )

  if not _makes(params):
    return place(params)
  # Inside `jit`, no device has all rows of a sharded table. Without
  # `out_shardings`, XLA would replicate the tables that it shards.
  make = lambda: place(params())

  def out_sharding(name: str, x: Any) -> Any:
    over = sharding_of(name)
    return x.with_value(over) if is_sharded(x) else over

  types = jax.eval_shape(make)
  shardings = leaf_util.map_named(out_sharding, types, is_sharded)
  return jax.jit(make, out_shardings=shardings)()


def _transformation(
  plan: Plan,
  axes: Axes,
  mesh: Mesh,
  tx: optax.GradientTransformation,
  params: Any,
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that updates all parameters."""
  form_of = {leaf.name: leaf.form for leaf in plan.leaves}
  by_owners = functools.partial(
    owners.sharded_optimizer, tx, axes, mesh=mesh, clip_norm=plan.clip_norm
  )
  if plan.clip_norm is not None:
    tx = optax.chain(optax.clip_by_global_norm(plan.clip_norm), tx)
  made = {}
  for form in _carriers(plan):
    in_form = lambda name, _, form=form: form_of[name] == form
    if form == ROWS:
      made[form] = _of_replicated(plan, axes, mesh, tx)
    elif form == SHARDED:
      made[form] = by_owners()
    elif form == ZERO1:
      made[form] = by_owners(sparse=in_form)
    else:
      made[form] = _kept_apart(tx, axes, mesh, in_form)
  made = made or {REPLICATED: tx}
  first, *more = made
  if not more:
    return optax.with_extra_args_support(made[first])
  label = lambda name, _: form_of[name] if form_of[name] in made else first
  labels = leaf_util.map_named(label, params, is_sharded)
  return optax.with_extra_args_support(optax.partition(made, labels))


def _of_replicated(
  plan: Plan, axes: Axes, mesh: Mesh, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Returns the transformation of replicated parameters, by rows or whole."""
  leaves = [x for x in plan.leaves if x.form in plans.SYNCED]
  part = dataclasses.replace(plan, leaves=tuple(leaves), clip_norm=None)
  if plan.per_device:
    sync = compressed.all_reduce(part, axes)
  else:
    sync = syncing.zen_sync(axes, plan=part, mesh=mesh)
  by_rows = any(leaf.form == ROWS for leaf in leaves)
  return optax.chain(sync, lazy.lazy_rows(tx) if by_rows else tx)


def _kept_apart(
  tx: optax.GradientTransformation,
  axes: Axes,
  mesh: Mesh,
  chosen: Callable[[str, Any], bool],
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx` with updates and state of chosen leaves sharded by rows.

  Without the constraint, XLA may shard the results of a step differently from
  its arguments.
  """
  tx = optax.with_extra_args_support(tx)
  split = NamedSharding(mesh, PartitionSpec(axes))

  def update(updates, state, params=None, **extra):
    out, state = tx.update(updates, state, params, **extra)
    named = leaf_util.named_leaves(out)
    names = {name for name, _ in named}
    shapes = {name: x.shape for name, x in named if chosen(name, x)}

    def pinned(name: str, x: Any) -> Any:
      is_mine = shapes.get(name) == jnp.shape(x)
      return lax.with_sharding_constraint(x, split) if is_mine else x

    of_state = lambda name, x: pinned(_parameter_of(name, names), x)
    state = leaf_util.map_named(of_state, state)
    return leaf_util.map_named(pinned, out), state

  return optax.GradientTransformationExtraArgs(tx.init, update)
