"""Defines every operation in plain JAX, which runs everywhere."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core.partition import lane_shifts
from zenjax._src.core.partition import LANES
from zenjax._src.core.partition import Layout

# `mask_pack` returns the nonzero rows of a table as a bitmap in (group, slot)
# order.


class RowMask(NamedTuple):
  """Which rows of a table have nonzero bits."""

  nonzero: jax.Array  # [R] bool, any bit except for sign bits
  written: jax.Array  # [R] bool, any bit, including signs of negative zeros


def row_mask(table: jax.Array) -> RowMask:
  """Finds the rows that are not zero, by one read of the table.

  It compares integers instead of floats. XLA:CPU treats subnormals as zero, and
  a row that only one replica misses would make replicas differ. `-0.0` counts
  as zero; NaN and Inf do not.

  Args:
    table: `[R, D]`, any floating dtype.
  """
  sign = _negative_zero(table.dtype)
  raw = lax.bitcast_convert_type(table, sign.dtype)

  def either(a, b):
    return a[0] | b[0], a[1] | b[1]

  # XLA:CPU fuses one reduction of two operands into one loop. It would write
  # the comparisons of a plain `any` or `max` to memory first.
  found = ((raw & ~sign) != 0, raw != 0)
  return RowMask(*lax.reduce(found, (np.False_, np.False_), either, (1,)))


def _negative_zero(dtype: jnp.dtype) -> np.ndarray:
  """Returns the bits of -0.0: the sign bit, or 0 if a dtype has no -0.0."""
  return np.array(-0.0, dtype).view(f"uint{jnp.dtype(dtype).itemsize * 8}")


class Packed(NamedTuple):
  """The nonzero rows of a table in (group, slot) order."""

  words: jax.Array  # [m, W] uint32: bit i of word w is slot 32 w + i
  negative: jax.Array  # [] bool, whether a row of zeros has a negative one


def mask_pack(table: jax.Array, layout: Layout) -> Packed:
  """Returns the hash bitmap of the nonzero rows of `table`.

  Args:
    table: `[R, D]`.
    layout: The place of each row in `m` groups of `S = 32 W` slots.
  """
  # The barrier keeps XLA:CPU from recomputing the mask for each lane.
  mask = RowMask(*lax.optimization_barrier(row_mask(table)))
  return Packed(
    words=pack_rows(mask.nonzero, layout),
    negative=jnp.any(mask.written & ~mask.nonzero),
  )


def plus_zero_where(negative: jax.Array, table: jax.Array) -> jax.Array:
  """Makes all zeros of `table` positive if `negative`.

  Rows of zeros are not sent, but replicas must be bit-identical. All other rows
  are overwritten with sums, in which signs of zeros have no meaning. The
  implementation is a loop with at most one iteration, because a branch would
  copy the table.

  Args:
    negative: `[] bool`, whether some row of zeros has a negative zero.
    table: `[R, D]`.
  """
  sign = _negative_zero(table.dtype)

  def clear(carry):
    flag, table = carry
    raw = lax.bitcast_convert_type(table, sign.dtype)
    zero = jnp.zeros((), table.dtype)
    return jnp.zeros_like(flag), jnp.where(raw == sign, zero, table)

  return lax.while_loop(lambda carry: carry[0], clear, (negative, table))[1]


def pack_rows(mask: jax.Array, layout: Layout) -> jax.Array:
  """Packs `mask: [R] bool` in row order to `[m, W] uint32` in slot order."""
  m, words = layout.groups, layout.words
  padding = words * LANES * m - layout.num_rows
  if layout.in_order:
    return indexing.pack(jnp.pad(mask, (0, padding)).reshape(m, -1))
  blocks = jnp.pad(mask, (0, padding)).reshape(words, LANES, m)
  lane = lax.broadcasted_iota(jnp.uint32, blocks.shape, 1)
  packed = jnp.sum(blocks.astype(jnp.uint32) << lane, axis=1, dtype=jnp.uint32)
  # `[W, m]` words of block columns become `[m, W]` words of groups. Lanes with
  # the same shift move together, so there is one gather of words for each
  # different shift, at most 32.
  packed = lax.optimization_barrier(packed)
  shifts = sorted(set(lane_shifts(m)))
  lanes = np.array(lane_shifts(m))[None] == np.array(shifts)[:, None]
  masks = lanes @ (np.uint32(1) << np.arange(32, dtype=np.uint32))
  word = jnp.arange(layout.words, dtype=jnp.int32)[None, :]
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  unrotated = group - layout.rotation(word) + 2 * m
  flat = packed.reshape(-1)

  def gather(i, rotated):
    column = unrotated - jnp.asarray(shifts, jnp.int32)[i]
    column = lax.rem(column, lax.full_like(column, m))
    lanes = indexing.take(flat, word * m + column)
    return rotated | (lanes & jnp.asarray(masks)[i])

  start = jnp.zeros((m, layout.words), jnp.uint32)
  start = compat.cast_like(start, packed)
  return lax.fori_loop(0, len(shifts), gather, start)


# `compact` gathers a range of nonzero rows for every group.


def compact(
  table: jax.Array,
  bitmap: indexing.Bitmap,
  layout: Layout,
  first: jax.Array,
  capacity: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns `capacity` nonzero rows of each group, from rank `first` on.

  Args:
    table: `[R, D]`.
    bitmap: The bitmap of nonzero rows, with `[m, W]` words.
    layout: The place of each row.
    first: `[m] int32`, rank of the first row to return for each group.
    capacity: `C`.

  Returns:
    `slots: [m, C] int32`, ascending and padded with `S`, and
    `rows: [m, C, D]`, padded with zeros.
  """
  slots, row = chosen(bitmap, layout, first, capacity)
  return slots, indexing.take_or(table, row, 0)


