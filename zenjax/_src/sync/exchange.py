"""One exchange of a group of tables, in the order in which it runs.

    enter   find the rows to send: of an array those that are not zero, of
            SparseRows all that were looked up
    push    send each owner the first of them that fit its buffer
    merge   sum at the owner what all devices sent
    pull    send everyone the first sums of each owner
    write   put these over the array's rows, or append them to a list of rows
    rounds  push, merge, pull and write in loops until nothing is left
    dense   or sum the whole table instead, above break-even density

The first push and pull have static sizes and stand outside any branch, so
that they may overlap with the backward pass. Not so between processes on CPUs:
there those of `zen` stand in branches, one for each of a few sizes, and the
least is taken that holds what earlier steps needed (of arrays where no
SparseRows are beside them).

Loops come in two sizes: large chunks while much is left, small ones for what
remains. On CPUs of one process they have that of the first round: XLA compiles
kernels for CPUs one by one, and equal ones once.

Sums that do not fill a large pull wait for the next push and join what that
brings. Conditions of loops derive from counts that every pull brings back,
equal on all devices, so no collective is spent on agreeing, but by owners who
need a value of all rows before they step (`Rounds.survey`).
"""

from collections.abc import Callable, Sequence
import dataclasses
import fractions
import functools
import operator
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core import wire
from zenjax._src.core.arguments import Capacity
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Asked
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import expected_bytes
from zenjax._src.schemes.base import Fit
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import received_bytes
from zenjax._src.schemes.base import Room
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import section
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import LARGE
from zenjax._src.schemes.buffer_sizes import SMALL
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.sync import table_sources
from zenjax._src.sync.table_sources import Appended
from zenjax._src.sync.table_sources import Carried
from zenjax._src.sync.table_sources import Listed
from zenjax._src.sync.table_sources import Masked
from zenjax._src.sync.table_sources import Whole

# Where the sums of one table go.
Target = Whole | Appended


class Local(NamedTuple):
  """One table before an exchange, or several that travel as one."""

  plan: TablePlan
  rows: Sequence[Any]  # arrays `[R, D]` whose rows of zeros stay, or SparseRows
  # Which travel dense from the start: `[p] bool`, equal on all devices.
  remembered: jax.Array | None = None  # None where there is no memory
  carried: Carried | None = None  # rows that waited until now, if they may
  # [2] f32, rows that a push and a pull needed of late, of `plan.guess`.
  needed: jax.Array | None = None


class Transfer(NamedTuple):
  """One table on its way."""

  plan: TablePlan
  source: Masked | Listed
  progress: "Progress"
  remembered: jax.Array | None
  probe: jax.Array  # [m, p] int32, see `Outgoing`


class Synced(NamedTuple):
  """One table after an exchange."""

  plan: TablePlan
  target: Target
  outcome: "Outcome"
  # What the first pull brought, and where sums were to be written before it:
  # for rows that wait.
  first: Arrived
  entered: Target


class Result(NamedTuple):
  """All tables after an exchange."""

  tables: list[Synced]
  counts: jax.Array | None = None  # as `begin` took them, of all devices
  owned: Any = ()  # what owners keep
  owner: Any = None  # `finish`'s, once it knows reductions over all rows


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
  """An exchange of which the first push is on its way.

  Attributes:
    tables: What is exchanged.
    scheme: How rows travel.
    context: Axes and operation.
    exact: Whether rows that do not fit the first round follow in loops. If
      False they keep their local values in the tables that come back, where
      `gradient_tree.withhold` then puts zeros.
    received: What `Scheme.send` returned.
    counts: See `begin`.
  """

  tables: Sequence[Transfer]
  scheme: Scheme
  context: Context
  exact: bool
  received: Any
  counts: jax.Array | None = None

  @property
  def mark(self) -> jax.Array | None:
    """Tells when the push has arrived, if anything of it is left to do."""
    return self.scheme.mark(self.received)


def begin(
  tables: Sequence[Local],
  scheme: Scheme,
  context: Context,
  *,
  exact: bool = True,
  rows_only: bool = False,
  counts: jax.Array | None = None,
) -> Exchange:
  """Enters tables into an exchange and sends the first push.

  Args:
    tables: Local gradients.
    scheme: How rows travel.
    context: Axes and operation.
    exact: See `Exchange`.
    rows_only: Whether only what arrives is used, and not the tables: these
      are then read and never written.
    counts: `[k] int32` to be summed over devices as well, in a collective of
      the exchange where one has room for them.
  """
  context = dataclasses.replace(context, fit=_fit(tables, context))
  with jax.named_scope("zenjax/mask"):
    entered = [_enter(table, exact, rows_only, context) for table in tables]
  outgoing = [
    Outgoing(
      Room(t.plan, t.plan.first.push),
      t.source,
      t.progress.start,
      compat.from_memory(t.probe),
    )
    for t in entered
  ]
  context = dataclasses.replace(context, quiet=_quiet(entered, context))
  received = scheme.send(outgoing, context)
  return Exchange(entered, scheme, context, exact, received, counts)


