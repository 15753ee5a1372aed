"""One exchange of a group of tables: rounds, overflow, the dense path.

The first push and pull have static sizes and stand outside any branch, so
that they may overlap with the backward pass. What did not fit the pull
follows in a loop of further pulls, what did not fit the push in a loop of
further rounds; their trip counts derive from counts that every pull brings
back, equal on all devices, so no collective is spent on agreeing. A table
found to be above break-even density takes the dense path instead, and may be
remembered as dense.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _bitmap
from zenjax import _compat
from zenjax import _dense
from zenjax._plan import TablePlan
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Held
from zenjax._schemes.base import Message
from zenjax._schemes.base import Outgoing
from zenjax._schemes.base import received_bytes
from zenjax._schemes.base import Scheme
from zenjax._schemes.base import Tally
from zenjax.kernels.expand.reference import expand
from zenjax.kernels.mask_pack.reference import mask_pack

# Sparse pays while its bytes stay under this part of the dense exchange's:
# packing and merging cost local work that a dense sum does not have.
_BREAK_EVEN = 0.5
# A table that travels dense returns to sparse below this part of break-even.
_RETURN = 0.8


class Outcome(NamedTuple):
  """What an exchange showed of one table, equal on all devices."""

  local_rows: jax.Array  # [] f32, nonzero rows of a device, mean
  union_rows: jax.Array  # [] f32, nonzero rows of the sum
  push_need: jax.Array  # [] f32, rows of the fullest (source, group) pair
  pull_need: jax.Array  # [] f32, rows of the fullest group's union
  push_mean: jax.Array  # [] f32, rows of a pair, mean
  rounds: jax.Array  # [] f32, pulls that carried rows of this table
  overflow_rows: jax.Array  # [] f32, of all devices, beyond the first push
  wire_bytes: jax.Array  # [] f32, received by a device
  went_dense: jax.Array  # [] bool, this time
  dense_next: jax.Array  # [] bool, what to remember


class Result(NamedTuple):
  """The outcome of one exchange; one entry a table in each list."""

  tables: list[jax.Array]  # [R, D], synced
  outcomes: list[Outcome]
  first: list[Arrived]  # what the first pull brought


class _Progress(NamedTuple):
  """Where one table stands between exchanges."""

  table: jax.Array  # [R, D], synced below `start` but for what is pending
  start: jax.Array  # [m] int32, where the next push begins
  union: jax.Array  # [m] int32, rows that came back so far
  pending: jax.Array  # [] int32, rows that the fullest owner has still to send
  rounds: jax.Array  # [] int32


class _Turns(NamedTuple):
  """How often each loop turned."""

  pulls: jax.Array  # [] int32, beyond the first
  pushes: jax.Array  # [] int32, beyond the first


def sync(
  tables: Sequence[jax.Array],
  plans: Sequence[TablePlan],
  scheme: Scheme,
  context: Context,
  *,
  remembered: Sequence[jax.Array] | None = None,
  exact: bool = True,
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
  """
  known = remembered if exact else None
  bitmaps, probes = _masks(tables, plans, known)
  starts = [jnp.zeros(p.layout.groups, jnp.int32) for p in plans]
  outgoing = [Outgoing(*o) for o in zip(tables, bitmaps, starts, probes)]
  held = scheme.push(outgoing, plans, [p.first.push for p in plans], context)
  sizes = [plan.first.pull for plan in plans]
  first = scheme.pull(held, [0] * len(plans), plans, sizes, context)
  dense = _verdicts(first, plans, scheme, context, known, exact)
  progress = [
    _advance(_begin(*b), arrived, skip)
    for b, arrived, skip in zip(zip(tables, starts), first, dense)
  ]
  zero = jnp.zeros((), jnp.int32)
  turns = _Turns(zero, zero)
  if exact:
    held = [_without(h, skip, p) for h, skip, p in zip(held, dense, plans)]
    with jax.named_scope("zenjax/rounds"):
      exchange = _Exchange(bitmaps, plans, scheme, context)
      progress, turns = exchange.pull_rest(progress, held, sizes, turns)
      progress, turns = exchange.push_rest(progress, turns)
    with jax.named_scope("zenjax/dense"):
      progress = [
        p
        if wanted is None
        else p._replace(table=_dense.reduce_where(p.table, wanted, context))
        for p, wanted in zip(progress, dense)
      ]
  tables = [_compat.as_invariant(p.table, context.axes) for p in progress]
  outcomes = [
    _outcome(*o, turns, scheme, context)
    for o in zip(tables, progress, first, dense, plans)
  ]
  return Result(tables, outcomes, first)


