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

from zenjax._plan import TablePlan
from zenjax._schemes import _across
from zenjax._schemes import _after
from zenjax._schemes import _push_pull
from zenjax._schemes import _sections
from zenjax._schemes import _ways
from zenjax._schemes._ways import Sections
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Held
from zenjax._schemes.base import Message
from zenjax._schemes.base import Outgoing
from zenjax._schemes.base import Scheme
from zenjax._schemes.base import section


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
        _push_pull.push_sections(*opc)
        for opc in zip(outgoing, plans, capacities)
      ]
      return _ways.sent(_ways.PUSH, sections, plans, context)

  def mark(self, received: list[Sections]) -> jax.Array:
    return _after.mark(received[-1].rows)  # Last, also where ids go first.

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
      sizes = [_push_pull.push_lengths(*pc) for pc in zip(plans, capacities)]
      rows = [size.rows for size in sizes]
      received = _ways.decoded(received, rows, context)
      room = [
        self.held_rows(plan, capacity, context)
        for plan, capacity in zip(plans, capacities)
      ]
      held = [
        _push_pull.merged(*rpcr)
        for rpcr in zip(received, plans, capacities, room)
      ]
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
        tally = _push_pull.tally(own, part, jnp.maximum(pending, 0))
        sections.append(
          _push_pull.pull_sections(tally, part, plan, capacity, context, me)
        )
      gathered = _ways.exchange(_ways.PULL, sections, plans, context)
      return [
        _push_pull.arrived(sections, part.slots, plan, capacity)
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
    lengths = [_push_pull.push_lengths(*pc) for pc in zip(plans, capacities)]
    pushes = _ways.messages(_ways.PUSH, lengths, plans, context)
    if len(context.axes) == 1:
      return pushes
    room = [self.held_rows(p, c, context) for p, c in zip(plans, capacities)]
    return [*pushes, *_across.messages(plans, room, context)]

  def pull_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    lengths = [_push_pull.pull_lengths(*pc) for pc in zip(plans, capacities)]
    return _ways.messages(_ways.PULL, lengths, plans, context)

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


def _waiting(sent: Sections, after: jax.Array) -> Sections:
  """What a push brought, not to be read before `after` is known."""
  count = _sections.decode_counts(sent.counts)[_ways.PUSH.there][0]
  return Sections(*_after.wait(sent, count, after))
