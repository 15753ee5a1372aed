"""Balanced Parallelism: push to hashed owners, merge, pull from them.

What device `s` does in a round:

    for every owner p:  send p the first C rows of p's that I hold   (push)
    sum what all sources sent me, in rank order                      (merge)
    send U rows of my union to everyone; write those of all owners
    over my array, or append them to a list of rows; again until
    none are left                                                    (pull)

An owner is a pair (row group, column group): `g = 1` hashes rows, `g = n`
splits columns, and between them lies the grid. Each owner finds a limit of its
own, below which its sums are complete: one past the last slot that came of a
source with more rows than fit, or the first slot that its union had no room
for. Rows from there on come with a later push.

For gradients whose rows overlap, Zen proves it optimal ("ZEN:
Empowering Distributed Training with Sparsity-driven Data Synchronization",
Wang et al., OSDI 2025); the hash keeps its balance with a bijection instead
of stored index sets, and columns are split for balance as nowhere there.
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
from zenjax._src.schemes import hierarchy
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Asked
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import over_devices
from zenjax._src.schemes.base import Room
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import section
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.base import TALLY_NUMBERS
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax.kernels import operations
from zenjax.kernels.operations import merge
from zenjax.kernels.reference import Union

# Each table has three sections in a buffer: counts, ids and rows. The first two
# depend on ids alone.


class Sections(NamedTuple):
  """Holds one table's part of a push or a pull.

  `b` parts, one for each owner or one for all; `n` of them arrive.
  """

  counts: jax.Array  # [b, k] int32
  ids: jax.Array  # [b, words], as `wire.encode_index` has them
  # [b, C, block] in the wire's dtype; of a push, words until it is merged.
  rows: jax.Array


class Lengths(NamedTuple):
  """Sizes of one part's sections."""

  counts: int
  ids: int  # words
  rows: jax.ShapeDtypeStruct  # [C, block]


# Index of the count of rows. Where it is more than fit, the first that fit are
# there.
_PUSHED = 0
_PULLED = Tally._fields.index("union")


