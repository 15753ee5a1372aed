"""Treats rows of narrow dtypes as words of 32 bits, which Mosaic can move.

`p = 2` or 4 rows of a narrow dtype share words. No copy can start or end within
a word, so an array of `R` such rows is treated as `[R / p, D]` words. If `p`
does not divide `R`, the rows after the last whole tile are copied to a second,
small array of words.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from zenjax._src.core import wire

LANES = 128
TILE = 8  # words of a column
_BLOCK = 1 << 20  # bytes of words that are copied at the same time
MOST_ROWS = 256  # of a block
_MOST_COLUMNS = 2048  # limits the code, which is unrolled over tiles of a row


class Cut(NamedTuple):
  """The rows and columns that a step of a kernel moves."""

  num_rows: int
  pack: int  # rows that share words
  rows: int
  columns: int

  @property
  def whole(self) -> int:
    """The number of words in a column of the table; others are copied aside."""
    aside = self.num_rows % TILE if self.num_rows % self.pack else 0
    return (self.num_rows - aside) // self.pack

  @property
  def bits(self) -> int:
    return 32 // self.pack

  @property
  def word(self) -> jnp.dtype:
    return jnp.dtype(jnp.int32 if self.pack > 1 else jnp.float32)

  def place(self, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the word of a row, and by how many bits the row is shifted."""
    word = lax.div(at, jnp.int32(self.pack))
    return word, (at - word * self.pack) * self.bits


def cut_of(table: jax.Array) -> Cut:
  """Returns a cut that fits in memory twice, together with two result blocks.

  Args:
    table: The table `[..., R, D]` whose rows move.

  Raises:
    NotImplementedError: The table has too few rows.
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
  return Cut(num_rows, pack, min(MOST_ROWS, fits), columns)


def _columns(width):
  """Returns the largest allowed divisor of `width` in whole tiles."""
  tiles = width // LANES
  fitting = range(1, min(tiles, _MOST_COLUMNS // LANES) + 1)
  return LANES * max(count for count in fitting if tiles % count == 0)


def moves(nbytes: int) -> pl.CostEstimate:
  """Returns the cost of a kernel. By default, XLA would count whole tables."""
  return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=nbytes)


def split(
  table: jax.Array, cut: Cut, interpret: Any
) -> tuple[jax.Array, jax.Array]:
  """Splits a table into `[..., R, D]` and the words `[..., k, D]` aside.

  In interpreted kernels the table is converted to words, because only Mosaic
  can treat one array as another. If rows are words, the second array is an
  unused placeholder.
  """
  whole, pack = cut.whole * cut.pack, cut.pack
  last = table[..., whole:, :]
  missing = [(0, 0)] * table.ndim
  missing[-2] = (0, -last.shape[-2] % pack or pack * (not last.shape[-2]))
  last = _as_words(jnp.pad(last, missing), pack)
  if interpret and pack > 1:
    table = _as_words(table[..., :whole, :], pack)
  if not interpret:
    # XLA would copy a table that fits to fast memory, including unused rows.
    table = pltpu.with_memory_space_constraint(table, pltpu.HBM)
  return table, last


def seen_as_words(table: Any, cut: Cut) -> Any:
  """Returns the reference `[..., R, D]` as a reference of words."""
  if table.dtype.itemsize == 4:
    return table
  every = (slice(None),) * (len(table.shape) - 2)
  return table.at[*every, pl.ds(0, cut.whole * cut.pack)].bitcast(jnp.int32)


def joined(
  table: jax.Array, last: jax.Array, cut: Cut, dtype: jnp.dtype
) -> jax.Array:
  """Joins what `split` returned, in place unless the table is words."""
  aside = cut.num_rows - cut.whole * cut.pack
  last = _as_rows(last, cut.pack, dtype)[:aside]
  if table.shape[0] != cut.num_rows:
    return jnp.concatenate([_as_rows(table, cut.pack, dtype), last])
  return table.at[cut.num_rows - aside :].set(last) if aside else table


def _as_words(raw, pack):
  """Packs `[..., n, D]` to `[..., n / pack, D] int32`, the first row lowest."""
  bits = 32 // pack
  if pack == 1:
    return wire.integers(raw)
  unsigned = jnp.dtype(f"uint{bits}")
  words = jnp.zeros((), jnp.uint32)
  # Shifts are used because XLA:TPU is slow with arrays of a few columns.
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
