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
from zenjax._src.core import wire_format
from zenjax._src.schemes import encoding
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Outgoing
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
  )


def arrive(own: Held, plan: TablePlan, context: Context) -> Arrived:
  """All that is held, equal on all devices already."""
  union = own.union
  return Arrived(
    row=plan.layout.row(jnp.zeros((), jnp.int32), union.slots),
    values=context.scaled(union.rows).astype(plan.table.dtype),
    tally=Tally(*(count[None] for count in tally(own))),
  )


_COUNTS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class AllGather(Scheme):
  """One all-gather of ids and rows over all axes."""

  name: str = "all_gather"

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    del sizes, column_groups
    return 1, 1

  def held_rows(self, plan: TablePlan, capacity: int, context: Context) -> int:
    return min(plan.most.pull, capacity * context.devices)

  def push(
    self,
    outgoing: Sequence[Outgoing],
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Held]:
    with jax.named_scope("all_gather/send"):
      sections: list[jax.Array] = []
      lengths: list[int] = []
      for out, plan, capacity in zip(outgoing, plans, capacities):
        sections += _sections_of(out, plan, capacity)
        lengths += _lengths(plan, capacity)
      buffer = wire_format.join(sections)[0]
      gathered = collectives.all_gather(buffer, context.axes)
    with jax.named_scope("all_gather/merge"):
      parts = iter(wire_format.split(gathered, lengths))
      return [
        _merge(
          next(parts),
          next(parts),
          next(parts),
          plan,
          capacity,
          self.held_rows(plan, capacity, context),
        )
        for plan, capacity in zip(plans, capacities)
      ]

  def pull(
    self,
    held: Sequence[Held],
    offset: Sequence[jax.Array] | Sequence[int],
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Arrived]:
    """Everyone holds the whole union already: nothing moves."""
    del offset, capacities
    return [arrive(own, plan, context) for own, plan in zip(held, plans)]

  def push_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    words = sum(sum(_lengths(p, c)) for p, c in zip(plans, capacities))
    return [Message("all_gather", context.axes, words)]

  def pull_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    del plans, capacities, context
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


def _lengths(plan: TablePlan, capacity: int) -> list[int]:
  table = plan.table
  return [
    _COUNTS,
    encoding.index_words(capacity, plan.layout.slots),
    wire_format.words_for(capacity * table.width, table.wire_dtype),
  ]


def _sections_of(
  out: Outgoing, plan: TablePlan, capacity: int
) -> list[jax.Array]:
  """`[1, words]` each."""
  slots, rows, remaining = out.source.rows_from(out.start, plan, capacity)
  return [
    encoding.encode_counts(remaining, out.probe[None]),
    encoding.encode_index(slots, plan.layout.slots),
    encoding.encode_rows(rows, plan.table.wire_dtype),
  ]


def _merge(
  counts: jax.Array,
  index: jax.Array,
  rows: jax.Array,
  plan: TablePlan,
  capacity: int,
  room: int,
) -> Held:
  table, num_slots = plan.table, plan.layout.slots
  remaining, probe = encoding.decode_counts(counts)
  slots = encoding.decode_index(index, capacity, num_slots)
  ends = jnp.where(remaining > capacity, slots[:, -1] + 1, num_slots)
  union = merge(
    slots,
    wire_format.from_words(rows, (capacity, table.width), table.wire_dtype),
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