def _fit(tables: Sequence[Local], context: Context) -> Fit | None:
  """Returns which part of first buffers holds what every table needs."""
  parts = [
    table.needed / np.array(table.plan.first, np.float32)
    for table in tables
    if table.plan.guess is not None and table.needed is not None
  ]
  if not parts:
    return None
  slices = jnp.ceil(functools.reduce(jnp.maximum, parts) * wire.SLICES)
  slices = jnp.clip(slices, 1, wire.SLICES).astype(jnp.int32)
  level = indexing.lower_bound(jnp.array(wire.PARTS, jnp.int32), slices)
  level = compat.agreed(level.astype(jnp.int32), context.axes)
  return Fit(level[0], level[1])


def _enter(
  table: Local, exact: bool, rows_only: bool, context: Context
) -> Transfer:
  """Finds the rows to send, and where sums are to be written."""
  plan = table.plan
  remembered = table.remembered if exact else None
  if remembered is not None:
    remembered = compat.one_copy(remembered, context.axes)
  if plan.table.look_ups is not None:
    source, probe = table_sources.enter_rows(table.rows, plan)
    target = table_sources.empty_list(plan)
  else:
    source, probe = table_sources.enter_arrays(
      table.rows, plan, remembered, table.carried
    )
    if rows_only:  # Nothing is written over the leaf.
      source = source._replace(tables=tuple(table.rows))
    target = Whole(source.tables)
  # The first round is to have the kernels of further ones.
  groups, members = plan.layout.groups, len(plan.tables)
  zero, none, union = compat.from_memory(
    [jnp.zeros(shape, jnp.int32) for shape in ((), groups, (groups, members))]
  )
  progress = Progress(
    target=target,
    start=none,
    union=union,
    sent=zero + context.sent(Room(plan, plan.first.push)),
    left=zero,
    to_come=zero,
    pulled=zero,
    pending=zero,
    rounds=zero,
  )
  return Transfer(plan, source, progress, remembered, probe)


def _quiet(tables: Sequence[Transfer], context: Context) -> jax.Array | None:
  """Tells if all tables are known to travel dense; None if one may not."""
  flags = [t.remembered for t in tables if t.remembered is not None]
  plain = len(context.axes) == 1 and not context.remote_copies
  if len(flags) < len(tables) or not plain or context.devices == 1:
    return None
  known = [jnp.all(compat.as_invariant(x, context.axes)) for x in flags]
  return functools.reduce(operator.and_, known)


def _with_samples(
  tables: Sequence[Transfer],
  first: Sequence[Arrived],
  counts: jax.Array | None,
  context: Context,
) -> tuple[list[Arrived], jax.Array | None]:
  """Sums the counts of samples, by which tables return, if no round did.

  A first round that was not sent says nothing of other devices. All else that
  it would have brought is known: nobody holds rows, and nothing is left.

  Returns:
    What arrived, with these counts, and the sum of `counts`, which travel with
    them.
  """
  more = [] if counts is None else [counts]
  total = functools.partial(collectives.psum, axes=context.axes)
  if context.quiet is None:
    return list(first), None if counts is None else total(counts)

  def apart(own, heard, more):
    del own
    return heard, [total(x) for x in more]

  def together(own, heard, more):
    summed = collectives.in_one(total, [*own, *more])
    found = [compat.cast_like(x, like) for x, like in zip(summed, heard)]
    return found, summed[len(own) :]

  probes, more = lax.platform_dependent(
    context.quiet,
    [t.probe for t in tables],
    [x.tally.probe for x in first],
    more,
    cpu=lambda quiet, *sums: lax.cond(quiet, together, apart, *sums),
    default=lambda quiet, *sums: apart(*sums),
  )
  first = [
    x._replace(tally=x.tally._replace(probe=probe))
    for x, probe in zip(first, probes)
  ]
  return first, more[0] if more else None


