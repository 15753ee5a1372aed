"""One exchange of a group of tables: rounds, overflow, the dense path.

The first round has a static size and stands outside any branch, so that it
may overlap with the backward pass. Whatever did not fit follows in loops
that normally turn zero times; their trip counts derive from counts that
every round brings back, equal on all devices, so no collective is spent on
agreeing. A table found to be above break-even density takes the dense path
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
from zenjax._plan import Capacity
from zenjax._plan import TablePlan
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
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
# A large chunk is sent while at least this part of it is expected to be full.
_MOSTLY_FULL = 0.6


class Outcome(NamedTuple):
  """What an exchange showed of one table, equal on all devices."""

  local_rows: jax.Array  # [] f32, nonzero rows of a device, mean
  union_rows: jax.Array  # [] f32, nonzero rows of the sum
  push_need: jax.Array  # [] f32, rows of the fullest (source, group) pair
  pull_need: jax.Array  # [] f32, rows of the fullest group's union
  push_mean: jax.Array  # [] f32, rows of a pair, mean
  rounds: jax.Array  # [] f32, that carried rows of this table
  overflow_rows: jax.Array  # [] f32, of all devices, beyond the first round
  wire_bytes: jax.Array  # [] f32, received by a device
  went_dense: jax.Array  # [] bool, this time
  dense_next: jax.Array  # [] bool, what to remember


class Result(NamedTuple):
  """The outcome of one exchange; one entry a table in each list."""

  tables: list[jax.Array]  # [R, D], synced
  outcomes: list[Outcome]
  first: list[Arrived]  # what the first round brought


class _Progress(NamedTuple):
  """Where one table stands between rounds."""

  table: jax.Array  # [R, D], synced below `start`
  start: jax.Array  # [m] int32
  union: jax.Array  # [m] int32, rows that came back so far
  left: jax.Array  # [2] f32, rows expected to remain: push, pull
  rounds: jax.Array  # [] int32


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
  capacities = [plan.first for plan in plans]
  first = scheme.round(outgoing, plans, capacities, context)
  dense = _verdicts(first, plans, scheme, context, known, exact)
  progress = [
    _advance(_begin(*b), arrived, skip)
    for b, arrived, skip in zip(zip(tables, starts), first, dense)
  ]
  turns: list[jax.Array] = []
  if exact:
    with jax.named_scope("zenjax/rounds"):
      progress, turns = _loops(progress, bitmaps, plans, scheme, context)
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
  return _Progress(table, start, start, jnp.zeros(2, jnp.float32), zero)


def _advance(
  progress: _Progress, arrived: Arrived, skip: jax.Array | None = None
) -> _Progress:
  """Writes a round's rows, or none and is done where `skip` says so."""
  tally = arrived.tally
  row, start = arrived.row, tally.limit
  if skip is not None:
    row = jnp.where(skip, progress.table.shape[0], row)
    start = jnp.where(skip, jnp.iinfo(jnp.int32).max, start)
  with jax.named_scope("zenjax/expand"):
    table = expand(progress.table, row, arrived.values)
  carried = (jnp.sum(tally.pushed) > 0).astype(jnp.int32)
  return _Progress(
    table=table,
    start=start,
    union=progress.union + tally.union,
    left=_left(tally),
    rounds=progress.rounds + carried,
  )


def _left(tally: Tally) -> jax.Array:
  """Rows expected to remain for the fullest pair and the fullest union."""
  pushed, merged, union, fullest = (
    x.astype(jnp.float32)
    for x in (tally.pushed, tally.merged, tally.union, tally.fullest)
  )
  left = pushed - merged
  # What remains overlaps about as much as what was summed so far.
  union_left = union * left / jnp.maximum(merged, 1)
  push_left = fullest * left / jnp.maximum(pushed, 1)
  return jnp.stack([jnp.max(push_left), jnp.max(union_left)])


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
    pull = jnp.max(tally.union).astype(jnp.float32) + _left(tally)[1]
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


def _loops(
  progress: list[_Progress],
  bitmaps: Sequence[_bitmap.Bitmap],
  plans: Sequence[TablePlan],
  scheme: Scheme,
  context: Context,
) -> tuple[list[_Progress], list[jax.Array]]:
  """Further rounds until nothing is left; turns of each loop."""
  turns = []
  levels = loop_capacities(plans)
  for level, capacities in enumerate(levels):
    last = level == len(levels) - 1
    carry = (jnp.zeros((), jnp.int32), progress)

    def unfinished(carry, last=last, capacities=capacities):
      return _any_left(carry[1], plans, None if last else capacities)

    def turn(carry, capacities=capacities):
      count, progress = carry
      zero = jnp.zeros((), jnp.int32)
      outgoing = [
        Outgoing(p.table, b, jnp.minimum(p.start, plan.layout.slots), zero)
        for p, b, plan in zip(progress, bitmaps, plans)
      ]
      arrived = scheme.round(outgoing, plans, capacities, context)
      return count + 1, [_resume(*pa) for pa in zip(progress, arrived)]

    count, progress = lax.while_loop(unfinished, turn, carry)
    turns.append(count)
  return progress, turns


def _resume(progress: _Progress, arrived: Arrived) -> _Progress:
  """Advances a table; one that took the dense path stays done."""
  after = _advance(progress, arrived)
  return after._replace(start=jnp.maximum(after.start, progress.start))


def loop_capacities(plans: Sequence[TablePlan]) -> list[list[Capacity]]:
  """Capacities of each loop, for each table; tables without loops ride along.

  Empty where the first round of every table holds all its rows.
  """
  levels = max((len(plan.loops) for plan in plans), default=0)
  return [
    [
      plan.loops[min(level, len(plan.loops) - 1)]
      if plan.loops
      else Capacity(1, 1)
      for plan in plans
    ]
    for level in range(levels)
  ]


def _any_left(
  progress: Sequence[_Progress],
  plans: Sequence[TablePlan],
  capacities: Sequence[Capacity] | None,
) -> jax.Array:
  """Whether a table is unfinished, by most of its capacity where given."""
  left = jnp.zeros((), bool)
  for i, (p, plan) in enumerate(zip(progress, plans)):
    one = jnp.any(p.start < plan.layout.slots)
    if capacities is not None:
      rounds = p.left / jnp.asarray(capacities[i], jnp.float32)
      one = one & (jnp.max(rounds) >= _MOSTLY_FULL)
    left = left | one
  return left


def _outcome(
  table: jax.Array,
  progress: _Progress,
  first: Arrived,
  dense: jax.Array | None,
  plan: TablePlan,
  turns: Sequence[jax.Array],
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
  turns: Sequence[jax.Array],
  scheme: Scheme,
  context: Context,
) -> jax.Array:
  """Bytes a device received for this table, padding included."""

  def of(capacity: Capacity) -> float:
    messages = scheme.messages([plan], [capacity], context)
    return float(received_bytes(messages, context))

  total = jnp.asarray(of(plan.first), jnp.float32)
  capacities = plan.loops or (Capacity(1, 1),)
  for level, count in enumerate(turns):
    capacity = capacities[min(level, len(capacities) - 1)]
    total += count.astype(jnp.float32) * of(capacity)
  dense = _dense.received_bytes(plan.table, context.devices)
  return total + jnp.where(went_dense, dense, 0.0)
