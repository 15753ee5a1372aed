"""Arrays and SparseRows as they enter and leave an exchange.

Of an array the rows that are not zero are sent from the array itself, and sums
are written over it: the union of all devices' nonzero rows contains the local
ones, so what is not written is zero already.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

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
from zenjax.kernels.reference import plus_zero_where
from zenjax.kernels.reference import row_mask
from zenjax.kernels.reference import RowMask


class Carried(NamedTuple):
  """Rows of one table that wait from earlier steps."""

  rows: jax.Array  # [R, D]
  some: jax.Array  # [] bool, or all of them are zero


class Masked(NamedTuple):
  """Nonzero rows of arrays; see `base.Source`."""

  tables: tuple[jax.Array, ...]  # [R, D] each, in the order of their slots
  bitmap: indexing.Bitmap  # of [m, W] words
  carried: jax.Array | None  # [R, D], to be added to the table

  def rows_from(
    self, start: jax.Array, plan: TablePlan, capacity: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    first = indexing.rank(self.bitmap, start[:, None])[:, 0]
    remaining = self.bitmap.total - first
    layout = plan.layout
    group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
    if plan.members:
      wanted = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
      slots = indexing.select(self.bitmap, wanted)
      rows = _taken(self.tables, layout.row(group, slots), plan)
      return slots, rows, remaining
    (table,) = self.tables
    slots, rows = compact(
      table, self.bitmap, layout, first, capacity, kernels=plan.kernels
    )
    if self.carried is not None:
      row = layout.row(group, slots)
      rows += indexing.take_or(self.carried, row, 0)
    return slots, rows, remaining

  def after(self, target: "Whole") -> "Masked":
    """The same once sums are written over the arrays, for further rounds."""
    return self._replace(tables=target.tables, carried=None)

  def without(self, skip: jax.Array, plan: TablePlan) -> "Masked":
    """The same but for rows of stacked tables with `skip: [p] bool`."""
    if not plan.members:
      return self
    left = _words_without(self.bitmap.words, skip, plan)
    return self._replace(bitmap=indexing.index(left))

  def counts(self, plan: TablePlan) -> jax.Array:
    """Rows of each stacked table in each group: `[m, p] int32`."""
    words = [member.layout.words for member in plan.members]
    starts = np.cumsum([0, *words[:-1]])
    before = indexing.take(self.bitmap.before.T, starts).T
    ends = jnp.append(before[:, 1:], self.bitmap.total[:, None], axis=1)
    return ends - before


def _taken(
  tables: Sequence[jax.Array], row: jax.Array, plan: TablePlan
) -> jax.Array:
  """Rows `row: [m, C]` of stacked tables, zero where there is none."""
  width, dtype = plan.table.width, plan.table.dtype
  rows = compat.cast_like(jnp.zeros((*row.shape, width), dtype), tables[0])
  for table, (at, here) in zip(tables, _places(row, plan)):
    at = jnp.clip(at, 0, table.shape[0] - 1)
    rows = jnp.where(here[..., None], indexing.take(table, at), rows)
  return rows


def _places(
  row: jax.Array, plan: TablePlan
) -> list[tuple[jax.Array, jax.Array]]:
  """The row of each stacked table that `row` is, and if it is one at all."""
  found = []
  for table, first in zip(plan.tables, plan.first_rows):
    at = row - first
    found.append((at, (at >= 0) & (at < table.num_rows)))
  return found


def arrived_counts(arrived: Arrived, plan: TablePlan) -> jax.Array:
  """Rows of each stacked table that came from each group: `[m, p] int32`."""
  row = arrived.row.reshape(plan.layout.groups, -1, 1)
  firsts = np.array(plan.first_rows, np.int32)[None, None]
  ends = firsts + np.array([table.num_rows for table in plan.tables], np.int32)
  here = (row >= firsts) & (row < ends)
  return jnp.sum(here, axis=1, dtype=jnp.int32)


class Whole(NamedTuple):
  """Arrays over which sums are written."""

  tables: tuple[jax.Array, ...]  # [R, D] each
  # [p] bool, tables that take the dense path: nothing is written over these.
  skip: jax.Array | None = None

  def written(self, arrived: Arrived, plan: TablePlan) -> "Whole":
    """With sums in the place of local rows."""
    if not plan.members:
      row = arrived.row
      if self.skip is not None:
        row = jnp.where(self.skip[0], plan.table.num_rows, row)
      table = self.tables[0]
      table = expand(table, row, arrived.values, kernels=plan.kernels)
      return self._replace(tables=(table,))
    firsts = jnp.asarray(plan.first_rows, jnp.int32)
    heights = jnp.array([table.shape[0] for table in self.tables], jnp.int32)
    if self.skip is not None:
      heights = jnp.where(self.skip, 0, heights)
    # As `expand` has it, but that one kernel finds the rows of any table.
    size = arrived.row.shape[0]
    padding = np.iinfo(np.int32).max - jnp.arange(size, dtype=jnp.int32)
    padding = compat.from_memory(padding)
    tables = []
    for i, table in zip(indexing.numbers(len(self.tables)), self.tables):
      at = arrived.row - indexing.nth(firsts, i)
      here = (at >= 0) & (at < indexing.nth(heights, i))
      at = jnp.where(here, at, padding)
      tables.append(indexing.put(table, at, arrived.values))
    return self._replace(tables=tuple(tables))


def enter_arrays(
  tables: Sequence[jax.Array],
  plan: TablePlan,
  remembered: jax.Array | None,
  carried: Carried | None,
) -> tuple[Masked, jax.Array]:
  """Finds the rows to send of tables that travel as one.

  Args:
    tables: `[R, D]` each.
    plan: Their sizes.
    remembered: Which of them travel dense from the start, `[p] bool`.
    carried: Rows that waited until now, if rows may wait; of one table.

  Returns:
    The rows to send, and `[m, p]` counts: of stacked tables their rows in each
    group, and of a table known to be dense how many of a sample are not zero.
    The tables there have positive zeros in rows of zeros, so that replicas
    agree bit for bit.
  """
  if plan.members:
    return _enter_stack(tables, plan, remembered)
  (table,) = tables
  found = _marked(table, None if remembered is None else remembered[0], plan)
  words, late = found.words, None
  if carried is not None:
    words |= _late_words(carried, plan, words)
    late = carried.rows
  # All who read or write take what comes back, or XLA would keep a copy.
  cleared = plus_zero_where(found.negative, tables)
  source = Masked(cleared, indexing.index(words), late)
  return source, jnp.broadcast_to(found.probe, (plan.layout.groups, 1))


def _enter_stack(
  tables: Sequence[jax.Array], plan: TablePlan, remembered: jax.Array | None
) -> tuple[Masked, jax.Array]:
  """Finds the rows to send of stacked tables, as `enter_arrays` does.

  Where all of them are known to be dense none is read. To leave out some of
  them XLA would compile a branch for each table.
  """

  def read(tables):
    return _read_stack(tables, plan)

  def unread(tables):
    words = jnp.zeros((plan.layout.groups, plan.layout.words), jnp.uint32)
    found = words, jnp.zeros((), bool)
    return tuple([functools.reduce(compat.cast_like, tables, x) for x in found])

  if remembered is None:
    words, negative = read(tables)
  else:
    words, negative = lax.cond(jnp.all(remembered), unread, read, tuple(tables))
    words = _words_without(words, remembered, plan)
  cleared = plus_zero_where(negative, tables)
  source = Masked(cleared, indexing.index(words), None)
  counts = source.counts(plan)
  if remembered is not None:
    probe = dense_sum.samples_where(jnp.any(remembered), cleared)
    counts = jnp.where(remembered, probe, counts)
  return source, counts


def _read_stack(
  tables: Sequence[jax.Array], plan: TablePlan
) -> tuple[jax.Array, jax.Array]:
  """Words of the rows that are not zero, and if a zero row has a negative."""
  found = [row_mask(table) for table in tables]
  nonzero, written = [], []
  for mask, member in zip(found, plan.members):
    room = member.layout.slots * member.layout.groups
    padding = jnp.zeros(room - len(mask.nonzero), bool)
    nonzero += [mask.nonzero, padding]
    written += [mask.written, padding]
  # The barrier keeps XLA:CPU from computing masks again for each lane.
  mask = lax.optimization_barrier(
    RowMask(jnp.concatenate(nonzero), jnp.concatenate(written))
  )
  negative = jnp.any(mask.written & ~mask.nonzero)
  return pack_rows(mask.nonzero, plan.layout), negative


def _words_without(
  words: jax.Array, skip: jax.Array, plan: TablePlan
) -> jax.Array:
  """Words `[m, W]` without the bits of stacked tables with `skip: [p] bool`."""
  words, skip = compat.from_memory((words, skip))
  counts = [member.layout.words for member in plan.members]
  skip = jnp.repeat(skip, np.array(counts), total_repeat_length=sum(counts))
  return jnp.where(skip, jnp.uint32(0), words)


def _late_words(late: Carried, plan: TablePlan, like: jax.Array) -> jax.Array:
  """Rows that wait, packed; nothing is read where there are none."""
  none = compat.cast_like(jnp.zeros_like(like), late.rows)
  return lax.cond(
    late.some,
    lambda rows: mask_pack(rows, plan.layout, kernels=plan.kernels).words,
    lambda rows: none,
    late.rows,
  )


class _Marks(NamedTuple):
  """Rows of an array that are to be sent."""

  words: jax.Array  # [m, W] uint32
  negative: jax.Array  # [] bool, whether a row of zeros has a negative one
  probe: jax.Array  # [] int32, nonzero rows of a sample


def _marked(
  table: jax.Array, remembered: jax.Array | None, plan: TablePlan
) -> _Marks:
  """Marks the nonzero rows of a table; none where it is known to be dense.

  A table that looks full is not read. It counts as full, which shows all
  devices that it is above break-even; a row of zeros that is sent after all
  adds nothing.
  """
  layout = plan.layout
  none = compat.cast_like(jnp.zeros((), jnp.int32), table)

  def read(table):
    packed = mask_pack(table, layout, kernels=plan.kernels)
    return _Marks(packed.words, packed.negative, none)

  def unread(table, full):
    words = pack_rows(jnp.full(table.shape[0], full), layout)
    probe = none if full else dense_sum.samples([table])[0]
    found = (words, jnp.zeros((), bool), probe)
    return _Marks(*[compat.cast_like(x, table) for x in found])

  if remembered is None:
    return read(table)
  way = dense_sum.looks_full(table).astype(jnp.int32)
  way = jnp.where(remembered, 2, way)
  ways = [functools.partial(unread, full=full) for full in (True, False)]
  return lax.switch(way, [read, *ways], table)


# SparseRows as they enter and leave an exchange.
#
# Nothing here has the size of the table, nor what follows, but for the ranges
# that `split_dense_gather` pulls: rows are sorted by the place that they have
# in a layout, sent from that list, and what comes back is appended to another,
# with room for as many as all devices together hold.


class Listed(NamedTuple):
  """Rows in the order of groups and slots, each once; see `base.Source`."""

  place: jax.Array  # [K] int32 ascending, group * S + slot; m * S past the last
  values: jax.Array  # [K, D]
  end: jax.Array  # [m] int32, rows up to the end of each group

  def rows_from(
    self, start: jax.Array, plan: TablePlan, capacity: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_slots = plan.layout.slots
    begin = jnp.arange(plan.layout.groups, dtype=jnp.int32) * num_slots
    begin = compat.from_memory(begin)
    earlier = self.place[None] < (begin + start)[:, None]
    first = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    at = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
    there = at < self.end[:, None]
    at = jnp.where(there, at, self.place.shape[0])
    place = indexing.take_or(self.place, at, 0)
    slots = jnp.where(there, place - begin[:, None], num_slots)
    rows = indexing.take_or(self.values, at, 0)
    return slots, rows, self.end - first

  def after(self, target: "Appended") -> "Listed":
    """The same: sums are written elsewhere."""
    del target
    return self


class Appended(NamedTuple):
  """Rows that came back, in the order in which they came.

  Those of stacked tables are apart, each in a room of its own.
  """

  row: jax.Array  # [k] int32, R past the last one
  values: jax.Array  # [k, D], zero there
  total: jax.Array  # [p] int32, how many there are

  def written(self, arrived: Arrived, plan: TablePlan) -> "Appended":
    """With sums behind those that came before."""
    # Out of range and all different, so that no index stands twice.
    size = arrived.row.shape[0]
    past = self.row.shape[0] + jnp.arange(size, dtype=jnp.int32)
    if plan.members:
      return self._written_apart(arrived, plan, past)
    real = arrived.row < plan.table.num_rows
    count = jnp.cumsum(real, dtype=jnp.int32)
    at = jnp.where(real, self.total[0] + count - 1, past)
    return self._put(at, arrived.row, arrived.values, count[-1:])

  def _put(self, at, row, values, more) -> "Appended":
    return Appended(
      row=indexing.put(self.row, at, row),
      values=indexing.put(self.values, at, values),
      total=self.total + more,
    )

  def _written_apart(
    self, arrived: Arrived, plan: TablePlan, past: jax.Array
  ) -> "Appended":
    """The same of stacked tables.

    Of each group rows come in the order of slots, so that those of one table
    follow each other: all move by one distance.
    """
    counts = arrived_counts(arrived, plan)  # [m, p]
    groups, size = counts.shape[0], past.shape[0]
    earlier = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
    inside = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts
    start = jnp.arange(groups, dtype=jnp.int32)[:, None] * (size // groups)
    rooms = np.cumsum([0, *plan.rooms[:-1]], dtype=np.int32)
    move = (rooms + self.total)[None] + earlier - (start + inside)
    move = jnp.repeat(move, size // groups, axis=0)
    place, row = past, arrived.row
    number = jnp.arange(size, dtype=jnp.int32)
    for i, (at, here) in enumerate(_places(arrived.row, plan)):
      place = jnp.where(here, number + move[:, i], place)
      row = jnp.where(here, at, row)
    more = jnp.sum(counts, axis=0, dtype=jnp.int32)
    return self._put(place, row, arrived.values, more)

  def rows(self, plan: TablePlan) -> list[SparseRows]:
    """All of them, of each table."""
    if not plan.members:
      found = SparseRows(self.row, self.values, plan.table.num_rows)
      return [found.as_unique()]
    starts = np.cumsum([0, *plan.rooms[:-1]], dtype=np.int32)
    found = []
    for i, room, table in zip(
      indexing.numbers(len(starts)), plan.rooms, plan.tables
    ):
      row, values = [
        lax.dynamic_slice_in_dim(x, indexing.nth(starts, i), room)
        for x in (self.row, self.values)
      ]
      rows = SparseRows(row, values, table.num_rows)
      found.append(rows.as_unique())
    return found


def enter_rows(
  tables: Sequence[SparseRows], plan: TablePlan
) -> tuple[Listed, jax.Array]:
  """Sorts rows by group and slot, and adds up those of one row.

  Args:
    tables: Rows of each table that travels as one with the others.
    plan: Their sizes.

  Returns:
    The rows to send, and `[m, p]` counts: of stacked tables their rows in each
    group, else nothing.
  """
  layout = plan.layout
  firsts = plan.first_rows or [0]
  found = [_ids(rows, first, plan) for rows, first in zip(tables, firsts)]
  ids = jnp.concatenate([ids for ids, _ in found])
  values = jnp.concatenate([values for _, values in found])
  real = ids < plan.table.num_rows
  group, slot = layout.place(jnp.where(real, ids, 0))
  nowhere = layout.groups * layout.slots
  place = jnp.where(real, group * layout.slots + slot, nowhere)
  merged = SparseRows(place, values, nowhere).combine()
  # Each round reads these.
  place, values = compat.from_memory((merged.indices, merged.values))
  slots = [member.layout.slots for member in plan.members or (plan,)]
  group = np.arange(layout.groups)[:, None] * layout.slots
  bounds = jnp.asarray(group + np.cumsum([0, *slots]), jnp.int32)
  before = indexing.lower_bound(place, bounds)
  counts = jnp.diff(before, axis=1)
  if not plan.members:
    counts = jnp.zeros_like(counts)
  return Listed(place, values, compat.from_memory(before[:, -1])), counts


def _ids(
  rows: SparseRows, first: int, plan: TablePlan
) -> tuple[jax.Array, jax.Array]:
  """Numbers in the table that travels, past its end where there is none."""
  ids, values = rows.indices, rows.values
  if not rows.capacity:
    ids = jnp.pad(ids, (0, 1), constant_values=rows.num_rows)
    values = jnp.pad(values, ((0, 1), (0, 0)))
  # As everywhere in JAX, what is negative counts from the end.
  ids = jnp.where(ids < 0, ids + rows.num_rows, ids)
  real = (ids >= 0) & (ids < rows.num_rows)
  return jnp.where(real, ids + first, plan.table.num_rows), values


def empty_list(plan: TablePlan) -> Appended:
  """Returns a list of no rows, with room for all that devices may send."""
  table = plan.table
  size = sum(plan.rooms)
  past = np.repeat([table.num_rows for table in plan.tables], plan.rooms)
  return Appended(
    row=jnp.asarray(past, jnp.int32),
    values=jnp.zeros((size, table.width), table.dtype),
    total=compat.from_memory(jnp.zeros(len(plan.tables), jnp.int32)),
  )
