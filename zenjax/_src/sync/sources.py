"""Defines how arrays and SparseRows enter and leave an exchange.

The nonzero rows of an array are sent from the array itself, and sums are
written over it. The union of all devices' nonzero rows contains the local ones,
so all other rows are zero already. SparseRows are sorted by owner. Their sums
are appended to a list with room for all rows that devices together hold, so
nothing there has the size of the table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.rows import sparse_rows
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax.kernels.operations import compact
from zenjax.kernels.operations import expand
from zenjax.kernels.operations import mask_pack
from zenjax.kernels.reference import plus_zero_where


class ArrayRows(NamedTuple):
  """The nonzero rows of an array; see `base.Source`.

  Sums are written over `table`. Rows that were not sent yet are still there.
  """

  table: jax.Array  # [R, D]
  bitmap: indexing.Bitmap  # of [m, W] words, the local rows
  total: jax.Array  # [p] int32, how many rows came of each table

  @classmethod
  def of(cls, parts: Sequence[jax.Array], plan: ExchangePlan) -> "ArrayRows":
    table = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    packed = mask_pack(table, plan.layout, kernels=plan.kernels)
    # Replicas are bit-identical only with positive zeros. Only the new table is
    # used from here on: XLA would copy the old one if it were used again.
    table = plus_zero_where(packed.negative, table)
    total = jnp.zeros(len(plan.tables), jnp.int32)
    return cls(table, indexing.index(packed.words), total)

  def take(
    self, start: jax.Array, plan: ExchangePlan
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    first = indexing.rank(self.bitmap, start[:, None])[:, 0]
    slots, rows = compact(
      self.table,
      self.bitmap,
      plan.layout,
      first,
      plan.push,
      kernels=plan.kernels,
    )
    return slots, rows, self.bitmap.total - first

  def whole(self, plan: ExchangePlan) -> tuple[jax.Array, jax.Array]:
    del plan
    return self.table, self.bitmap.words

  def written(self, arrived: Arrived, plan: ExchangePlan) -> "ArrayRows":
    if not arrived.row.size:  # A scheme without a pull.
      return self
    table = expand(
      self.table, arrived.row, arrived.values, kernels=plan.kernels
    )
    more = jnp.sum(_by_table(arrived.row, plan), axis=0, dtype=jnp.int32)
    return self._replace(table=table, total=self.total + more)

  def leaves(self, plan: ExchangePlan) -> list[jax.Array]:
    """Returns the sum of each table."""
    if len(plan.tables) == 1:
      return [self.table]
    return jnp.split(self.table, plan.first_rows[1:].tolist())


def _by_table(row: jax.Array, plan: ExchangePlan) -> jax.Array:
  """Returns which of the joined tables each row is of, `[k, p] bool`."""
  firsts = plan.first_rows
  ends = np.append(firsts[1:], np.int32(plan.table.num_rows))
  return (row[:, None] >= firsts[None]) & (row[:, None] < ends[None])


class ListRows(NamedTuple):
  """Distinct rows in the order of groups and slots; see `base.Source`.

  Sums are appended to a list with room for all that devices may send. If
  several tables are sent as one, each has a range of the list for itself.
  """

  place: jax.Array  # [K] int32 ascending, group * S + slot; m * S as padding
  values: jax.Array  # [K, D]
  end: jax.Array  # [m] int32, where the rows of each group end
  row: jax.Array  # [k] int32, rows that came back; R as padding
  sums: jax.Array  # [k, D], zeros for padding
  total: jax.Array  # [p] int32, how many rows came of each table

  @classmethod
  def of(cls, parts: Sequence[SparseRows], plan: ExchangePlan) -> "ListRows":
    """Sorts the rows of tables that are sent as one, and sums duplicates."""
    layout, table, room = plan.layout, plan.table, sum(plan.rooms)
    parts = [sparse_rows.resized(x, max(1, x.capacity)) for x in parts]
    firsts = plan.first_rows.tolist()
    ids = jnp.concatenate(
      [_ids(rows, first, plan) for rows, first in zip(parts, firsts)]
    )
    values = jnp.concatenate([rows.values for rows in parts])
    real = ids < table.num_rows
    group, slot = layout.place(jnp.where(real, ids, 0))
    nowhere = layout.groups * layout.slots
    place = jnp.where(real, group * layout.slots + slot, nowhere)
    merged = SparseRows(place, values, nowhere).combine()
    ends = np.arange(1, layout.groups + 1, dtype=np.int32) * layout.slots
    end = indexing.lower_bound(merged.indices, jnp.asarray(ends))
    return cls(
      place=merged.indices,
      values=merged.values,
      end=end,
      row=jnp.full(room, table.num_rows, jnp.int32),
      sums=jnp.zeros((room, table.width), table.dtype),
      total=jnp.zeros(len(plan.tables), jnp.int32),
    )

  def take(
    self, start: jax.Array, plan: ExchangePlan
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_slots = plan.layout.slots
    begin = jnp.arange(plan.layout.groups, dtype=jnp.int32) * num_slots
    first = indexing.lower_bound(self.place, begin + start)
    index = first[:, None] + jnp.arange(plan.push, dtype=jnp.int32)[None]
    valid = index < self.end[:, None]
    index = jnp.where(valid, index, self.place.shape[0])
    place = indexing.take_or(self.place, index, 0)
    slots = jnp.where(valid, place - begin[:, None], num_slots)
    rows = indexing.take_or(self.values, index, 0)
    return slots, rows, self.end - first

  def whole(self, plan: ExchangePlan) -> tuple[jax.Array, jax.Array]:
    layout, table = plan.layout, plan.table
    slots = layout.groups * layout.slots
    words = indexing.from_slots(self.place, slots)
    group = lax.div(self.place, jnp.full_like(self.place, layout.slots))
    row = layout.row(group, self.place - group * layout.slots)
    past = table.num_rows + jnp.arange(row.shape[0], dtype=jnp.int32)
    row = jnp.where(self.place < slots, row, past)
    zeros = jnp.zeros((table.num_rows, table.width), self.values.dtype)
    whole = indexing.put(compat.cast_like(zeros, self.values), row, self.values)
    return whole, words.reshape(layout.groups, -1)

  def written(self, arrived: Arrived, plan: ExchangePlan) -> "ListRows":
    row, begins = arrived.row, _starts(plan)
    by_table = _by_table(row, plan)
    counted = jnp.cumsum(by_table, axis=0, dtype=jnp.int32)
    index = counted + (self.total + begins)[None] - 1
    index = jnp.sum(jnp.where(by_table, index, 0), axis=1, dtype=jnp.int32)
    # Padding gets places out of range and all different.
    past = self.row.shape[0] + jnp.arange(row.shape[0], dtype=jnp.int32)
    index = jnp.where(row < plan.table.num_rows, index, past)
    return self._replace(
      row=indexing.put(self.row, index, row),
      sums=indexing.put(self.sums, index, arrived.values),
      total=self.total + jnp.sum(by_table, axis=0, dtype=jnp.int32),
    )

  def leaves(self, plan: ExchangePlan) -> list[SparseRows]:
    """Returns the rows of each table."""
    leaves = []
    for table, room, first, begin in zip(
      plan.tables, plan.rooms, plan.first_rows.tolist(), _starts(plan).tolist()
    ):
      row = self.row[begin : begin + room] - first
      row = jnp.minimum(row, table.num_rows)
      rows = SparseRows(row, self.sums[begin : begin + room], table.num_rows)
      leaves.append(rows.as_unique())
    return leaves


def _ids(rows: SparseRows, first: int, plan: ExchangePlan) -> jax.Array:
  """Returns ids in the joined table, padded with its number of rows."""
  # As everywhere in JAX, a negative id counts from the end.
  ids = rows.indices
  ids = jnp.where(ids < 0, ids + rows.num_rows, ids)
  real = (ids >= 0) & (ids < rows.num_rows)
  return jnp.where(real, ids + first, plan.table.num_rows)


def _starts(plan: ExchangePlan) -> np.ndarray:
  """Returns where the room of each table begins in a list, `[p] int32`."""
  return np.cumsum([0, *plan.rooms[:-1]]).astype(np.int32)