def finish(
  exchange: Exchange,
  *,
  after: jax.Array | None = None,
  owner: "OwnerStep | None" = None,
  owned: Any = (),
) -> Result:
  """Sums what the first push brought, and does all the rest.

  Args:
    exchange: As `begin` returned it.
    after: Marks what that sum should wait for, see `schemes/zen.py`.
    owner: What owners make of the sums of each push before they are pulled.
      Tables then never take the dense path, where nobody owns anything.
    owned: What it keeps on a device from push to push.
  """
  tables, scheme, context = exchange.tables, exchange.scheme, exchange.context
  rooms = [Room(t.plan, t.plan.first.push) for t in tables]
  held = scheme.merge(exchange.received, rooms, context, after)
  loops = Rounds(
    [table.plan for table in tables],
    [table.source for table in tables],
    scheme,
    # Ids of later rounds are no earlier than values.
    dataclasses.replace(context, ids_first=False, quiet=None, fit=None),
    owner,
  )
  surveys = jnp.zeros((), jnp.int32)
  if owner:
    with jax.named_scope("zenjax/survey"):
      targets = [table.progress.target for table in tables]
      owner, surveys = loops.survey(targets, held, owned)
    loops = dataclasses.replace(loops, owner=owner)
    held, owned = owner(held, owned)
  asked = [
    Asked(Room(t.plan, t.plan.first.pull), own, t.progress.pulled)
    for t, own in zip(tables, held)
  ]
  first, counts = _with_samples(
    tables, scheme.pull(asked, context), exchange.counts, context
  )
  may_sum = exchange.exact and owner is None
  dense = [
    _takes_dense_path(t, arrived.tally, scheme, context) if may_sum else None
    for t, arrived in zip(tables, first)
  ]
  progress = []
  for table, arrived, skip in zip(tables, first, dense):
    plan = table.plan
    start = table.progress
    # Tables on the dense path keep their local rows.
    if skip is not None and isinstance(start.target, Whole):
      start = start._replace(target=start.target._replace(skip=skip))
    pulled = context.sent(Room(plan, plan.first.pull), pull=True)
    progress.append(advance(start, arrived, pulled, plan))
  loops = dataclasses.replace(
    loops,
    sources=[
      source.without(skip, source_of.plan)
      if skip is not None and isinstance(source, Masked)
      else source
      for source, skip, source_of in zip(loops.sources, dense, tables)
    ],
  )
  turns = Turns(jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32))
  if exchange.exact:
    with jax.named_scope("zenjax/rounds"):
      progress, turns, owned = loops.run(progress, held, dense, owned)
  targets = [p.target for p in progress]
  with jax.named_scope("zenjax/dense"):
    targets = _sum_dense(targets, dense, context)
  turns = turns._replace(pushes=turns.pushes.at[LARGE].add(surveys))
  as_equal = functools.partial(compat.as_invariant, axes=context.axes)
  targets = [jax.tree.map(as_equal, target) for target in targets]
  # Rows of stacked tables were counted where they arrived.
  progress = [p._replace(union=as_equal(p.union)) for p in progress]
  shown = Shown(turns, scheme, context, exchange.exact)
  synced = [
    Synced(
      t.plan,
      target,
      outcome_of(t, target, p, arrived, d, shown),
      arrived,
      t.progress.target,
    )
    for t, target, p, arrived, d in zip(tables, targets, progress, first, dense)
  ]
  return Result(synced, counts, owned, owner)


def _sum_dense(
  targets: Sequence[Target],
  dense: Sequence[jax.Array | None],
  context: Context,
) -> list[Target]:
  """Sums the tables that take the dense path, mostly none.

  Accelerators ask first if any does: the host of a GPU waits for every answer.
  """
  flags, found = {}, {}
  for i, (target, skip) in enumerate(zip(targets, dense)):
    if skip is not None and isinstance(target, Whole):
      flags[i], found[i] = skip, target.tables

  def of_one(i, tables):
    numbers = indexing.numbers(len(tables))
    skips = [indexing.nth(flags[i], k) for k in numbers]
    return tuple(
      [
        dense_sum.reduce_where(x, skip, context)
        for x, skip in zip(tables, skips)
      ]
    )

  summed = lambda found: {i: of_one(i, x) for i, x in found.items()}

  if compat.for_cpus() or sum(map(len, found.values())) < 2:
    found = summed(found)
  else:
    some = functools.reduce(operator.or_, map(jnp.any, flags.values()))
    found = dense_sum.once_where(some, summed, found)
  return [
    Whole(found[i]) if i in found else target
    for i, target in enumerate(targets)
  ]


