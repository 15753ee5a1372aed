"""Splits tables over devices, each row to its owner, and joins them again."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.tables import reorder
from zenjax._src.tables.sharded_table import is_sharded
from zenjax._src.tables.sharded_table import ShardedTable


@dataclasses.dataclass(frozen=True)
class RowInitializer:
  """A table that `shard` makes row by row, where rows belong.

  Attributes:
    fun: Takes ids `[k] int32` in `[0, R)`, returns their rows `[k, D]`. Row `r`
      of table `t` of a stack has id `t * R + r`.
    shape: `(R, D)`, of a stack `(T, R, D)`.
    dtype: Of the rows.
  """

  fun: Callable[[jax.Array], jax.Array]
  shape: tuple[int, ...]
  dtype: Any

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return math.prod(self.shape)


# Ids on which a function of rows is tried, all of them and the first few.
_TRIED, _FEW = 24, 5


def init_by_rows(
  fun: Callable[[jax.Array], jax.Array], num_rows: int | Sequence[int]
) -> RowInitializer:
  """Describes a table by a function of its row ids, for `shard`.

  Use it for tables that fill the memory of devices: each device makes the rows
  that it owns, some MiB at a time, and nothing else. The table is the same for
  any number of devices.

  `fun` is tried on a few ids in two orders, and on fewer, and its rows must be
  the same. Where it was made of values that are still traced, a table of a
  function that is not by row is NaN.

  Args:
    fun: Takes ids `[k] int32` and returns rows `[k, D]`, each by its id alone.
    num_rows: `R`; of a stack of tables `(T, R)`, whose ids are `t * R + r` for
      row `r` of table `t`.

  Returns:
    A leaf of the parameters that are given to `shard`.

  Raises:
    ValueError: `fun` does not return floating rows `[k, D]`, or a row depends
      on the place of its id or on other ids; or `num_rows` are not integers
      whose product is from 1 to 2**31 - 1.

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
  one = not isinstance(num_rows, Sequence)
  rows = (num_rows,) if one else tuple(num_rows)
  whole = rows and all(isinstance(x, int | np.integer) for x in rows)
  if not whole or min(rows) < 1 or math.prod(map(int, rows)) >= 2**31:
    raise ValueError(
      "`num_rows` must be an integer from 1 to 2**31 - 1, or `(T, R)` of a"
      f" stack that has no more rows in all, got {num_rows!r}."
    )
  some = jax.ShapeDtypeStruct((_TRIED,), jnp.int32)
  found: Any = jax.eval_shape(fun, some)
  shape: Any = getattr(found, "shape", ())
  made = len(shape) == 2 and shape[0] == _TRIED
  if not made or not jnp.issubdtype(found.dtype, jnp.floating):
    raise ValueError(
      "`fun` of init_by_rows must return floating rows `[k, D]` of ids `[k]`,"
      f" got {found} of {_TRIED} ids."
    )
  with jax.ensure_compile_time_eval():
    by_row = _is_by_row(fun, math.prod(map(int, rows)))
  if isinstance(by_row, Tracer):
    of_ids = fun
    fun = lambda ids: jnp.where(by_row, of_ids(ids), jnp.nan)
  elif not by_row:
    raise ValueError(
      "`fun` of init_by_rows must make each row from its id alone, and its rows"
      " change with the place of an id, or with the other ids; draw numbers by"
      " `jax.random.fold_in(key, id)` for each id under `jax.vmap`."
    )
  return RowInitializer(fun, (*map(int, rows), shape[1]), found.dtype)


