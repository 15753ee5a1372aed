"""Implements SparCML's recursive doubling: unions of 2, 4, 8, ... devices.

This is SSAR_Recursive_double (Renggli et al., SC 2019), and "Hierarchical
Centralization" in ZEN (OSDI 2025). In step `k`, two devices whose ranks differ
in bit `k` exchange the unions of their `2^k` devices, and both merge them.
After `log2 n` steps all devices hold the union of all.

    bytes = (d_1 + d_2 + d_4 + .. + d_{n/2}) * R * (D * size + index)

with `d_k` the union density of `k` devices. This takes few bytes and few
messages for a small `n`, but rows that devices have in common are sent again in
every step. If `n` is not a power of two, the ranks above the largest power send
their rows first and receive the result last.

Buffer sizes are static: they grow with the number of merged devices from `push`
to `pull` rows. Overflowing rows wait for the next round on all devices. If the
union exceeds the break-even density, SparCML switches to a dense vector; here
the table takes the dense path. Partial sums are sent in the accumulator's
dtype, and local rows in the wire dtype.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import wire
from zenjax._src.core.row_wire import RowWire
from zenjax._src.schemes.all_gather import AllGather
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import counts_of
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Number
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import Sums
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax.kernels.operations import merge
from zenjax.kernels.reference import Union

# A list of hops says who sends to whom, and how much. Along each axis, the
# fastest first, ranks above the largest power of two fold in their rows, the
# other ranks double, and the result is spread to the ranks above.


# Between the first and the last hop, unions are expected to grow by a power
# law, as those of a vocabulary do. Buffers exceed it by this factor. Unions of
# rows that are drawn uniformly may grow faster. Up to half of the table, this
# is enough on eight devices. Beyond, a second round follows.
_MARGIN = 1.15


class Hop(NamedTuple):
  """One static step along one axis."""

  kind: str  # "fold" ranks above in, "double", or "spread" the result to them
  axis: str
  pairs: list[tuple[int, int]]
  distance: int  # in ranks
  merged: int  # devices whose rows are sent
  after: int  # devices whose rows the receiver then holds


def hops(context: Context) -> Iterator[Hop]:
  """Yields all steps in order; they are static and equal on all devices."""
  below = 1  # devices along faster axes
  for axis, n in reversed([*zip(context.axes, context.sizes)]):
    power = 1 << (n.bit_length() - 1)
    above = n - power
    if above:
      pairs = [(power + i, i) for i in range(above)]
      yield Hop("fold", axis, pairs, power, below, 2 * below)
    held = below * (2 if above else 1)
    for k in range(power.bit_length() - 1):
      step = 1 << k
      pairs = [(i, i ^ step) for i in range(power)]
      sent = min(held * step, below * n)
      after = min(held * 2 * step, below * n)
      yield Hop("double", axis, pairs, step, sent, after)
    below *= n
    if above:
      pairs = [(i, power + i) for i in range(above)]
      yield Hop("spread", axis, pairs, power, below, below)


def rows_of(plan: ExchangePlan, context: Context) -> list[tuple[int, int]]:
  """Returns the rows sent and the rows held afterwards, for each hop."""
  rows, sent = [], plan.push
  grown = max(plan.pull / plan.push, 1.0)
  growth = math.log(grown) / math.log(max(context.devices, 2))
  steps = list(hops(context))
  for i, hop in enumerate(steps):
    # After the last merge rows are not sent again, so a large buffer costs only
    # memory.
    held = sent if hop.kind == "spread" else 2 * sent
    if i + 1 < len(steps) and hop.kind != "spread":
      wanted = math.ceil(plan.push * hop.after**growth * _MARGIN)
      held = max(min(held, wanted), sent)
    held = min(held, plan.most_pull)
    rows.append((sent, held))
    sent = held
  return rows


# Merging two unions gives equal results on the two devices that exchanged them.


def take(
  hop: Hop,
  rank: jax.Array,
  own: Sums,
  came: Sums,
  plan: ExchangePlan,
  room: int,
) -> Sums:
  """Merges this device's sums with the received ones.

  Args:
    hop: The step.
    rank: The rank of this device along the hop's axis.
    own: The sums of this device.
    came: The received sums, of the same shape. Devices that are not in a pair
      ignore them.
    plan: The plan of the table.
    room: How many rows the result can hold.
  """
  if hop.kind == "spread":
    mine = rank < hop.distance
    return jax.tree.map(lambda a, b: jnp.where(mine, a, b), own, came)
  upper = (rank & hop.distance) != 0
  if hop.kind == "fold":
    came = _empty_unless(rank < len(hop.pairs), came, plan)
    upper = jnp.zeros_like(upper)
  # Both devices add in the order of ranks, so that even NaN is bit-identical.
  lower, higher = (
    jax.tree.map(lambda a, b: jnp.where(upper, b, a), own, came),
    jax.tree.map(lambda a, b: jnp.where(upper, a, b), own, came),
  )
  return _merge(lower, higher, plan, room)


def _empty_unless(there: jax.Array, came: Sums, plan: ExchangePlan) -> Sums:
  """Returns `came`, or an empty complete union unless `there`."""
  past = plan.layout.slots
  came = jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), came)
  union = came.union._replace(
    slots=jnp.where(there, came.union.slots, past),
    limit=jnp.where(there, came.union.limit, past),
  )
  return came._replace(union=union)


def _merge(a: Sums, b: Sums, plan: ExchangePlan, room: int) -> Sums:
  x, y = a.union, b.union
  union = merge(
    jnp.stack([x.slots, y.slots]),
    jnp.stack([x.rows, y.rows]),
    jnp.minimum(x.limit, y.limit),
    plan.layout.slots,
    room,
    x.rows.dtype,
    kernels=plan.kernels,
  )
  # `merge` counts the rows of two unions, but `summed` counts rows of devices.
  # The sum of both counts is exact unless `merge` left rows out. Then it is
  # reduced in proportion.
  kept = union.summed.astype(jnp.float32)
  came = jnp.maximum(x.total + y.total, 1).astype(jnp.float32)
  both = wire.sum_counts(jnp.stack([x.summed, y.summed]))
  part = (both.astype(jnp.float32) * (kept / came)).astype(jnp.int32)
  summed = jnp.where(union.summed == x.total + y.total, both, part)
  return Sums(
    union=union._replace(summed=summed),
    pushed=wire.sum_counts(jnp.stack([a.pushed, b.pushed])),
    fullest=jnp.maximum(a.fullest, b.fullest),
  )


@dataclasses.dataclass(frozen=True, slots=True)
class RecursiveDoubling(AllGather):
  """Exchanges unions with ranks at distance 1, 2, 4, ... along each axis.

  As in `AllGather`, all devices hold the union of all rows before the pull.
  """

  name: str = "recursive_doubling"
  union_margin: float = _MARGIN

  def held_rows(self, plan: ExchangePlan, context: Context) -> int:
    return [plan.push, *(held for _, held in rows_of(plan, context))][-1]

  def holds_all(self, plan: ExchangePlan, context: Context) -> bool:
    return plan.push >= plan.most_push and all(
      held >= min(2 * sent, plan.most_pull)
      for hop, (sent, held) in zip(hops(context), rows_of(plan, context))
      if hop.kind != "spread"
    )

  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Sums]:
    with jax.named_scope("recursive_doubling"):
      plans = [out.plan for out in outgoing]
      rows = [rows_of(plan, context) for plan in plans]
      local = [_own(out) for out in outgoing]
      sums = [own for own, _ in local]
      for i, hop in enumerate(hops(context)):
        first, room = hop.merged == 1, [held[i][1] for held in rows]
        # Rounding twice may differ from rounding once.
        sent = [encoded if first else None for _, encoded in local]
        sections = list(map(_encode, sums, plans, sent))
        received = wire.send(sections, collectives.permute, hop.axis, hop.pairs)
        rank = lax.axis_index(hop.axis)
        sums = [
          take(hop, rank, own, _decode(came, plan, own, first), plan, most)
          for own, came, plan, most in zip(sums, received, plans, room)
        ]
      return jax.tree.map(lambda x: compat.agreed(x, context.axes), sums)

  def messages(
    self, plans: Sequence[ExchangePlan], context: Context
  ) -> list[Message]:
    rows = [rows_of(plan, context) for plan in plans]
    messages = []
    for i, hop in enumerate(hops(context)):
      words = 0
      for plan, hop_rows in zip(plans, rows):
        sent, _ = hop_rows[i]
        words += len(Tally._fields) + wire.index_words(sent, plan.layout.slots)
        words += _row_wire(plan, hop.merged == 1).words(sent)
      messages.append(Message("collective_permute", (hop.axis,), words))
    return messages

  def expected_messages(
    self, plan: ExchangePlan, context: Context, push: Number, pull: Number
  ) -> list[Message]:
    least = jnp.maximum(push, 1.0)
    power = jnp.log(jnp.maximum(pull, least) / least)
    power = power / math.log(max(context.devices, 2))
    messages = []
    for hop in hops(context):
      margin = _MARGIN if hop.merged > 1 else 1.0
      grown = push * jnp.minimum(hop.merged**power * margin, hop.merged)
      rows = jnp.minimum(grown, jnp.maximum(pull, push))
      words = rows * (_row_wire(plan, hop.merged == 1).nbytes + 4.0) / 4
      messages.append(Message("collective_permute", (hop.axis,), words))
    return messages


def _row_wire(plan: ExchangePlan, first: bool) -> RowWire:
  """Returns how rows are sent, in the `first` hop or later."""
  if first:
    return plan.row_wire
  return RowWire(collectives.accumulator(plan.table.dtype), plan.table.width)


def _own(out: Outgoing) -> tuple[Sums, jax.Array]:
  """Returns the first local rows as the union of one device, and encoded."""
  plan = out.plan
  slots, rows, left = out.source.take(out.start, plan)
  slots, left = slots[0], left[0]
  # A device rounds its own rows as if it sent them. Otherwise the results on
  # the two devices of a hop would differ.
  encoded = plan.row_wire.encode(rows[0])
  rows = plan.row_wire.decode(encoded)
  rows = rows.astype(collectives.accumulator(plan.table.dtype))
  sent = jnp.minimum(left, plan.push)
  limit = jnp.where(left > plan.push, slots[-1] + 1, plan.layout.slots)
  union = Union(slots=slots, rows=rows, total=sent, limit=limit, summed=sent)
  return Sums(union, pushed=left, fullest=left), encoded


def _encode(
  own: Sums, plan: ExchangePlan, rows: jax.Array | None
) -> list[jax.Array]:
  """Returns the sections of a union, with its encoded `rows` if given."""
  union = own.union
  return [
    counts_of(own)[None],
    wire.encode_index(union.slots[None], plan.layout.slots),
    (union.rows if rows is None else rows)[None],
  ]


def _decode(
  came: Sequence[jax.Array], plan: ExchangePlan, own: Sums, first: bool
) -> Sums:
  """Decodes received sums, in the same shape as `own`."""
  counts, index, rows = came
  tally = Tally(*counts[0])
  room = own.union.slots.shape[0]
  union = Union(
    slots=wire.decode_index(index, room, plan.layout.slots)[0],
    rows=_row_wire(plan, first).decode(rows[0]).astype(own.union.rows.dtype),
    total=tally.union,
    limit=tally.limit,
    summed=tally.summed,
  )
  return Sums(union, pushed=tally.pushed, fullest=tally.fullest)
