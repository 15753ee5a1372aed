"""Synchronizes gradients in plain `jit`, where XLA partitions the program.

There the loss is taken over the whole batch, and XLA sums the arrays of its
gradient. Two kinds of gradients are left to sum: `SparseRows`, which have a row
for each lookup of the batch and are sharded like the batch, and arrays whose
type says that they are unreduced. Each device's part of them is exchanged
inside a `shard_map`.
"""

from collections.abc import Callable, Iterable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import filled_up
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.sync import gradient_tree
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_state import ZenSyncState
from zenjax._src.tables import sharded_table
from zenjax._src.tables.table_update import on_devices


class Parts(NamedTuple):
  """The gradients that are left to sum: each device has a part.

  Attributes:
    is_part: For each gradient, whether it is left to sum.
    structure: The tree of all gradients.
    options: The options for the parts of one device, whose shapes do not tell
      which leaves are sent sparse.
    sparse: Names of these leaves.
    names: The names of the gradients that are left to sum.
    given: These gradients, as the exchange takes them.
    given_specs: Their specs before the exchange.
    synced_specs: Their specs after it.
    summed: The gradients that XLA has summed, by name.
  """

  is_part: list[bool]
  structure: Any
  options: Options
  sparse: frozenset[str]
  names: list[str]
  given: list[Any]
  given_specs: list[Any]
  synced_specs: list[Any]
  summed: dict[str, Any]

  def tree(self, parts: Iterable[Any], summed: Iterable[Any]) -> Any:
    """Returns a tree of `parts`, and of `summed` for all other gradients."""
    parts, summed = iter(parts), iter(summed)
    return self.structure.unflatten(
      [next(parts) if is_part else next(summed) for is_part in self.is_part]
    )


def parts_of(updates: Any, mesh: Any, options: Options) -> Parts:
  """Finds what is left to sum: row gradients, and arrays typed as unreduced.

  Raises:
    ValueError: Nothing is left to sum, a gradient is sharded over other axes,
      or a mean is wanted.
  """
  axes = options.axes
  refuse_mean(options)
  named = leaf_util.named_leaves(updates, is_rows)
  is_part = [_is_part(x) for _, x in named]
  if not any(is_part):
    way = "`zenjax.value_and_grad(loss_fn)`"
    if set(axes) <= compat.explicit_of(mesh):
      way += f", or with respect to `zenjax.unreduced(params, {axes!r})`"
    raise ValueError(
      "`updates` must hold SparseRows or unreduced arrays outside of shard_map,"
      f" but XLA has summed all of them over {axes!r}. Take gradients by {way}."
      " `zenjax.rows.explain_tables` says why a table has no row gradient. If"
      " none has one, use your optimizer without zenjax. If you use"
      " `optax.MultiSteps`, put it after this transformation."
    )
  chosen = leaf_util.select(updates, options.sparse, options.unit)
  devices = math.prod([mesh.shape[axis] for axis in axes])
  sparse = frozenset(
    [name for (name, _), wanted in zip(named, chosen) if wanted]
  )
  parts = Parts(
    is_part=is_part,
    structure=jax.tree.structure(updates, is_leaf=is_rows),
    options=dataclasses.replace(
      options, op="sum", sparse=lambda name, _: name in sparse
    ),
    sparse=sparse,
    names=[],
    given=[],
    given_specs=[],
    synced_specs=[],
    summed={},
  )
  for (name, x), left, is_sparse in zip(named, is_part, chosen):
    if not left:
      parts.summed[name] = x
      continue
    given, synced = _specs(name, x, is_sparse, options)
    if is_rows(x):
      require_one(f"leaf {name!r} of `updates`", x)
      x = filled_up(x, devices)
      if set(axes) & compat.explicit_of(mesh):
        # Types must say so before, also if all devices have all rows.
        x = jax.tree.map(
          lambda spec, x: jax.sharding.reshard(x, NamedSharding(mesh, spec)),
          given,
          x,
        )
    parts.names.append(name)
    parts.given.append(x)
    parts.given_specs.append(given)
    parts.synced_specs.append(synced)
  return parts


def refuse_mean(options: Options) -> None:
  """Raises ValueError if a mean is wanted of gradients of the whole batch."""
  if options.op == "mean":
    raise ValueError(
      "`op` must be 'sum' outside of shard_map, got 'mean'. The loss in plain"
      " jit is taken over the whole batch, so its gradient is a sum. Leave `op`"
      " out."
    )


def has_parts(updates: Any) -> bool:
  """Returns True if any gradient is left to sum."""
  return any(map(_is_part, jax.tree.leaves(updates, is_leaf=is_rows)))


def _is_part(x: Any) -> bool:
  return is_rows(x) or bool(_unreduced_axes(x))


