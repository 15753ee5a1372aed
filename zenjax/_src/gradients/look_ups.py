"""Which equations look up rows, and of which ids.

A look-up traces to one of four forms, each with its own rule for ids out of
range:

- `jnp.take`, Flax: a gather that fills them with NaN; no gradient.
- `table[ids]`, Haiku: one that promises there are none. XLA clips them, and
  drops their gradient.
- a scalar index under `vmap`, Equinox: one that clips them, with a second
  column of indices; the gradient goes to the row that was read.
- a scalar index, also in `scan` and `map`: a dynamic slice, clipped.

Slices of constant rows count as well. A leaf may be a stack of tables, `[T, R,
D]`: then an equation either reads rows, each with its table, or cuts tables out
of the stack (`cut`).
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
  """Where the rows of a table, or of a stack of tables, stand in their leaf.

  Attributes:
    num_rows: Rows of the leaf: the id that stands for none.
    first: The leaf's row that is the first one here.
    strides: From table to table, for each dimension before that of rows.
  """

  num_rows: int
  first: Any = 0
  strides: tuple[int, ...] = ()

  @classmethod
  def of(cls, shape: Sequence[int]) -> "Place":
    """Returns the place of a whole leaf `[..., R, D]`."""
    return cls(math.prod(shape[:-1]), 0, strides_of(shape))

  def at(self, index: Any) -> "Place":
    """Returns the place of one of the tables along the first dimension."""
    one = self.shifted(index * self.strides[0])
    return one._replace(strides=self.strides[1:])

  def shifted(self, rows: Any) -> "Place":
    """Returns the place that begins so many rows later."""
    return self._replace(first=self.first + rows)

  def ids(self, at: Sequence[jax.Array]) -> jax.Array:
    """Returns ids of rows at `at`, an index along each dimension but the last.

    Along any of them -1 stands for no row.
    """
    first, around = self.first, jax.sharding.get_abstract_mesh()
    if isinstance(first, jax.Array) and not around.empty:
      if jax.typeof(first).sharding.mesh != around:  # Of other kinds of axes.
        first = jax.sharding.reshard(first, jax.sharding.PartitionSpec())
    real = functools.reduce(jnp.logical_and, [x >= 0 for x in at])
    each = zip(at, (*self.strides, 1), strict=True)
    row = functools.reduce(jnp.add, [x * stride for x, stride in each])
    return jnp.where(real, first + row, self.num_rows)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
  """Rows from table to table of `[..., R, D]`, for each dimension before R."""
  return tuple([math.prod(shape[k + 1 : -1]) for k in range(len(shape) - 2)])


class LookUp(NamedTuple):
  """Rows that were read; `...` are the dimensions of ids.

  Ids are rows of the leaf; its number of rows stands for none.
  """

  ids: jax.Array  # [...] int32, of no row where no gradient goes
  read: jax.Array  # [...] int32, of no row where none was read
  out: jax.Array  # rows as the equation gives them
  rows: Callable[[jax.Array], jax.Array]  # of `out`: [..., D]
  restored: Callable[[jax.Array], jax.Array]  # `out` of rows
  fill_value: Any = None  # what rows hold that were not read; None if all were


def gather(
  eqn: jex_core.JaxprEqn, table: jax.Array, place: Place, others: Sequence[Any]
) -> LookUp | str:
  """Reads a `gather`; a word why not where it reads other than whole rows.

  Each dimension of `[T, R, D]` but the last is indexed, shared with a dimension
  of the indices as under `vmap`, or read along its whole length. Ids have the
  dimensions of the indices, then the shared ones, then those read whole: a
  batch stays first.
  """
  (indices,) = others
  dims, *sizes, width = eqn.params["dimension_numbers"], *table.shape
  mode = jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
  clips = mode == jax.lax.GatherScatterMode.CLIP
  fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
  indexed = tuple(map(int, dims.start_index_map))
  on = map(int, dims.start_indices_batching_dims)
  shared = dict(zip(map(int, dims.operand_batching_dims), on))
  rows = len(sizes) - 1  # The dimension of rows.
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
  """Says why a `gather` reads other than whole rows; "" if it does not."""
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
  """Reads a `dynamic_slice`, or a `slice` of constant rows."""
  (rows,) = jaxprs.bind(eqn, [table, *others])
  if rows.shape[-1] != table.shape[-1]:
    return "is sliced into other pieces than whole rows"
  starts, steps = _begin(eqn, table.shape, others)
  ids = _grid(place, starts[:-1], rows.shape[:-1], steps[:-1])
  same = lambda rows: rows
  return LookUp(ids, ids, rows, same, same)


def _begin(
  eqn: jex_core.JaxprEqn, shape: Sequence[int], others: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[int]]:
  """Where a slice begins along each dimension, and its steps."""
  ones = (1,) * len(shape)
  if eqn.primitive.name == "slice":
    return eqn.params["start_indices"], eqn.params["strides"] or ones
  # Clipped, as JAX does.
  last = [r - c for r, c in zip(shape, eqn.params["slice_sizes"])]
  each = zip(others, last, strict=True)
  return [in_range(jnp.asarray(x), k + 1, True) for x, k in each], ones


def _grid(
  place: Place,
  starts: Sequence[Any],
  counts: Sequence[int],
  steps: Sequence[int],
) -> jax.Array:
  """Ids of the rows of a slice, in its shape but for columns."""
  at = []
  for k, (start, count, step) in enumerate(zip(starts, counts, steps)):
    x = start + step * jnp.arange(count, dtype=jnp.int32)
    at.append(_along(x, k, len(counts)))
  return place.ids(at)


def _along(x: jax.Array, dim: int, dims: int) -> jax.Array:
  """`x: [k]` as dimension `dim` of `dims`."""
  return (
    x if dims == 1 else jnp.expand_dims(x, [d for d in range(dims) if d != dim])
  )


# What may cut tables out of a stack.
CUTS = ("reshape", "squeeze", "unstack", "split", "slice", "dynamic_slice")


def cut(
  eqn: jex_core.JaxprEqn, table: jax.Array, place: Place, others: Sequence[Any]
) -> list[Place] | None:
  """Returns the places of what an equation leaves of `[T, R, D]`, all of R.

  None where it does another thing: reads rows, say.
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
  """`ids` as int32, those out of range clipped or -1."""
  ids = sparse_rows.narrowed(ids, num_rows, "Ids of rows")
  if clips:
    return jnp.clip(ids, 0, num_rows - 1)
  return jnp.where(ids < num_rows, jnp.maximum(ids, -1), -1)
