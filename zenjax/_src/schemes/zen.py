"""Balanced Parallelism: push to hashed owners, merge, pull from them.

What device `s` does in a round:

    for every owner p:  send p the first C rows of p's that I hold   (push)
    sum what all sources sent me, in rank order                      (merge)
    send U rows of my union to everyone; write those of all owners
    into my gradient; again until none are left                      (pull)

An owner is a pair (row group, column group): `g = 1` hashes rows, `g = n`
splits columns, and between them lies the grid. A round is complete for the
slots below a limit that every owner finds: the first slot that some source
had no room for, or that the union had no room for. Rows beyond it wait.

Zen proves this scheme optimal for overlapping sparse gradients ("ZEN:
Empowering Distributed Training with Sparsity-driven Data Synchronization",
Wang et al., OSDI 2025); the hash keeps its balance with a bijection instead
of stored index sets, and columns are split for balance as nowhere there.
"""

from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.schemes import hierarchy
from zenjax._src.schemes import transport
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Asked
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import Room
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import section
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.schemes.transport import Lengths
from zenjax._src.schemes.transport import Sections
from zenjax.kernels.merge.reference import Union
from zenjax.kernels.operations import merge

# What a push and a pull of zen put on the wire, and make of what arrives.
#
# Of each table three sections: counts, index, rows. The first two derive from
# ids alone.


_PUSH_COUNTS = 2
_PULL_COUNTS = len(Tally._fields)


def push_lengths(room: Room) -> Lengths:
  """Returns how much goes to one owner."""
  index = wire.index_words(room.capacity, room.plan.layout.slots)
  return Lengths(_PUSH_COUNTS, index, _rows(room))


def pull_lengths(room: Room) -> Lengths:
  """Returns how much one owner sends; a row group's share out its index."""
  return Lengths(_PULL_COUNTS, _pull_index_words(room), _rows(room))