def _takes_dense_path(
  table: Transfer, tally: Tally, scheme: Scheme, context: Context
) -> jax.Array | None:
  """Returns which tables are summed whole this time; None if none can be.

  One is if the first pull did not end it and all of this step's rows, as that
  pull counts and extrapolates them, cost more than break-even, or if the last
  step said so.
  """
  plan = table.plan
  if plan.table.look_ups is not None:
    return None  # There is no array to sum.
  pushed, push = _pushed(tally, plan)
  if plan.members:
    # Rows of each overlap as those of all that were merged.
    total, merged = jnp.sum(tally.total), jnp.maximum(jnp.sum(tally.merged), 1)
    kept = total.astype(jnp.float32) / merged.astype(jnp.float32)
    pull = jnp.maximum(push, pushed / plan.layout.groups * kept)
    slots = [member.layout.slots for member in plan.members]
    pull = jnp.minimum(pull, np.array(slots, np.float32))
  else:
    pull = jnp.max(tally.total).astype(jnp.float32) + rows_to_come(tally)
  dense = unfinished(tally, plan)
  dense &= _above(push, pull, plan, scheme, context, 1.0)
  if table.remembered is None:
    return dense
  return dense | compat.as_invariant(table.remembered, context.axes)


# Where a table stands between pushes and pulls.


class Progress(NamedTuple):
  """Where one table stands; every count is equal on all devices."""

  target: Target  # synced below `start` but for what is pending
  start: jax.Array  # [m] int32, where the next push begins
  union: jax.Array  # [m, p] int32, rows of each table that came so far
  sent: jax.Array  # [] int32, capacity of the last push
  left: jax.Array  # [] int32, beyond `sent` in the fullest (source, group) pair
  to_come: jax.Array  # [] int32, a guess of what `left` adds to a full union
  pulled: jax.Array  # [] int32, rows that were asked for of what is held
  pending: jax.Array  # [] int32, rows that the fullest owner has still to send
  rounds: jax.Array  # [] int32, pulls that carried rows


def advance(
  progress: Progress,
  arrived: Arrived,
  capacity: jax.Array | int,
  plan: TablePlan,
) -> Progress:
  """Writes what a pull of `capacity` rows brought."""
  tally = arrived.tally
  if plan.members:  # Or each table would compute its rows from slots anew.
    row = lax.optimization_barrier(arrived.row)
    arrived = arrived._replace(row=row)
  with jax.named_scope("zenjax/expand"):
    target = progress.target.written(arrived, plan)
    union = tally.union[:, None]
    if plan.members:
      union = table_sources.arrived_counts(arrived, plan)
  brought = (jnp.sum(tally.union) > 0).astype(jnp.int32)
  return progress._replace(
    target=target,
    # A table that took the dense path, or had no more rows, stays done.
    start=jnp.maximum(tally.end, progress.start),
    union=progress.union + union,
    left=jnp.maximum(jnp.max(tally.fullest) - progress.sent, 0),
    to_come=rows_to_come(tally).astype(jnp.int32),
    pulled=progress.pulled + capacity,
    pending=jnp.max(tally.pending),
    rounds=progress.rounds + brought,
  )


def rows_to_come(tally: Tally) -> jax.Array:
  """Rows that what was not merged yet will add to the fullest union, `[] f32`.

  It is expected to overlap as much as what was merged.
  """
  counts = tally.pushed, tally.merged, tally.total
  pushed, merged, total = [x.astype(jnp.float32) for x in counts]
  return jnp.max(total * (pushed - merged) / jnp.maximum(merged, 1))


