"""AGsparse: every device sends its rows to all others and sums them itself.

What Horovod, PyTorch and DeepSpeed do for sparse gradients. One collective a
round and no partition, but a device receives `(n - 1)` times the rows of the
fullest one: overlap between devices saves nothing. It is the best choice for
few devices with little overlap (ZEN, OSDI 2025, sections 2.2 and 2.3).

Unlike those systems it merges with static shapes, sends in rounds where a
buffer overflows, and sums in rank order, so replicas agree bit for bit.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Asked
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import over_devices
from zenjax._src.schemes.base import Room
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax.kernels.operations import merge

# Unions of which one pull brings all, or none has to bring anything.


def tally(own: Held) -> Tally:
  """Counts of an owner from which one pull brings all, `[]` each."""
  union = own.union
  return Tally(
    limit=union.limit,
    end=union.limit,
    union=union.total,
    total=union.total,
    pending=jnp.zeros_like(union.total),
    pushed=own.pushed,
    fullest=own.fullest,
    merged=union.merged,
    probe=own.probe,
    peak=own.peak,
  )


def arrive(asked: Asked, context: Context) -> Arrived:
  """Returns all that is held, equal on all devices already."""
  plan, own = asked.room.plan, asked.held
  union = own.union
  return Arrived(
    row=plan.layout.row(jnp.zeros((), jnp.int32), union.slots),
    values=context.scaled(union.rows).astype(plan.table.dtype),
    tally=Tally(*(count[None] for count in tally(own))),
  )


@dataclasses.dataclass(frozen=True, slots=True)
class AllGather(Scheme):
  """One all-gather of ids and rows over all axes."""

  name: str = "all_gather"

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    del sizes, column_groups
    return 1, 1

  def held_rows(self, room: Room, context: Context) -> int:
    return min(room.plan.most.pull, room.capacity * context.devices)

  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Held]:
    with jax.named_scope("all_gather/send"):
      sections = [_sections_of(out) for out in outgoing]
      gather = wire.unless(context.quiet, collectives.all_gather, context.axes)
      received = wire.exchange(sections, gather, context.axes)
    with jax.named_scope("all_gather/merge"):
      return [
        _merge(parts, out.room, self.held_rows(out.room, context))
        for out, parts in zip(outgoing, received)
      ]

  def pull(self, asked: Sequence[Asked], context: Context) -> list[Arrived]:
    """Everyone holds the whole union already: nothing moves."""
    return [arrive(table, context) for table in asked]

  def push_messages(
    self, rooms: Sequence[Room], context: Context
  ) -> list[Message]:
    words = sum(sum(_lengths(room)) for room in rooms)
    return [Message("all_gather", context.axes, words)]

  def pull_messages(
    self, rooms: Sequence[Room], context: Context
  ) -> list[Message]:
    del rooms, context
    return []

  def expected_messages(
    self,
    plan: TablePlan,
    context: Context,
    push: jax.Array | float,
    pull: jax.Array | float,
  ) -> list[Message]:
    del pull
    row = plan.table.width * plan.table.wire_dtype.itemsize + 4.0
    return [Message("all_gather", context.axes, push * row / 4)]


def _lengths(room: Room) -> list[int]:
  table = room.plan.table
  return [
    1 + len(room.plan.tables),
    wire.index_words(room.capacity, room.plan.layout.slots),
    wire.words_for(room.capacity * table.width, table.wire_dtype),
  ]


def _sections_of(out: Outgoing) -> list[jax.Array]:
  """`[1, ...]` each."""
  plan = out.room.plan
  slots, rows, remaining = out.source.rows_from(out.start, *out.room)
  return [
    jnp.concatenate([remaining[:, None], out.probe], axis=1),
    wire.encode_index(slots, plan.layout.slots),
    rows.astype(plan.table.wire_dtype),
  ]


def _merge(received: Sequence[jax.Array], room: Room, most: int) -> Held:
  counts, index, rows = received
  table, num_slots = room.plan.table, room.plan.layout.slots
  remaining = counts[:, 0]
  probe, peak = over_devices(counts[:, 1:], room.plan)
  slots = wire.decode_index(index, room.capacity, num_slots)
  ends = jnp.where(remaining > room.capacity, slots[:, -1] + 1, num_slots)
  union = merge(
    slots,
    rows,
    jnp.min(ends),
    num_slots,
    most,
    collectives.accumulator(table.dtype),
    kernels=room.plan.kernels,
  )
  return Held(
    union=union,
    pushed=wire.sum_counts(remaining),
    fullest=jnp.max(remaining),
    probe=probe,
    peak=peak,
  )
