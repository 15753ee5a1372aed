"""Moves rows one by one between a table and a buffer, on a TPU.

The copy of a row costs an instruction and latency, which the copies of other
rows in the block hide. No other rows are moved. A row must consist of whole
tiles of lanes, because the hardware cannot move a part of a tile. Narrower
tables are stored by columns, and packing them here would take a second table
and more bytes than their rows.

Rows of narrow dtypes share words. To write such a row, the kernel reads its
words, changes a part of them, and writes them. Rows at different places in
their words are written one after another, so that copies at the same time never
share a word.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core.indexing import Bitmap
from zenjax._src.core.partition import Layout
from zenjax.kernels import reference
from zenjax.kernels._dispatch import loadable
from zenjax.kernels.tpu import words as in_words
from zenjax.kernels.tpu.words import LANES
from zenjax.kernels.tpu.words import TILE


def compact(
  table: jax.Array,
  bitmap: Bitmap,
  layout: Layout,
  first: jax.Array,
  capacity: int,
  *,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """See `reference.compact`.

  XLA finds the slots, because they are few. The kernel moves existing rows
  directly to their place in the buffer.
  """
  cut, width = _cut_of(table, capacity), table.shape[1]
  slots, row = reference.chosen(bitmap, layout, first, capacity)
  raw = loadable(table, interpret)
  gathered = pl.pallas_call(
    functools.partial(_gather, cut=cut),
    grid=(layout.groups, pl.cdiv(capacity, cut.rows), width // cut.columns),
    in_specs=[_rows_of(cut.rows)] + [pl.BlockSpec(memory_space=pl.ANY)] * 2,
    out_specs=pl.BlockSpec(
      (1, cut.rows, cut.columns), lambda g, b, c: (g, b, c)
    ),
    out_shape=compat.struct((*row.shape, width), raw.dtype, table),
    scratch_shapes=[_words(cut), pltpu.SemaphoreType.DMA],
    cost_estimate=in_words.moves(
      row.nbytes + row.size * width * (4 + table.dtype.itemsize)
    ),
    interpret=interpret,
    name="zenjax_compact",
  )(_in_blocks(row, cut), *in_words.split(raw, cut, interpret))
  return slots, lax.bitcast_convert_type(gathered, table.dtype)


def expand(
  table: jax.Array,
  row: jax.Array,
  values: jax.Array,
  *,
  interpret: Any = False,
) -> jax.Array:
  """See `reference.expand`."""
  cut, width = _cut_of(table, row.size), table.shape[1]
  raw = loadable(table, interpret)
  whole, last = in_words.split(raw, cut, interpret)
  written, last = pl.pallas_call(
    functools.partial(_scatter, cut=cut),
    grid=(1, pl.cdiv(row.size, cut.rows), width // cut.columns),
    in_specs=[
      _rows_of(cut.rows),
      pl.BlockSpec((cut.rows, cut.columns), lambda g, b, c: (b, c)),
      *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
    ],
    out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
    out_shape=[compat.struct(x.shape, x.dtype, table) for x in (whole, last)],
    scratch_shapes=[_words(cut), _words(cut), pltpu.SemaphoreType.DMA],
    input_output_aliases={2: 0, 3: 1},
    # Words that are written in part are read first.
    cost_estimate=in_words.moves(
      row.nbytes + values.nbytes + values.size * (4 if cut.pack == 1 else 8)
    ),
    interpret=interpret,
    name="zenjax_expand",
  )(_in_blocks(row[None], cut), loadable(values, interpret), whole, last)
  written = in_words.joined(written, last, cut, raw.dtype)
  return lax.bitcast_convert_type(written, table.dtype)


def _cut_of(table, count):
  """Returns the cut; raises NotImplementedError if rows cannot be moved."""
  dtype, width = table.dtype, table.shape[1]
  if dtype.itemsize > 4 or dtype == jnp.float16 or width % LANES:
    raise NotImplementedError(
      "float32, bfloat16 and float8, which Mosaic loads, in rows of a width"
      " that 128 divides, which can be moved one by one (`zenjax.packed` stores"
      f" narrower tables so), got {dtype} of width {width}"
    )
  if count < 1:
    raise NotImplementedError("at least one row to move, got none")
  return in_words.cut_of(table)


def _words(cut):
  """Returns memory with a word for every row of a block.

  If rows are words, it is unused and has the least size.
  """
  rows = cut.rows if cut.pack > 1 else TILE
  return pltpu.VMEM((rows, cut.columns), jnp.int32)


def _rows_of(size):
  return pl.BlockSpec(
    (1, 1, 1, size), lambda g, b, c: (g, b, 0, 0), memory_space=pltpu.SMEM
  )


def _in_blocks(row, cut):
  """Returns `[m, blocks, 1, rows]`, padded with `R`."""
  m, count = row.shape
  blocks = pl.cdiv(count, cut.rows)
  row = jnp.pad(
    row,
    ((0, 0), (0, blocks * cut.rows - count)),
    constant_values=cut.num_rows,
  )
  return row.reshape(m, blocks, 1, cut.rows)


def _gather(row, table, last, out, words, done, *, cut):
  to = words if cut.pack > 1 else out.at[0]
  to[...] = jnp.zeros(to.shape, to.dtype)
  copies = _Copies(row, table, last, done, cut)
  copies.all_at_once(lambda i, word: (word, to.at[pl.ds(i, 1)]))
  if cut.pack == 1:
    return

  def join(j, carry):
    """Joins rows that share a word in the buffer."""
    joined = jnp.zeros((1, cut.columns), jnp.int32)
    for part in range(cut.pack):
      i = j * cut.pack + part
      _, up = cut.place(row[0, 0, 0, i])
      one = lax.shift_right_logical(words[pl.ds(i, 1), :], up)
      joined |= (one & _lowest(cut)) << (part * cut.bits)
    # Word j can be overwritten, because rows up to it have been read.
    words[pl.ds(j, 1), :] = joined
    return carry

  count = cut.rows // cut.pack
  lax.fori_loop(0, count, join, 0)
  out[0] = pltpu.bitcast(words[:count, :], out.dtype)


def _scatter(row, values, _, __, table, last, words, mine, done, *, cut):
  copies = _Copies(row, table, last, done, cut)
  if cut.pack == 1:
    copies.all_at_once(lambda i, word: (values.at[pl.ds(i, 1)], word))
    return
  mine[: cut.rows // cut.pack, :] = pltpu.bitcast(values[...], jnp.int32)

  def write(i, up):
    word, part = cut.place(i)
    one = lax.shift_right_logical(mine[pl.ds(word, 1), :], part)
    kept = words[pl.ds(i, 1), :] & ~(_lowest(cut) << up)
    words[pl.ds(i, 1), :] = kept | ((one & _lowest(cut)) << up)

  for part in range(cut.pack):
    up = part * cut.bits
    copies.all_at_once(lambda i, word: (word, words.at[pl.ds(i, 1)]), up)
    copies.each(lambda i, at, up=up: write(i, up), up)
    copies.all_at_once(lambda i, word: (words.at[pl.ds(i, 1)], word), up)


def _lowest(cut):
  return jnp.int32((1 << cut.bits) - 1)


class _Copies:
  """Copies the words of the rows of a block."""

  def __init__(self, row, table, last, done, cut):
    self._row, self._last = row, last
    self._table = in_words.seen_as_words(table, cut)
    self._done, self._cut = done, cut

  def each(self, do, up=None):
    """Runs `do(i, word)` for existing rows, or for those `up` in their word."""
    cut = self._cut

    def one(i, carry):
      at = self._row[0, 0, 0, i]
      word, above = cut.place(at)
      there = at < cut.num_rows

      @pl.when(there if up is None else there & (above == up))
      def _():
        do(i, word)

      return carry

    lax.fori_loop(0, cut.rows, one, 0)

  def all_at_once(self, between, up=None):
    """Starts the copy `between(i, word)` of each row, then awaits all."""
    cut = self._cut
    columns = pl.ds(
      pl.multiple_of(pl.program_id(2) * cut.columns, LANES), cut.columns
    )

    def copy(i, ref, at, do):
      source, target = between(i, ref.at[pl.ds(at, 1), columns])
      do(pltpu.make_async_copy(source, target, self._done))

    def each(do):
      def one(i, word):
        if cut.num_rows % cut.pack == 0:
          copy(i, self._table, word, do)
          return
        pl.when(word < cut.whole)(lambda: copy(i, self._table, word, do))
        pl.when(word >= cut.whole)(
          lambda: copy(i, self._last, word - cut.whole, do)
        )

      self.each(one, up)

    each(lambda one: one.start())
    each(lambda one: one.wait())
