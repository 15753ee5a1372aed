"""What did not fit the first push and pull: loops of further ones.

Sizes are static, so pushes and pulls come in two: large chunks while much is
left, small ones for what remains. What is less than a large pull waits for
the next push and joins what that brings. The loops' conditions derive from
counts that every pull brings back, equal on all devices, so no collective is
spent on agreeing.
"""

from collections.abc import Callable, Sequence
import dataclasses
import fractions
import functools
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import section
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import LARGE
from zenjax._src.schemes.buffer_sizes import SMALL
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.sync.table_sources import Appended
from zenjax._src.sync.table_sources import Whole

# Where one table stands between pushes and pulls.


# Where the sums of one table go.
Target = Whole | Appended


class Progress(NamedTuple):
  """Where one table stands; every count is equal on all devices."""

  target: Target  # synced below `start` but for what is pending
  start: jax.Array  # [m] int32, where the next push begins
  union: jax.Array  # [m] int32, rows that came back so far
  sent: jax.Array  # [] int32, capacity of the last push
  left: jax.Array  # [] int32, rows that did not fit it in the fullest pair
  to_come: jax.Array  # [] int32, rows that these will add to a union, a guess
  pulled: jax.Array  # [] int32, rows that were asked for of what is held
  pending: jax.Array  # [] int32, rows that the fullest owner has still to send
  rounds: jax.Array  # [] int32, pulls that carried rows


def begin(target: Target, plan: TablePlan) -> Progress:
  """Before the first push."""
  zero = jnp.zeros((), jnp.int32)
  none = jnp.zeros(plan.layout.groups, jnp.int32)
  return Progress(
    target=target,
    start=none,
    union=none,
    sent=jnp.full_like(zero, plan.first.push),
    left=zero,
    to_come=zero,
    pulled=zero,
    pending=zero,
    rounds=zero,
  )


def advance(
  progress: Progress, arrived: Arrived, capacity: int, plan: TablePlan
) -> Progress:
  """Writes what a pull of `capacity` rows brought."""
  tally = arrived.tally
  with jax.named_scope("zenjax/expand"):
    target = progress.target.written(arrived, plan)
  carried = (jnp.sum(tally.union) > 0).astype(jnp.int32)
  return progress._replace(
    target=target,
    # A table that took the dense path, or had no more rows, stays done.
    start=jnp.maximum(tally.end, progress.start),
    union=progress.union + tally.union,
    left=jnp.maximum(jnp.max(tally.fullest) - progress.sent, 0),
    to_come=rows_to_come(tally).astype(jnp.int32),
    pulled=progress.pulled + capacity,
    pending=jnp.max(tally.pending),
    rounds=progress.rounds + carried,
  )


def rows_to_come(tally: Tally) -> jax.Array:
  """Rows that what was not merged yet will add to the fullest union, `[] f32`.

  It is expected to overlap as much as what was merged.
  """
  pushed, merged, total = (
    x.astype(jnp.float32) for x in (tally.pushed, tally.merged, tally.total)
  )
  return jnp.max(total * (pushed - merged) / jnp.maximum(merged, 1))


def finish_where(
  skip: jax.Array | None, progress: Progress, held: Held, plan: TablePlan
) -> tuple[Progress, Held]:
  """Nothing left to push or pull where the table takes the dense path."""
  if skip is None:
    return progress, held
  past = jnp.iinfo(jnp.int32).max
  progress = progress._replace(
    start=jnp.where(skip, past, progress.start),
    left=jnp.where(skip, 0, progress.left),
    to_come=jnp.where(skip, 0, progress.to_come),
    pending=jnp.where(skip, 0, progress.pending),
  )
  union = held.union
  union = union._replace(
    slots=jnp.where(skip, plan.layout.slots, union.slots),
    total=jnp.where(skip, 0, union.total),
  )
  fullest = jnp.where(skip, 0, held.fullest)
  return progress, held._replace(union=union, fullest=fullest)


# Unions that wait at their owners: given room, joined with what comes next.


def resized(held: Held, room: int, plan: TablePlan) -> Held:
  """With space for `room` rows, no less than there was."""
  union = held.union
  more = room - union.slots.shape[0]
  slots = jnp.pad(union.slots, (0, more), constant_values=plan.layout.slots)
  rows = jnp.pad(union.rows, ((0, more), (0, 0)))
  return held._replace(union=union._replace(slots=slots, rows=rows))


