"""Makes the program of a table plan: parameters, state and optimizer."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import optax

from zenjax._src.compress import all_reduce as compressed
from zenjax._src.gradients import value_and_grad as row_gradients
from zenjax._src.planner.optimizer_facts import Optimizer
from zenjax._src.planner.table_forms import OF_ARRAYS
from zenjax._src.planner.table_forms import OF_OWNERS
from zenjax._src.planner.table_forms import REPLICATED
from zenjax._src.planner.table_forms import ROWS
from zenjax._src.planner.table_forms import SHARDED
from zenjax._src.planner.table_forms import XLA
from zenjax._src.planner.table_forms import ZERO1
from zenjax._src.rows import lazy
from zenjax._src.rows import leaf_util
from zenjax._src.sync import sharded_optimizer as owners
from zenjax._src.sync import zen_sync as syncing
from zenjax._src.sync.plans import Plan
from zenjax._src.tables import sharding
from zenjax._src.tables.sharded_table import is_sharded
from zenjax._src.training import placement

# The transformation of parameters that are not tables, if they are compressed.
_COMPRESSED = "compressed"

# Why some forms are not possible.
MOVES = (
  "`tx` may change rows that have no gradient, so an array of all rows would"
  " train differently"
)
SUMS = (
  "`tx` sums over all rows, but each device would see only some of them. To"
  " clip by a norm, give `clip_norm=`"
)
BY_XLA = (
  "with `allow` the step runs inside `zenjax.data_parallel`, where XLA neither"
  " places tables nor sums their gradients"
)
COPIES = (
  "with `allow` the step runs inside `zenjax.data_parallel`, which takes no"
  " copies of sharded tables along a second axis"
)


class Program(NamedTuple):
  """The parts of a planned training step.

  `TablePlan.set_up` makes it for a mesh. The step runs in plain `jit`, with the
  loss of the whole batch. If the plan may compress gradients, it runs inside
  `zenjax.data_parallel`, with the loss of a device's part.

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
  form_of: Mapping[str, str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
  params: Any,
  tx: optax.GradientTransformation,
  clip_norm: float | None,
  gradients: Plan | None,
) -> Program:
  """Returns a program with tables in these forms.

  Args:
    form_of: The form of each table.
    axes: Axes of the batch, the slowest first.
    mesh: A mesh with these axes.
    params: The parameters, or a function that makes them.
    tx: The optimizer, as it is written for one device.
    clip_norm: Norm to which gradients are clipped; None for no clipping.
    gradients: How other gradients are compressed; None if they are not.

  Raises:
    ValueError: With this optimizer, the forms would train differently.
  """
  types = jax.eval_shape(params) if callable(params) else params
  _check(form_of, Optimizer(tx, types, clip_norm), gradients is not None)
  placed = _placed(params, form_of, axes, mesh)
  made = _transformation(form_of, axes, mesh, tx, placed, clip_norm, gradients)
  if gradients is None:
    state = _state_placed(made.init(placed), placed, mesh)
  else:
    state = placement.init_state(made, placed, mesh, axes)
  both = jax.value_and_grad
  if not set(form_of.values()) <= set(OF_ARRAYS):
    both = functools.partial(
      row_gradients.value_and_grad,
      tables=lambda name, _: form_of.get(name, REPLICATED) not in OF_ARRAYS,
    )
  return Program(placed, state, made, both)


def _carriers(form_of: Mapping[str, str]) -> list[str]:
  """Returns the forms that have a transformation of their own.

  Replicated arrays are updated by the transformation of any other form.
  """
  order = SHARDED, ZERO1, ROWS, XLA
  return [form for form in order if form in form_of.values()]