def _masks(
  tables: Sequence[jax.Array],
  plans: Sequence[TablePlan],
  remembered: Sequence[jax.Array] | None,
) -> tuple[list[_bitmap.Bitmap], list[jax.Array]]:
  """Bitmaps, empty for tables known to be dense, and their sampled counts."""
  with jax.named_scope("zenjax/mask"):
    bitmaps, probes = [], []
    for i, (table, plan) in enumerate(zip(tables, plans)):
      if remembered is None:
        words = mask_pack(table, plan.layout)
        probes.append(jnp.zeros((), jnp.int32))
      else:
        words = lax.cond(
          remembered[i],
          lambda t, p=plan: _no_rows(t, p),
          lambda t, p=plan: mask_pack(t, p.layout),
          table,
        )
        probes.append(_dense.sample(table))
      bitmaps.append(_bitmap.index(words))
    return bitmaps, probes


def _no_rows(table: jax.Array, plan: TablePlan) -> jax.Array:
  shape = (plan.layout.groups, plan.layout.words)
  return _compat.cast_like(jnp.zeros(shape, jnp.uint32), table)


def _begin(table: jax.Array, start: jax.Array) -> _Progress:
  zero = jnp.zeros((), jnp.int32)
  return _Progress(table, start, start, zero, zero)


def _advance(
  progress: _Progress, arrived: Arrived, skip: jax.Array | None = None
) -> _Progress:
  """Writes what a pull brought, or nothing and is done where `skip` says so."""
  tally = arrived.tally
  row, start = arrived.row, tally.limit
  pending = jnp.max(tally.pending)
  if skip is not None:
    row = jnp.where(skip, progress.table.shape[0], row)
    start = jnp.where(skip, jnp.iinfo(jnp.int32).max, start)
    pending = jnp.where(skip, 0, pending)
  with jax.named_scope("zenjax/expand"):
    table = expand(progress.table, row, arrived.values)
  carried = (jnp.sum(tally.union) > 0).astype(jnp.int32)
  return _Progress(
    table=table,
    # A table that took the dense path, or had no more rows, stays done.
    start=jnp.maximum(start, progress.start),
    union=progress.union + tally.union,
    pending=pending,
    rounds=progress.rounds + carried,
  )


def _without(held: Held, skip: jax.Array | None, plan: TablePlan) -> Held:
  """Holds no rows where the table takes the dense path."""
  if skip is None:
    return held
  union = held.union
  slots = jnp.where(skip, plan.layout.slots, union.slots)
  total = jnp.where(skip, 0, union.total)
  return held._replace(union=union._replace(slots=slots, total=total))


def _left(tally: Tally) -> jax.Array:
  """Rows expected of the fullest union beyond what was merged."""
  pushed, merged, total = (
    x.astype(jnp.float32) for x in (tally.pushed, tally.merged, tally.total)
  )
  # What remains overlaps about as much as what was summed so far.
  return jnp.max(total * (pushed - merged) / jnp.maximum(merged, 1))


