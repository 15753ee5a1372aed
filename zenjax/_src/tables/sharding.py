"""Shards tables by rows over devices, and converts them back to arrays."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core import row_wire
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.schemes import buffer_sizes
from zenjax._src.tables import reorder
from zenjax._src.tables.sharded_table import is_sharded
from zenjax._src.tables.sharded_table import ShardedTable


class RowInitializer(jax.ShapeDtypeStruct):
  """The type of a table, with a function that makes its rows.

  Args:
    fun: Maps ids `[k] int32` in `[0, R)` to rows `[k, D]`. Row `r` of table `t`
      of a stack has id `t * R + r`.
    shape: `(R, D)`, or `(T, R, D)` for a stack.
    dtype: The dtype of the rows.
  """

  def __init__(self, fun: Callable[..., Any], shape: Any, dtype: Any):
    super().__init__(shape, dtype)
    self.fun = fun


# How many ids a function of rows is tried on, and how many in a shorter call.
_TRIED, _FEW = 24, 5


def init_by_rows(
  fun: Callable[[jax.Array], jax.Array], num_rows: int | Sequence[int]
) -> RowInitializer:
  """Describes a table by a function of its row ids, for `shard`.

  Use it for tables that no device or host can hold as a whole. Each device
  makes only the rows that it owns, a few MiB at a time. The table is the same
  for any number of devices.

  `fun` is called on a few ids in two orders, and on fewer ids, to check that
  its rows do not change. If `fun` uses traced values, the check cannot raise:
  the table is then NaN if it fails.

  Args:
    fun: Maps ids `[k] int32` to rows `[k, D]`. Each row must depend only on its
      id, for example by `jax.random.fold_in(key, id)`.
    num_rows: `R`, or `(T, R)` for a stack of tables, where row `r` of table `t`
      has id `t * R + r`.

  Returns:
    A value to put in place of the parameter, for `zenjax.tables.shard`.

  Raises:
    ValueError: `fun` does not return floating rows `[k, D]`, or a row depends
      on other ids or on the position of its id. Or `num_rows` does not consist
      of integers whose product is from 1 to 2**30 - 1.

  Example:
    >>> import jax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> def rows(ids):
    ...   key = jax.random.key(0)
    ...   keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
    ...   return jax.vmap(lambda key: jax.random.normal(key, (16,)))(keys)
    >>> table = zenjax.tables.init_by_rows(rows, 2000)
    >>> zenjax.tables.shard({"table": table}, mesh, "data")["table"].shape
    (2000, 16)
  """
  rows: Any = num_rows if isinstance(num_rows, tuple) else (num_rows,)
  if not rows or not all(arguments.is_integer(x) and x > 0 for x in rows):
    raise ValueError(
      "`num_rows` must be a positive integer, or `(T, R)` for a stack, got"
      f" {num_rows!r}. For joined tables, give the sum of their rows."
    )
  rows = tuple(map(int, rows))
  buffer_sizes.require_rows("`num_rows`", math.prod(rows))
  some = jax.ShapeDtypeStruct((_TRIED,), jnp.int32)
  rows_type: Any = jax.eval_shape(fun, some)
  shape: Any = getattr(rows_type, "shape", ())
  made = len(shape) == 2 and shape[0] == _TRIED
  if not made or not jnp.issubdtype(rows_type.dtype, jnp.floating):
    raise ValueError(
      "`fun` of init_by_rows must return floating rows `[k, D]` for ids `[k]`,"
      f" got {rows_type} for {_TRIED} ids."
    )
  with jax.ensure_compile_time_eval():
    by_row = _is_by_row(fun, math.prod(rows))
  if isinstance(by_row, Tracer):
    of_ids = fun
    fun = lambda ids: jnp.where(by_row, of_ids(ids), jnp.nan)
  elif not by_row:
    raise ValueError(
      "`fun` of init_by_rows must make each row from its id alone, but its rows"
      " change with the position of an id or with other ids. Use one key per"
      " id: `jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)`."
    )
  return RowInitializer(fun, (*rows, shape[1]), rows_type.dtype)


def _is_by_row(fun: Callable[[jax.Array], jax.Array], num_rows: int) -> Any:
  """Tells if `fun` makes the same rows in another order and for fewer ids."""
  rng = np.random.default_rng(0)
  order = rng.permutation(_TRIED)
  ids = rng.integers(num_rows, size=_TRIED).astype(np.int32)
  rows = [fun(jnp.asarray(x)) for x in (ids, ids[order], ids[:_FEW])]
  first, moved, few = [x.astype(jnp.float32) for x in rows]
  # XLA may round differently if it computes fewer rows at once.
  close = lambda x, y: jnp.allclose(x, y, rtol=1e-3, atol=1e-6, equal_nan=True)
  return close(first[order], moved) & close(first[:_FEW], few)


def shard_leaves(
  params: Any,
  mesh: jax.sharding.Mesh,
  axis_name: AxisName,
  *,
  tables: SparseSpec = None,
  replicas: AxisName | None = None,
  hash_seed: int = 0,
  wire_dtype: Any = None,
) -> Any:
  """Implements `shard` for parameters."""
  axes = arguments.mesh_axes(axis_name, mesh)
  if len(axes) > 1:
    raise ValueError(
      f"`axis_name` must be one axis, got {axis_name!r}. Give the axis with the"
      " fastest links, and the other axes as `replicas=`."
    )
  copies = replica_axes(replicas, axes, mesh)
  arguments.hash_seed(hash_seed)
  wire = arguments.row_wire_dtype("wire_dtype", wire_dtype)
  remedy = "Convert it with `zenjax.tables.unshard` first"
  leaf_util.refuse_sharded(params, "params", "zenjax.tables.shard", remedy)
  named = leaf_util.named_leaves(params)
  # Modules also hold functions, which are not tables.
  arrays = [x if hasattr(x, "ndim") else np.int32(0) for _, x in named]
  structure = jax.tree.structure(params)
  types = structure.unflatten(arrays)
  chosen = leaf_util.select(types, tables, "row", argument="tables")
  if not any(chosen):
    shapes = {name: jnp.shape(x) for (name, _), x in zip(named[:8], arrays)}
    raise ValueError(
      f"`tables` must choose a parameter, got none of {shapes}. Name small"
      " tables and stacks of tables with `tables=lambda name, leaf: ..`. If"
      " none should be sharded, leave `shard` out."
    )
  leaves, hash_offset = [], 0
  for (name, leaf), wanted in zip(named, chosen, strict=True):
    if not wanted:
      if isinstance(leaf, RowInitializer):
        raise ValueError(
          f"`tables` must choose parameter {name!r}, because it is made by"
          " `init_by_rows`."
        )
      leaves.append(replicated(leaf, mesh))
      continue
    if leaf.ndim < 2:
      raise ValueError(
        "`tables` must choose parameters `[rows, columns]` or stacks `[tables,"
        f" rows, columns]`, but {name!r} has shape {leaf.shape}. Leave it out,"
        f" for example by `tables=lambda name, leaf: name != {name!r}`."
      )
    *stack, rows, columns = leaf.shape
    if wire is not None:
      row_wire.require(name, jnp.dtype(leaf.dtype), wire, columns)
    num_rows = rows * math.prod(stack)
    buffer_sizes.require_rows(repr(name), num_rows)
    table = ShardedTable(
      value=None,
      num_rows=num_rows,
      axes=axes,
      devices=math.prod([mesh.shape[axis] for axis in axes]),
      seed=hash_seed,
      hash_offset=hash_offset,
      replicas=copies,
      stack=tuple(stack),
      wire_dtype=wire,
    )
    hash_offset = (hash_offset + num_rows) % 2**32
    leaves.append(table.with_value(placed(leaf, table, mesh)))
  return structure.unflatten(leaves)


def placed(leaf: Any, table: ShardedTable, mesh: Any) -> jax.Array:
  """Returns a leaf `[*stack, R, ...]` as the value of a sharded table."""
  if isinstance(leaf, RowInitializer):
    return reorder.made_by_rows(leaf, table, mesh)
  return reorder.rows_to_owners(leaf, table, mesh, table.stack)


def replica_axes(
  replicas: AxisName | None, axes: Axes, mesh: jax.sharding.Mesh
) -> Axes:
  """Returns the axes along which tables have copies.

  Raises:
    ValueError: The mesh does not have all of them, or tables are sharded over
      one of them.
  """
  if replicas is None:
    return ()
  copies = arguments.mesh_axes(replicas, mesh, "replicas")
  if set(copies) & set(axes):
    raise ValueError(
      f"`replicas` must name other axes than `axis_name`, got {replicas!r} and"
      f" {axes!r}."
    )
  return copies


def unshard_leaves(tree: Any) -> Any:
  """Implements `unshard`."""
  whole = lambda node: reorder.rows_of(node) if is_sharded(node) else node
  return jax.tree.map(whole, tree, is_leaf=is_sharded)


def replicated(leaf: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns a leaf that is not a table, replicated unless it is on the mesh."""
  if isinstance(leaf, Tracer) or not leaf_util.is_array(leaf):
    return leaf
  sharding = getattr(leaf, "sharding", None)
  if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
    return leaf
  return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
