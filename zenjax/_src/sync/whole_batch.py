"""Synchronizes gradients in plain `jit`, where XLA partitions the program.

There the loss is taken over the whole batch, and XLA sums the arrays of its
gradient. Two kinds of gradients are left to sum: `SparseRows`, which have a row
for each lookup of the batch and are sharded like the batch, and arrays whose
type says that they are unreduced. Each device's part of them is exchanged
inside a `shard_map`.
"""

from collections.abc import Callable, Collection, Iterable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from zenjax._src.core import compat
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import filled_up
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import processes
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.plans import require_tree
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_state import ZenSyncState
from zenjax._src.tables import sharded_table

NO_MEAN = (
  "`op` must be 'sum' outside of shard_map, got 'mean': in plain jit the loss"
  " is taken over the whole batch, so its gradient is a sum. Leave `op` out."
)


class Placement(NamedTuple):
  """How a gradient goes into the exchange, and how it comes out."""

  given: Any
  synced: Any


class Unreduced(NamedTuple):
  """Unreduced gradients, and how they are placed on devices.

  Attributes:
    named: All gradients, with their names.
    mine: Which of them are unreduced.
    sparse: Names of the leaves that are sent sparse. The shape of a device's
      part does not tell.
    given: The unreduced gradients, as the exchange takes them.
    lie: Their placements.
    structure: The tree of all gradients.
  """

  named: list[tuple[str, Any]]
  mine: list[bool]
  sparse: frozenset[str]
  given: list[Any]
  lie: list[Placement]
  structure: Any

  def tree(self, values: Iterable[Any], summed: Iterable[Any]) -> Any:
    """A tree of `values` for the unreduced ones and `summed` for the others."""
    left, rest = iter(values), iter(summed)
    return self.structure.unflatten(
      [next(left) if is_mine else next(rest) for is_mine in self.mine]
    )

  @property
  def summed(self) -> list[Any]:
    """The gradients that XLA has summed."""
    return [x for (_, x), is_mine in zip(self.named, self.mine) if not is_mine]


def parts_of(updates: Any, mesh: Any, options: Options) -> Unreduced:
  """Finds what is not summed yet: row gradients, and arrays typed unreduced.

  Raises:
    ValueError: Nothing is left to sum, or a gradient lies over other axes.
  """
  named = leaf_util.named_leaves(updates, is_rows)
  mine = [is_rows(x) or _unreduced(x) != frozenset() for _, x in named]
  _require(named, mine, mesh, options)
  chosen = leaf_util.select(updates, options.sparse, options.unit)
  devices = math.prod([mesh.shape[axis] for axis in options.axes])
  given: list[Any] = []
  lie: list[Placement] = []
  for (name, x), is_mine, is_sparse in zip(named, mine, chosen):
    if is_mine:
      lie.append(_placement(name, x, is_sparse, options))
      given.append(filled_up(x, devices) if is_rows(x) else x)
  if set(options.axes) & compat.explicit_of(mesh):
    # Types must say so before, of rows too that lie whole on every device.
    place = lambda spec, x: jax.sharding.reshard(x, NamedSharding(mesh, spec))
    given = [
      jax.tree.map(place, own.given, x) if is_rows(x) else x
      for own, x in zip(lie, given)
    ]
  sparse = [name for (name, _), is_ in zip(named, chosen) if is_]
  structure = jax.tree.structure(updates, is_leaf=is_rows)
  return Unreduced(named, mine, frozenset(sparse), given, lie, structure)