def _state_placed(state: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns a state on the mesh, placed like parameters of the same shape."""
  placements = {
    x.shape: x.sharding
    for x in jax.tree.leaves(params, is_leaf=is_sharded)
    if not is_sharded(x)
  }
  everywhere = NamedSharding(mesh, PartitionSpec())

  def place(x: Any) -> Any:
    if getattr(getattr(x, "sharding", None), "mesh", None) == mesh:
      return x
    return jax.device_put(x, placements.get(jnp.shape(x), everywhere))

  return jax.tree.map(place, state)


def _check(
  form_of: Mapping[str, str], optimizer: Optimizer, compresses: bool
) -> None:
  moved = [
    name
    for name, form in form_of.items()
    if form in OF_ARRAYS and name not in optimizer.resting
  ]
  carriers = _carriers(form_of) + compresses * [_COMPRESSED]
  why = ""
  # A program of arrays alone is the user's plain program: any `tx` is right.
  if moved and not set(form_of.values()) <= set(OF_ARRAYS):
    why = f"{MOVES} (table {moved[0]!r})"
  elif optimizer.sums and not {*form_of.values()}.isdisjoint(OF_OWNERS):
    why = SUMS
  elif len(carriers) > 1 and optimizer.sums_all:
    why = (
      f"it sums over all gradients, but each of the forms {carriers} would sum"
      " over its own tables only"
    )
  if why:
    raise ValueError(
      f"`tx` does not fit the plan, because {why}. Make a new plan with"
      " `zenjax.planner.plan_tables(.., tx=tx)`."
    )


def _placed(
  params: Any,
  form_of: Mapping[str, str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
) -> Any:
  """Returns parameters with every table placed in its form."""
  over = {XLA: axes, SHARDED: axes[-1]}
  sharding_of = lambda name: NamedSharding(
    mesh, PartitionSpec(over.get(form_of.get(name, "")))
  )
  by_owners = lambda name, _: form_of.get(name) == SHARDED

  def place(params: Any) -> Any:
    leaves = [
      x if by_owners(name, x) else jax.device_put(x, sharding_of(name))
      for name, x in leaf_util.named_leaves(params)
    ]
    placed = jax.tree.unflatten(jax.tree.structure(params), leaves)
    if SHARDED not in form_of.values():
      return placed
    copies = axes[:-1] or None
    return sharding.shard_leaves(
      placed, mesh, axes[-1], tables=by_owners, replicas=copies
    )

  if not callable(params):
    return place(params)
  # Inside `jit`, no device has all rows of a sharded table. Without
  # `out_shardings`, XLA would replicate the tables that it shards.
  make = lambda: place(params())
  types = jax.eval_shape(make)
  shardings = [
    x.with_value(sharding_of(name)) if is_sharded(x) else sharding_of(name)
    for name, x in leaf_util.named_leaves(types, is_sharded)
  ]
  structure = jax.tree.structure(types, is_leaf=is_sharded)
  return jax.jit(make, out_shardings=structure.unflatten(shardings))()


def _transformation(
  form_of: Mapping[str, str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
  tx: optax.GradientTransformation,
  params: Any,
  clip_norm: float | None,
  gradients: Plan | None,
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that updates all parameters."""
  around = mesh if gradients is None else None
  by_owners = functools.partial(
    owners.sharded_optimizer, tx, axes, mesh=around, clip_norm=clip_norm
  )
  if clip_norm is not None:
    tx = optax.chain(optax.clip_by_global_norm(clip_norm), tx)
  made = {}
  if gradients is not None:
    sync = compressed.all_reduce(gradients, axes)
    made[_COMPRESSED] = optax.chain(sync, tx)
  for form in _carriers(form_of):
    in_form = lambda name, _, form=form: form_of.get(name) == form
    if form == SHARDED:
      made[form] = by_owners()
    elif form == ZERO1:
      made[form] = by_owners(sparse=in_form)
    elif form == ROWS:
      sync = syncing.zen_sync(axes, sparse=in_form, mesh=around)
      made[form] = optax.chain(sync, lazy.lazy_rows(tx))
    else:
      made[form] = _kept_apart(tx, axes, mesh, in_form)
  made = made or {REPLICATED: tx}
  first, *more = made
  if not more:
    return optax.with_extra_args_support(made[first])
  labels = [
    form if (form := form_of.get(name)) in made else first
    for name, _ in leaf_util.named_leaves(params, is_sharded)
  ]
  structure = jax.tree.structure(params, is_leaf=is_sharded)
  return optax.with_extra_args_support(
    optax.partition(made, structure.unflatten(labels))
  )


def _kept_apart(
  tx: optax.GradientTransformation,
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
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
    shapes = {x.shape for name, x in named if chosen(name, x)}
    pin = lambda x: lax.with_sharding_constraint(x, split)
    leaves = [pin(x) if chosen(name, x) else x for name, x in named]
    state = jax.tree.map(lambda x: pin(x) if x.shape in shapes else x, state)
    return jax.tree.unflatten(jax.tree.structure(out), leaves), state

  return optax.GradientTransformationExtraArgs(tx.init, update)
