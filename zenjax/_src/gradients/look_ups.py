"""Recognizes equations that look up rows, and computes their ids.

A lookup traces to one of four forms, which treat ids out of range differently:

- `jnp.take`, Flax: a gather that fills rows with NaN. They have no gradient.
- `table[ids]`, Haiku: a gather that promises ids in range. XLA clips ids, and
  drops their gradient.
- A scalar index under `vmap`, Equinox: a gather that clips ids, with a second
  column of indices. The gradient belongs to the row that was read.
- A scalar index elsewhere, also in `scan` and `map`: a dynamic slice that clips
  ids.

Slices of constant rows are lookups too. If a leaf is a stack of tables, `[T, R,
D]`, an equation either reads rows of several tables, or cuts tables out of the
stack (`cut`).
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import jaxprs
from zenjax._src.rows import sparse_rows


class Place(NamedTuple):
  """The place of a table, or of a stack of tables, in its leaf.

  Attributes:
    num_rows: The number of rows of the leaf, which is also the id of no row.
    first: The row of the leaf that is the first row here.
    strides: The rows from one table to the next, for each dimension before the
      rows.
  """

  num_rows: int
  first: Any = 0
  strides: tuple[int, ...] = ()

  def at(self, index: Any) -> "Place":
    """Returns the place of one of the tables along the first dimension."""
    one = self.shifted(index * self.strides[0])
    return one._replace(strides=self.strides[1:])

  def shifted(self, rows: Any) -> "Place":
    """Returns the place that begins so many rows later."""
    return self._replace(first=self.first + rows)

  def ids(self, at: Sequence[jax.Array]) -> jax.Array:
    """Returns ids of rows, given an index for each dimension except columns.

    An index of -1 means no row.
    """
    first, around = self.first, jax.sharding.get_abstract_mesh()
    if isinstance(first, jax.Array) and not around.empty:
      if jax.typeof(first).sharding.mesh != around:  # Axes of other types.
        first = jax.sharding.reshard(first, jax.sharding.PartitionSpec())
    real = functools.reduce(jnp.logical_and, [x >= 0 for x in at])
    each = zip(at, (*self.strides, 1), strict=True)
    row = functools.reduce(jnp.add, [x * stride for x, stride in each])
    return jnp.where(real, first + row, self.num_rows)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns `Place.strides` of an array `[..., R, D]`."""
  return tuple([math.prod(shape[k + 1 : -1]) for k in range(len(shape) - 2)])


class LookUp(NamedTuple):
  """Rows that an equation reads; `...` are the dimensions of ids.

  Ids are rows of the leaf. The number of rows of the leaf means no row.
  """

  ids: jax.Array  # [...] int32, the rows that gradients belong to
  read: jax.Array  # [...] int32, the rows that are read
  out: jax.Array  # the result of the equation
  rows: Callable[[jax.Array], jax.Array]  # reshapes `out` to [..., D]
  restored: Callable[[jax.Array], jax.Array]  # the inverse of `rows`
  fill_value: Any = None  # of rows that are not read; None if all are read


def gather(
  eqn: jex_core.JaxprEqn, table: jax.Array, place: Place, others: Sequence[Any]
) -> LookUp | str:
  """Returns the lookup of a `gather`, or why it does not read whole rows.

  Each dimension of `[T, R, D]` except columns is either indexed, or shared with
  a dimension of the indices (as under `vmap`), or read whole. The ids have
  the dimensions of the indices, then shared ones, then whole ones, so that the
  batch comes first.
  """
  (indices,) = others
  dims, *sizes, width = eqn.params["dimension_numbers"], *table.shape
  mode = jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
  clips = mode == jax.lax.GatherScatterMode.CLIP
  fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
  indexed = tuple(map(int, dims.start_index_map))
  on = map(int, dims.start_indices_batching_dims)
  shared = dict(zip(map(int, dims.operand_batching_dims), on))
  rows = len(sizes) - 1  # the dimension of rows
  whole = [k for k in range(rows) if k not in indexed and k not in shared]
  reason = _not_rows(eqn, table.shape, indexed, whole, fills)
  if reason:
    return reason

  batch = indices.ndim - 1
  front = [d for d in range(batch) if d not in shared.values()]
  order = [*front, *[d for d in range(batch) if d in shared.values()]]
  counts = [indices.shape[d] for d in order] + [sizes[k] for k in whole]

  def at(k: int, clips: bool) -> jax.Array:
    if k in whole or k in shared:
      dim = batch + whole.index(k) if k in whole else order.index(shared[k])
      return _along(jnp.arange(sizes[k], dtype=jnp.int32), dim, len(counts))
    column = indices[..., indexed.index(k)].transpose(order)
    x = in_range(column, sizes[k], clips)
    return jnp.expand_dims(x, tuple(range(batch, len(counts))))

  def ids(clips: bool) -> jax.Array:
    found = place.ids([at(k, clips) for k in range(len(sizes))])
    return jnp.broadcast_to(found, counts)

  (out,) = jaxprs.bind(eqn, [table, indices])
  windows = tuple(map(int, dims.offset_dims))
  kept = [d for d in range(out.ndim) if d not in windows]
  moved = [*[kept[d] for d in order], *windows]
  shape = tuple([out.shape[d] for d in moved])
  back = [moved.index(d) for d in range(out.ndim)]
  fill = eqn.params["fill_value"]
  return LookUp(
    ids=ids(clips),
    read=ids(not fills),
    out=out,
    rows=lambda out: out.transpose(moved).reshape(*counts, width),
    restored=lambda rows: rows.reshape(shape).transpose(back),
    fill_value=(np.nan if fill is None else fill) if fills else None,
  )