def _lengths(room: Room, pull: bool, context: Context) -> Lengths:
  """Returns how much goes to one owner, or comes from one."""
  plan, capacity = room[0], context.sent(room, pull)
  ids = wire.index_words(room.capacity, plan.layout.slots)
  if _is_cut(room, pull)[1]:
    ids = capacity
  if pull:  # The owners of a row group share its ids out.
    ids = -(-ids // plan.column_groups) if plan.layout.groups > 1 else 0
  rows = (capacity, plan.block_width), plan.table.wire_dtype
  counts = len(plan.tables) + (TALLY_NUMBERS + len(plan.members) if pull else 1)
  return Lengths(counts, ids, jax.ShapeDtypeStruct(*rows))


def _messages(
  rooms: Sequence[Room], context: Context, pull: bool
) -> list[Message]:
  """Returns each buffer that a push or a pull sends, in order."""
  lengths = [_lengths(room, pull, context) for room in rooms]
  if context.remote_copies:
    header = sum([table.counts + table.ids for table in lengths])
    return [_copied_message(header, [t.rows for t in lengths], context)]
  early, late = 0, 0
  for length, first in zip(lengths, _ahead(rooms, context)):
    header = length.counts + length.ids
    early += header if first else 0
    late += 0 if first else header
    late += wire.words_for(math.prod(length.rows.shape), length.rows.dtype)
  op, parts = ("all_gather", 1) if pull else ("all_to_all", context.sizes[-1])
  return [
    Message(op, context.axes[-1:], words * parts)
    for words in ([early, late] if early else [late])
  ]


def _is_cut(room: Room, pull: bool) -> tuple[bool, bool, bool]:
  """Says which sections are cut where a first round sends a part.

  A bitmap of ids is whole, and so are ids that several owners share out.
  """
  plan, capacity = room
  if plan.guess is None:
    return False, False, False
  listed = wire.index_words(capacity, plan.layout.slots) == capacity
  return False, listed and not (pull and plan.column_groups > 1), True


def _cut(
  rooms: Sequence[Room], context: Context, pull: bool
) -> wire.Cut | None:
  """Returns which parts of which sections travel; None for all."""
  if context.fit is None:
    return None
  level = context.fit.pull if pull else context.fit.push
  return wire.Cut(level, [_is_cut(room, pull) for room in rooms])


def _only_sent(
  slots: jax.Array, room: Room, sent: jax.Array | int
) -> jax.Array:
  """Slots `[.., C]` of the first `sent` rows, and of no others."""
  if isinstance(sent, int):
    return slots
  column = jnp.arange(room.capacity, dtype=jnp.int32)
  return jnp.where(column < sent, slots, room.plan.layout.slots)


def _ahead(rooms: Sequence[Room], context: Context) -> list[int]:
  """How many sections of each table go in the early buffer.

  With `ids_first` the counts and ids of SparseRows: those of arrays are known
  no sooner than their rows.
  """
  first = context.ids_first
  return [
    2 if first and room.plan.table.look_ups is not None else 0 for room in rooms
  ]


def push_sections(out: Outgoing, sent: jax.Array | int) -> Sections:
  """Returns what goes to every owner, `b = n`."""
  plan = out.room.plan
  slots, rows, remaining = out.source.rows_from(out.start, *out.room)
  slots = _only_sent(slots, out.room, sent)
  counts = jnp.concatenate([remaining[:, None], out.probe], axis=1)
  index = wire.encode_index(slots, plan.layout.slots)
  if plan.column_groups > 1:
    counts = jnp.repeat(counts, plan.column_groups, axis=0)
    index = jnp.repeat(index, plan.column_groups, axis=0)
    rows = wire.split_columns(rows, plan.column_groups)
  return Sections(counts, index, rows.astype(plan.table.wire_dtype))


def merged(
  received: Sections, room: Room, most: int, sent: jax.Array | int
) -> Held:
  """Returns the sum of what all sources pushed, `most` rows at most."""
  counts, index, rows = received
  plan, capacity = room
  table, num_slots = plan.table, plan.layout.slots
  remaining = counts[:, _PUSHED]
  probe, peak = over_devices(counts[:, 1:], plan)
  slots = wire.decode_index(index, capacity, num_slots)
  slots = _only_sent(slots, room, sent)
  # A source that did not fit is complete up to the last row that it sent.
  if isinstance(sent, int):
    last = slots[:, sent - 1]
  else:
    last = lax.dynamic_index_in_dim(slots, sent - 1, axis=1, keepdims=False)
  ends = jnp.where(remaining > sent, last + 1, num_slots)
  union = merge(
    slots,
    rows,
    jnp.min(ends),
    num_slots,
    most,
    collectives.accumulator(table.dtype),
    kernels=plan.kernels,
  )
  return Held(
    union=union,
    pushed=wire.sum_counts(remaining),
    fullest=jnp.max(remaining),
    probe=probe,
    peak=peak,
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
    peak=own.peak,
  )
  # A row group's owners, one for each column group, share its ids out.
  whole = dataclasses.replace(context, fit=None)
  length = _lengths(asked.room, True, whole).ids
  index = jnp.zeros((1, 0), jnp.int32)
  if length:
    index = wire.encode_index(part.slots[None], plan.layout.slots)
  if plan.column_groups > 1 and length:
    g = plan.column_groups
    index = jnp.pad(index, ((0, 0), (0, length * g - index.shape[1])))
    index = lax.dynamic_slice_in_dim(index, (me % g) * length, length, axis=1)
  values = context.scaled(part.rows).astype(plan.table.dtype)
  return Sections(
    tally.line()[None], index, values[None].astype(plan.table.wire_dtype)
  )


def arrived(
  gathered: Sections, own_slots: jax.Array, room: Room, sent: jax.Array | int
) -> Arrived:
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
    slots = _only_sent(slots, room, sent)
  if g > 1:
    rows = wire.join_columns(rows, g, table.width)
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  return Arrived(
    row=layout.row(group, slots).reshape(-1),
    values=rows.astype(table.dtype).reshape(-1, table.width),
    tally=Tally.of(counts[::g], plan),
  )


# What remote copies between TPUs bring in the place of a collective.
#
# One kernel takes all tables. First a header, which travels whole: what a
# collective would carry but for the rows. Of rows each device sends those that
# it has, and no padding.

_OPTION = "exchange='remote_copies'", "exchange='collectives'"


def _copied(
  tables: Sequence[Sections], pull: bool, context: Context
) -> list[Sections]:
  """Brings what all devices send, rows zero past those that there are.

  Raises:
    NotImplementedError: The kernel cannot serve.
  """
  operation = operations.pull if pull else operations.push
  there = [table.counts[:, _PULLED if pull else _PUSHED] for table in tables]
  came: list[jax.Array] = []

  def copy(joined):
    # Words in rows of one: they share lines.
    arrays = [joined[:, :, None], *[table.rows for table in tables]]
    whole = jnp.full_like(there[0], joined.shape[1])
    counts = jnp.stack([whole, *there], axis=1)
    if pull:
      arrays, counts = [x[0] for x in arrays], counts[0]
    found, _ = operation.required(*_OPTION, arrays, counts, context.axes)
    came.extend(found[1:])
    return found[0][:, :, 0]

  headers = wire.exchange([table[:2] for table in tables], copy)
  return [
    Sections(counts, ids, rows) for (counts, ids), rows in zip(headers, came)
  ]


def _copied_message(
  header: int, rows: Sequence[jax.ShapeDtypeStruct], context: Context
) -> Message:
  """Declares a copy of a header and of `[C, D]` rows of each table.

  Its words are those of full buffers, each sent to every device: no more can
  travel.
  """
  # What only compiles for TPUs: importing it takes a moment.
  from zenjax.kernels import _remote_tpu

  first = jax.ShapeDtypeStruct((header, 1), jnp.uint32)
  words = _remote_tpu.most_bytes([first, *rows]) // 4
  return Message("remote_copy", context.axes, words * math.prod(context.sizes))


# Local work waits for collectives whose results it does not need.
#
# Where several tables have an exchange each, XLA's scheduler for TPUs fills the
# time of one push with the merge of another and leaves it nothing of the
# backward pass, which could stand there as well. Once no merge can begin before
# all pushes have arrived, backward work is all that is left to stand beside
# them. `lax.optimization_barrier` is gone before that scheduler runs: what
# waits depends on numbers that are never seen.


def _waiting(sent: Sections, after: jax.Array) -> Sections:
  """Returns a push that is not read before `after` is known, on TPUs."""
  count = sent.counts[0, _PUSHED]
  zero = lax.platform_dependent(
    count, after, tpu=_unseen_zero, default=_plain_zero
  )
  # As integers: a zero that is added to -0.0 makes it 0.0.
  bits = lax.bitcast_convert_type(
    sent.rows, f"uint{8 * sent.rows.dtype.itemsize}"
  )
  bits = bits + zero.astype(bits.dtype)
  return Sections(
    counts=sent.counts + zero,
    ids=sent.ids + zero.astype(sent.ids.dtype),
    rows=lax.bitcast_convert_type(bits, sent.rows.dtype),
  )


def _unseen_zero(count: jax.Array, marked: jax.Array) -> jax.Array:
  """Zero, as `count >= 0 >= marked`, which XLA cannot see."""
  return jnp.maximum(count, marked) - count


def _plain_zero(count: jax.Array, marked: jax.Array) -> jax.Array:
  return (count & 0) | (marked & 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Zen(Scheme):
  """Push along the fastest axis, sum over the others, pull back."""

  name: str = "zen"
  fits: bool = True

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
      sections = [
        push_sections(out, context.sent(out.room)) for out in outgoing
      ]
      if context.remote_copies:
        return _copied(sections, False, context)
      rooms = [out.room for out in outgoing]
      # Rows stay words until `merge`: as an array they are laid out anew.
      sections = [x._replace(rows=wire.to_words(x.rows)) for x in sections]
      came = wire.exchange(
        sections,
        wire.unless(context.quiet, collectives.all_to_all),
        context.axes[-1:],
        ahead=_ahead(rooms, context),
        cut=_cut(rooms, context, pull=False),
      )
      return [Sections(*table) for table in came]

  def mark(self, received: list[Sections]) -> jax.Array:
    # Rows are last, also where ids go first.
    return jnp.minimum(wire.leading_word(received[-1].rows), 0)

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
      if not context.remote_copies:
        whole = dataclasses.replace(context, fit=None)
        shapes = [_lengths(room, False, whole).rows for room in rooms]
        received = [
          x._replace(rows=wire.from_words(x.rows, like.shape, like.dtype))
          for x, like in zip(received, shapes)
        ]
      most = [self.held_rows(room, context) for room in rooms]
      held = [
        merged(table, room, rows, context.sent(room))
        for table, room, rows in zip(received, rooms, most)
      ]
      if len(context.axes) > 1:
        rooms = [Room(room.plan, rows) for room, rows in zip(rooms, most)]
        held = hierarchy.sum_over(held, rooms, context)
    return held

  def pull(self, asked: Sequence[Asked], context: Context) -> list[Arrived]:
    with jax.named_scope("zen/pull"):
      me = lax.axis_index(context.axes[-1])
      rooms = [table.room for table in asked]
      sent = [context.sent(room, pull=True) for room in rooms]
      parts = [
        section(table.held.union, table.offset, table.room.capacity, rows)
        for table, rows in zip(asked, sent)
      ]
      sections = [
        pull_sections(table, part, context, me)
        for table, part in zip(asked, parts)
      ]
      if context.remote_copies:
        gathered = _copied(sections, True, context)
      else:
        axes = context.axes[-1:]
        gathered = wire.exchange(
          sections,
          wire.unless(context.quiet, collectives.all_gather, axes),
          axes,
          ahead=_ahead(rooms, context),
          cut=_cut(rooms, context, pull=True),
        )
      return [
        arrived(Sections(*table), part.slots, room, rows)
        for table, part, room, rows in zip(gathered, parts, rooms, sent)
      ]

  def push_messages(
    self, rooms: Sequence[Room], context: Context
  ) -> list[Message]:
    pushes = _messages(rooms, context, pull=False)
    if len(context.axes) == 1:
      return pushes
    held = [Room(r.plan, self.held_rows(r, context)) for r in rooms]
    return [*pushes, *hierarchy.messages(held, context)]

  def pull_messages(
    self, rooms: Sequence[Room], context: Context
  ) -> list[Message]:
    return _messages(rooms, context, pull=True)

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
