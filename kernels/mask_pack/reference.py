"""Nonzero rows of a table as a bitmap in (group, slot) order."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax import _bitmap
from zenjax import _compat
from zenjax._partition import LANES
from zenjax._partition import Layout

# From this width on XLA:CPU vectorizes a maximum of bytes and not an `any`:
# 1.05 to 1.2 against 1.7 to 2.0 times one read at width 128, and the other
# way round (4 to 5 against 1.0 to 1.4) at width 16.
_BYTES_FROM_WIDTH = 48


def row_mask(table: jax.Array) -> jax.Array:
  """Which rows have any bit set other than sign bits.

  Integers are compared, not floats: XLA:CPU takes subnormals for zero, and a
  row missed on one replica would leave replicas different. `-0.0` is zero;
  NaN and Inf are not.

  Args:
    table: `[R, D]`, any floating dtype.

  Returns:
    `[R] bool`.
  """
  bits = jnp.dtype(f"uint{table.dtype.itemsize * 8}")
  magnitude = np.array(np.iinfo(bits).max >> 1, bits)
  nonzero = (lax.bitcast_convert_type(table, bits) & magnitude) != 0
  if table.shape[1] < _BYTES_FROM_WIDTH:
    return jnp.any(nonzero, axis=1)
  return jnp.max(nonzero.astype(jnp.int8), axis=1) > 0


def mask_pack(table: jax.Array, layout: Layout) -> jax.Array:
  """The hash bitmap of the nonzero rows of `table`.

  Args:
    table: `[R, D]`.
    layout: Where each row lives; `m` groups of `S = 32 W` slots.

  Returns:
    `[m, W] uint32`: bit `i` of word `w` in row `p` is slot `32 w + i` of
    group `p`.
  """
  # The barrier keeps XLA:CPU from computing the mask again for each lane.
  return pack_rows(lax.optimization_barrier(row_mask(table)), layout)


def pack_rows(mask: jax.Array, layout: Layout) -> jax.Array:
  """`mask: [R] bool` in row order to `[m, W] uint32` in slot order."""
  m, words = layout.groups, layout.words
  if m == 1:
    padding = words * LANES - layout.num_rows
    return _bitmap.pack(jnp.pad(mask, (0, padding)))[None]
  padding = words * LANES * m - layout.num_rows
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
    lanes = flat.at[word * m + column].get(mode="promise_in_bounds")
    return rotated | (lanes & jnp.asarray(masks, jnp.uint32)[i])

  start = jnp.zeros((m, layout.words), jnp.uint32)
  start = _compat.cast_like(start, packed)
  return lax.fori_loop(0, len(shifts), gather, start)
