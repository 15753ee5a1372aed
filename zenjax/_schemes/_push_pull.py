"""What a push and a pull of zen put on the wire, and make of what arrives.

Of each table three sections: counts, index, rows. The first two derive from
ids alone.
"""

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax._plan import TablePlan
from zenjax._schemes import _sections
from zenjax._schemes._ways import Lengths
from zenjax._schemes._ways import Sections
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Held
from zenjax._schemes.base import Outgoing
from zenjax._schemes.base import Tally
from zenjax.kernels.merge.reference import Union
from zenjax.kernels.operations import merge

_PUSH_COUNTS = 2
_PULL_COUNTS = len(Tally._fields)


def push_lengths(plan: TablePlan, capacity: int) -> Lengths:
  """For one owner."""
  index = _sections.index_words(capacity, plan.layout.slots)
  return Lengths(_PUSH_COUNTS, index, _rows(plan, capacity))


def pull_lengths(plan: TablePlan, capacity: int) -> Lengths:
  """From one owner; the owners of a row group share out its index."""
  index = _pull_index_words(plan, capacity)
  return Lengths(_PULL_COUNTS, index, _rows(plan, capacity))


def _pull_index_words(plan: TablePlan, capacity: int) -> int:
  if plan.layout.groups == 1:
    return 0
  index = _sections.index_words(capacity, plan.layout.slots)
  return -(-index // plan.column_groups)


def _rows(plan: TablePlan, capacity: int) -> jax.ShapeDtypeStruct:
  shape = capacity, plan.block_width
  return jax.ShapeDtypeStruct(shape, plan.table.wire_dtype)


def push_sections(out: Outgoing, plan: TablePlan, capacity: int) -> Sections:
  """What goes to every owner, `b = n`."""
  slots, rows, remaining = out.source.rows_from(out.start, plan, capacity)
  probe = jnp.broadcast_to(out.probe, remaining.shape)
  counts = _sections.encode_counts(remaining, probe)
  index = _sections.encode_index(slots, plan.layout.slots)
  rows = _sections.split_columns(rows, plan.column_groups)
  return Sections(
    jnp.repeat(counts, plan.column_groups, axis=0),
    jnp.repeat(index, plan.column_groups, axis=0),
    rows.astype(plan.table.wire_dtype),
  )


def merged(
  received: Sections, plan: TablePlan, capacity: int, room: int
) -> Held:
  """The sum of what all sources pushed."""
  counts, index, rows = received
  table, num_slots = plan.table, plan.layout.slots
  remaining, probe = _sections.decode_counts(counts)
  slots = _sections.decode_index(index, capacity, num_slots)
  # A source that did not fit is complete up to the last row that it sent.
  ends = jnp.where(remaining > capacity, slots[:, -1] + 1, num_slots)
  union = merge(
    slots,
    rows,
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
  """What goes to everyone, `b = 1`."""
  values = context.scaled(part.rows).astype(plan.table.dtype)
  return Sections(
    _sections.encode_counts(*tally),
    _index_share(part, plan, capacity, me),
    values[None].astype(plan.table.wire_dtype),
  )


def _index_share(
  union: Union, plan: TablePlan, capacity: int, me: jax.Array
) -> jax.Array:
  """This owner's part of its row group's index, `[1, words]`."""
  length = _pull_index_words(plan, capacity)
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
  """What all owners sent."""
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
  values = _sections.join_columns(rows, g, table.width).astype(table.dtype)
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  return Arrived(
    row=layout.row(group, slots).reshape(-1),
    values=values.reshape(-1, table.width),
    tally=Tally(*_sections.decode_counts(counts[::g])),
  )
