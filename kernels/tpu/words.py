"""Rows of narrow dtypes as Mosaic moves them: in words of 32 bits.

Of a dtype with fewer bits `p = 2` or 4 rows lie beside each other in words. No
copy can start or end within a word, so an array of `R` such rows is seen as
`[R / p, D]` words; where `p` does not divide `R`, the rows past the last whole
tile are copied aside, to words of their own.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

LANES = 128
TILE = 8  # words of a column
_BLOCK = 1 << 20  # bytes of words that are under way at once
MOST_ROWS = 256
_MOST_COLUMNS = 2048  # code is written out for all tiles of a row


class Cut(NamedTuple):
  """What a step of a kernel moves, and where a row is in its word."""

  num_rows: int
  pack: int  # rows that share words
  rows: int
  columns: int

  @property
  def whole(self) -> int:
    """Words, in a column, that are seen in the table; others are aside."""
    rest = self.num_rows % TILE if self.num_rows % self.pack else 0
    return (self.num_rows - rest) // self.pack

  @property
  def bits(self) -> int:
    return 32 // self.pack

  @property
  def word(self) -> jnp.dtype:
    return jnp.dtype(jnp.int32 if self.pack > 1 else jnp.float32)

  def place(self, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The word of a row, and how far up in it the row is."""
    word = lax.div(at, jnp.int32(self.pack))
    return word, (at - word * self.pack) * self.bits


def cut_of(table: jax.Array, most_rows: int = MOST_ROWS) -> Cut:
  """Returns how much of `[..., R, D]` fits, twice, beside two result blocks.

  Args:
    table: The rows that move.
    most_rows: An upper bound for the rows of a block.

  Raises:
    NotImplementedError: The rows do not fill a word.
  """
  *_, num_rows, width = table.shape
  pack = 4 // table.dtype.itemsize
  # Mosaic of JAX 0.10 cuts arrays at whole tiles only.
  fewest = TILE if num_rows % pack else pack
  if num_rows < fewest:
    raise NotImplementedError(
      f"at least {fewest} rows of {table.dtype}, {pack} of which share words of"
      f" 32 bits, got {num_rows}"
    )
  least = TILE * pack
  columns = _columns(width)
  fits = _BLOCK // (columns * 4) // least * least
  return Cut(num_rows, pack, min(most_rows, fits), columns)


def _columns(width):
  """The largest divisor of `width` in whole tiles that is not too large."""
  tiles = width // LANES
  fitting = range(1, min(tiles, _MOST_COLUMNS // LANES) + 1)
  return LANES * max(count for count in fitting if tiles % count == 0)


def moves(nbytes: int) -> pl.CostEstimate:
  """What a kernel tells XLA, which would count whole tables otherwise."""
  return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=nbytes)


def split(
  table: jax.Array, cut: Cut, interpret: Any
) -> tuple[jax.Array, jax.Array]:
  """`[..., R, D]`, and `[..., k, D]` the words of the rows past its `whole`.

  Where XLA would run the kernel the table is given to it as words: only Mosaic
  sees one array as another. Both have no use where rows are words.
  """
  whole, pack = cut.whole * cut.pack, cut.pack
  last = table[..., whole:, :]
  missing = [(0, 0)] * table.ndim
  missing[-2] = (0, -last.shape[-2] % pack or pack * (not last.shape[-2]))
  last = _as_words(jnp.pad(last, missing), pack)
  if interpret and pack > 1:
    table = _as_words(table[..., :whole, :], pack)
  if not interpret:
    # XLA would copy what fits to fast memory, rows that nobody reads as well.
    table = pltpu.with_memory_space_constraint(table, pltpu.HBM)
  return table, last


def seen_as_words(table: Any, cut: Cut) -> Any:
  """The reference `[..., R, D]`, as one of words."""
  if table.dtype.itemsize == 4:
    return table
  every = (slice(None),) * (len(table.shape) - 2)
  return table.at[*every, pl.ds(0, cut.whole * cut.pack)].bitcast(jnp.int32)


def joined(
  table: jax.Array, last: jax.Array, cut: Cut, dtype: jnp.dtype
) -> jax.Array:
  """Inverse of `split`; in place where the table is not given as words."""
  rest = cut.num_rows - cut.whole * cut.pack
  last = _as_rows(last, cut.pack, dtype)[:rest]
  if table.shape[0] != cut.num_rows:
    return jnp.concatenate([_as_rows(table, cut.pack, dtype), last])
  return table.at[cut.num_rows - rest :].set(last) if rest else table


def integers(x: jax.Array) -> jax.Array:
  """The bits of `x`."""
  return lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))


def _as_words(raw, pack):
  """`[..., n, D]` to `[..., n / pack, D] int32`, the first row lowest."""
  bits = 32 // pack
  if pack == 1:
    return integers(raw)
  unsigned = jnp.dtype(f"uint{bits}")
  words = jnp.zeros((), jnp.uint32)
  # By shifts: XLA for TPU takes long over arrays of a few columns.
  for part in range(pack):
    row = lax.bitcast_convert_type(raw[..., part::pack, :], unsigned)
    words |= row.astype(jnp.uint32) << (part * bits)
  return lax.bitcast_convert_type(words, jnp.int32)


def _as_rows(words, pack, dtype):
  """Inverse of `_as_words`."""
  if pack == 1:
    return lax.bitcast_convert_type(words, dtype)
  *batch, count, width = words.shape
  bits = 32 // pack
  words = lax.bitcast_convert_type(words, jnp.uint32)
  parts = [
    (words >> (part * bits)).astype(jnp.dtype(f"uint{bits}"))
    for part in range(pack)
  ]
  rows = jnp.stack(parts, axis=-2).reshape(*batch, count * pack, width)
  return lax.bitcast_convert_type(rows, dtype)