def mapped(
  f: Callable[..., Any], mesh: Any, axes: Axes, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
  """`f` of what each device has."""
  whole = jax.shard_map(
    f,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={*axes, *compat.explicit_of(mesh)},
    check_vma=False,
  )
  if not jax.config.jax_disable_jit:
    return whole

  def compiled(*args):
    with jax.disable_jit(False):  # An exchange runs for minutes otherwise.
      return jax.jit(whole)(*args)

  return compiled


def sync(
  updates: Any, state: ZenSyncState, mesh: Any, options: Options
) -> tuple[Any, ZenSyncState]:
  """Sums what is not summed yet; all else stays as it is.

  Args:
    updates: Gradients of the whole batch.
    state: Of the transformation.
    mesh: Has the axes.
    options: Of the transformation.

  Raises:
    ValueError: Nothing is left to sum, a gradient lies over other axes, or the
      plan is of other leaves.
  """
  parts = parts_of(updates, mesh, options)
  none = [None] * len(parts.summed)
  mine = {name for (name, _), own in zip(parts.named, parts.mine) if own}
  leaves = {name: x for name, x in state.leaves.items() if name in mine}
  spread_over = _axes_of([x.synced for x in parts.lie])

  if options.plan:
    require_tree(options.plan, leaf_util.shapes(parts.named))

  def exchanged(given: Any, own: Any) -> Any:
    tree = parts.tree(given, none)
    inner = dataclasses.replace(
      options, mean=False, sparse=lambda name, _: name in parts.sparse
    )
    if options.plan:
      inner = dataclasses.replace(inner, plan=_of_parts(options.plan, tree))
    out, new = gradient_tree.sync_tree(tree, own, inner)
    step = processes.compared(own.step + 1, "zen_sync", inner, tree, own.tuned)
    new = own.replace(step=step, leaves=new, mean=jnp.zeros_like(own.mean))
    return jax.tree.leaves(out, is_leaf=is_rows), _alike(new, spread_over)

  own = state.replace(leaves=leaves)
  everywhere = PartitionSpec()
  synced, new = mapped(
    exchanged,
    mesh,
    options.axes,
    in_specs=([x.given for x in parts.lie], everywhere),
    out_specs=([x.synced for x in parts.lie], everywhere),
  )(parts.given, own)
  new = new.replace(leaves=state.leaves | new.leaves)
  return parts.tree(synced, parts.summed), new


def select(
  update: Callable[[Any, Any], tuple[Any, Any]],
  updates: Any,
  state: Any,
  mesh: Any,
  axes: Axes,
  *,
  by: str,
  sums: bool,
  needed: Collection[str] | None = None,
) -> tuple[Any, Any]:
  """Has a sparsifier select from what each device has of unreduced arrays.

  Args:
    update: The sparsifier's, `(arrays, state)` of one device.
    updates: Gradients of the whole batch; SparseRows stay as they are.
    state: Of the sparsifier.
    mesh: Has the axes.
    axes: Over which gradients are not summed.
    by: Name of the sparsifier.
    sums: Whether arrays come back summed; else they are unreduced as before.
    needed: Names of the arrays that the sparsifier changes, by default all.

  Raises:
    ValueError: XLA has summed an array, or it lies over other axes.
  """
  leaves, structure = jax.tree.flatten(updates, is_leaf=is_rows)
  passes = []
  for name, x in leaf_util.named_leaves(updates, is_rows):
    summed = not is_rows(x) and not _unreduced(x)
    unused = needed is not None and name not in needed
    passes.append(is_rows(x) or (summed and unused))
    if passes[-1]:
      continue
    if summed:
      raise ValueError(
        f"`updates` of {by} must be unreduced outside of shard_map, and XLA has"
        f" summed leaf {name!r} over {axes!r} already: nothing is left to"
        f" select from; on explicit axes take gradients by `zenjax.unreduced("
        f"params, {axes!r})`, on others, and where that leaves a short vector"
        " as it is, wrap the step in `zenjax.data_parallel`, where gradients"
        " are those of one device."
      )
    _require_whole(by, name, x, axes)
  place = lambda x: PartitionSpec(unreduced=frozenset(axes))
  arrays = structure.unflatten(
    [None if stays else x for x, stays in zip(leaves, passes)]
  )
  lie = jax.tree.map(place, arrays)
  specs = state.specs(PartitionSpec(axes))
  out, state = mapped(
    update,
    mesh,
    axes,
    in_specs=(lie, specs),
    out_specs=(jax.tree.map(lambda _: PartitionSpec(), arrays), specs)
    if sums
    else (lie, specs),
  )(arrays, placed(state, specs, by, mesh, axes))
  found = iter(jax.tree.leaves(out))
  return structure.unflatten(
    [x if stays else next(found) for x, stays in zip(leaves, passes)]
  ), state


def placed(state: Any, specs: Any, by: str, mesh: Any, axes: Axes) -> Any:
  """Places a state of which each device has a part by `specs`.

  Raises:
    ValueError: It was made for another number of devices.
  """
  devices = math.prod([mesh.shape[axis] for axis in axes])
  explicit = set(axes) & compat.explicit_of(mesh)

  def place(spec: PartitionSpec, x: jax.Array) -> jax.Array:
    if spec == PartitionSpec(axes):
      sharded_table.require_devices(f"`state` of {by}", x.shape[0], devices)
    return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if explicit else x

  return jax.tree.map(place, specs, state)


def _require_whole(by: str, name: str, leaf: jax.Array, axes: Axes) -> None:
  """Raises where devices have columns of a leaf, or parts over other axes."""
  _require_unreduced(name, leaf, axes)
  over = [axis for axis in compat.explicit_spec(leaf) if axis is not None]
  if over:
    raise ValueError(
      f"`updates` of {by} must be whole on every device, and leaf {name!r} is"
      f" spread over {over}: what a device keeps of it would be a part; leave"
      " it out, or replicate that parameter."
    )


def _require_unreduced(name: str, leaf: jax.Array, axes: Axes) -> None:
  if _unreduced(leaf) != set(axes):
    raise ValueError(
      "`axis_name` must name the axes over which gradients are unreduced, got"
      f" {axes!r} and for leaf {name!r} {sorted(_unreduced(leaf))}; give both"
      " the same."
    )


def _of_parts(plan: Plan, tree: Any) -> Plan:
  """Returns the plan of the exchanged leaves, with the shapes of their parts.

  Explicit axes of the mesh that are not summed over leave a device columns.
  """
  shapes = leaf_util.shapes(leaf_util.named_leaves(tree, is_rows))
  leaves = [
    dataclasses.replace(leaf, shape=shapes[leaf.name][0])
    for leaf in plan.leaves
    if leaf.name in shapes
  ]
  return dataclasses.replace(plan, leaves=tuple(leaves))


def _placement(
  name: str, leaf: Any, sparse: bool, options: Options
) -> Placement:
  """Returns the specs of a gradient; ValueError where it lies over others."""
  axes, rows_out = options.axes, sparse and options.output == "rows"
  if is_rows(leaf):
    spec = compat.explicit_spec(leaf.values)
    over = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    if spec[0] is not None and set(over) != set(axes):
      raise ValueError(
        f"`axis_name` must name all axes over which the batch is spread, got"
        f" {axes!r}, and look-ups of leaf {name!r} lie over {over!r}; give"
        " zen_sync these."
      )
    spec, rows_out = (None, spec[1]), options.output != "dense"
    given = _of_rows(leaf, axes, spec[1])
  else:
    spec = compat.explicit_spec(leaf)
    _require_unreduced(name, leaf, axes)
    given = PartitionSpec(*spec, unreduced=frozenset(axes))
  if rows_out and spec[0] is not None:
    raise ValueError(
      f"`output` must not be 'rows' for leaf {name!r}, whose rows are sharded"
      f" over {spec[0]!r}, so ids would count rows of a part. Leave it out."
    )
  synced: Any = PartitionSpec(*spec)
  if rows_out:
    structure = SparseRows([0], [[0.0]], leaf.shape[0]).as_unique()
    synced = _of_rows(structure, None, spec[1])
  return Placement(given, synced)


def _axes_of(specs: Any) -> tuple[str, ...]:
  """Axes over which what comes out is spread."""
  is_spec = lambda x: isinstance(x, PartitionSpec)
  entries = [tuple(x) for x in jax.tree.leaves(specs, is_leaf=is_spec)]
  return tuple(sorted({*jax.tree.leaves(entries)}))


def _alike(state: Any, axes: tuple[str, ...]) -> Any:
  """The state with the largest statistics of the parts of a leaf.

  Parts are exchanged by themselves, and count rows of their own.
  """
  if not axes:
    return state

  def largest(x):
    number = x.astype(jnp.int32) if x.dtype == bool else x
    return lax.pmax(number, axes).astype(x.dtype)

  return jax.tree.map(largest, state)


def _of_rows(rows: SparseRows, by_row: Any, by_column: Any) -> Any:
  """Specs in the structure of SparseRows."""
  specs = PartitionSpec(by_row), PartitionSpec(by_row, by_column)
  return jax.tree.unflatten(jax.tree.structure(rows), specs)


def _unreduced(leaf: Any) -> frozenset[str]:
  """Axes over which the type of an array says that parts are not added yet."""
  if is_rows(leaf) or not compat.explicit_axes(leaf):
    return frozenset()
  return frozenset(jax.typeof(leaf).sharding.spec.unreduced)


def _require(
  named: list[tuple[str, Any]], mine: list[bool], mesh: Any, options: Options
) -> None:
  """Raises where nothing is left to sum, or rows of tables are stacked."""
  if not any(mine):
    way = "take gradients of `zenjax.value_and_grad(loss_fn)`, which are"
    way += " SparseRows for tables that the loss only looks up"
    way += " (`zenjax.rows.explain_tables` says why a leaf has none)"
    if set(options.axes) <= compat.explicit_of(mesh):
      way += f", or by `zenjax.unreduced(params, {options.axes!r})`"
    raise ValueError(
      "`updates` must hold SparseRows or unreduced arrays outside of shard_map,"
      f" and all are arrays that XLA has summed over {options.axes!r} already:"
      f" nothing is left to save; {way}, put `optax.MultiSteps` behind and not"
      " around, or wrap the step in `zenjax.data_parallel`, where gradients are"
      " those of one device."
    )
  for name, leaf in named:
    if is_rows(leaf):
      require_one(f"leaf {name!r} of `updates`", leaf)