def joined(
  old: Held, pulled: jax.Array, new: Held, kept: int, room: int, plan: TablePlan
) -> Held:
  """What `old` has still to send, then `new`, whose slots are all higher.

  Args:
    old: Held before the push.
    pulled: `[] int32`, rows of it that were asked for.
    new: What the push brought.
    kept: The most rows that may wait.
    room: Rows that there is space for; `kept` and those of `new` at least.
    plan: Of the table.
  """
  if not kept:
    return resized(new, room, plan)
  waits = section(old.union, pulled, kept)
  slots = jnp.minimum(waits.slots, plan.layout.slots)
  waits = waits._replace(slots=slots)
  both = resized(new._replace(union=waits), room, plan).union
  union = new.union._replace(
    slots=_insert(both.slots, new.union.slots, waits.total),
    rows=_insert(both.rows, new.union.rows, waits.total),
    total=waits.total + new.union.total,
  )
  return new._replace(union=union)


def _insert(x: jax.Array, part: jax.Array, at: jax.Array) -> jax.Array:
  return lax.dynamic_update_slice_in_dim(x, part, at, axis=0)


# What must be left for a large chunk, as a part of its capacity. What a large
# pull wastes, small ones would not; a push is a small part of all bytes, and
# small ones cost a turn each and another for the pull that follows.
_LARGE_PUSH_FROM = fractions.Fraction(1, 2)
_LARGE_PULL_FROM = fractions.Fraction(7, 8)


class Owner(Protocol):
  """What owners do with the rows of a push before these are pulled."""

  def __call__(
    self, held: Sequence[Held], state: Any
  ) -> tuple[list[Held], Any]:
    """Changes them, and what is kept from push to push."""
    ...

  @property
  def depth(self) -> int:
    """How often owners must first agree on a value of all rows."""
    ...

  def nothing(self, level: int) -> Any:
    """Returns what is found before any push."""
    ...

  def reduced(
    self, level: int, parts: Any, held: Sequence[Held], state: Any
  ) -> Any:
    """Joins what was found with what a push brought."""
    ...

  def agreed(self, parts: Any) -> "Owner":
    """Returns the owner that knows what all have found."""
    ...


class Turns(NamedTuple):
  """How often each loop turned, by size of chunk."""

  pushes: jax.Array  # [2] int32
  pulls: jax.Array  # [2] int32


class _Flow(NamedTuple):
  """What all loops carry."""

  turns: Turns
  pushed: jax.Array  # [] bool, since the last pull: `pending` is a guess
  progress: list[Progress]
  held: list[Held]
  owned: Any


