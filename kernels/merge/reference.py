"""The sum of rows received from `n` sources, in rank order."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import bitmaps
from zenjax._src.core import compat
from zenjax._src.core import indexing

# A bitmap costs by the slots, a sort by what is received: about as much for so
# many slots a row (XLA:CPU, 0.10 and 0.12).
_SLOTS_A_ROW = 64


class Union(NamedTuple):
  """The rows that any source sent, summed."""

  slots: jax.Array  # [U] int32, ascending, S past the last one
  rows: jax.Array  # [U, D] in the accumulator's dtype
  total: jax.Array  # [] int32, rows held
  limit: jax.Array  # [] int32: complete for all slots below this
  merged: jax.Array  # [] int32, received rows that were summed


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
  return union._replace(
    rows=_sum_in_rank_order(position, rows, capacity, dtype)
  )


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
    merged=jnp.sum(kept < num_slots, dtype=jnp.int32),
  )
  return union, jnp.where(kept < num_slots, position, padding)


class _Index(NamedTuple):
  """Different slots of many."""

  found: jax.Array  # [k] int32, the first of them, ascending, S past the last
  total: jax.Array  # [] int32, how many there are
  rank: Callable[[jax.Array], jax.Array]  # how many are less than each slot


def _packed(slots: jax.Array, num_slots: int, k: int) -> _Index:
  """By a bitmap over all slots."""
  bitmap = bitmaps.index(bitmaps.from_slots(slots, num_slots))
  found = bitmaps.select(bitmap, jnp.arange(k, dtype=jnp.int32))
  return _Index(found, bitmap.total, lambda at: bitmaps.rank(bitmap, at))


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
  return _Index(found, count[-1], lambda at: bitmaps.lower_bound(found, at))


def _sum_in_rank_order(
  position: jax.Array, rows: jax.Array, capacity: int, dtype: jnp.dtype
) -> jax.Array:
  """One scatter-add a source, so that the order is fixed."""

  def add(source, total):
    at = lax.dynamic_index_in_dim(position, source, keepdims=False)
    row = lax.dynamic_index_in_dim(rows, source, keepdims=False)
    return indexing.add(total, at, row.astype(dtype))

  total = jnp.zeros((capacity, rows.shape[2]), dtype)
  total = compat.cast_like(total, rows)
  return lax.fori_loop(0, rows.shape[0], add, total)
