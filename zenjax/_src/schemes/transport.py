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
from zenjax._src.core import wire_format
from zenjax._src.core.collectives import Axes
from zenjax._src.schemes import encoding
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax.kernels import operations
from zenjax.kernels._dispatch import Operation

# What remote copies between TPUs bring in the place of a collective.
#
# One kernel takes all tables. First a header, which travels whole: what a
# collective would carry but for the rows. Of rows each device sends those that
# it has, and no padding.


_ASKED = "exchange='remote_copies'", "exchange='collectives'"


def copied_remotely(
  header: Sequence[jax.Array],
  rows: Sequence[jax.Array],
  counts: jax.Array,
  operation: Operation,
  context: Context,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """What all devices send.

  Args:
    header: Sections `[b, k] uint32`.
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
  joined = wire_format.join(header)
  # Words in rows of one: they share lines.
  arrays = [joined[:, :, None], *rows]
  whole = jnp.full_like(counts[:, :1], joined.shape[1])
  counts = jnp.concatenate([whole, counts], axis=1)
  if operation.name == "pull":
    arrays, counts = [x[0] for x in arrays], counts[0]
  come, _ = operation.required(*_ASKED, arrays, counts, context.axes)
  lengths = [section.shape[1] for section in header]
  return wire_format.split(come[0][:, :, 0], lengths), list(come[1:])


def message(
  header: int, rows: Sequence[jax.ShapeDtypeStruct], context: Context
) -> Message:
  """Of a header of so many words and `[C, D]` rows of each table.

  Its words are those of full buffers, each sent to every device: no more can
  travel.
  """
  # What only compiles for TPUs: importing it takes a moment.
  from zenjax.kernels import _remote_tpu

  first = jax.ShapeDtypeStruct((header, 1), jnp.uint32)
  words = _remote_tpu.most_bytes([first, *rows]) // 4
  return Message("remote_copy", context.axes, words * math.prod(context.sizes))


class Sections(NamedTuple):
  """What travels of one table.

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
    return self.counts, self.ids, wire_format.words_for(size, self.rows.dtype)


class Way(NamedTuple):
  """A push, or a pull."""

  op: str  # the collective
  send: Callable[[jax.Array, Axes], jax.Array]
  copies: Operation  # the same by remote copies
  to_all: bool  # one part
  there: int  # which of the counts is that of the rows; more than fit are C


PUSH = Way(
  op="all_to_all",
  send=collectives.all_to_all,
  copies=operations.push,
  to_all=False,
  there=0,
)
PULL = Way(
  op="all_gather",
  send=lambda x, axes: collectives.all_gather(x[0], axes),
  copies=operations.pull,
  to_all=True,
  there=Tally._fields.index("union"),
)


def exchange(
  way: Way,
  tables: Sequence[Sections],
  plans: Sequence[TablePlan],
  context: Context,
) -> list[Sections]:
  """What comes of all tables, zero past the rows that there are.

  In one buffer; with `context.ids_first` the counts and ids of SparseRows go in
  one before it, which waits for no gradient.
  """
  rows = [jax.typeof(table.rows) for table in tables]
  shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows]
  return decoded(sent(way, tables, plans, context), shapes, context)


def sent(
  way: Way,
  tables: Sequence[Sections],
  plans: Sequence[TablePlan],
  context: Context,
) -> list[Sections]:
  """As `exchange`, but what collectives brought of rows is still words."""
  if context.remote_copies:
    return _copied(way, tables, context)
  sections = [
    section
    for counts, ids, rows in tables
    for section in (counts, ids, wire_format.to_words(rows))
  ]
  axes = context.axes[-1:]
  come = iter(
    wire_format.exchange(
      sections, _ahead(plans, context), lambda x: way.send(x, axes)
    )
  )
  return [Sections(next(come), next(come), next(come)) for _ in tables]


def decoded(
  come: Sequence[Sections],
  rows: Sequence[jax.ShapeDtypeStruct],
  context: Context,
) -> list[Sections]:
  """What `sent` returned, with rows of these shapes in each part."""
  if context.remote_copies:
    return list(come)
  return [
    table._replace(
      rows=wire_format.from_words(table.rows, like.shape, like.dtype)
    )
    for table, like in zip(come, rows)
  ]


def _copied(
  way: Way, tables: Sequence[Sections], context: Context
) -> list[Sections]:
  there = [encoding.decode_counts(t.counts)[way.there] for t in tables]
  header, rows = copied_remotely(
    [section for counts, ids, _ in tables for section in (counts, ids)],
    [table.rows for table in tables],
    jnp.stack(there, axis=1),
    way.copies,
    context,
  )
  come = iter(header)
  return [Sections(next(come), next(come), x) for x in rows]


def messages(
  way: Way,
  tables: Sequence[Lengths],
  plans: Sequence[TablePlan],
  context: Context,
) -> list[Message]:
  """Of each buffer that `exchange` sends, in order."""
  if context.remote_copies:
    header = sum(table.counts + table.ids for table in tables)
    return [message(header, [t.rows for t in tables], context)]
  words = [n for table in tables for n in table.words]
  ahead = _ahead(plans, context)
  early = sum(n for n, first in zip(words, ahead) if first)
  late = sum(words) - early
  parts = 1 if way.to_all else context.sizes[-1]
  return [
    Message(way.op, context.axes[-1:], n * parts)
    for n in ([early, late] if any(ahead) else [late])
  ]


def _ahead(plans: Sequence[TablePlan], context: Context) -> list[bool]:
  """Which sections go first: ids of an array are found in its gradient."""
  found = []
  for plan in plans:
    early = context.ids_first and plan.table.look_ups is not None
    found += [early, early, False]
  return found


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
