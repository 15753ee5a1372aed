"""The program of a table plan: parameters, state and optimizer in its forms."""

from collections.abc import Callable, Mapping, Sequence
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

# Forms by the transformation that carries them out; replicated arrays go with
# any.
CARRIED = (
  table_forms.SHARDED,
  table_forms.ZERO1,
  table_forms.ROWS,
  table_forms.XLA,
)
MOVES = (
  "`tx` moves rows without a gradient, or cannot be seen not to, so that an"
  " array of all rows would train otherwise"
)


class Program(NamedTuple):
  """A program as a plan has it, for plain `jit` over a mesh.

  Attributes:
    params: Parameters, every table in its form.
    opt_state: State of `tx`.
    tx: A transformation, for `optax.apply_updates`.
    value_and_grad: Takes a loss that is written for whole tables and for the
      whole batch; in the place of `jax.value_and_grad`.

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
    form_of: Form of each table.
    axes: Axes of the batch, the slowest first.
    mesh: Has the axes.
    params: The parameters, or a function that makes them.
    tx: The optimizer, written for whole parameters.
    clip_norm: Largest norm of all gradients; None for any.

  Raises:
    ValueError: Forms would train otherwise by this optimizer.
  """
  make = params if callable(params) else lambda: params
  used = set(form_of.values())
  carriers = [form for form in CARRIED if form in used]
  optimizer = Optimizer(tx, jax.eval_shape(make), clip_norm)
  _check(form_of, carriers, optimizer)
  place = functools.partial(_placed, form_of=form_of, axes=axes, mesh=mesh)
  if callable(params):
    init = lambda: place(make())
    placed = jax.jit(
      init, out_shardings=_placements(jax.eval_shape(init), form_of, axes, mesh)
    )()
  else:
    placed = place(params)
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
  # The plain program trains as it does.
  if moved and not set(form_of.values()) <= {*OF_ARRAYS}:
    why = f"{MOVES} (table {moved[0]!r})"
  elif len(carriers) > 1 and optimizer.sums_all:
    why = (
      f"it sums over all gradients, and each of the plan's forms {carriers} has"
      " a transformation of its own"
    )
  if why:
    raise ValueError(
      f"`tx` must be one that the plan was made for, but {why}; make the plan"
      " anew by `zenjax.planner.plan_tables` with this `tx`."
    )


def _placed(
  params: Any,
  form_of: Mapping[str, str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
) -> Any:
  """Returns parameters with every table in its form."""
  *others, last = axes
  sharded = {k for k, form in form_of.items() if form == table_forms.SHARDED}
  leaves = []
  for name, leaf in leaf_util.named_leaves(params):
    if name not in sharded:
      over = axes if form_of.get(name) == table_forms.XLA else None
      leaf = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(over)))
    leaves.append(leaf)
  tree = jax.tree.unflatten(jax.tree.structure(params), leaves)
  if not sharded:
    return tree
  return sharding.shard_leaves(
    tree,
    mesh,
    last,
    tables=lambda name, _: name in sharded,
    replicas=tuple(others) or None,
  )


def _placements(
  types: Any,
  form_of: Mapping[str, str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
) -> Any:
  """Returns the placement of every parameter."""
  place = lambda over: NamedSharding(mesh, PartitionSpec(over))
  found = []
  for name, leaf in leaf_util.named_leaves(types, is_sharded):
    if is_sharded(leaf):
      found.append(leaf.with_value(place(axes[-1])))
    else:
      by_xla = form_of.get(name) == table_forms.XLA
      found.append(place(axes if by_xla else None))
  return jax.tree.unflatten(
    jax.tree.structure(types, is_leaf=is_sharded), found
  )


def _transformation(
  form_of: Mapping[str, str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
  tx: optax.GradientTransformation,
  params: Any,
  carriers: Sequence[str],
  clip_norm: float | None,
) -> optax.GradientTransformationExtraArgs:
  """Returns what updates all parameters, each form by its own means."""
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
  """Returns `tx` with updates and state of chosen leaves split by rows.

  XLA might place what a step returns otherwise than what it was given.
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
  """Returns a state on the mesh, its arrays placed as parameters like them."""
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