def _not_rows(
  eqn: jex_core.JaxprEqn,
  shape: Sequence[int],
  indexed: Sequence[int],
  whole: Sequence[int],
  fills: bool,
) -> str:
  """Returns why a `gather` does not read whole rows; "" if it does."""
  *pieces, columns = eqn.params["slice_sizes"]
  rows, last = len(shape) - 2, len(shape) - 1
  if columns != shape[last] or (last in indexed and fills):
    return "is gathered from by other pieces than whole rows"
  if rows not in indexed or pieces[rows] != 1:
    return "is gathered from along other dimensions than its rows"
  if [k for k in whole if pieces[k] != shape[k]]:
    return "is gathered from by a part of the tables in its stack"
  if [k for k in indexed if k < rows and pieces[k] != 1]:
    return "is gathered from by more than one table for an index"
  return ""


def sliced(
  eqn: jex_core.JaxprEqn, table: jax.Array, place: Place, others: Sequence[Any]
) -> LookUp | str:
  """Returns the lookup of a slice, dynamic or of constant rows."""
  (rows,) = jaxprs.bind(eqn, [table, *others])
  *counts, width = rows.shape
  if width != table.shape[-1]:
    return "is sliced into other pieces than whole rows"
  index = [
    _along(start + step * jnp.arange(count, dtype=jnp.int32), k, len(counts))
    for k, (count, start, step) in enumerate(
      zip(counts, *_begin(eqn, table.shape, others))
    )
  ]
  ids = place.ids(index)
  same = lambda rows: rows
  return LookUp(ids, ids, rows, same, same)


def _begin(
  eqn: jex_core.JaxprEqn, shape: Sequence[int], others: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[int]]:
  """Returns the start of a slice along each dimension, and its steps."""
  ones = (1,) * len(shape)
  if eqn.primitive.name == "slice":
    return eqn.params["start_indices"], eqn.params["strides"] or ones
  # Clipped, as JAX does.
  last = [r - c for r, c in zip(shape, eqn.params["slice_sizes"])]
  each = zip(others, last, strict=True)
  return [in_range(jnp.asarray(x), k + 1, True) for x, k in each], ones


def _along(x: jax.Array, dim: int, dims: int) -> jax.Array:
  """Returns `x: [k]` as dimension `dim` of `dims`."""
  return jnp.expand_dims(x, [d for d in range(dims) if d != dim])


# Primitives that may cut tables out of a stack.
CUTS = ("reshape", "squeeze", "unstack", "split", "slice", "dynamic_slice")


def cut(
  eqn: jex_core.JaxprEqn, table: jax.Array, place: Place, others: Sequence[Any]
) -> list[Place] | None:
  """Returns the places of tables that an equation cuts out of `[T, R, D]`.

  It returns None if the equation does something else, for example reads rows.
  """
  name, strides = eqn.primitive.name, place.strides
  outs: list[Any] = [x.aval for x in eqn.outvars]
  if name == "reshape":
    each = zip(strides, strides_of(table.shape), table.shape)
    in_order = all(x == y or size == 1 for x, y, size in each)
    shape = outs[0].shape
    if not in_order or len(shape) < 2 or shape[-1] != table.shape[-1]:
      return None
    return [place._replace(strides=strides_of(shape))]
  if not strides or any(x.shape[-2:] != table.shape[-2:] for x in outs):
    return None
  if name == "squeeze":
    left = [
      s for d, s in enumerate(strides) if d not in eqn.params["dimensions"]
    ]
    return [place._replace(strides=tuple(left))]
  if name == "unstack" and eqn.params["axis"] == 0:
    return [place.at(t) for t in range(len(outs))]
  if name == "split":
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    begins = [sum(map(int, sizes[:k])) for k in range(len(sizes))]
    return [place.shifted(x * strides[axis]) for x in begins]
  if name not in ("slice", "dynamic_slice"):
    return None
  starts, steps = _begin(eqn, table.shape, others)
  strides = tuple([x * step for x, step in zip(strides, steps)])
  for start, stride in zip(starts, place.strides):
    place = place.shifted(start * stride)
  return [place._replace(strides=strides)]


FORMS: dict[str, Callable[..., LookUp | str]] = {
  "gather": gather,
  "dynamic_slice": sliced,
  "slice": sliced,
}


def in_range(ids: jax.Array, num_rows: int, clips: bool) -> jax.Array:
  """Returns `ids` as int32; ids out of range are clipped or become -1."""
  ids = sparse_rows.narrowed(ids, num_rows, "Ids of rows")
  if clips:
    return jnp.clip(ids, 0, num_rows - 1)
  return jnp.where(ids < num_rows, jnp.maximum(ids, -1), -1)
