"""Every operation in plain JAX: its definition, which runs everywhere."""

from collections.abc import Callable, Sequence
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

# Nonzero rows of a table as a bitmap in (group, slot) order.


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
  sign = _negative_zero(table.dtype)
  raw = lax.bitcast_convert_type(table, sign.dtype)

  def either(a, b):
    return a[0] | b[0], a[1] | b[1]

  # One reduction of two operands: XLA:CPU keeps it in one loop, and writes the
  # comparisons of a plain `any` or `max` to memory first.
  found = ((raw & ~sign) != 0, raw != 0)
  return RowMask(*lax.reduce(found, (np.False_, np.False_), either, (1,)))


def _negative_zero(dtype: jnp.dtype) -> np.ndarray:
  """Returns the bits of -0.0: the sign, or none where a dtype has no such."""
  return np.array(-0.0, dtype).view(f"uint{jnp.dtype(dtype).itemsize * 8}")


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


def plus_zero_where(
  negative: jax.Array, tables: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
  """`tables`, with all zeros made positive where `negative`.

  Rows that are zero everywhere are not sent, and every replica must hold the
  same bits. The others come back as sums, in which signs of zeros mean nothing.
  A loop that turns once or not at all: a branch would copy.

  Args:
    negative: `[] bool`, whether some row of zeros has a negative one.
    tables: `[R, D]` each.
  """

  def clear(carry):
    flag, tables = carry
    cleared = []
    for table in tables:
      sign = _negative_zero(table.dtype)
      raw = lax.bitcast_convert_type(table, sign.dtype)
      zero = jnp.zeros((), table.dtype)
      cleared.append(jnp.where(raw == sign, zero, table))
    return jnp.zeros_like(flag), tuple(cleared)

  carry = negative, tuple(tables)
  return lax.while_loop(lambda carry: carry[0], clear, carry)[1]


def pack_rows(mask: jax.Array, layout: Layout) -> jax.Array:
  """`mask: [R] bool` in row order to `[m, W] uint32` in slot order."""
  m, words = layout.groups, layout.words
  padding = words * LANES * m - layout.num_rows
  if layout.in_order:
    return indexing.pack(jnp.pad(mask, (0, padding)).reshape(m, -1))
  blocks = jnp.pad(mask, (0, padding)).reshape(words, LANES, m)
  lane = lax.broadcasted_iota(jnp.uint32, blocks.shape, 1)
  packed = jnp.sum(blocks.astype(jnp.uint32) << lane, axis=1, dtype=jnp.uint32)
  # `[W, m]` words of block columns to `[m, W]` words of groups. Lanes that
  # share a shift move together: as many gathers of words as there are different
  # shifts, 32 at most.
  packed = lax.optimization_barrier(packed)
  shifts = sorted(set(lane_shifts(m)))
  lanes = np.array(lane_shifts(m))[None] == np.array(shifts)[:, None]
  masks = np.sum(
    np.where(lanes, np.uint32(1) << np.arange(32, dtype=np.uint32), 0),
    axis=1,
    dtype=np.uint32,
  )
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


# Select and gather a range of nonzero rows for every group.


def compact(
  table: jax.Array,
  bitmap: indexing.Bitmap,
  layout: Layout,
  first: jax.Array,
  capacity: int,
) -> tuple[jax.Array, jax.Array]:
  """The `capacity` nonzero rows of each group from rank `first` on.

  Args:
    table: `[R, D]`.
    bitmap: Of `[m, W]` words.
    layout: Where each row lives.
    first: `[m] int32`, rank of the first row wanted in each group.
    capacity: `C`.

  Returns:
    `slots: [m, C] int32`, ascending, `S` where a group has no more rows, and
    `rows: [m, C, D]`, zero there.
  """
  wanted = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None, :]
  slots = indexing.select(bitmap, wanted)
  group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
  row = layout.row(group, slots)
  return slots, indexing.take_or(table, row, 0)


# The sum of rows received from `n` sources, in rank order.

# A bitmap costs by the slots, a sort by what is received: about as much for so
# many slots a row (XLA:CPU, 0.10 and 0.12).
_SLOTS_A_ROW = 64


