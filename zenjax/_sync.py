"""One exchange of a group of tables: first round, loops, dense path.

The first push and pull have static sizes and stand outside any branch, so
that they may overlap with the backward pass. What did not fit follows in
loops. A table found to be above break-even density takes the dense path
instead, and may be remembered as dense.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _bitmap
from zenjax import _compat
from zenjax import _dense
from zenjax import _outcome
from zenjax import _progress
from zenjax import _rounds
from zenjax._plan import TablePlan
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Outgoing
from zenjax._schemes.base import Scheme
from zenjax.kernels.mask_pack.reference import mask_pack
from zenjax.kernels.mask_pack.reference import pack_rows
from zenjax.kernels.mask_pack.reference import Packed
from zenjax.kernels.mask_pack.reference import plus_zero_where


class Carried(NamedTuple):
  """Rows of one table that wait from earlier steps."""

  rows: jax.Array  # [R, D]
  some: jax.Array  # [] bool, or all of them are zero


class Result(NamedTuple):
  """The outcome of one exchange; one entry a table in each list."""

  tables: list[jax.Array]  # [R, D], synced
  outcomes: list[_outcome.Outcome]
  first: list[Arrived]  # what the first pull brought


def sync(
  tables: Sequence[jax.Array],
  plans: Sequence[TablePlan],
  scheme: Scheme,
  context: Context,
  *,
  remembered: Sequence[jax.Array] | None = None,
  exact: bool = True,
  carried: Sequence[Carried] | None = None,
  rows_only: bool = False,
) -> Result:
  """Synchronizes local `tables: [R, D]` over `context.axes`.

  Args:
    tables: Local gradients; rows of zeros are not sent.
    plans: Sizes for each table.
    scheme: How rows travel.
    context: Axes and operation.
    remembered: For each table, whether it travels dense from the start
      (`[] bool`, equal on all devices). None where there is no memory.
    exact: Whether rows that do not fit the first round follow in loops. If
      False they keep their local values in the tables that come back.
    carried: For each table what waited until now, if rows may wait.
    rows_only: Whether only what arrives is used, and not the tables: these
      are then read and never written.
  """
  known = remembered if exact else None
  bitmaps, probes, cleared = _masks(tables, plans, known, carried)
  if not rows_only:
    tables = cleared
  progress = [_progress.begin(*tp) for tp in zip(tables, plans)]
  outgoing = [
    Outgoing(table, bitmap, p.start, probe, late and late.rows)
    for table, bitmap, p, probe, late in zip(
      tables, bitmaps, progress, probes, carried or [None] * len(plans)
    )
  ]
  held = scheme.push(outgoing, plans, [p.first.push for p in plans], context)
  sizes = [plan.first.pull for plan in plans]
  first = scheme.pull(held, [0] * len(plans), plans, sizes, context)
  dense = _verdicts(first, plans, scheme, context, known, exact)
  arrived = [_unless(*ap) for ap in zip(first, dense, plans)]
  progress = [_progress.advance(*pa) for pa in zip(progress, arrived, sizes)]
  rounds = _rounds.Rounds(bitmaps, plans, scheme, context)
  turns = rounds.no_turns()
  if exact:
    with jax.named_scope("zenjax/rounds"):
      progress, turns = rounds.run(progress, held, dense)
    with jax.named_scope("zenjax/dense"):
      progress = [_sum_where(*pd, context) for pd in zip(progress, dense)]
  tables = [_compat.as_invariant(p.table, context.axes) for p in progress]
  outcomes = [
    _outcome.outcome(*o, turns, scheme, context)
    for o in zip(tables, progress, first, dense, plans)
  ]
  return Result(tables, outcomes, first)


def _masks(
  tables: Sequence[jax.Array],
  plans: Sequence[TablePlan],
  remembered: Sequence[jax.Array] | None,
  carried: Sequence[Carried] | None,
) -> tuple[list[_bitmap.Bitmap], list[jax.Array], list[jax.Array]]:
  """Bitmaps, empty for tables known to be dense; sampled counts; tables."""
  with jax.named_scope("zenjax/mask"):
    bitmaps, probes, cleared = [], [], []
    for i, (table, plan) in enumerate(zip(tables, plans)):
      if remembered is None:
        packed, probe = _pack(table, plan)
      else:
        packed, probe = lax.cond(
          remembered[i],
          lambda t, p=plan: _no_rows(t, p),
          lambda t, p=plan: _pack_unless_full(t, p),
          table,
        )
      words = packed.words
      if carried is not None:
        words |= _late_words(carried[i], plan, words)
      bitmaps.append(_bitmap.index(words))
      probes.append(probe)
      # All who write take what comes back, or XLA would keep a copy.
      cleared.append(plus_zero_where(packed.negative, table))
    return bitmaps, probes, cleared


def _late_words(late: Carried, plan: TablePlan, like: jax.Array) -> jax.Array:
  """Rows that wait, packed; nothing is read where there are none."""
  none = _compat.cast_like(jnp.zeros_like(like), late.rows)
  return lax.cond(
    late.some,
    lambda rows: mask_pack(rows, plan.layout).words,
    lambda rows: none,
    late.rows,
  )


def _pack(table: jax.Array, plan: TablePlan) -> tuple[Packed, jax.Array]:
  none = jnp.zeros((), jnp.int32)
  return mask_pack(table, plan.layout), _compat.cast_like(none, table)


def _pack_unless_full(
  table: jax.Array, plan: TablePlan
) -> tuple[Packed, jax.Array]:
  """Spares the read of a table that looks full.

  It counts as full, which shows all devices that it is above break-even; a row
  of zeros that is sent after all adds nothing.
  """
  return lax.cond(
    _dense.looks_full(table),
    lambda t: _all_rows(t, plan),
    lambda t: _pack(t, plan),
    table,
  )


def _all_rows(table: jax.Array, plan: TablePlan) -> tuple[Packed, jax.Array]:
  words = pack_rows(jnp.ones(plan.table.num_rows, bool), plan.layout)
  return _unread(table, words, jnp.zeros((), jnp.int32))


def _no_rows(table: jax.Array, plan: TablePlan) -> tuple[Packed, jax.Array]:
  """Nothing to send, and a sampled count in place of that of all rows."""
  shape = (plan.layout.groups, plan.layout.words)
  return _unread(table, jnp.zeros(shape, jnp.uint32), _dense.sample(table))


def _unread(
  table: jax.Array, words: jax.Array, probe: jax.Array
) -> tuple[Packed, jax.Array]:
  packed = Packed(words=words, negative=jnp.zeros((), bool))
  typed = [_compat.cast_like(x, table) for x in (*packed, probe)]
  return Packed(*typed[:-1]), typed[-1]


def _verdicts(
  first: Sequence[Arrived],
  plans: Sequence[TablePlan],
  scheme: Scheme,
  context: Context,
  remembered: Sequence[jax.Array] | None,
  exact: bool,
) -> list[jax.Array | None]:
  """Which tables take the dense path this time, None where none can."""
  if not exact:
    return [None] * len(plans)
  verdicts: list[jax.Array | None] = []
  for i, (arrived, plan) in enumerate(zip(first, plans)):
    dense = _outcome.above_break_even(arrived.tally, plan, scheme, context)
    if remembered is not None:
      dense = dense | _compat.as_invariant(remembered[i], context.axes)
    verdicts.append(dense)
  return verdicts


def _unless(
  arrived: Arrived, skip: jax.Array | None, plan: TablePlan
) -> Arrived:
  """No rows to write where the local ones are still to be summed."""
  if skip is None:
    return arrived
  row = jnp.where(skip, plan.table.num_rows, arrived.row)
  return arrived._replace(row=row)


def _sum_where(
  progress: _progress.Progress, wanted: jax.Array | None, context: Context
) -> _progress.Progress:
  if wanted is None:
    return progress
  table = _dense.reduce_where(progress.table, wanted, context)
  return progress._replace(table=table)
