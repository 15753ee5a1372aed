"""Sums received rows into their union in rank order, on a TPU.

The rows of a source are sorted, so its rows for a block of the union form one
range, which XLA finds. The kernel copies only the rows of this range, while it
adds the rows of the source before. Sums stay in fast memory and are written
once. One core adds one row after another in the order of ranks, so no locks are
needed.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax.kernels import reference
from zenjax.kernels.tpu import words as in_words
from zenjax.kernels.tpu.words import LANES
from zenjax.kernels.tpu.words import TILE


def merge(
  slots: jax.Array,
  rows: jax.Array,
  limit: jax.Array,
  num_slots: int,
  capacity: int,
  dtype: jnp.dtype,
  *,
  interpret: Any = False,
) -> reference.Union:
  """See `reference.merge`."""
  if rows.dtype.name not in ("float32", "bfloat16") or rows.shape[2] % LANES:
    raise NotImplementedError(
      "float32 and bfloat16 rows of a width that 128 divides (`zenjax.packed`"
      f" stores narrower tables so), got {rows.dtype} of width {rows.shape[2]}"
    )
  if jnp.dtype(dtype) != jnp.float32:
    raise NotImplementedError(f"sums in float32, got {jnp.dtype(dtype)}")
  if capacity < 1 or slots.size < 1:
    raise NotImplementedError(
      f"at least one row sent and one to hold, got slots of {slots.shape} and"
      f" a capacity of {capacity}"
    )
  union, position = reference.place(slots, limit, num_slots, capacity)
  n, _, width = rows.shape
  cut = in_words.cut_of(rows)
  blocks = pl.cdiv(capacity, cut.rows)
  # How many chunks of lanes the positions of a range may cover.
  chunks = pl.cdiv(cut.rows - 1, LANES) + 1
  sums = pl.pallas_call(
    functools.partial(_kernel, cut=cut),
    grid=(blocks, width // cut.columns),
    in_specs=[
      pl.BlockSpec((1, 2, n), lambda b, c: (b, 0, 0), memory_space=pltpu.SMEM),
      *[pl.BlockSpec(memory_space=pl.ANY)] * 3,
    ],
    out_specs=pl.BlockSpec((cut.rows, cut.columns), lambda b, c: (b, c)),
    out_shape=compat.struct((capacity, width), dtype, rows),
    scratch_shapes=[
      # A range may start and end within a tile, so two more tiles are needed.
      pltpu.VMEM((2, cut.rows // cut.pack + 2 * TILE, cut.columns), cut.word),
      pltpu.SMEM((2, chunks, 1, LANES), jnp.int32),
      pltpu.SemaphoreType.DMA((2,)),
    ],
    cost_estimate=in_words.moves(
      position.nbytes + rows.nbytes + capacity * width * 4
    ),
    interpret=interpret,
    name="zenjax_merge",
  )(
    _ranges(position, blocks, cut.rows, capacity),
    _by_lanes(position, chunks),
    *in_words.split(rows, cut, interpret),
  )
  return union._replace(rows=sums)


def _ranges(position, blocks, size, capacity):
  """Returns `[blocks, 2, n]`: start and end of a source's rows for a block."""
  edges = jnp.minimum(jnp.arange(blocks + 1, dtype=jnp.int32) * size, capacity)
  bound = jax.vmap(indexing.lower_bound, (0, None), 1)(position, edges)
  return jnp.stack([bound[:-1], bound[1:]], axis=1)


def _by_lanes(position, chunks):
  """Returns positions `[n, k, 1, 128]`, padded so that copies stay inside."""
  n, count = position.shape
  size = (pl.cdiv(count, LANES) + chunks) * LANES
  position = jnp.pad(position, ((0, 0), (0, size - count)))
  return position.reshape(n, -1, 1, LANES)


def _kernel(ranges, position, rows, last, sums, words, at, arrived, *, cut):
  block, piece = pl.program_id(0), pl.program_id(1)
  n = rows.shape[0]
  rows = in_words.seen_as_words(rows, cut)
  columns = pl.ds(pl.multiple_of(piece * cut.columns, LANES), cut.columns)
  # Several tiles are copied at once. Words after the last tile are copied one
  # by one.
  tiles = cut.whole // TILE
  sizes = [
    1 << i for i in range(min(tiles, words.shape[1] // TILE).bit_length())
  ]

  def copies(source, do):
    """Runs `do` on all copies of a source's rows for this block."""
    into = source % 2

    def copy(origin, where, to, size):
      do(
        pltpu.make_async_copy(
          origin.at[source, pl.ds(where, size), columns],
          words.at[into, pl.ds(to, size)],
          arrived.at[into],
        )
      )

    start, end = ranges[0, 0, source], ranges[0, 1, source]
    first = start // cut.pack // TILE
    past = pl.cdiv(end, cut.pack)
    count = jnp.minimum(pl.cdiv(past, TILE), tiles) - first

    @pl.when(end > start)
    def _():
      chunk = pl.ds(start // LANES, at.shape[1])
      do(
        pltpu.make_async_copy(
          position.at[source, chunk], at.at[into], arrived.at[into]
        )
      )
      for size in sizes:
        before = count & -(2 * size)

        @pl.when((count > 0) & (count & size != 0))
        def _(before=before, size=size):
          to = pl.multiple_of(before * TILE, TILE)
          origin = pl.multiple_of((first + before) * TILE, TILE)
          copy(rows, origin, to, size * TILE)

      def one_by_one(origin, before, begin, end):
        def one(word, carry):
          copy(origin, word - before, word - first * TILE, 1)
          return carry

        begin = jnp.maximum(start // cut.pack, begin)
        lax.fori_loop(begin, jnp.minimum(past, end), one, 0)

      one_by_one(rows, 0, tiles * TILE, cut.whole)
      if cut.num_rows % cut.pack:
        one_by_one(last, cut.whole, cut.whole, cut.num_rows)

  def add(source):
    start, end = ranges[0, 0, source], ranges[0, 1, source]
    into, first = source % 2, start // cut.pack // TILE * TILE

    def one(i, carry):
      from_chunk = i - start // LANES * LANES
      to = at[into, from_chunk // LANES, 0, from_chunk % LANES]
      to -= block * cut.rows
      word, up = cut.place(i)
      row = words[into, pl.ds(word - first, 1), :]
      if cut.pack > 1:
        row = lax.shift_right_logical(row, up) << 16
        row = lax.bitcast_convert_type(row, jnp.float32)
      sums[pl.ds(to, 1), :] += row
      return carry

    lax.fori_loop(start, end, one, 0)

  def each(source, carry):
    @pl.when(source + 1 < n)
    def _():
      copies(source + 1, lambda copy: copy.start())

    copies(source, lambda copy: copy.wait())
    add(source)
    return carry

  sums[...] = jnp.zeros(sums.shape, sums.dtype)
  copies(0, lambda copy: copy.start())
  lax.fori_loop(0, n, each, 0)
