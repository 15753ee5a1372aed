"""Implements Balanced Parallelism: push to hashed owners, merge, and pull.

Every device repeats these steps until no rows are left:

    push   send each owner the first C of its rows that this device holds
    merge  sum the rows that all devices sent, in rank order
    pull   send the union, up to U rows, to all devices; write the rows of all
           owners over the local array, or append them to a list of rows

An owner is a pair (row group, column group): `g = 1` hashes rows, `g = n`
splits columns, and any divisor in between makes a grid. Sums of an owner are
complete below a *limit*. Two kinds of overflow lower it. If a source had more
rows than its buffer, the limit is one past the last slot that it sent. If the
union has more rows than its buffer, the limit is the first slot left out. Rows
from the limit on follow in the next round.

Zen proves that this scheme is optimal for gradients whose rows overlap ("ZEN:
Empowering Distributed Training with Sparsity-driven Data Synchronization",
Wang et al., OSDI 2025). Two things differ from the paper: the hash is a
bijection instead of stored index sets, and column groups are new.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.core.collectives import Axes
from zenjax._src.schemes import hierarchy
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import counts_of
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Number
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import Sums
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax.kernels.operations import merge


class Sections(NamedTuple):
  """The part of one table in the buffer of a push or a pull.

  A push has `b = n` parts, one for each owner. A pull has one part, for all
  devices.
  """

  counts: jax.Array  # [b, k] int32
  ids: jax.Array  # [b, words], encoded by `wire.encode_index`
  rows: jax.Array  # [b, C, k], encoded by `ExchangePlan.row_wire`


def push_sections(out: Outgoing) -> Sections:
  """Returns the sections to send to each owner."""
  plan = out.plan
  slots, rows, left = out.source.take(out.start, plan)
  counts, ids = left[:, None], wire.encode_index(slots, plan.layout.slots)
  if plan.column_groups > 1:
    counts = jnp.repeat(counts, plan.column_groups, axis=0)
    ids = jnp.repeat(ids, plan.column_groups, axis=0)
    rows = wire.split_columns(rows, plan.column_groups)
  return Sections(counts, ids, plan.row_wire.encode(rows))


def push_words(plan: ExchangePlan) -> int:
  """Returns how many words of 32 bits the sections for one owner take."""
  ids = wire.index_words(plan.push, plan.layout.slots)
  return 1 + ids + plan.row_wire.words(plan.push)


def owner_sums(received: Sections, plan: ExchangePlan, room: int) -> Sums:
  """Returns the sums of the rows that all devices pushed, at most `room`."""
  left, num_slots = received.counts[:, 0], plan.layout.slots
  slots = wire.decode_index(received.ids, plan.push, num_slots)
  # A source with overflow is complete up to the last row that it sent.
  ends = jnp.where(left > plan.push, slots[:, -1] + 1, num_slots)
  union = merge(
    slots,
    plan.row_wire.decode(received.rows),
    jnp.min(ends),
    num_slots,
    room,
    collectives.accumulator(plan.table.dtype),
    kernels=plan.kernels,
  )
  return Sums(union, pushed=wire.sum_counts(left), fullest=jnp.max(left))


def _shared_ids(plan: ExchangePlan, room: int) -> int:
  """Returns how many words of ids each owner sends in a pull.

  The owners of a row group, one for each column group, hold the same ids, so
  each sends a part of them. With one row group, all devices know all ids
  already.
  """
  if plan.layout.groups == 1:
    return 0
  return -(-wire.index_words(room, plan.layout.slots) // plan.column_groups)


def pull_sections(
  sums: Sums, plan: ExchangePlan, context: Context, axes: Axes
) -> Sections:
  """Returns the sections to send to all devices along `axes`."""
  union, g = sums.union, plan.column_groups
  length = _shared_ids(plan, union.slots.shape[0])
  ids = jnp.zeros((1, 0), jnp.int32)
  if length:
    ids = wire.encode_index(union.slots[None], plan.layout.slots)
  if length and g > 1:
    share = lax.axis_index(axes) % g
    ids = jnp.pad(ids, ((0, 0), (0, length * g - ids.shape[1])))
    ids = lax.dynamic_slice_in_dim(ids, share * length, length, axis=1)
  values = context.scaled(union.rows).astype(plan.table.dtype)
  values = plan.row_wire.encode(values)
  return Sections(counts_of(sums)[None], ids, values[None])


def arrived(
  gathered: Sections, own_slots: jax.Array, plan: ExchangePlan
) -> Arrived:
  """Returns the rows that all owners sent."""
  counts, ids, rows = gathered
  table, layout, g = plan.table, plan.layout, plan.column_groups
  m, room = layout.groups, own_slots.shape[0]
  if m == 1:  # Every owner received all ids, so all have the same union.
    slots = own_slots[None]
  else:
    words = wire.index_words(room, layout.slots)
    ids = ids.reshape(m, -1)[:, :words]
    slots = wire.decode_index(ids, room, layout.slots)
  rows = wire.join_columns(plan.row_wire.decode(rows), g, table.width)
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  return Arrived(
    row=layout.row(group, slots).reshape(-1),
    values=rows.astype(table.dtype).reshape(-1, table.width),
    tally=Tally(*counts[::g].T),
  )


@dataclasses.dataclass(frozen=True, slots=True)
class Zen(Scheme):
  """Pushes along the fastest axis, sums over the others, and pulls.

  With `flat`, all axes are one: each device is an owner for all others.
  """

  name: str = "zen"
  flat: bool = False

  def level(self, context: Context) -> Context:
    """Returns the devices among which rows are pushed and pulled."""
    if self.flat:
      return context
    axes, sizes = context.axes[-1:], context.sizes[-1:]
    return dataclasses.replace(context, axes=axes, sizes=sizes)

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    owners = math.prod(sizes) if self.flat else sizes[-1]
    return owners // column_groups, column_groups

  def held_rows(self, plan: ExchangePlan, context: Context) -> int:
    return min(plan.pull, plan.push * context.devices)

  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Sums]:
    plans = [out.plan for out in outgoing]
    level = self.level(context)
    with jax.named_scope("zen/push"):
      sections = [push_sections(out) for out in outgoing]
      came = wire.send(sections, collectives.all_to_all, level.axes)
    with jax.named_scope("zen/merge"):
      sums = [
        owner_sums(Sections(*table), plan, self.held_rows(plan, level))
        for table, plan in zip(came, plans)
      ]
    if level != context:
      with jax.named_scope("zen/slow_axes"):
        rooms = [self.held_rows(plan, context) for plan in plans]
        sums = hierarchy.sum_over(sums, plans, rooms, context)
    return sums

  def pull(
    self, plans: Sequence[ExchangePlan], sums: Sequence[Sums], context: Context
  ) -> list[Arrived]:
    axes = self.level(context).axes
    with jax.named_scope("zen/pull"):
      sections = [
        pull_sections(own, plan, context, axes)
        for own, plan in zip(sums, plans)
      ]
      came = wire.send(sections, collectives.all_gather, axes)
      return [
        arrived(Sections(*table), own.union.slots, plan)
        for table, own, plan in zip(came, sums, plans)
      ]

  def messages(
    self, plans: Sequence[ExchangePlan], context: Context
  ) -> list[Message]:
    level = self.level(context)
    pushed = level.devices * sum(map(push_words, plans))
    rooms = [self.held_rows(plan, context) for plan in plans]
    slow = []
    if level != context:
      inside = [self.held_rows(plan, level) for plan in plans]
      slow = hierarchy.messages(plans, inside, rooms, context)
    pulled = len(Tally._fields) * len(plans)
    for plan, room in zip(plans, rooms):
      pulled += _shared_ids(plan, room) + plan.row_wire.words(room)
    return [
      Message("all_to_all", level.axes, pushed),
      *slow,
      Message("all_gather", level.axes, pulled),
    ]

  def expected_messages(
    self, plan: ExchangePlan, context: Context, push: Number, pull: Number
  ) -> list[Message]:
    level, block = self.level(context), plan.row_wire.nbytes
    pushed = level.devices * push * (block + 4.0) / 4
    pull_index = 0 if plan.layout.groups == 1 else 4 / plan.column_groups
    slow = []
    if level != context:
      slow = hierarchy.expected_messages(plan, context, push, pull)
    return [
      Message("all_to_all", level.axes, pushed),
      *slow,
      Message("all_gather", level.axes, pull * (block + pull_index) / 4),
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class PushOnly(Zen):
  """Zen without a pull: owners keep the sums, and send only their `Tally`."""

  def pull(
    self, plans: Sequence[ExchangePlan], sums: Sequence[Sums], context: Context
  ) -> list[Arrived]:
    counts = [[counts_of(own)[None]] for own in sums]
    # Counts wait for the sums, so that all devices run collectives in the same
    # order.
    counts, _ = lax.optimization_barrier((counts, list(sums)))
    came = wire.send(counts, collectives.all_gather, context.axes[-1:])
    return [
      Arrived(
        row=jnp.zeros(0, jnp.int32),
        values=jnp.zeros((0, plan.table.width), plan.table.dtype),
        tally=Tally(*told.T),
      )
      for (told,), plan in zip(came, plans)
    ]

  def messages(
    self, plans: Sequence[ExchangePlan], context: Context
  ) -> list[Message]:
    *pushes, _ = Zen.messages(self, plans, context)
    words = len(Tally._fields) * len(plans)
    return [*pushes, Message("all_gather", context.axes[-1:], words)]
