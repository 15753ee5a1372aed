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
from zenjax._src.schemes import encoding
from zenjax._src.schemes import hierarchy
from zenjax._src.schemes import transport
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Outgoing
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


def push_lengths(plan: TablePlan, capacity: int) -> Lengths:
  """For one owner."""
  index = encoding.index_words(capacity, plan.layout.slots)
  return Lengths(_PUSH_COUNTS, index, _rows(plan, capacity))


def pull_lengths(plan: TablePlan, capacity: int) -> Lengths:
  """From one owner; the owners of a row group share out its index."""
  index = _pull_index_words(plan, capacity)
  return Lengths(_PULL_COUNTS, index, _rows(plan, capacity))


def _pull_index_words(plan: TablePlan, capacity: int) -> int:
  if plan.layout.groups == 1:
    return 0
  index = encoding.index_words(capacity, plan.layout.slots)
  return -(-index // plan.column_groups)


def _rows(plan: TablePlan, capacity: int) -> jax.ShapeDtypeStruct:
  shape = capacity, plan.block_width
  return jax.ShapeDtypeStruct(shape, plan.table.wire_dtype)


def push_sections(out: Outgoing, plan: TablePlan, capacity: int) -> Sections:
  """What goes to every owner, `b = n`."""
  slots, rows, remaining = out.source.rows_from(out.start, plan, capacity)
  probe = jnp.broadcast_to(out.probe, remaining.shape)
  counts = encoding.encode_counts(remaining, probe)
  index = encoding.encode_index(slots, plan.layout.slots)
  rows = encoding.split_columns(rows, plan.column_groups)
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
  remaining, probe = encoding.decode_counts(counts)
  slots = encoding.decode_index(index, capacity, num_slots)
  # A source that did not fit is complete up to the last row that it sent.
  ends = jnp.where(remaining > capacity, slots[:, -1] + 1, num_slots)
  union = merge(
    slots,
    rows,
    jnp.min(ends),
    num_slots,
    room,
    collectives.accumulator(table.dtype),
  )
  return Held(
    union=union,
    pushed=encoding.sum_counts(remaining),
    fullest=jnp.max(remaining),
    probe=jnp.sum(probe, dtype=jnp.int32),
  )


def tally_of(own: Held, part: Union, pending: jax.Array) -> Tally:
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
    encoding.encode_counts(*tally),
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
  index = encoding.encode_index(union.slots[None], plan.layout.slots)
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
    index_size = encoding.index_words(capacity, num_slots)
    index = index.reshape(m, -1)[:, :index_size]
    slots = encoding.decode_index(index, capacity, num_slots)
  values = encoding.join_columns(rows, g, table.width).astype(table.dtype)
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  return Arrived(
    row=layout.row(group, slots).reshape(-1),
    values=values.reshape(-1, table.width),
    tally=Tally(*encoding.decode_counts(counts[::g])),
  )


@dataclasses.dataclass(frozen=True, slots=True)
class Zen(Scheme):
  """Push along the fastest axis, sum over the others, pull back."""

  name: str = "zen"

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    return sizes[-1] // column_groups, column_groups

  def held_rows(self, plan: TablePlan, capacity: int, context: Context) -> int:
    most = plan.most.pull
    if len(context.axes) > 1:
      # What is held crosses the slow links whole: no more than one pull.
      return min(most, max(plan.first.pull, capacity))
    return min(most, capacity * context.sizes[-1])

  def push(
    self,
    outgoing: Sequence[Outgoing],
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Held]:
    received = self.send(outgoing, plans, capacities, context)
    return self.merge(received, plans, capacities, context)

  def send(
    self,
    outgoing: Sequence[Outgoing],
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Sections]:
    with jax.named_scope("zen/push"):
      sections = [
        push_sections(*opc) for opc in zip(outgoing, plans, capacities)
      ]
      return transport.sent(transport.PUSH, sections, plans, context)

  def mark(self, received: list[Sections]) -> jax.Array:
    return transport.mark(received[-1].rows)  # Last, also where ids go first.

  def merge(
    self,
    received: list[Sections],
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
    after: jax.Array | None = None,
  ) -> list[Held]:
    with jax.named_scope("zen/merge"):
      if after is not None:
        received = [_waiting(table, after) for table in received]
      sizes = [push_lengths(*pc) for pc in zip(plans, capacities)]
      rows = [size.rows for size in sizes]
      received = transport.decoded(received, rows, context)
      room = [
        self.held_rows(plan, capacity, context)
        for plan, capacity in zip(plans, capacities)
      ]
      held = [merged(*rpcr) for rpcr in zip(received, plans, capacities, room)]
      if len(context.axes) > 1:
        held = hierarchy.sum_over(held, plans, room, context)
    return held

  def pull(
    self,
    held: Sequence[Held],
    offset: Sequence[jax.Array] | Sequence[int],
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Arrived]:
    with jax.named_scope("zen/pull"):
      me = lax.axis_index(context.axes[-1])
      parts = [
        section(own.union, at, capacity)
        for own, at, capacity in zip(held, offset, capacities)
      ]
      sections = []
      for own, at, part, plan, capacity in zip(
        held, offset, parts, plans, capacities
      ):
        pending = own.union.total - at - part.total
        tally = tally_of(own, part, jnp.maximum(pending, 0))
        sections.append(pull_sections(tally, part, plan, capacity, context, me))
      gathered = transport.exchange(transport.PULL, sections, plans, context)
      return [
        arrived(sections, part.slots, plan, capacity)
        for sections, part, plan, capacity in zip(
          gathered, parts, plans, capacities
        )
      ]

  def push_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    lengths = [push_lengths(*pc) for pc in zip(plans, capacities)]
    pushes = transport.messages(transport.PUSH, lengths, plans, context)
    if len(context.axes) == 1:
      return pushes
    room = [self.held_rows(p, c, context) for p, c in zip(plans, capacities)]
    return [*pushes, *hierarchy.messages(plans, room, context)]

  def pull_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    lengths = [pull_lengths(*pc) for pc in zip(plans, capacities)]
    return transport.messages(transport.PULL, lengths, plans, context)

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
    return [
      Message("all_to_all", axes, n * push * (block + 4.0) / 4),
      *hierarchy.expected_messages(plan, context, pull),
      Message("all_gather", axes, pull * (block + pull_index) / 4),
    ]


def _waiting(sent: Sections, after: jax.Array) -> Sections:
  """What a push brought, not to be read before `after` is known."""
  count = encoding.decode_counts(sent.counts)[transport.PUSH.there][0]
  return Sections(*transport.wait(sent, count, after))