def finish_where(
  skip: jax.Array | None, progress: Progress, held: Held, plan: TablePlan
) -> tuple[Progress, Held]:
  """Nothing left to push or pull where all tables take the dense path."""
  if skip is None:
    return progress, held
  skip = jnp.all(skip)
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
  """Joins what `old` has still to send and `new`, whose slots are higher.

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
  update = functools.partial(
    lax.dynamic_update_slice_in_dim, start_index=waits.total, axis=0
  )
  union = new.union._replace(
    slots=update(both.slots, new.union.slots),
    rows=update(both.rows, new.union.rows),
    total=waits.total + new.union.total,
  )
  return new._replace(union=union)


# The least part of a large chunk's capacity that must be left for it. Padding
# of pulls is most of what is wasted: a large pull must be nearly full. Pushes
# are few of all bytes, and a small one costs two turns, its own and that of the
# pull which follows: half a large push is enough.
_LARGE_PUSH_FROM = fractions.Fraction(1, 2)
_LARGE_PULL_FROM = fractions.Fraction(7, 8)

# Joins flags: True if one is.
_any = functools.partial(functools.reduce, operator.or_)


class OwnerStep(Protocol):
  """A step of owners: changes the rows of a push before these are pulled."""

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

  def agreed(self, parts: Any) -> "OwnerStep":
    """Returns the step that knows what all owners have found."""
    ...


class Turns(NamedTuple):
  """How often each loop turned, by size of chunk."""

  pushes: jax.Array  # [2] int32
  pulls: jax.Array  # [2] int32


class _Flow(NamedTuple):
  """The carry of all loops."""

  turns: Turns
  unpulled: jax.Array  # [] bool, pushed since the last pull: `pending` guessed
  progress: list[Progress]
  held: list[Held]
  owned: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Rounds:
  """The loops of one group of tables.

  Attributes:
    plans: How they travel.
    sources: Their local rows.
    scheme: How rows travel.
    context: Axes and operation.
    owner: What owners do after each push, if anything.
  """

  plans: Sequence[TablePlan]
  sources: Sequence[Masked | Listed]
  scheme: Scheme
  context: Context
  owner: OwnerStep | None = None

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
    none = jnp.zeros(2, jnp.int32)
    pushes, pulls = _levels(self.plans, self.scheme, self.context)
    if not pulls:
      return list(progress), Turns(none, none), owned
    # Rows of each table that may wait for the next push, and room for them and
    # all that any push brings.
    kept = [p.chunks[LARGE].pull if LARGE in pulls else 0 for p in self.plans]
    rooms = []
    for plan, more in zip(self.plans, kept):
      sizes = [plan.first.push, *[chunk.push for chunk in plan.chunks]]
      most = [
        self.scheme.held_rows(Room(plan, size), self.context) for size in sizes
      ]
      rooms.append(max(most) + more)
    rest = [
      finish_where(skip, p, own, plan)
      for skip, p, own, plan in zip(dense, progress, held, self.plans)
    ]
    progress = [p for p, _ in rest]
    # Unions of one size, whatever the push that they come from.
    held = [
      resized(own, room, plan)
      for (_, own), room, plan in zip(rest, rooms, self.plans)
    ]
    # A loop turns where its condition calls for it; the others wait.
    bind = functools.partial
    loops = [
      (
        bind(self._due, kind="push", level=level, pulls=pulls),
        bind(self._push, level=level, kept=kept, rooms=rooms),
      )
      for level in pushes
    ] + [
      (
        bind(self._due, kind="pull", level=level, pulls=pulls),
        bind(self._pull, level=level),
      )
      for level in pulls
    ]

    def body(flow):
      for condition, turn in loops:
        flow = lax.while_loop(condition, turn, flow)
      return flow

    unpulled = jnp.zeros((), bool)
    flow = _Flow(Turns(none, none), unpulled, progress, held, owned)
    if len(loops) == 1:
      # libtpu 0.0.50 dies of a kernel in a loop that is all of another loop.
      flow = body(flow)
    else:
      flow = lax.while_loop(self._unfinished, body, flow)
    return flow.progress, flow.turns, flow.owned

  def survey(
    self, targets: Sequence[Target], held: Sequence[Held], owned: Any
  ) -> tuple[OwnerStep, jax.Array]:
    """Lets owners agree on values of all rows before any sum is pulled.

    Args:
      targets: As the tables were entered.
      held: By the first push.
      owned: What the owner keeps.

    Returns:
      The step that knows them, and how many pushes that took, `[] int32`.
    """
    owner, pushes = self.owner, jnp.zeros((), jnp.int32)
    if owner is None:
      raise AssertionError("there is nobody to agree")
    for level in range(owner.depth):
      add = functools.partial(owner.reduced, level, state=owned)
      parts = add(owner.nothing(level), held)
      parts, more = self._visit(targets, held, add, parts)
      owner, pushes = owner.agreed(parts), pushes + more
    return owner, pushes

  def _visit(
    self,
    targets: Sequence[Target],
    held: Sequence[Held],
    reduce: Callable[[Any, list[Held]], Any],
    found: Any,
  ) -> tuple[Any, jax.Array]:
    """Pushes the remaining rows to owners, who reduce and then forget them.

    Args:
      targets: As the tables were entered.
      held: By the first push.
      reduce: Joins `found` with what a push brought.
      found: Made of the first push.

    Returns:
      What was found in all pushes, and how many these were, `[] int32`.
    """
    number = jnp.zeros((), jnp.int32)
    if not _levels(self.plans, self.scheme, self.context)[0]:
      return found, number

    def unsent(flow):
      starts, _, _ = flow
      return _any(
        [jnp.any(s < p.layout.slots) for s, p in zip(starts, self.plans)]
      )

    def turn(flow):
      starts, number, found = flow
      # As in `_push`: without this a turn that never comes would be run.
      starts, number = lax.optimization_barrier((starts, number))
      outgoing = self._outgoing(targets, starts, LARGE, number * 0)
      held = self.scheme.push(outgoing, self.context)
      return self._limits(held), number + 1, reduce(found, held)

    flow = self._limits(held), number, found
    _, number, found = lax.while_loop(unsent, turn, flow)
    return found, number

  def _outgoing(self, targets, starts, level, probe):
    """Rows of each table from `starts` on, for a push of this size."""
    return [
      Outgoing(
        Room(plan, plan.chunks[level].push),
        source.after(target),
        *compat.from_memory(
          (
            jnp.minimum(start, plan.layout.slots),
            jnp.broadcast_to(probe, (plan.layout.groups, len(plan.tables))),
          )
        ),
      )
      for plan, source, target, start in zip(
        self.plans, self.sources, targets, starts
      )
    ]

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
    return _any(
      [
        jnp.any(p.start < plan.layout.slots)
        for p, plan in zip(flow.progress, self.plans)
      ]
    )

  def _due(
    self, flow: _Flow, kind: str, level: int, pulls: Sequence[int]
  ) -> jax.Array:
    """Returns True if a push, or a pull, of this size is the next turn.

    A pull waits until it is well filled or nothing is left to push, and a push
    until no pull is due.
    """
    waits = _any([p.pending > 0 for p in flow.progress])
    if LARGE not in pulls and kind == "pull":
      return waits
    filled = waits
    if LARGE in pulls:
      sizes = [int(p.chunks[LARGE].pull * _LARGE_PULL_FROM) for p in self.plans]
      filled = _any([p.pending > s for p, s in zip(flow.progress, sizes)])
    if kind == "pull":
      last = flow.unpulled | ~self._unsent(flow)
      return filled if level == LARGE else waits & ~filled & last
    may = self._unsent(flow) & ~flow.unpulled & ~filled
    if level == SMALL:
      return may
    sizes = [int(p.chunks[LARGE].push * _LARGE_PUSH_FROM) for p in self.plans]
    return may & _any([p.left > s for p, s in zip(flow.progress, sizes)])

  def _push(
    self, flow: _Flow, level: int, kept: Sequence[int], rooms: Sequence[int]
  ) -> _Flow:
    """A turn: owners hold what waited, then what a push of this size brings."""
    # A push changes nothing that it reads. Without this XLA would see code
    # that is the same in every turn and run it before the first, always.
    starts, _ = lax.optimization_barrier(
      ([p.start for p in flow.progress], flow.turns.pushes)
    )
    zero = jnp.zeros((), jnp.int32)
    targets = [p.target for p in flow.progress]
    outgoing = self._outgoing(targets, starts, level, zero)
    held = self.scheme.push(outgoing, self.context)
    owned = flow.owned
    if self.owner:
      held, owned = self.owner(held, owned)
    held = [
      joined(old, p.pulled, new, more, room, out.room.plan)
      for old, new, p, out, more, room in zip(
        flow.held, held, flow.progress, outgoing, kept, rooms
      )
    ]
    progress = [
      p._replace(
        sent=jnp.full_like(p.sent, out.room.capacity),
        pulled=zero,
        pending=jnp.maximum(p.pending + p.to_come, 1),
      )
      for p, out in zip(flow.progress, outgoing)
    ]
    pushes = flow.turns.pushes.at[level].add(1)
    turns = flow.turns._replace(pushes=pushes)
    return _Flow(turns, jnp.ones_like(flow.unpulled), progress, held, owned)

  def _pull(self, flow: _Flow, level: int) -> _Flow:
    """A turn: everyone writes what a pull of this size brings."""
    asked = [
      Asked(Room(plan, plan.chunks[level].pull), own, p.pulled)
      for plan, own, p in zip(self.plans, flow.held, flow.progress)
    ]
    arrived = self.scheme.pull(asked, self.context)
    progress = [
      advance(p, came, table.room.capacity, table.room.plan)
      for p, came, table in zip(flow.progress, arrived, asked)
    ]
    pulls = flow.turns.pulls.at[level].add(1)
    turns = flow.turns._replace(pulls=pulls)
    unpulled = jnp.zeros_like(flow.unpulled)
    return _Flow(turns, unpulled, progress, flow.held, flow.owned)


def _levels(
  plans: Sequence[TablePlan], scheme: Scheme, context: Context
) -> tuple[list[int], list[int]]:
  """Which sizes of push and pull these tables may need."""
  # Both, or one where small tables make them the same.
  pushes, pulls = [
    [SMALL]
    if all([large == small for large, small in sizes])
    else [LARGE, SMALL]
    for sizes in (
      [(p.chunks[LARGE].push, p.chunks[SMALL].push) for p in plans],
      [(p.chunks[LARGE].pull, p.chunks[SMALL].pull) for p in plans],
    )
  ]
  if all(
    [
      p.guess is None and scheme.holds_all(Room(p, p.first.push), context)
      for p in plans
    ]
  ):
    pushes = []
  if not any([scheme.pull_messages([Room(p, 1)], context) for p in plans]):
    # A pull without a message brings everything at once.
    return pushes, [SMALL] if pushes else []
  held = [scheme.held_rows(Room(p, p.first.push), context) for p in plans]
  if not pushes and all([n <= p.first.pull for n, p in zip(held, plans)]):
    return [], []
  return pushes, pulls


def loop_messages(
  plans: Sequence[TablePlan], scheme: Scheme, context: Context
) -> list[list[Message]]:
  """Returns the collectives in each loop's body, as they are lowered."""
  context = dataclasses.replace(context, ids_first=False)
  pushes, pulls = _levels(plans, scheme, context)
  push_rooms = [
    [Room(p, p.chunks[level].push) for p in plans] for level in pushes
  ]
  pull_rooms = [
    [Room(p, p.chunks[level].pull) for p in plans] for level in pulls
  ]
  return [
    *(scheme.push_messages(rooms, context) for rooms in push_rooms),
    *(scheme.pull_messages(rooms, context) for rooms in pull_rooms),
  ]