def _verdicts(
  first: Sequence[Arrived],
  plans: Sequence[TablePlan],
  scheme: Scheme,
  context: Context,
  remembered: Sequence[jax.Array] | None,
  exact: bool,
) -> list[jax.Array | None]:
  """Which tables take the dense path this time, from the first counts."""
  if not exact:
    return [None] * len(plans)
  verdicts: list[jax.Array | None] = []
  for i, (arrived, plan) in enumerate(zip(first, plans)):
    tally = arrived.tally
    pull = jnp.max(tally.total).astype(jnp.float32) + _left(tally)
    push = jnp.max(tally.fullest).astype(jnp.float32)
    unfinished = jnp.any(tally.limit < plan.layout.slots)
    dense = unfinished & _above(push, pull, plan, scheme, context, 1.0)
    if remembered is not None:
      dense = dense | _compat.as_invariant(remembered[i], context.axes)
    verdicts.append(dense)
  return verdicts


def _above(
  push: jax.Array,
  pull: jax.Array,
  plan: TablePlan,
  scheme: Scheme,
  context: Context,
  factor: float,
) -> jax.Array:
  """Whether the sparse exchange is above `factor` times break-even."""
  dense = _dense.received_bytes(plan.table, context.devices)
  sparse = scheme.expected_bytes(plan, context, push, pull)
  return jnp.asarray(sparse > dense * _BREAK_EVEN * factor)


@dataclasses.dataclass(frozen=True)
class _Exchange:
  """What all further rounds of a group share."""

  bitmaps: Sequence[_bitmap.Bitmap]
  plans: Sequence[TablePlan]
  scheme: Scheme
  context: Context

  def pull_rest(
    self,
    progress: list[_Progress],
    held: Sequence[Held],
    offset: Sequence[int],
    turns: _Turns,
  ) -> tuple[list[_Progress], _Turns]:
    """Pulls what is held beyond row number `offset`, in chunks."""
    if not _pulls_rest(self.plans, self.scheme, self.context):
      return progress, turns
    sizes = [plan.chunk.pull for plan in self.plans]

    def unfinished(carry):
      return _any([p.pending > 0 for p in carry[1]])

    def turn(carry):
      turns, progress = carry
      done = turns.pulls - before
      at = [o + done * size for o, size in zip(offset, sizes)]
      arrived = self.scheme.pull(held, at, self.plans, sizes, self.context)
      progress = [_advance(*pa) for pa in zip(progress, arrived)]
      return turns._replace(pulls=turns.pulls + 1), progress

    before = turns.pulls
    turns, progress = lax.while_loop(unfinished, turn, (turns, progress))
    return progress, turns

  def push_rest(
    self, progress: list[_Progress], turns: _Turns
  ) -> tuple[list[_Progress], _Turns]:
    """Whole rounds until nothing is left."""
    if all(p.first.push >= p.layout.slots for p in self.plans):
      return progress, turns
    sizes = [plan.chunk for plan in self.plans]

    def unfinished(carry):
      ends = [plan.layout.slots for plan in self.plans]
      return _any([jnp.any(p.start < e) for p, e in zip(carry[1], ends)])

    def turn(carry):
      turns, progress = carry
      zero = jnp.zeros((), jnp.int32)
      outgoing = [
        Outgoing(p.table, b, jnp.minimum(p.start, plan.layout.slots), zero)
        for p, b, plan in zip(progress, self.bitmaps, self.plans)
      ]
      pushes = [c.push for c in sizes]
      held = self.scheme.push(outgoing, self.plans, pushes, self.context)
      pulls = [c.pull for c in sizes]
      none = [0] * len(pulls)
      arrived = self.scheme.pull(held, none, self.plans, pulls, self.context)
      progress = [_advance(*pa) for pa in zip(progress, arrived)]
      progress, turns = self.pull_rest(progress, held, pulls, turns)
      return turns._replace(pushes=turns.pushes + 1), progress

    turns, progress = lax.while_loop(unfinished, turn, (turns, progress))
    return progress, turns