@dataclasses.dataclass(frozen=True)
class Rounds:
  """The loops of one group of tables.

  Attributes:
    sources: The local rows of each table.
    plans: Sizes for each table.
    scheme: How rows travel.
    context: Axes and operation.
    owner: What owners do after each push, if anything.
  """

  sources: Sequence[Any]
  plans: Sequence[TablePlan]
  scheme: Scheme
  context: Context
  owner: Owner | None = None

  def no_turns(self) -> Turns:
    none = jnp.zeros(2, jnp.int32)
    return Turns(none, none)

  def run(
    self,
    progress: Sequence[Progress],
    held: Sequence[Held],
    dense: Sequence[jax.Array | None],
    owned: Any,
  ) -> tuple[list[Progress], Turns, Any]:
    """Pulls and pushes until nothing is left.

    Args:
      progress: After the first pull.
      held: By the first push.
      dense: Which tables take the dense path and are done here.
      owned: What `owner` keeps.
    """
    pushes, pulls = _levels(self.plans, self.scheme, self.context)
    if not pulls:
      return list(progress), self.no_turns(), owned
    rest = [
      finish_where(*sphp) for sphp in zip(dense, progress, held, self.plans)
    ]
    progress = [p for p, _ in rest]
    held = self._with_room([own for _, own in rest])
    # A loop turns where its condition calls for it; the others wait.
    loops = [
      *((self._may_push(level, pulls), self._push(level)) for level in pushes),
      *((self._may_pull(level, pulls), self._pull(level)) for level in pulls),
    ]

    def body(flow):
      for condition, turn in loops:
        flow = lax.while_loop(condition, turn, flow)
      return flow

    pushed = jnp.zeros((), bool)
    flow = _Flow(self.no_turns(), pushed, progress, held, owned)
    if len(loops) == 1:
      # libtpu 0.0.50 dies of a kernel in a loop that is all of another loop.
      flow = body(flow)
    else:
      flow = lax.while_loop(self._unfinished, body, flow)
    return flow.progress, flow.turns, flow.owned

  def visit(
    self,
    progress: Sequence[Progress],
    held: Sequence[Held],
    joined: Callable[[Any, list[Held]], Any],
    found: Any,
  ) -> tuple[Any, jax.Array]:
    """Shows what did not fit the first push to its owners; nothing is pulled.

    Args:
      progress: Before the first pull.
      held: By the first push.
      joined: What owners make of a push and of `found`.
      found: Made of the first push.

    Returns:
      What was found in all pushes, and how many these were, `[] int32`.
    """
    number = jnp.zeros((), jnp.int32)
    if not _levels(self.plans, self.scheme, self.context)[0]:
      return found, number
    sizes = [plan.chunks[LARGE].push for plan in self.plans]
    ends = [plan.layout.slots for plan in self.plans]

    def unsent(flow):
      starts, _, _ = flow
      return _any([jnp.any(s < e) for s, e in zip(starts, ends)])

    def turn(flow):
      starts, number, found = flow
      # As in `_push`: without this a turn that never comes would be run.
      starts, number = lax.optimization_barrier((starts, number))
      outgoing = [
        Outgoing(source.after(p.target), jnp.minimum(start, end), number * 0)
        for p, source, start, end in zip(progress, self.sources, starts, ends)
      ]
      held = self.scheme.push(outgoing, self.plans, sizes, self.context)
      return self._limits(held), number + 1, joined(found, held)

    flow = self._limits(held), number, found
    _, number, found = lax.while_loop(unsent, turn, flow)
    return found, number

  def _limits(self, held: Sequence[Held]) -> list[jax.Array]:
    """Up to which slot rows of each table have reached their owners, `[m]`."""
    own = jnp.stack([h.union.limit for h in held])
    limits = collectives.all_gather(own, self.context.axes)
    return [
      limits[:: plan.column_groups, i] for i, plan in enumerate(self.plans)
    ]

  def _unfinished(self, flow: _Flow) -> jax.Array:
    return self._unsent(flow) | _any([p.pending > 0 for p in flow.progress])

  def _unsent(self, flow: _Flow) -> jax.Array:
    ends = [plan.layout.slots for plan in self.plans]
    return _any([jnp.any(p.start < e) for p, e in zip(flow.progress, ends)])

  def _much(self, flow: _Flow) -> jax.Array:
    """Whether a large pull would be well filled."""
    sizes = [int(p.chunks[LARGE].pull * _LARGE_PULL_FROM) for p in self.plans]
    return _any([p.pending > s for p, s in zip(flow.progress, sizes)])

  def _may_push(
    self, level: int, pulls: Sequence[int]
  ) -> Callable[[_Flow], jax.Array]:
    sizes = [int(p.chunks[LARGE].push * _LARGE_PUSH_FROM) for p in self.plans]

    def condition(flow):
      may = self._unsent(flow) & ~flow.pushed & ~waits(flow)
      if level == SMALL:
        return may
      return may & _any([p.left > s for p, s in zip(flow.progress, sizes)])

    def waits(flow):
      if LARGE in pulls:
        return self._much(flow)
      return _any([p.pending > 0 for p in flow.progress])

    return condition

  def _may_pull(
    self, level: int, pulls: Sequence[int]
  ) -> Callable[[_Flow], jax.Array]:
    def condition(flow):
      some = _any([p.pending > 0 for p in flow.progress])
      if LARGE not in pulls:
        return some
      much = self._much(flow)
      last = flow.pushed | ~self._unsent(flow)
      return much if level == LARGE else some & ~much & last

    return condition

  def _push(self, level: int) -> Callable[[_Flow], _Flow]:
    def turn(flow):
      # A push changes nothing that it reads. Without this XLA would see code
      # that is the same in every turn and run it before the first, always.
      starts, _ = lax.optimization_barrier(
        ([p.start for p in flow.progress], flow.turns.pushes)
      )
      outgoing = [
        Outgoing(
          source.after(p.target), jnp.minimum(start, plan.layout.slots), zero
        )
        for p, source, start, plan in zip(
          flow.progress, self.sources, starts, self.plans
        )
      ]
      sizes = [plan.chunks[level].push for plan in self.plans]
      held = self.scheme.push(outgoing, self.plans, sizes, self.context)
      owned = flow.owned
      if self.owner:
        held, owned = self.owner(held, owned)
      held = [
        joined(old, p.pulled, new, self._kept(plan), self._room(plan), plan)
        for old, new, p, plan in zip(flow.held, held, flow.progress, self.plans)
      ]
      progress = [
        p._replace(
          sent=jnp.full_like(p.sent, size),
          pulled=zero,
          pending=jnp.maximum(p.pending + p.to_come, 1),
        )
        for p, size in zip(flow.progress, sizes)
      ]
      pushes = flow.turns.pushes.at[level].add(1)
      turns = flow.turns._replace(pushes=pushes)
      return _Flow(turns, jnp.ones_like(flow.pushed), progress, held, owned)

    zero = jnp.zeros((), jnp.int32)
    return turn

  def _pull(self, level: int) -> Callable[[_Flow], _Flow]:
    def turn(flow):
      at = [p.pulled for p in flow.progress]
      sizes = [plan.chunks[level].pull for plan in self.plans]
      arrived = self.scheme.pull(flow.held, at, self.plans, sizes, self.context)
      progress = [
        advance(*pa) for pa in zip(flow.progress, arrived, sizes, self.plans)
      ]
      pulls = flow.turns.pulls.at[level].add(1)
      turns = flow.turns._replace(pulls=pulls)
      pushed = jnp.zeros_like(flow.pushed)
      return _Flow(turns, pushed, progress, flow.held, flow.owned)

    return turn

  def _with_room(self, held: Sequence[Held]) -> list[Held]:
    """Unions of one size, whatever the push that they come from."""
    return [
      resized(own, self._room(plan), plan)
      for own, plan in zip(held, self.plans)
    ]

  def _room(self, plan: TablePlan) -> int:
    sizes = [plan.first.push, *(c.push for c in plan.chunks)]
    held = (self.scheme.held_rows(plan, c, self.context) for c in sizes)
    return max(held) + self._kept(plan)

  def _kept(self, plan: TablePlan) -> int:
    """Rows that may wait for the next push."""
    _, pulls = _levels(self.plans, self.scheme, self.context)
    return plan.chunks[LARGE].pull if LARGE in pulls else 0


