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

from zenjax import _collectives
from zenjax import _wire
from zenjax._plan import TablePlan
from zenjax._schemes import _across
from zenjax._schemes import _sections
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Held
from zenjax._schemes.base import Message
from zenjax._schemes.base import Outgoing
from zenjax._schemes.base import Scheme
from zenjax._schemes.base import section
from zenjax._schemes.base import Tally
from zenjax.kernels.merge.reference import merge
from zenjax.kernels.merge.reference import Union

_PUSH_COUNTS = 2
_PULL_COUNTS = len(Tally._fields)


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
    with jax.named_scope("zen/push"):
      sections: list[jax.Array] = []
      for out, plan, capacity in zip(outgoing, plans, capacities):
        sections += _push_sections(out, plan, capacity)
      buffer = _wire.join(sections)
      received = _collectives.all_to_all(buffer, context.axes[-1:])
    with jax.named_scope("zen/merge"):
      room = [
        self.held_rows(plan, capacity, context)
        for plan, capacity in zip(plans, capacities)
      ]
      held = _merge_all(received, plans, capacities, room)
      if len(context.axes) > 1:
        held = _across.sum_over(held, plans, room, context)
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
      fast = context.axes[-1:]
      me = lax.axis_index(fast[0])
      parts = [
        section(own.union, at, capacity)
        for own, at, capacity in zip(held, offset, capacities)
      ]
      sections: list[jax.Array] = []
      for own, at, part, plan, capacity in zip(
        held, offset, parts, plans, capacities
      ):
        pending = own.union.total - at - part.total
        tally = _tally(own, part, jnp.maximum(pending, 0))
        sections += _pull_sections(tally, part, plan, capacity, context, me)
      gathered = _collectives.all_gather(_wire.join(sections)[0], fast)
      return _arrivals(gathered, parts, plans, capacities)

  def push_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    words = sum(sum(_push_lengths(p, c)) for p, c in zip(plans, capacities))
    devices = context.sizes[-1]
    push = Message("all_to_all", context.axes[-1:], words * devices)
    if len(context.axes) == 1:
      return [push]
    room = [self.held_rows(p, c, context) for p, c in zip(plans, capacities)]
    return [push, *_across.messages(plans, room, context)]

  def pull_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    words = sum(sum(_pull_lengths(p, c)) for p, c in zip(plans, capacities))
    return [Message("all_gather", context.axes[-1:], words)]

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
      *_across.expected_messages(plan, context, pull),
      Message("all_gather", axes, pull * (block + pull_index) / 4),
    ]


def _push_lengths(plan: TablePlan, capacity: int) -> list[int]:
  """Words for one owner: counts, index, rows."""
  return [
    _PUSH_COUNTS,
    _sections.index_words(capacity, plan.layout.slots),
    _wire.words_for(capacity * plan.block_width, plan.table.wire_dtype),
  ]


def _pull_lengths(plan: TablePlan, capacity: int) -> list[int]:
  """Words from one owner; the owners of a row group share out its index."""
  index = _sections.index_words(capacity, plan.layout.slots)
  whole = plan.layout.groups == 1
  return [
    _PULL_COUNTS,
    0 if whole else -(-index // plan.column_groups),
    _wire.words_for(capacity * plan.block_width, plan.table.wire_dtype),
  ]


def _push_sections(
  out: Outgoing, plan: TablePlan, capacity: int
) -> list[jax.Array]:
  """`[n, words]` each."""
  slots, rows, remaining = out.source.rows_from(out.start, plan, capacity)
  probe = jnp.broadcast_to(out.probe, remaining.shape)
  counts = _sections.encode_counts(remaining, probe)
  index = _sections.encode_index(slots, plan.layout.slots)
  rows = _sections.split_columns(rows, plan.column_groups)
  return [
    jnp.repeat(counts, plan.column_groups, axis=0),
    jnp.repeat(index, plan.column_groups, axis=0),
    _sections.encode_rows(rows, plan.table.wire_dtype),
  ]


def _merge_all(
  received: jax.Array,
  plans: Sequence[TablePlan],
  capacities: Sequence[int],
  room: Sequence[int],
) -> list[Held]:
  lengths = [
    length
    for plan, capacity in zip(plans, capacities)
    for length in _push_lengths(plan, capacity)
  ]
  parts = iter(_wire.split(received, lengths))
  return [
    _merge_one(next(parts), next(parts), next(parts), plan, capacity, rows)
    for plan, capacity, rows in zip(plans, capacities, room)
  ]


def _merge_one(
  counts: jax.Array,
  index: jax.Array,
  rows: jax.Array,
  plan: TablePlan,
  capacity: int,
  room: int,
) -> Held:
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


def _tally(own: Held, part: Union, pending: jax.Array) -> Tally:
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


def _pull_sections(
  tally: Tally,
  part: Union,
  plan: TablePlan,
  capacity: int,
  context: Context,
  me: jax.Array,
) -> list[jax.Array]:
  """`[1, words]` each."""
  values = context.scaled(part.rows).astype(plan.table.dtype)
  return [
    _sections.encode_counts(*tally),
    _index_share(part, plan, capacity, me),
    _sections.encode_rows(values[None], plan.table.wire_dtype),
  ]


def _index_share(
  union: Union, plan: TablePlan, capacity: int, me: jax.Array
) -> jax.Array:
  """This owner's part of its row group's index, `[1, words]`."""
  length = _pull_lengths(plan, capacity)[1]
  if not length:
    return jnp.zeros((1, 0), jnp.uint32)
  index = _sections.encode_index(union.slots[None], plan.layout.slots)
  g = plan.column_groups
  if g == 1:
    return index
  index = jnp.pad(index, ((0, 0), (0, length * g - index.shape[1])))
  return lax.dynamic_slice_in_dim(index, (me % g) * length, length, axis=1)


def _arrivals(
  gathered: jax.Array,
  parts_held: Sequence[Union],
  plans: Sequence[TablePlan],
  capacities: Sequence[int],
) -> list[Arrived]:
  lengths = [
    length
    for plan, capacity in zip(plans, capacities)
    for length in _pull_lengths(plan, capacity)
  ]
  parts = iter(_wire.split(gathered, lengths))
  return [
    _arrive(next(parts), next(parts), next(parts), held.slots, plan, capacity)
    for held, plan, capacity in zip(parts_held, plans, capacities)
  ]


def _arrive(
  counts: jax.Array,
  index: jax.Array,
  rows: jax.Array,
  own_slots: jax.Array,
  plan: TablePlan,
  capacity: int,
) -> Arrived:
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