def _pull_index_words(room: Room) -> int:
  plan = room.plan
  if plan.layout.groups == 1:
    return 0
  index = wire.index_words(room.capacity, plan.layout.slots)
  return -(-index // plan.column_groups)


def _rows(room: Room) -> jax.ShapeDtypeStruct:
  shape = room.capacity, room.plan.block_width
  return jax.ShapeDtypeStruct(shape, room.plan.table.wire_dtype)


def push_sections(out: Outgoing) -> Sections:
  """Returns what goes to every owner, `b = n`."""
  plan = out.room.plan
  slots, rows, remaining = out.rows()
  probe = jnp.broadcast_to(out.probe, remaining.shape)
  counts = wire.encode_counts(remaining, probe)
  index = wire.encode_index(slots, plan.layout.slots)
  rows = wire.split_columns(rows, plan.column_groups)
  return Sections(
    jnp.repeat(counts, plan.column_groups, axis=0),
    jnp.repeat(index, plan.column_groups, axis=0),
    rows.astype(plan.table.wire_dtype),
  )


def merged(received: Sections, room: Room, most: int) -> Held:
  """Returns the sum of what all sources pushed, `most` rows at most."""
  counts, index, rows = received
  plan, capacity = room
  table, num_slots = plan.table, plan.layout.slots
  remaining, probe = wire.decode_counts(counts)
  slots = wire.decode_index(index, capacity, num_slots)
  # A source that did not fit is complete up to the last row that it sent.
  ends = jnp.where(remaining > capacity, slots[:, -1] + 1, num_slots)
  union = merge(
    slots,
    rows,
    jnp.min(ends),
    num_slots,
    most,
    collectives.accumulator(table.dtype),
  )
  return Held(
    union=union,
    pushed=wire.sum_counts(remaining),
    fullest=jnp.max(remaining),
    probe=jnp.sum(probe, dtype=jnp.int32),
  )


def pull_sections(
  asked: Asked, part: Union, context: Context, me: jax.Array
) -> Sections:
  """Returns what goes to everyone, `b = 1`: this part of an owner's union."""
  own, plan = asked.held, asked.room.plan
  pending = own.union.total - asked.offset - part.total
  tally = Tally(
    limit=part.limit,
    end=own.union.limit,
    union=part.total,
    total=own.union.total,
    pending=jnp.maximum(pending, 0),
    pushed=own.pushed,
    fullest=own.fullest,
    merged=own.union.merged,
    probe=own.probe,
  )
  values = context.scaled(part.rows).astype(plan.table.dtype)
  return Sections(
    wire.encode_counts(*[count[None] for count in tally]),
    _index_share(part, asked.room, me),
    values[None].astype(plan.table.wire_dtype),
  )


def _index_share(union: Union, room: Room, me: jax.Array) -> jax.Array:
  """This owner's part of its row group's index, `[1, words]`."""
  length = _pull_index_words(room)
  if not length:
    return jnp.zeros((1, 0), jnp.uint32)
  index = wire.encode_index(union.slots[None], room.plan.layout.slots)
  g = room.plan.column_groups
  if g == 1:
    return index
  index = jnp.pad(index, ((0, 0), (0, length * g - index.shape[1])))
  return lax.dynamic_slice_in_dim(index, (me % g) * length, length, axis=1)


def arrived(gathered: Sections, own_slots: jax.Array, room: Room) -> Arrived:
  """Returns what all owners sent."""
  counts, index, rows = gathered
  plan, capacity = room
  table, layout, g = plan.table, plan.layout, plan.column_groups
  m, num_slots = layout.groups, layout.slots
  if m == 1:
    # Every owner was sent all ids and formed the same union.
    slots = own_slots[None]
  else:
    index_size = wire.index_words(capacity, num_slots)
    index = index.reshape(m, -1)[:, :index_size]
    slots = wire.decode_index(index, capacity, num_slots)
  values = wire.join_columns(rows, g, table.width).astype(table.dtype)
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  return Arrived(
    row=layout.row(group, slots).reshape(-1),
    values=values.reshape(-1, table.width),
    tally=Tally(*wire.decode_counts(counts[::g])),
  )


@dataclasses.dataclass(frozen=True, slots=True)
class Zen(Scheme):
  """Push along the fastest axis, sum over the others, pull back."""

  name: str = "zen"

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    return sizes[-1] // column_groups, column_groups

  def held_rows(self, room: Room, context: Context) -> int:
    plan, capacity = room
    most = plan.most.pull
    if len(context.axes) > 1:
      # What is held crosses the slow links whole: no more than one pull.
      return min(most, max(plan.first.pull, capacity))
    return min(most, capacity * context.sizes[-1])

  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Held]:
    received = self.send(outgoing, context)
    return self.merge(received, [out.room for out in outgoing], context)

  def send(
    self, outgoing: Sequence[Outgoing], context: Context
  ) -> list[Sections]:
    with jax.named_scope("zen/push"):
      sections = [push_sections(out) for out in outgoing]
      rooms = [out.room for out in outgoing]
      return transport.exchange(transport.PUSH, sections, rooms, context)

  def mark(self, received: list[Sections]) -> jax.Array:
    return transport.mark(received[-1].rows)  # Last, also where ids go first.

  def merge(
    self,
    received: list[Sections],
    rooms: Sequence[Room],
    context: Context,
    after: jax.Array | None = None,
  ) -> list[Held]:
    with jax.named_scope("zen/merge"):
      if after is not None:
        received = [_waiting(table, after) for table in received]
      received = [
        transport.with_rows(table, _rows(room), context)
        for table, room in zip(received, rooms)
      ]
      most = [self.held_rows(room, context) for room in rooms]
      held = [
        merged(table, room, rows)
        for table, room, rows in zip(received, rooms, most)
      ]
      if len(context.axes) > 1:
        rooms = [Room(room.plan, rows) for room, rows in zip(rooms, most)]
        held = hierarchy.sum_over(held, rooms, context)
    return held

  def pull(self, asked: Sequence[Asked], context: Context) -> list[Arrived]:
    with jax.named_scope("zen/pull"):
      me = lax.axis_index(context.axes[-1])
      parts = [
        section(table.held.union, table.offset, table.room.capacity)
        for table in asked
      ]
      sections = [
        pull_sections(table, part, context, me)
        for table, part in zip(asked, parts)
      ]
      rooms = [table.room for table in asked]
      gathered = transport.exchange(transport.PULL, sections, rooms, context)
      gathered = [
        transport.with_rows(table, _rows(room), context)
        for table, room in zip(gathered, rooms)
      ]
      return [
        arrived(table, part.slots, room)
        for table, part, room in zip(gathered, parts, rooms)
      ]

  def push_messages(
    self, rooms: Sequence[Room], context: Context
  ) -> list[Message]:
    lengths = [push_lengths(room) for room in rooms]
    pushes = transport.messages(transport.PUSH, lengths, rooms, context)
    if len(context.axes) == 1:
      return pushes
    held = [Room(r.plan, self.held_rows(r, context)) for r in rooms]
    return [*pushes, *hierarchy.messages(held, context)]

  def pull_messages(
    self, rooms: Sequence[Room], context: Context
  ) -> list[Message]:
    lengths = [pull_lengths(room) for room in rooms]
    return transport.messages(transport.PULL, lengths, rooms, context)

  def expected_messages(
    self,
    plan: TablePlan,
    context: Context,
    push: jax.Array | float,
    pull: jax.Array | float,
  ) -> list[Message]:
    axes, n = context.axes[-1:], context.sizes[-1]
    block = plan.block_width * plan.table.wire_dtype.itemsize
    pull_index = 0 if plan.layout.groups == 1 else 4 / plan.column_groups
    slow = []
    if len(context.axes) > 1:
      slow = hierarchy.expected_messages(plan, context, pull)
    return [
      Message("all_to_all", axes, n * push * (block + 4.0) / 4),
      *slow,
      Message("all_gather", axes, pull * (block + pull_index) / 4),
    ]


def _waiting(sent: Sections, after: jax.Array) -> Sections:
  """Returns a push that is not read before `after` is known."""
  count = wire.decode_counts(sent.counts)[transport.PUSH.there][0]
  return Sections(*transport.wait(sent, count, after))