# What an exchange showed: the dense verdict, statistics, bytes.

# A table that travels dense returns to sparse below this part of break-even.
_RETURN = 0.8


class Outcome(NamedTuple):
  """Numbers of the exchange of a table, or of `p` that were stacked.

  They are equal on all devices. Stacked tables share buffers: overflow and
  bytes of all are shared out by the rows that they sent.
  """

  local_rows: jax.Array  # [p] f32, nonzero rows of a device, mean
  union_rows: jax.Array  # [p] f32, nonzero rows of the sum
  push_need: jax.Array  # [p] f32, rows of the fullest (source, group) pair
  pull_need: jax.Array  # [p] f32, rows of the fullest group's union
  push_mean: jax.Array  # [p] f32, rows of a pair, mean
  rounds: jax.Array  # [] f32, pulls that carried rows of these tables
  overflow_rows: jax.Array  # [p] f32, of all devices, beyond the first push
  wire_bytes: jax.Array  # [p] f32, received by a device
  dense_bytes: np.ndarray  # [p] f32, of a ring all-reduce
  went_dense: jax.Array  # [p] bool, this time
  withheld: jax.Array  # [] bool, some rows wait for the next step
  above: jax.Array  # [p] bool, it is one for the dense path, taken or not
  dense_next: jax.Array  # [p] bool, what to remember