def _is_by_row(fun: Callable[[jax.Array], jax.Array], num_rows: int) -> Any:
  """Says if `fun` makes the same rows in another order, and of fewer ids."""
  rng = np.random.default_rng(0)
  order = rng.permutation(_TRIED)
  ids = rng.integers(num_rows, size=_TRIED).astype(np.int32)
  rows = [fun(jnp.asarray(x)) for x in (ids, ids[order], ids[:_FEW])]
  first, moved, few = [x.astype(jnp.float32) for x in rows]
  # XLA may round otherwise where it computes fewer rows at once.
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
) -> Any:
  """Returns parameters with a `ShardedTable` for each table: see `shard`."""
  axes = arguments.mesh_axes(axis_name, mesh)
  if len(axes) > 1:
    raise ValueError(
      f"`axis_name` must be one axis, got {axis_name!r}; make a mesh that has"
      " all devices along one, or give that of the fastest links, and the"
      " others as `replicas=`, along which tables have copies."
    )
  copies = replica_axes(replicas, axes, mesh)
  arguments.hash_seed(hash_seed)
  named = leaf_util.named_leaves(params, is_sharded)
  structure = jax.tree.structure(params, is_leaf=is_sharded)
  for name, leaf in named:
    if is_sharded(leaf):
      raise ValueError(
        f"`params` must hold arrays, and leaf {name!r} is split already; use"
        " it as it is, or `zenjax.tables.unshard` it first."
      )
  # Modules hold functions beside arrays: no table is among these.
  arrays = [x if hasattr(x, "ndim") else np.int32(0) for _, x in named]
  chosen = leaf_util.select(
    structure.unflatten(arrays), tables, "row", argument="tables"
  )
  if not any(chosen):
    shapes = {name: jnp.shape(x) for (name, _), x in zip(named[:8], arrays)}
    raise ValueError(
      "`tables` must choose a leaf, and it chooses none of"
      f" {shapes}{', ..' if len(named) > 8 else ''}; name tables by"
      " `tables=lambda name, leaf: ..`, as those of few rows are not taken by"
      " themselves, nor are stacks of tables."
    )
  found, hash_offset = [], 0
  for (name, leaf), wanted in zip(named, chosen, strict=True):
    if not wanted:
      if isinstance(leaf, RowInitializer):
        raise ValueError(
          f"`tables` must choose leaf {name!r}, which init_by_rows makes for"
          " the devices that own its rows."
        )
      found.append(replicated(leaf, mesh))
      continue
    if leaf.ndim < 2:
      raise ValueError(
        "`tables` must choose leaves of two dimensions, `[rows, columns]`, or"
        " stacks of tables, with further dimensions in front, and leaf"
        f" {name!r} has shape {leaf.shape}; leave it out, or reshape it."
      )
    *stack, rows, _ = leaf.shape
    num_rows = rows * math.prod(stack)
    if num_rows >= 2**31:
      raise ValueError(
        f"`tables` must choose leaves of fewer than 2**31 rows in all, and leaf"
        f" {name!r} has {num_rows}; make several leaves of it."
      )
    table = ShardedTable(
      value=None,
      num_rows=num_rows,
      axes=axes,
      devices=math.prod([mesh.shape[axis] for axis in axes]),
      seed=hash_seed,
      hash_offset=hash_offset,
      replicas=copies,
      stack=tuple(stack),
    )
    hash_offset = (hash_offset + num_rows) % 2**32
    found.append(table.with_value(placed(leaf, table, mesh)))
  return structure.unflatten(found)


def placed(leaf: Any, table: ShardedTable, mesh: Any) -> jax.Array:
  """Returns a leaf `[*stack, R, ...]` as the value of a sharded table."""
  if isinstance(leaf, RowInitializer):
    return reorder.made_by_rows(
      leaf.fun, table, mesh, leaf.shape[-1], leaf.dtype
    )
  if table.stack:
    return reorder.stack_to_owners(leaf, table, mesh)
  return reorder.rows_to_owners(leaf, table, mesh)


def replica_axes(
  replicas: AxisName | None, axes: Axes, mesh: jax.sharding.Mesh
) -> Axes:
  """Returns the axes along which tables have copies.

  Raises:
    ValueError: The mesh has not all of them, or one is an owner's.
  """
  if replicas is None:
    return ()
  copies = arguments.mesh_axes(replicas, mesh, "replicas")
  if set(copies) & set(axes):
    raise ValueError(
      "`replicas` must name other axes than `axis_name`, along which tables"
      f" have copies, got {replicas!r} for owners along {axes!r}."
    )
  return copies


def unshard_leaves(tree: Any) -> Any:
  """Returns a tree with arrays for sharded tables: see `unshard`."""
  whole = lambda node: reorder.rows_of(node) if is_sharded(node) else node
  return jax.tree.map(whole, tree, is_leaf=is_sharded)


def replicated(leaf: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns a leaf that is not a table on all devices, if it is not yet."""
  if isinstance(leaf, Tracer) or not leaf_util.is_array(leaf):
    return leaf
  sharding = getattr(leaf, "sharding", None)
  if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
    return leaf
  return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
