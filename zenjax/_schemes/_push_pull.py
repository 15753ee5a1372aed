"""What a push and a pull of zen put on the wire, and make of what arrives.

Of each table three sections: counts, index, rows. The first two derive from
ids alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax import _wire
from zenjax._plan import TablePlan
from zenjax._schemes import _sections
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Held
from zenjax._schemes.base import Outgoing
from zenjax._schemes.base import Tally
from zenjax.kernels.merge.reference import Union
from zenjax.kernels.operations import merge

_PUSH_COUNTS = 2
_PULL_COUNTS = len(Tally._fields)


class Sections(NamedTuple):
  """Of one table, `[b, words] uint32` each; as lengths, their words."""

  counts: Any
  index: Any
  rows: Any


def exchange(
  tables: Sequence[Sections],
  plans: Sequence[TablePlan],
  context: Context,
  send: Callable[[jax.Array], jax.Array],
) -> list[Sections]:
  """What `send` brings of all tables.

  In one buffer; with `context.ids_first` the counts and ids of SparseRows go in
  one before it, which waits for no gradient.
  """
  sections = [section for table in tables for section in table]
  ahead = [early for plan in plans for early in _ahead(plan, context)]
  parts = iter(_wire.exchange(sections, ahead, send))
  return [Sections(next(parts), next(parts), next(parts)) for _ in tables]


def words(
  lengths: Sequence[Sections], plans: Sequence[TablePlan], context: Context
) -> list[int]:
  """Of each buffer that `exchange` sends, in order."""
  sizes = [n for table in lengths for n in table]
  ahead = [early for plan in plans for early in _ahead(plan, context)]
  early = sum(n for n, first in zip(sizes, ahead) if first)
  late = sum(sizes) - early
  return [early, late] if any(ahead) else [late]


def _ahead(plan: TablePlan, context: Context) -> Sections:
  """Which sections go first: ids of an array are found in its gradient."""
  early = context.ids_first and plan.table.look_ups is not None
  return Sections(early, early, False)


def push_lengths(plan: TablePlan, capacity: int) -> Sections:
  """Words for one owner."""
  return Sections(
    _PUSH_COUNTS,
    _sections.index_words(capacity, plan.layout.slots),
    _wire.words_for(capacity * plan.block_width, plan.table.wire_dtype),
  )


def pull_lengths(plan: TablePlan, capacity: int) -> Sections:
  """Words from one owner; the owners of a row group share out its index."""
  index = _sections.index_words(capacity, plan.layout.slots)
  whole = plan.layout.groups == 1
  return Sections(
    _PULL_COUNTS,
    0 if whole else -(-index // plan.column_groups),
    _wire.words_for(capacity * plan.block_width, plan.table.wire_dtype),
  )


def push_sections(out: Outgoing, plan: TablePlan, capacity: int) -> Sections:
  """What goes to every owner, `[n, words]` each."""
  slots, rows, remaining = out.source.rows_from(out.start, plan, capacity)
  probe = jnp.broadcast_to(out.probe, remaining.shape)
  counts = _sections.encode_counts(remaining, probe)
  index = _sections.encode_index(slots, plan.layout.slots)
  rows = _sections.split_columns(rows, plan.column_groups)
  return Sections(
    jnp.repeat(counts, plan.column_groups, axis=0),
    jnp.repeat(index, plan.column_groups, axis=0),
    _sections.encode_rows(rows, plan.table.wire_dtype),
  )


def merged(
  received: Sections, plan: TablePlan, capacity: int, room: int
) -> Held:
  """The sum of what all sources pushed, `[n, words]` each."""
  counts, index, rows = received
  table, num_slots = plan.table, plan.layout.slots
  remaining, probe = _sections.decode_counts(counts)
  slots = _sections.decode_index(index, capacity, num_slots)
  shape = (capacity, plan.block_width)
  # A source that did not fit is complete up to the last row that it sent.
  ends = jnp.where(remaining > capacity, slots[:, -1] + 1, num_slots)
  union = merge(
    slots,
    _wire.from_words(rows, shape, table.wire_dtype),
    jnp.min(ends),
    num_slots,
    room,
    _collectives.accumulator(table.dtype),
  )
  return Held(
    union=union,
    pushed=_sections.sum_counts(remaining),
    fullest=jnp.max(remaining),
    probe=jnp.sum(probe, dtype=jnp.int32),
  )


def tally(own: Held, part: Union, pending: jax.Array) -> Tally:
  """This owner's counts, `[1]` each."""
  tally = Tally(
    limit=part.limit,
    end=own.union.limit,
    union=part.total,
    total=own.union.total,
    pending=pending,
    pushed=own.pushed,
    fullest=own.fullest,
    merged=own.union.merged,
    probe=own.probe,
  )
  return Tally(*(count[None] for count in tally))


def pull_sections(
  tally: Tally,
  part: Union,
  plan: TablePlan,
  capacity: int,
  context: Context,
  me: jax.Array,
) -> Sections:
  """What goes to everyone, `[1, words]` each."""
  values = context.scaled(part.rows).astype(plan.table.dtype)
  return Sections(
    _sections.encode_counts(*tally),
    _index_share(part, plan, capacity, me),
    _sections.encode_rows(values[None], plan.table.wire_dtype),
  )


def _index_share(
  union: Union, plan: TablePlan, capacity: int, me: jax.Array
) -> jax.Array:
  """This owner's part of its row group's index, `[1, words]`."""
  length = pull_lengths(plan, capacity).index
  if not length:
    return jnp.zeros((1, 0), jnp.uint32)
  index = _sections.encode_index(union.slots[None], plan.layout.slots)
  g = plan.column_groups
  if g == 1:
    return index
  index = jnp.pad(index, ((0, 0), (0, length * g - index.shape[1])))
  return lax.dynamic_slice_in_dim(index, (me % g) * length, length, axis=1)


def arrived(
  gathered: Sections,
  own_slots: jax.Array,
  plan: TablePlan,
  capacity: int,
) -> Arrived:
  """What all owners sent, `[n, words]` each."""
  counts, index, rows = gathered
  table, layout, g = plan.table, plan.layout, plan.column_groups
  m, num_slots = layout.groups, layout.slots
  if m == 1:
    # Every owner was sent all ids and formed the same union.
    slots = own_slots[None]
  else:
    index_size = _sections.index_words(capacity, num_slots)
    index = index.reshape(m, -1)[:, :index_size]
    slots = _sections.decode_index(index, capacity, num_slots)
  shape = (capacity, plan.block_width)
  values = _wire.from_words(rows, shape, table.wire_dtype)
  values = _sections.join_columns(values, g, table.width).astype(table.dtype)
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  return Arrived(
    row=layout.row(group, slots).reshape(-1),
    values=values.reshape(-1, table.width),
    tally=Tally(*_sections.decode_counts(counts[::g])),
  )