def _any(flags: Sequence[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.logical_or, flags)


def _pulls_rest(
  plans: Sequence[TablePlan], scheme: Scheme, context: Context
) -> bool:
  """Whether an owner may hold more than one pull brings."""
  return any(
    scheme.pull_messages([p], [1], context)
    and (
      scheme.held_rows(p, p.first.push, context) > p.first.pull
      or scheme.held_rows(p, p.chunk.push, context) > p.chunk.pull
    )
    for p in plans
  )


def loop_messages(
  plans: Sequence[TablePlan], scheme: Scheme, context: Context
) -> list[list[Message]]:
  """The collectives in each loop's body, as the lowered program shows them."""
  pull = scheme.pull_messages(plans, [p.chunk.pull for p in plans], context)
  push = scheme.push_messages(plans, [p.chunk.push for p in plans], context)
  rest = [pull] if _pulls_rest(plans, scheme, context) else []
  if all(p.first.push >= p.layout.slots for p in plans):
    return rest
  return [*rest, [*push, *pull], *rest]


def _outcome(
  table: jax.Array,
  progress: _Progress,
  first: Arrived,
  dense: jax.Array | None,
  plan: TablePlan,
  turns: _Turns,
  scheme: Scheme,
  context: Context,
) -> Outcome:
  tally = first.tally
  went_dense = jnp.zeros((), bool) if dense is None else dense
  pushed = jnp.sum(tally.pushed).astype(jnp.float32)
  local = pushed / context.devices
  union = jnp.sum(progress.union).astype(jnp.float32)
  push = jnp.max(tally.fullest).astype(jnp.float32)
  pull = jnp.max(progress.union).astype(jnp.float32)
  groups, rows = plan.layout.groups, plan.table.num_rows
  if dense is not None:
    # A dense exchange counts no rows: a sample of them stands for all.
    scale = rows / _dense.sample_count(rows)
    seen_union = _dense.sample(table).astype(jnp.float32) * scale
    seen_local = tally.probe[0].astype(jnp.float32) * scale / context.devices
    counted = pushed > 0
    local = jnp.where(counted, local, seen_local)
    push = jnp.where(counted, push, seen_local / groups)
    union = jnp.where(went_dense, seen_union, union)
    pull = jnp.where(went_dense, seen_union / groups, pull)
  enter = _above(push, pull, plan, scheme, context, 1.0)
  stay = _above(push, pull, plan, scheme, context, _RETURN)
  return Outcome(
    local_rows=local,
    union_rows=union,
    push_need=push,
    pull_need=pull,
    push_mean=local / groups,
    rounds=progress.rounds.astype(jnp.float32),
    overflow_rows=jnp.where(
      went_dense, 0.0, pushed - jnp.sum(tally.merged).astype(jnp.float32)
    ),
    wire_bytes=_wire_bytes(plan, went_dense, turns, scheme, context),
    went_dense=went_dense,
    dense_next=jnp.where(went_dense, stay, enter),
  )


def _wire_bytes(
  plan: TablePlan,
  went_dense: jax.Array,
  turns: _Turns,
  scheme: Scheme,
  context: Context,
) -> jax.Array:
  """Bytes a device received for this table, padding included."""

  pushes = [plan.first.push, plan.chunk.push]
  pulls = [plan.first.pull, plan.chunk.pull]
  push, push_chunk = (
    float(received_bytes(scheme.push_messages([plan], [c], context), context))
    for c in pushes
  )
  pull, pull_chunk = (
    float(received_bytes(scheme.pull_messages([plan], [c], context), context))
    for c in pulls
  )
  # A further round pushes and pulls; further pulls are counted apart.
  rounds = turns.pushes.astype(jnp.float32) * (push_chunk + pull_chunk)
  total = push + pull + rounds + turns.pulls.astype(jnp.float32) * pull_chunk
  dense = _dense.received_bytes(plan.table, context.devices)
  return total + jnp.where(went_dense, dense, 0.0)