def mapped(
  f: Callable[..., Any], mesh: Any, axes: Axes, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
  """Returns `f` as a function of global arrays; `f` sees a device's parts."""
  whole = on_devices(f, mesh, axes, in_specs, out_specs)
  if not jax.config.jax_disable_jit:
    return whole

  def compiled(*args):
    with jax.disable_jit(False):  # An exchange runs for minutes otherwise.
      return jax.jit(whole)(*args)

  return compiled


def sync(
  updates: Any, state: ZenSyncState, mesh: Any, options: Options
) -> tuple[Any, ZenSyncState]:
  """Sums what is left to sum; everything else stays unchanged.

  Args:
    updates: Gradients of the whole batch.
    state: The state of the transformation.
    mesh: A mesh that has the axes.
    options: The options of the transformation.

  Raises:
    ValueError: Nothing is left to sum, or a gradient is sharded over other
      axes.
  """
  parts = parts_of(updates, mesh, options)
  none = [None] * len(parts.summed)
  leaves = {name: x for name, x in state.leaves.items() if name in parts.names}

  def exchanged(given: Any, state: Any) -> Any:
    tree = parts.tree(given, none)
    out, new = gradient_tree.sync_tree(tree, state, parts.options)
    return jax.tree.leaves(out, is_leaf=is_rows), _largest(new, parts)

  everywhere = PartitionSpec()
  synced, new = mapped(
    exchanged,
    mesh,
    options.axes,
    in_specs=(parts.given_specs, everywhere),
    out_specs=(parts.synced_specs, everywhere),
  )(parts.given, state.replace(leaves=leaves))
  new = new.replace(leaves=state.leaves | new.leaves)
  return parts.tree(synced, parts.summed.values()), new


def select(
  update: Callable[[Any, Any], tuple[Any, Any]],
  updates: Any,
  state: Any,
  mesh: Any,
  axes: Axes,
  *,
  by: str,
  sums: bool,
) -> tuple[Any, Any]:
  """Runs a transformation on each device's part of unreduced arrays.

  Args:
    update: Its update, `(arrays, state)` of one device.
    updates: Gradients of the whole batch, arrays.
    state: Its state.
    mesh: A mesh that has the axes.
    axes: The axes over which gradients are not summed.
    by: Its name.
    sums: Whether `update` returns sums. Otherwise its arrays are unreduced.

  Raises:
    ValueError: XLA has summed an array, or it is sharded over other axes.
  """
  for name, x in leaf_util.named_leaves(updates):
    _require_unreduced(by, name, x, axes)
  unreduced = jax.tree.map(
    lambda _: PartitionSpec(unreduced=frozenset(axes)), updates
  )
  summed = jax.tree.map(lambda _: PartitionSpec(), updates)
  specs = state.specs(PartitionSpec(axes))
  return mapped(
    update,
    mesh,
    axes,
    in_specs=(unreduced, specs),
    out_specs=(summed if sums else unreduced, specs),
  )(updates, _placed(state, specs, by, mesh, axes))


def _placed(state: Any, specs: Any, by: str, mesh: Any, axes: Axes) -> Any:
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


def _require_unreduced(by: str, name: str, leaf: jax.Array, axes: Axes) -> None:
  """Raises ValueError if a leaf is not unreduced, or is sharded."""
  if not _unreduced_axes(leaf):
    raise ValueError(
      f"`updates` of {by} must be unreduced outside of shard_map, but leaf"
      f" {name!r} is not: XLA has summed it over {axes!r}, or the batch is not"
      " split. Wrap the step in `zenjax.data_parallel`. Or make a mesh with"
      " explicit axes (`jax.make_mesh`), split the batch by"
      f" `jax.device_put(batch, jax.P({axes!r}))`, and take gradients of"
      f" `zenjax.unreduced(params, {axes!r})`. That does not help for biases,"
      " which XLA always sums: if you pass `leaves=`, leave them out."
    )
  _require_axes(name, leaf, axes)
  over = [axis for axis in compat.explicit_spec(leaf) if axis is not None]
  if over:
    raise ValueError(
      f"`updates` of {by} must be whole on every device, but leaf {name!r} is"
      f" sharded over {over}. Replicate that parameter, or leave it out."
    )


def _require_axes(name: str, leaf: jax.Array, axes: Axes) -> None:
  """Raises ValueError if an array is unreduced over other axes."""
  if _unreduced_axes(leaf) != set(axes):
    raise ValueError(
      "`axis_name` must name the axes over which gradients are unreduced, got"
      f" {axes!r}, but for leaf {name!r} they are"
      f" {sorted(_unreduced_axes(leaf))}. Give both the same."
    )


def _specs(
  name: str, leaf: Any, sparse: bool, options: Options
) -> tuple[Any, Any]:
  """Returns the specs of a gradient before the exchange, and after it.

  Raises:
    ValueError: It is on other axes, or its rows are sharded.
  """
  axes, rows_out = options.axes, sparse and options.output == "rows"
  if is_rows(leaf):
    spec = compat.explicit_spec(leaf.values)
    over = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    if spec[0] is not None and set(over) != set(axes):
      raise ValueError(
        "`axis_name` must name all axes over which the batch is sharded, got"
        f" {axes!r}, but lookups of leaf {name!r} are sharded over {over!r}."
        f" Give `axis_name={over!r}`."
      )
    spec, rows_out = (None, spec[1]), options.output != "dense"
    given = _of_rows(leaf, axes, spec[1])
  else:
    spec = compat.explicit_spec(leaf)
    _require_axes(name, leaf, axes)
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
  return given, synced


def _largest(state: Any, parts: Parts) -> Any:
  """Returns a state with the largest counts of all devices.

  Parts of a leaf that stays sharded are exchanged by themselves, and have
  counts of their own.
  """
  entries = [tuple(spec) for spec in jax.tree.leaves(parts.synced_specs)]
  axes = tuple(sorted({*jax.tree.leaves(entries)}))
  if not axes:
    return state
  return jax.tree.map(lambda x: collectives.pmax(x, axes), state)


def _of_rows(rows: SparseRows, by_row: Any, by_column: Any) -> Any:
  """Returns specs in the structure of SparseRows."""
  specs = PartitionSpec(by_row), PartitionSpec(by_row, by_column)
  return jax.tree.unflatten(jax.tree.structure(rows), specs)


def _unreduced_axes(leaf: Any) -> frozenset[str]:
  """Returns the axes over which an array's type says that it is unreduced."""
  if not compat.explicit_axes(leaf):
    return frozenset()
  return frozenset(jax.typeof(leaf).sharding.spec.unreduced)
