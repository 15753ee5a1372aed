"""Nonzero rows of a table as a bitmap in (group, slot) order."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import bitmaps
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core.partition import LANES
from zenjax._src.core.partition import Layout


class RowMask(NamedTuple):
  """What one read of a table tells of its rows."""

  nonzero: jax.Array  # [R] bool, any bit other than sign bits
  written: jax.Array  # [R] bool, any bit: also where a zero is negative


def row_mask(table: jax.Array) -> RowMask:
  """Which rows are not zero.

  Integers are compared, not floats: XLA:CPU takes subnormals for zero, and a
  row missed on one replica would leave replicas different. `-0.0` is zero;
  NaN and Inf are not.

  Args:
    table: `[R, D]`, any floating dtype.
  """
  bits = jnp.dtype(f"uint{table.dtype.itemsize * 8}")
  magnitude = np.array(np.iinfo(bits).max >> 1, bits)
  raw = lax.bitcast_convert_type(table, bits)

  def either(a, b):
    return a[0] | b[0], a[1] | b[1]

  # One reduction of two operands: XLA:CPU keeps it in one loop, and writes the
  # comparisons of a plain `any` or `max` to memory first.
  found = ((raw & magnitude) != 0, raw != 0)
  return RowMask(*lax.reduce(found, (np.False_, np.False_), either, (1,)))


class Packed(NamedTuple):
  """The nonzero rows of a table in (group, slot) order."""

  words: jax.Array  # [m, W] uint32: bit i of word w is slot 32 w + i
  negative: jax.Array  # [] bool, whether a row of zeros has a negative one


def mask_pack(table: jax.Array, layout: Layout) -> Packed:
  """The hash bitmap of the nonzero rows of `table`.

  Args:
    table: `[R, D]`.
    layout: Where each row lives; `m` groups of `S = 32 W` slots.
  """
  # The barrier keeps XLA:CPU from computing the mask again for each lane.
  mask = RowMask(*lax.optimization_barrier(row_mask(table)))
  return Packed(
    words=pack_rows(mask.nonzero, layout),
    negative=jnp.any(mask.written & ~mask.nonzero),
  )


def plus_zero_where(negative: jax.Array, table: jax.Array) -> jax.Array:
  """`table` with the zeros of its zero rows made positive.

  Rows that are zero everywhere are not sent, and every replica must hold the
  same bits. A loop that turns once or not at all: a branch would copy.

  Args:
    negative: `[] bool`, whether there is anything to do.
    table: `[R, D]`.
  """

  def clear(carry):
    flag, table = carry
    nonzero = row_mask(table).nonzero[:, None]
    cleared = jnp.where(nonzero, table, jnp.zeros((), table.dtype))
    return jnp.zeros_like(flag), cleared

  return lax.while_loop(lambda carry: carry[0], clear, (negative, table))[1]


def pack_rows(mask: jax.Array, layout: Layout) -> jax.Array:
  """`mask: [R] bool` in row order to `[m, W] uint32` in slot order."""
  m, words = layout.groups, layout.words
  padding = words * LANES * m - layout.num_rows
  if layout.in_order:
    return bitmaps.pack(jnp.pad(mask, (0, padding)).reshape(m, -1))
  blocks = jnp.pad(mask, (0, padding)).reshape(words, LANES, m)
  lane = lax.broadcasted_iota(jnp.uint32, blocks.shape, 1)
  packed = jnp.sum(blocks.astype(jnp.uint32) << lane, axis=1, dtype=jnp.uint32)
  return _rotate(lax.optimization_barrier(packed), layout)


def _rotate(packed: jax.Array, layout: Layout) -> jax.Array:
  """`[W, m]` words of block columns to `[m, W]` words of groups.

  Lanes that share a shift move together: as many gathers of words as there
  are different shifts, 32 at most.
  """
  m = layout.groups
  shifts = sorted(set(layout.lanes))
  masks = [
    sum(1 << i for i, lane in enumerate(layout.lanes) if lane == shift)
    for shift in shifts
  ]
  word = jnp.arange(layout.words, dtype=jnp.int32)[None, :]
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  unturned = group - layout.turn(word) + 2 * m
  flat = packed.reshape(-1)

  def gather(i, rotated):
    column = unturned - jnp.asarray(shifts, jnp.int32)[i]
    column = lax.rem(column, lax.full_like(column, m))
    lanes = indexing.take(flat, word * m + column)
    return rotated | (lanes & jnp.asarray(masks, jnp.uint32)[i])

  start = jnp.zeros((m, layout.words), jnp.uint32)
  start = compat.cast_like(start, packed)
  return lax.fori_loop(0, len(shifts), gather, start)