def _any(flags: Sequence[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.logical_or, flags)


def _levels(
  plans: Sequence[TablePlan], scheme: Scheme, context: Context
) -> tuple[list[int], list[int]]:
  """Which sizes of push and pull these tables may need."""
  complete = all(p.first.push >= p.most.push for p in plans)
  pushes = [] if complete else _different([p.chunks for p in plans], "push")
  if not any(scheme.pull_messages([p], [1], context) for p in plans):
    # A pull without a message brings everything at once.
    return pushes, [SMALL] if pushes else []
  first_held = [scheme.held_rows(p, p.first.push, context) for p in plans]
  if not pushes and all(
    rows <= p.first.pull for rows, p in zip(first_held, plans)
  ):
    return [], []
  return pushes, _different([p.chunks for p in plans], "pull")


def _different(chunks: Sequence[Sequence[NamedTuple]], field: str) -> list[int]:
  """Both levels, or one where small tables make them the same."""
  same = all(
    getattr(c[LARGE], field) == getattr(c[SMALL], field) for c in chunks
  )
  return [SMALL] if same else [LARGE, SMALL]


def loop_messages(
  plans: Sequence[TablePlan], scheme: Scheme, context: Context
) -> list[list[Message]]:
  """The collectives in each loop's body, as the lowered program shows them."""
  pushes, pulls = _levels(plans, scheme, context)
  push_sizes = [[p.chunks[level].push for p in plans] for level in pushes]
  pull_sizes = [[p.chunks[level].pull for p in plans] for level in pulls]
  return [
    *(scheme.push_messages(plans, sizes, context) for sizes in push_sizes),
    *(scheme.pull_messages(plans, sizes, context) for sizes in pull_sizes),
  ]
