"""How a push or a pull of zen travels: by a collective or by remote copies.

Collectives send whole buffers, in which all sections lie one after another.
Remote copies send the rows that there are.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.core.collectives import Axes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Room
from zenjax._src.schemes.base import Tally
from zenjax.kernels import operations
from zenjax.kernels._dispatch import Operation

# What remote copies between TPUs bring in the place of a collective.
#
# One kernel takes all tables. First a header, which travels whole: what a
# collective would carry but for the rows. Of rows each device sends those that
# it has, and no padding.


_ASKED = "exchange='remote_copies'", "exchange='collectives'"


def copied_remotely(
  header: Sequence[Sequence[jax.Array]],
  rows: Sequence[jax.Array],
  counts: jax.Array,
  operation: Operation,
  context: Context,
) -> tuple[list[list[jax.Array]], list[jax.Array]]:
  """Brings what all devices send.

  Args:
    header: Sections `[b, k] uint32` of each table.
    rows: `[b, C, D]` of each table.
    counts: `[b, tables] int32`, how many of them there are.
    operation: Push, of parts for every rank (`b = n`), or pull, of one for all
      (`b = 1`).
    context: Of the exchange.

  Returns:
    The sections, `[n, k]` each, and the rows, `[n, C, D]`, zero past those that
    there are.

  Raises:
    NotImplementedError: The kernel cannot serve.
  """
  come: list[jax.Array] = []

  def copy(joined):
    # Words in rows of one: they share lines.
    arrays = [joined[:, :, None], *rows]
    whole = jnp.full_like(counts[:, :1], joined.shape[1])
    there = jnp.concatenate([whole, counts], axis=1)
    if operation.name == "pull":
      arrays, there = [x[0] for x in arrays], there[0]
    found, _ = operation.required(*_ASKED, arrays, there, context.axes)
    come.extend(found[1:])
    return found[0][:, :, 0]

  return wire.exchange(header, copy), come


def message(
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


class Sections(NamedTuple):
  """Sections of a buffer that belong to one table.

  `b` parts, one for each owner or one for all; `n` of them arrive.
  """

  counts: jax.Array  # [b, k] uint32
  ids: jax.Array  # [b, words] uint32
  rows: jax.Array  # [b, C, block] in the wire's dtype


class Lengths(NamedTuple):
  """How much that is in one part."""

  counts: int
  ids: int  # words
  rows: jax.ShapeDtypeStruct  # [C, block]

  @property
  def words(self) -> tuple[int, int, int]:
    size = math.prod(self.rows.shape)
    return self.counts, self.ids, wire.words_for(size, self.rows.dtype)


class Way(NamedTuple):
  """A push, or a pull."""

  op: str  # the collective
  collective: Callable[[jax.Array, Axes], jax.Array]
  copies: Operation  # the same by remote copies
  to_all: bool  # one part
  there: int  # which of the counts is that of the rows; more than fit are C


PUSH = Way(
  op="all_to_all",
  collective=collectives.all_to_all,
  copies=operations.push,
  to_all=False,
  there=0,
)
PULL = Way(
  op="all_gather",
  collective=collectives.gather_parts,
  copies=operations.pull,
  to_all=True,
  there=Tally._fields.index("union"),
)


def exchange(
  way: Way,
  tables: Sequence[Sections],
  rooms: Sequence[Room],
  context: Context,
) -> list[Sections]:
  """Sends the sections of all tables in one buffer.

  With `context.ids_first` the counts and ids of SparseRows go in one before it,
  which waits for no gradient.

  Returns:
    The sections that came, zero past the rows that there are. Rows that a
    collective brought are words: see `with_rows`.
  """
  if context.remote_copies:
    return _copied(way, tables, context)
  axes = context.axes[-1:]
  sections = [
    [table.counts, table.ids, wire.to_words(table.rows)] for table in tables
  ]
  early = [i for i, room in enumerate(rooms) if _goes_ahead(room, context)]
  if not early:
    return [Sections(*s) for s in wire.exchange(sections, way.collective, axes)]
  ahead = wire.exchange([sections[i][:2] for i in early], way.collective, axes)
  for i in early:
    sections[i] = sections[i][2:]
  came = wire.exchange(sections, way.collective, axes)
  for i, headers in zip(early, ahead):
    came[i] = headers + came[i]
  return [Sections(*s) for s in came]


def _goes_ahead(room: Room, context: Context) -> bool:
  """True if ids of a table go first: those of arrays lie in the gradient."""
  return context.ids_first and room.plan.table.look_ups is not None


def with_rows(
  came: Sections, rows: jax.ShapeDtypeStruct, context: Context
) -> Sections:
  """Returns what came of a table with rows of this shape in each part."""
  if context.remote_copies:
    return came
  return came._replace(rows=wire.from_words(came.rows, rows.shape, rows.dtype))


def _copied(
  way: Way, tables: Sequence[Sections], context: Context
) -> list[Sections]:
  there = [wire.decode_counts(t.counts)[way.there] for t in tables]
  header, rows = copied_remotely(
    [table[:2] for table in tables],
    [table.rows for table in tables],
    jnp.stack(there, axis=1),
    way.copies,
    context,
  )
  return [Sections(counts, ids, x) for (counts, ids), x in zip(header, rows)]


def messages(
  way: Way,
  lengths: Sequence[Lengths],
  rooms: Sequence[Room],
  context: Context,
) -> list[Message]:
  """Returns each buffer that `exchange` sends, in order."""
  if context.remote_copies:
    header = sum(table.counts + table.ids for table in lengths)
    return [message(header, [t.rows for t in lengths], context)]
  early = sum(
    sum(length.words[:2])
    for length, room in zip(lengths, rooms)
    if _goes_ahead(room, context)
  )
  late = sum(sum(length.words) for length in lengths) - early
  parts = 1 if way.to_all else context.sizes[-1]
  return [
    Message(way.op, context.axes[-1:], n * parts)
    for n in ([early, late] if early else [late])
  ]


# Has local work wait for collectives whose results it does not need.
#
# Where several tables have an exchange each, XLA's scheduler for TPUs fills the
# time of one push with the merge of another and leaves it nothing of the
# backward pass, which could stand there as well; what merges then waits for is
# beside nothing. Once no merge can begin before all pushes have arrived,
# backward work is all that is left to stand beside them.
# `lax.optimization_barrier` is gone before that scheduler runs: what waits
# depends on numbers that are never seen.


def mark(received: jax.Array) -> jax.Array:
  """`[] int32`, never positive, known once all these words have arrived."""
  number = lax.bitcast_convert_type(received.reshape(-1)[0], jnp.int32)
  return jnp.minimum(number, 0)


def of_all(marks: Sequence[jax.Array]) -> jax.Array:
  """One that is known when all of them are."""
  return functools.reduce(jnp.maximum, marks)


def wait(
  arrays: Sequence[jax.Array], count: jax.Array, marked: jax.Array
) -> list[jax.Array]:
  """Words as they are, on TPUs not before `marked` is known.

  Args:
    arrays: What waits.
    count: `[] int32`, never negative, which only who calls this knows.
    marked: Of `mark`.
  """
  zero = lax.platform_dependent(
    count, marked, tpu=_unseen_zero, default=_plain_zero
  )
  return [x + zero.astype(x.dtype) for x in arrays]


def _unseen_zero(count: jax.Array, marked: jax.Array) -> jax.Array:
  return jnp.maximum(count, marked) - count


def _plain_zero(count: jax.Array, marked: jax.Array) -> jax.Array:
  return (count & 0) | (marked & 0)