def chosen(
  bitmap: indexing.Bitmap, layout: Layout, first: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the slots that `compact` returns, and their rows in the table."""
  wanted = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None, :]
  slots = indexing.select(bitmap, wanted)
  group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
  return slots, layout.row(group, slots)


# `merge` sums rows received from `n` sources, in rank order.

# The cost of a bitmap depends on the number of slots, and the cost of a sort on
# the number of received rows. Both are about equal at this number of slots per
# row (XLA:CPU, JAX 0.10 and 0.12).
_SLOTS_A_ROW = 64


class Union(NamedTuple):
  """The sums of the rows that any source sent."""

  slots: jax.Array  # [U] int32, ascending, padded with S
  rows: jax.Array  # [U, D] in the accumulator's dtype
  total: jax.Array  # [] int32, number of rows
  limit: jax.Array  # [] int32, all slots below it are complete
  summed: jax.Array  # [] int32, received rows that were summed


def merge(
  slots: jax.Array,
  rows: jax.Array,
  limit: jax.Array,
  num_slots: int,
  capacity: int,
  dtype: jnp.dtype,
) -> Union:
  """Adds the received rows below `limit` into at most `capacity` rows.

  If the union overflows, the returned `limit` is lower. Rows from that limit on
  are left out completely, and wait for the next round.

  Args:
    slots: `[n, C] int32`, ascending for each source, padded with `num_slots`.
    rows: `[n, C, D]`.
    limit: `[] int32`. Slots from here on are incomplete, and are ignored.
    num_slots: `S`.
    capacity: `U`.
    dtype: The dtype of the sums.

  Returns:
    The union, summed over sources in rank order.
  """
  union, position = place(slots, limit, num_slots, capacity)

  def add(source, total):
    # A scatter-add for each source keeps the order of summation fixed.
    at = lax.dynamic_index_in_dim(position, source, keepdims=False)
    row = lax.dynamic_index_in_dim(rows, source, keepdims=False)
    return indexing.add(total, at, row.astype(dtype))

  total = compat.cast_like(jnp.zeros((capacity, rows.shape[2]), dtype), rows)
  return union._replace(rows=lax.fori_loop(0, rows.shape[0], add, total))


def place(
  slots: jax.Array, limit: jax.Array, num_slots: int, capacity: int
) -> tuple[Union, jax.Array]:
  """Returns the union without its rows, and the position of received rows.

  Returns:
    The union, whose `rows` have width 0, and `position: [n, C] int32`, which is
    `capacity` or more for rows that are not summed. All positions of a source
    are different.
  """
  kept = jnp.where(slots < limit, slots, num_slots)
  # One more slot is found than is kept, because it is the new limit.
  index = _sorted if num_slots > _SLOTS_A_ROW * slots.size else _packed
  found, total, rank = index(kept.reshape(-1), num_slots, capacity + 1)
  limit = jnp.minimum(limit, found[capacity])
  kept = jnp.where(kept < limit, kept, num_slots)
  position = rank(kept.reshape(-1)).reshape(kept.shape)
  # Padding gets different positions out of range. If all positions of a source
  # are different, XLA needs no atomics on GPUs.
  padding = capacity + jnp.arange(kept.shape[1], dtype=jnp.int32)
  union = Union(
    slots=jnp.where(found[:-1] < limit, found[:-1], num_slots),
    rows=jnp.zeros((capacity, 0)),
    total=jnp.minimum(total, capacity),
    limit=limit,
    summed=jnp.sum(kept < num_slots, dtype=jnp.int32),
  )
  return union, jnp.where(kept < num_slots, position, padding)


# The first `k` different slots, ascending and padded with `S`; the number of
# all different slots; and a function that counts those less than each slot.
_Index = tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]


def _packed(slots: jax.Array, num_slots: int, k: int) -> _Index:
  """Finds different slots by a bitmap over all slots."""
  bitmap = indexing.index(indexing.from_slots(slots, num_slots))
  found = indexing.select(bitmap, jnp.arange(k, dtype=jnp.int32))
  return found, bitmap.total, functools.partial(indexing.rank, bitmap)


def _sorted(slots: jax.Array, num_slots: int, k: int) -> _Index:
  """Finds different slots by a sort, with no array of the table's size."""
  ordered = lax.sort(slots)
  before = jnp.pad(ordered[:-1], (1, 0), constant_values=-1)
  new = (ordered != before) & (ordered < num_slots)
  count = jnp.cumsum(new, dtype=jnp.int32)
  past = k + jnp.arange(slots.shape[0], dtype=jnp.int32)
  found = (
    jnp.full_like(slots, num_slots, shape=(k,))
    .at[jnp.where(new, count - 1, past)]
    .set(ordered, mode="drop", unique_indices=True)
  )
  return found, count[-1], lambda at: indexing.lower_bound(found, at)


# `expand` writes summed rows over the local gradient.


def expand(table: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
  """Writes `values` at `row` of `table`; rows `>= R` are padding.

  The union of all devices contains all local nonzero rows, so rows that are not
  written are zero already. The table therefore needs no second pass, and XLA
  updates it in place.

  Args:
    table: `[R, D]`, the local gradient.
    row: `[k] int32`, all different except for padding.
    values: `[k, D]`, in the table's dtype.
  """
  # Padding does not depend on the table, so that XLA computes it once for all.
  padding = np.iinfo(np.int32).max - jnp.arange(row.shape[0], dtype=jnp.int32)
  row = jnp.where(row < table.shape[0], row, padding)
  return indexing.put(table, row, values)