class Union(NamedTuple):
  """The rows that any source sent, summed."""

  slots: jax.Array  # [U] int32, ascending, S past the last one
  rows: jax.Array  # [U, D] in the accumulator's dtype
  total: jax.Array  # [] int32, rows held
  limit: jax.Array  # [] int32: complete for all slots below this
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

  Where the union does not fit, `limit` comes back lower: rows beyond it are
  left out as a whole, never in part, and wait for the next round.

  Args:
    slots: `[n, C] int32`, ascending for each source, `num_slots` as padding.
    rows: `[n, C, D]`.
    limit: `[] int32`, slots from here on are incomplete and ignored.
    num_slots: `S`.
    capacity: `U`.
    dtype: In which to add.

  Returns:
    The union; sums run over sources in rank order.
  """
  union, position = place(slots, limit, num_slots, capacity)

  def add(source, total):
    # One scatter-add a source, so that the order is fixed.
    at = lax.dynamic_index_in_dim(position, source, keepdims=False)
    row = lax.dynamic_index_in_dim(rows, source, keepdims=False)
    return indexing.add(total, at, row.astype(dtype))

  total = compat.cast_like(jnp.zeros((capacity, rows.shape[2]), dtype), rows)
  return union._replace(rows=lax.fori_loop(0, rows.shape[0], add, total))


def place(
  slots: jax.Array, limit: jax.Array, num_slots: int, capacity: int
) -> tuple[Union, jax.Array]:
  """The union without its rows, and where received ones belong in it.

  Returns:
    The union, whose `rows` are of no width, and `position: [n, C] int32`, from
    `capacity` on for what is not summed, nowhere twice in a source.
  """
  kept = jnp.where(slots < limit, slots, num_slots)
  # One more than is kept: the first slot left out is the new limit.
  index = _sorted if num_slots > _SLOTS_A_ROW * slots.size else _packed
  found, total, rank = index(kept.reshape(-1), num_slots, capacity + 1)
  limit = jnp.minimum(limit, found[capacity])
  kept = jnp.where(kept < limit, kept, num_slots)
  position = rank(kept.reshape(-1)).reshape(kept.shape)
  # Padding gets positions out of range and all different: with no position
  # twice in a source XLA needs no atomics on GPUs.
  padding = capacity + jnp.arange(kept.shape[1], dtype=jnp.int32)
  union = Union(
    slots=jnp.where(found[:-1] < limit, found[:-1], num_slots),
    rows=jnp.zeros((capacity, 0)),
    total=jnp.minimum(total, capacity),
    limit=limit,
    summed=jnp.sum(kept < num_slots, dtype=jnp.int32),
  )
  return union, jnp.where(kept < num_slots, position, padding)


class _Index(NamedTuple):
  """Different slots of many."""

  found: jax.Array  # [k] int32, the first of them, ascending, S past the last
  total: jax.Array  # [] int32, how many there are
  rank: Callable[[jax.Array], jax.Array]  # how many are less than each slot


def _packed(slots: jax.Array, num_slots: int, k: int) -> _Index:
  """By a bitmap over all slots."""
  bitmap = indexing.index(indexing.from_slots(slots, num_slots))
  found = indexing.select(bitmap, jnp.arange(k, dtype=jnp.int32))
  rank = functools.partial(indexing.rank, bitmap)
  return _Index(found, bitmap.total, rank)


def _sorted(slots: jax.Array, num_slots: int, k: int) -> _Index:
  """By a sort of what was received: nothing has the size of the table."""
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
  return _Index(found, count[-1], lambda at: indexing.lower_bound(found, at))


# Write summed rows over the local gradient.


def expand(table: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
  """`table` with `values` at `row`; rows `>= R` are padding and dropped.

  The union of all devices' nonzero rows contains the local ones, so what is
  not written is zero already: no zero fill and no second pass over the table,
  which XLA updates in place.

  Args:
    table: `[R, D]`, the local gradient.
    row: `[k] int32`, no row twice.
    values: `[k, D]`, in the table's dtype.
  """
  # The same numbers for every table: XLA makes them once.
  padding = np.iinfo(np.int32).max - jnp.arange(row.shape[0], dtype=jnp.int32)
  row = jnp.where(row < table.shape[0], row, padding)
  return indexing.put(table, row, values)
