"""Arrays and SparseRows as they enter and leave an exchange.

Of an array the rows that are not zero are sent from the array itself, and sums
are written over it: the union of all devices' nonzero rows contains the local
ones, so what is not written is zero already.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax.kernels.operations import compact
from zenjax.kernels.operations import expand
from zenjax.kernels.operations import mask_pack
from zenjax.kernels.reference import pack_rows
from zenjax.kernels.reference import Packed
from zenjax.kernels.reference import plus_zero_where


class Carried(NamedTuple):
  """Rows of one table that wait from earlier steps."""

  rows: jax.Array  # [R, D]
  some: jax.Array  # [] bool, or all of them are zero


class Masked(NamedTuple):
  """Nonzero rows of an array; see `base.Source`."""

  table: jax.Array  # [R, D]
  bitmap: indexing.Bitmap  # of [m, W] words
  carried: jax.Array | None  # [R, D], to be added to the table

  def rows_from(
    self, start: jax.Array, plan: TablePlan, capacity: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    first = indexing.rank(self.bitmap, start[:, None])[:, 0]
    layout = plan.layout
    slots, rows = compact(self.table, self.bitmap, layout, first, capacity)
    if self.carried is not None:
      group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
      row = layout.row(group, slots)
      rows += indexing.take_or(self.carried, row, 0)
    return slots, rows, self.bitmap.total - first

  def after(self, target: "Whole") -> "Masked":
    """The same once sums are written over the array, for further rounds."""
    return self._replace(table=target.table, carried=None)


class Whole(NamedTuple):
  """An array over which sums are written."""

  table: jax.Array  # [R, D]

  def written(self, arrived: Arrived, plan: TablePlan) -> "Whole":
    """With sums in the place of local rows."""
    del plan
    return Whole(expand(self.table, arrived.row, arrived.values))


def enter_array(
  table: jax.Array,
  plan: TablePlan,
  remembered: jax.Array | None,
  carried: Carried | None,
) -> tuple[Masked, jax.Array]:
  """Finds the rows to send of a table; none where it is known to be dense.

  Args:
    table: `[R, D]`.
    plan: Its sizes.
    remembered: Whether it travels dense from the start, `[] bool`.
    carried: What waited until now, if rows may wait.

  Returns:
    The rows to send, and a sampled count of rows of a table known to be dense,
    zero for others. The table there has positive zeros in rows of zeros, so
    that replicas agree bit for bit.
  """
  if remembered is None:
    packed, probe = _pack(table, plan)
  else:
    packed, probe = lax.cond(
      remembered,
      functools.partial(_unread, plan=plan, full=False),
      functools.partial(_pack_unless_full, plan=plan),
      table,
    )
  words, late = packed.words, None
  if carried is not None:
    words |= _late_words(carried, plan, words)
    late = carried.rows
  # All who read or write take what comes back, or XLA would keep a copy.
  cleared = plus_zero_where(packed.negative, table)
  return Masked(cleared, indexing.index(words), late), probe


def _late_words(late: Carried, plan: TablePlan, like: jax.Array) -> jax.Array:
  """Rows that wait, packed; nothing is read where there are none."""
  none = compat.cast_like(jnp.zeros_like(like), late.rows)
  return lax.cond(
    late.some,
    lambda rows: mask_pack(rows, plan.layout).words,
    lambda rows: none,
    late.rows,
  )


def _pack(table: jax.Array, plan: TablePlan) -> tuple[Packed, jax.Array]:
  none = jnp.zeros((), jnp.int32)
  return mask_pack(table, plan.layout), compat.cast_like(none, table)


def _pack_unless_full(
  table: jax.Array, plan: TablePlan
) -> tuple[Packed, jax.Array]:
  """Spares the read of a table that looks full.

  It counts as full, which shows all devices that it is above break-even; a row
  of zeros that is sent after all adds nothing.
  """
  return lax.cond(
    dense_sum.looks_full(table),
    functools.partial(_unread, plan=plan, full=True),
    functools.partial(_pack, plan=plan),
    table,
  )


def _unread(
  table: jax.Array, plan: TablePlan, full: bool
) -> tuple[Packed, jax.Array]:
  """All rows of a table, or none and a sampled count in place of theirs."""
  if full:
    words = pack_rows(jnp.ones(plan.table.num_rows, bool), plan.layout)
    probe = jnp.zeros((), jnp.int32)
  else:
    words = jnp.zeros((plan.layout.groups, plan.layout.words), jnp.uint32)
    probe = dense_sum.sample(table)
  found = (words, jnp.zeros((), bool), probe)
  words, negative, probe = [compat.cast_like(x, table) for x in found]
  return Packed(words, negative), probe


# SparseRows as they enter and leave an exchange.
#
# Nothing here, or after it, has the size of the table: rows are sorted by the
# place that they have in a layout, sent from that list, and what comes back is
# appended to another, with room for as many as all devices together hold.


class Listed(NamedTuple):
  """Rows in the order of groups and slots, each once; see `base.Source`."""

  place: jax.Array  # [K] int32 ascending, group * S + slot; m * S past the last
  values: jax.Array  # [K, D]

  def rows_from(
    self, start: jax.Array, plan: TablePlan, capacity: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_slots = plan.layout.slots
    begin = jnp.arange(plan.layout.groups, dtype=jnp.int32) * num_slots
    first, end = self._before(begin + start), self._before(begin + num_slots)
    at = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
    there = at < end[:, None]
    at = jnp.where(there, at, self.place.shape[0])
    place = indexing.take_or(self.place, at, 0)
    slots = jnp.where(there, place - begin[:, None], num_slots)
    rows = indexing.take_or(self.values, at, 0)
    return slots, rows, end - first

  def after(self, target: "Appended") -> "Listed":
    """The same: sums are written elsewhere."""
    del target
    return self

  def _before(self, place: jax.Array) -> jax.Array:
    """Rows before each `place: [m] int32`: `[m] int32`."""
    earlier = self.place[None] < place[:, None]
    return jnp.sum(earlier, axis=1, dtype=jnp.int32)


class Appended(NamedTuple):
  """Rows that came back, in the order in which they came."""

  row: jax.Array  # [k] int32, R past the last one
  values: jax.Array  # [k, D], zero there
  total: jax.Array  # [] int32, how many there are

  def written(self, arrived: Arrived, plan: TablePlan) -> "Appended":
    """With sums behind those that came before."""
    real = arrived.row < plan.table.num_rows
    count = jnp.cumsum(real, dtype=jnp.int32)
    # Out of range and all different, so that no index stands twice.
    past = self.row.shape[0] + jnp.arange(real.shape[0], dtype=jnp.int32)
    at = jnp.where(real, self.total + count - 1, past)

    def put(x, new):
      return indexing.put(x, at, new)

    return Appended(
      row=put(self.row, arrived.row),
      values=put(self.values, arrived.values),
      total=self.total + count[-1],
    )

  def rows(self, num_rows: int) -> SparseRows:
    """All of them, of a table of so many rows."""
    return SparseRows(self.row, self.values, num_rows).as_unique()


def enter_rows(rows: SparseRows, plan: TablePlan) -> tuple[Listed, jax.Array]:
  """Adds up duplicates of `rows`; returns also a count of nothing."""
  layout = plan.layout
  if not rows.capacity:
    padding = jnp.pad(rows.indices, (0, 1), constant_values=rows.num_rows)
    zero = jnp.pad(rows.values, ((0, 1), (0, 0)))
    rows = SparseRows(padding, zero, rows.num_rows)
  ids = rows.indices
  # As everywhere in JAX, what is negative counts from the end.
  ids = jnp.where(ids < 0, ids + rows.num_rows, ids)
  real = (ids >= 0) & (ids < rows.num_rows)
  group, slot = layout.place(jnp.where(real, ids, 0))
  nowhere = layout.groups * layout.slots
  place = jnp.where(real, group * layout.slots + slot, nowhere)
  merged = SparseRows(place, rows.values, nowhere).combine()
  probe = jnp.zeros_like(place, shape=())
  return Listed(merged.indices, merged.values), probe


def room(plan: TablePlan, devices: int) -> Appended:
  """For all rows that any devices may send."""
  table = plan.table
  if table.look_ups is None:
    raise AssertionError("arrays are written over, not listed")
  size = min(table.num_rows, devices * table.look_ups)
  return Appended(
    row=jnp.full(size, table.num_rows, jnp.int32),
    values=jnp.zeros((size, table.width), table.dtype),
    total=jnp.zeros((), jnp.int32),
  )
