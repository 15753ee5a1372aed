"""SparCML's recursive doubling: unions of 2, 4, 8, ... devices.

SSAR_Recursive_double (Renggli et al., SC 2019), "Hierarchical Centralization"
in ZEN (OSDI 2025): in step `k` a device and the one whose rank differs in bit
`k` exchange the unions of their `2^k` devices, and both merge. After `log2 n`
steps all hold the whole union.

    bytes = (d_1 + d_2 + d_4 + .. + d_{n/2}) * R * (D * size + index)

with `d_k` the union density of `k` devices: few bytes and few messages where
`n` is small, but an overlap is sent once in every step. Where `n` is not a
power of two, the ranks above fold their rows in first and get the result last.

Sizes are static: the union of `k` devices gets room as it grows from `push` to
`pull` rows, both of which can be pinned; what does not fit waits for the next
round, on all devices alike. SparCML switches to a dense vector where the union
passes break-even density; here the table takes the dense path then. Partial
sums travel in the accumulator's dtype, local rows in the wire's.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax import _compat
from zenjax import _wire
from zenjax._plan import TablePlan
from zenjax._schemes import _halves
from zenjax._schemes import _hops
from zenjax._schemes import _sections
from zenjax._schemes import _whole
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Held
from zenjax._schemes.base import Message
from zenjax._schemes.base import Outgoing
from zenjax._schemes.base import Scheme
from zenjax.kernels.merge.reference import Union

_COUNTS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class RecursiveDoubling(Scheme):
  """Exchanges with ranks at distance 1, 2, 4, ... along each axis."""

  name: str = "recursive_doubling"

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    del sizes, column_groups
    return 1, 1

  def held_rows(self, plan: TablePlan, capacity: int, context: Context) -> int:
    rooms = [capacity, *(r for _, r in _hops.rooms(plan, capacity, context))]
    return rooms[-1]

  def push(
    self,
    outgoing: Sequence[Outgoing],
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Held]:
    with jax.named_scope("recursive_doubling"):
      held = [_own(*opc) for opc in zip(outgoing, plans, capacities)]
      rooms = [_hops.rooms(p, c, context) for p, c in zip(plans, capacities)]
      for i, hop in enumerate(_hops.hops(context)):
        first = hop.merged == 1
        sections = [
          part
          for own, plan in zip(held, plans)
          for part in _encode(own, plan, first)
        ]
        buffer = _collectives.permute(
          _wire.join(sections)[0], hop.axis, hop.pairs
        )
        lengths = [
          length
          for plan, room in zip(plans, rooms)
          for length in _lengths(plan, room[i][0], first)
        ]
        parts = iter(_wire.split(buffer[None], lengths))
        rank = lax.axis_index(hop.axis)
        held = [
          _halves.take(
            hop,
            rank,
            own,
            _decode(next(parts), next(parts), next(parts), plan, own, first),
            plan,
            room[i][1],
          )
          for own, plan, room in zip(held, plans, rooms)
        ]
      return jax.tree.map(lambda x: _compat.agreed(x, context.axes), held)

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
    return [_whole.arrive(own, plan, context) for own, plan in zip(held, plans)]

  def push_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    rooms = [_hops.rooms(p, c, context) for p, c in zip(plans, capacities)]
    return [
      Message(
        "collective_permute",
        (hop.axis,),
        sum(
          sum(_lengths(plan, room[i][0], hop.merged == 1))
          for plan, room in zip(plans, rooms)
        ),
      )
      for i, hop in enumerate(_hops.hops(context))
    ]

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
    least = jnp.maximum(push, 1.0)
    power = jnp.log(jnp.maximum(pull, least) / least)
    power = power / math.log(max(context.devices, 2))
    found = []
    for hop in _hops.hops(context):
      rows = jnp.minimum(push * hop.merged**power, jnp.maximum(pull, push))
      wide = _wide(plan, hop.merged == 1).itemsize
      words = rows * (plan.table.width * wide + 4.0) / 4
      found.append(Message("collective_permute", (hop.axis,), words))
    return found


def _wide(plan: TablePlan, first: bool) -> jnp.dtype:
  table = plan.table
  return table.wire_dtype if first else _collectives.accumulator(table.dtype)


def _lengths(plan: TablePlan, capacity: int, first: bool) -> list[int]:
  return [
    _COUNTS,
    _sections.index_words(capacity, plan.layout.slots),
    _wire.words_for(capacity * plan.table.width, _wide(plan, first)),
  ]


def _own(out: Outgoing, plan: TablePlan, capacity: int) -> Held:
  """The first local rows, as a union of one device."""
  slots, rows, remaining = out.source.rows_from(out.start, plan, capacity)
  slots, remaining = slots[0], remaining[0]
  # As they travel, or the two ends of a hop would differ.
  rows = rows[0].astype(plan.table.wire_dtype)
  rows = rows.astype(_collectives.accumulator(plan.table.dtype))
  past = plan.layout.slots
  sent = jnp.minimum(remaining, capacity)
  union = Union(
    slots=slots,
    rows=rows,
    total=sent,
    limit=jnp.where(remaining > capacity, slots[-1] + 1, past),
    merged=sent,
  )
  return Held(union=union, pushed=remaining, fullest=remaining, probe=out.probe)


def _encode(own: Held, plan: TablePlan, first: bool) -> list[jax.Array]:
  union = own.union
  counts = (
    union.total,
    union.limit,
    union.merged,
    own.pushed,
    own.fullest,
    own.probe,
  )
  return [
    _sections.encode_counts(*(count[None] for count in counts)),
    _sections.encode_index(union.slots[None], plan.layout.slots),
    _sections.encode_rows(union.rows[None], _wide(plan, first)),
  ]


def _decode(
  counts: jax.Array,
  index: jax.Array,
  rows: jax.Array,
  plan: TablePlan,
  own: Held,
  first: bool,
) -> Held:
  """What came, of the shape of what was sent."""
  numbers = [count[0] for count in _sections.decode_counts(counts)]
  total, limit, merged, pushed, fullest, probe = numbers
  shape = own.union.rows.shape
  slots = _sections.decode_index(index, shape[0], plan.layout.slots)[0]
  values = _wire.from_words(rows, shape, _wide(plan, first))[0]
  union = Union(
    slots=slots,
    rows=values.astype(own.union.rows.dtype),
    total=total,
    limit=limit,
    merged=merged,
  )
  return Held(union=union, pushed=pushed, fullest=fullest, probe=probe)