def unfinished(tally: Tally, plan: TablePlan) -> jax.Array:
  """Returns True if some device has rows that the first pull did not bring."""
  return jnp.any(tally.limit < plan.layout.slots)


def _above(
  push: jax.Array,
  pull: jax.Array,
  plan: TablePlan,
  scheme: Scheme,
  context: Context,
  factor: float,
) -> jax.Array:
  """Returns which tables are above `factor` times break-even: `[p] bool`."""
  most = _dense_bytes(plan, context) * np.float32(scheme.break_even * factor)
  return jnp.asarray(expected_bytes(scheme, plan, push, pull, context) > most)


def _dense_bytes(plan: TablePlan, context: Context) -> np.ndarray:
  """Bytes of a sum of each table as a whole: `[p] float32`."""
  whole = [
    dense_sum.received_bytes(table, context.devices) for table in plan.tables
  ]
  return np.array(whole, np.float32)


class Shown(NamedTuple):
  """Numbers of an exchange that all tables share."""

  turns: Turns
  scheme: Scheme
  context: Context
  exact: bool  # whether loops sent what the first round left


def outcome_of(
  table: Transfer,
  target: Target,
  progress: Progress,
  first: Arrived,
  dense: jax.Array | None,
  shown: Shown,
) -> Outcome:
  """Returns what the exchange of a table, or of stacked ones, showed.

  Args:
    table: As it was sent.
    target: Synced.
    progress: After the last round.
    first: What the first pull brought.
    dense: Which took the dense path, `[p] bool`; None where none could.
    shown: Of all tables.
  """
  turns, scheme, context, exact = shown
  plan, tally = table.plan, first.tally
  went_dense = jnp.zeros(len(plan.tables), bool) if dense is None else dense
  pushed, push = _pushed(tally, plan)
  counted = pushed > 0
  if plan.members and table.remembered is not None:
    counted = ~compat.as_invariant(table.remembered, context.axes)
  local = pushed / context.devices
  union = jnp.sum(progress.union.astype(jnp.float32), axis=0)
  pull = jnp.max(progress.union, axis=0).astype(jnp.float32)
  groups = plan.layout.groups
  sent = jnp.where(counted, pushed, 0.0)
  if dense is not None and isinstance(target, Whole):
    # A dense exchange counts no rows: a sample of them stands for all.
    rows = [one.num_rows for one in plan.tables]
    samples = [dense_sum.sample_count(n) for n in rows]
    scale = np.divide(rows, samples).astype(np.float32)
    sampled = dense_sum.samples_where(jnp.any(went_dense), target.tables)
    seen_union = sampled.astype(jnp.float32) * scale
    seen_local = tally.probe[0].astype(jnp.float32) * scale / context.devices
    local = jnp.where(counted, local, seen_local)
    push = jnp.where(counted, push, seen_local / groups)
    union = jnp.where(went_dense, seen_union, union)
    pull = jnp.where(went_dense, seen_union / groups, pull)
  may = dense is not None
  enter = _above(push, pull, plan, scheme, context, 1.0)
  stay = _above(push, pull, plan, scheme, context, _RETURN)
  both = indexing.stacked([tally.pushed, tally.merged])
  all_sent, merged = jnp.sum(both.astype(jnp.float32), axis=0)
  left = all_sent - merged
  sparse = _sparse_bytes(
    plan,
    turns,
    all_sent / context.devices / groups,
    jnp.sum(progress.union.astype(jnp.float32)) / groups,
    scheme,
    context,
  )
  share = jnp.ones(1, jnp.float32)
  if plan.members:  # Of rows that were sent, or of all where none were.
    rows = np.array([one.num_rows for one in plan.tables], np.float32)
    some = jnp.sum(sent)
    share = jnp.where(some > 0, sent / jnp.maximum(some, 1), rows / sum(rows))
  whole = _dense_bytes(plan, context)
  return Outcome(
    local_rows=local,
    union_rows=union,
    push_need=push,
    pull_need=pull,
    push_mean=local / groups,
    rounds=progress.rounds.astype(jnp.float32),
    overflow_rows=jnp.where(went_dense, 0.0, left * share),
    wire_bytes=sparse * share + jnp.where(went_dense, whole, 0.0),
    dense_bytes=whole,
    went_dense=went_dense,
    withheld=unfinished(tally, plan) & (not exact),
    above=enter & may,
    dense_next=jnp.where(went_dense, stay, enter) & may,
  )


