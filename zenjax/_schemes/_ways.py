"""How a push or a pull of zen travels: by a collective or by remote copies.

Collectives send whole buffers, in which all sections lie one after another.
Remote copies send the rows that there are.
"""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax import _wire
from zenjax._collectives import Axes
from zenjax._plan import TablePlan
from zenjax._schemes import _copies
from zenjax._schemes import _sections
from zenjax._schemes.base import Context
from zenjax._schemes.base import Message
from zenjax._schemes.base import Tally
from zenjax.kernels import operations
from zenjax.kernels._dispatch import Operation


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
    return self.counts, self.ids, _wire.words_for(size, self.rows.dtype)


class Way(NamedTuple):
  """A push, or a pull."""

  op: str  # the collective
  send: Callable[[jax.Array, Axes], jax.Array]
  copies: Operation  # the same by remote copies
  to_all: bool  # one part
  there: int  # which of the counts is that of the rows; more than fit are C


PUSH = Way(
  op="all_to_all",
  send=_collectives.all_to_all,
  copies=operations.push,
  to_all=False,
  there=0,
)
PULL = Way(
  op="all_gather",
  send=lambda x, axes: _collectives.all_gather(x[0], axes),
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
    for section in (counts, ids, _wire.to_words(rows))
  ]
  axes = context.axes[-1:]
  come = iter(
    _wire.exchange(
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
    table._replace(rows=_wire.from_words(table.rows, like.shape, like.dtype))
    for table, like in zip(come, rows)
  ]


def _copied(
  way: Way, tables: Sequence[Sections], context: Context
) -> list[Sections]:
  there = [_sections.decode_counts(t.counts)[way.there] for t in tables]
  header, rows = _copies.exchange(
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
    return [_copies.message(header, [t.rows for t in tables], context)]
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
