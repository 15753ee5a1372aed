"""Makes the program of a table plan: parameters, state and optimizer."""

from collections.abc import Callable, Mapping, Sequence, Set
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import optax

from zenjax._src.gradients import value_and_grad as row_gradients
from zenjax._src.planner import table_forms
from zenjax._src.planner.optimizer_facts import Optimizer
from zenjax._src.planner.table_forms import OF_ARRAYS
from zenjax._src.rows import lazy
from zenjax._src.rows import leaf_util
from zenjax._src.sync import sharded_optimizer as owners
from zenjax._src.sync import zen_sync as syncing
from zenjax._src.tables import sharding
from zenjax._src.tables.sharded_table import is_sharded

# Forms that have a transformation of their own. Replicated arrays are updated
# by any of these transformations.
CARRIED = (
  table_forms.SHARDED,
  table_forms.ZERO1,
  table_forms.ROWS,
  table_forms.XLA,
)
MOVES = (
  "`tx` changes rows that have no gradient, or may do so, and an array of all"
  " rows would therefore train differently"
)


class Program(NamedTuple):
  """The parts of a planned training step, for plain `jit`.

  `TablePlan.set_up` makes it for a mesh.

  Attributes:
    params: The parameters, with every table in its planned form.
    opt_state: The state of `tx`.
    tx: The optimizer. Apply its updates with `optax.apply_updates`.
    value_and_grad: Use it in place of `jax.value_and_grad`. Write the loss for
      the whole batch, and index tables as usual.

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
) -> Program:
  """Returns a program with tables in these forms.

  Args:
    form_of: The form of each table.
    axes: Axes of the batch, the slowest first.
    mesh: A mesh with these axes.
    params: The parameters, or a function that makes them.
    tx: The optimizer, as it is written for one device.
    clip_norm: Norm to which gradients are clipped; None for no clipping.

  Raises:
    ValueError: With this optimizer, the forms would train differently.
  """
  make = params if callable(params) else lambda: params
  used = set(form_of.values())
  carriers = [form for form in CARRIED if form in used]
  optimizer = Optimizer(tx, jax.eval_shape(make), clip_norm)
  _check(form_of, carriers, optimizer)
  over = {table_forms.XLA: axes, table_forms.SHARDED: axes[-1]}
  placements = {
    name: NamedSharding(mesh, PartitionSpec(over.get(form_of.get(name, ""))))
    for name, _ in leaf_util.named_leaves(jax.eval_shape(make))
  }
  sharded = {k for k, form in form_of.items() if form == table_forms.SHARDED}
  place = functools.partial(
    _placed, placements=placements, sharded=sharded, axes=axes, mesh=mesh
  )
  init = lambda: place(make())
  placed = _made(init, placements) if callable(params) else init()
  made = _transformation(form_of, axes, mesh, tx, placed, carriers, clip_norm)
  listed = {k for k, form in form_of.items() if form not in OF_ARRAYS}
  both = jax.value_and_grad
  if listed:
    both = functools.partial(
      row_gradients.value_and_grad, tables=lambda name, _: name in listed
    )
  state = made.init(placed)
  return Program(placed, _state_placed(state, placed, mesh), made, both)


def _check(
  form_of: Mapping[str, str], carriers: Sequence[str], optimizer: Optimizer
) -> None:
  moved = [
    name
    for name, form in form_of.items()
    if form in OF_ARRAYS and name not in optimizer.resting
  ]
  why = ""
  # A program of arrays alone is the user's plain program: any `tx` is right.
  if moved and not set(form_of.values()) <= {*OF_ARRAYS}:
    why = f"{MOVES} (table {moved[0]!r})"
  elif len(carriers) > 1 and optimizer.sums_all:
    why = (
      f"it sums over all gradients, and each of the plan's forms {carriers}"
      " would sum over its own tables only"
    )
  if why:
    raise ValueError(
      f"`tx` is not the optimizer that the plan was made for: {why}. Make a new"
      " plan with `zenjax.planner.plan_tables(.., tx=tx)`."
    )


def _placed(
  params: Any,
  placements: Mapping[str, NamedSharding],
  sharded: Set[str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
) -> Any:
  """Returns parameters with every table placed in its form."""
  leaves = [
    leaf if name in sharded else jax.device_put(leaf, placements[name])
    for name, leaf in leaf_util.named_leaves(params)
  ]
  tree = jax.tree.unflatten(jax.tree.structure(params), leaves)
  if not sharded:
    return tree
  return sharding.shard_leaves(
    tree,
    mesh,
    axes[-1],
    tables=lambda name, _: name in sharded,
    replicas=axes[:-1] or None,
  )


def _made(
  init: Callable[[], Any], placements: Mapping[str, NamedSharding]
) -> Any:
  """Runs `init` in `jit`, so that no device has all rows of a sharded table."""
  types = jax.eval_shape(init)
  placed = [
    x.with_value(placements[name]) if is_sharded(x) else placements[name]
    for name, x in leaf_util.named_leaves(types, is_sharded)
  ]
  structure = jax.tree.structure(types, is_leaf=is_sharded)
  return jax.jit(init, out_shardings=structure.unflatten(placed))()


def _transformation(
  form_of: Mapping[str, str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
  tx: optax.GradientTransformation,
  params: Any,
  carriers: Sequence[str],
  clip_norm: float | None,
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that updates all parameters."""
  in_form = lambda form: lambda name, _: form_of.get(name) == form
  by_owners = functools.partial(
    owners.sharded_optimizer, tx, axes, mesh=mesh, clip_norm=clip_norm
  )
  if clip_norm is not None:
    tx = optax.chain(optax.clip_by_global_norm(clip_norm), tx)
  made = {}
  for form in carriers:
    if form == table_forms.SHARDED:
      made[form] = by_owners()
    elif form == table_forms.ZERO1:
      made[form] = by_owners(sparse=in_form(form))
    elif form == table_forms.ROWS:
      sync = syncing.zen_sync(axes, sparse=in_form(form), mesh=mesh)
      made[form] = optax.chain(sync, lazy.lazy_rows(tx))
    else:
      made[form] = _kept_apart(tx, axes, mesh, in_form(form))
  if not made:
    return optax.with_extra_args_support(tx)
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