def _pushed(tally: Tally, plan: TablePlan) -> tuple[jax.Array, jax.Array]:
  """Rows of all devices, and of the fullest pair: `[p] float32` each."""
  if plan.members:
    pushed = jnp.sum(tally.probe.astype(jnp.float32), axis=0)
    return pushed, jnp.max(tally.peak, axis=0).astype(jnp.float32)
  pushed = jnp.sum(tally.pushed.astype(jnp.float32))
  fullest = jnp.max(tally.fullest).astype(jnp.float32)
  return pushed[None], fullest[None]


def _sparse_bytes(
  plan: TablePlan,
  turns: Turns,
  push_mean: jax.Array,
  pull_mean: jax.Array,
  scheme: Scheme,
  context: Context,
) -> jax.Array:
  """Bytes a device received for this table's rows, padding included.

  Remote copies send no padding: at most the bytes of the mean number of rows.
  """

  def both(size: Capacity, fit: Fit | None) -> list[float]:
    """Bytes of a push and of a pull."""
    known = dataclasses.replace(context, fit=fit)
    messages = [
      scheme.push_messages([Room(plan, size.push)], known),
      scheme.pull_messages([Room(plan, size.pull)], known),
    ]
    return [float(received_bytes(x, context)) for x in messages]

  chunks = [both(size, None) for size in plan.chunks]
  turned = jnp.stack(turns, axis=1).astype(jnp.float32)
  if context.fit is None:
    sent = jnp.float32(sum(both(plan.first, None)))
  else:
    levels = range(len(wire.PARTS))
    parts = np.array([both(plan.first, Fit(k, k)) for k in levels], np.float32)
    push, pull = jnp.asarray(parts).T
    sent = push[context.fit.push] + pull[context.fit.pull]
  if context.quiet is not None:
    left_out = lax.platform_dependent(
      context.quiet, cpu=lambda quiet: quiet, default=jnp.zeros_like
    )
    sent = jnp.where(left_out, 0.0, sent)
  sparse = sent + jnp.sum(turned * np.array(chunks, np.float32))
  if context.remote_copies:
    rows = expected_bytes(scheme, plan, push_mean, pull_mean, context)
    sparse = jnp.minimum(sparse, rows)
  return sparse
