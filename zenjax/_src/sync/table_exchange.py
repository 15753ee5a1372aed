"""One exchange of a group of tables: first round, loops, dense path.

The first push and pull have static sizes and stand outside any branch, so
that they may overlap with the backward pass. What did not fit follows in
loops. A table found to be above break-even density takes the dense path
instead, and may be remembered as dense.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core.sparse_rows import SparseRows
from zenjax._src.schemes import dense_path
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.buffer_sizes import LARGE
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.sync import further_rounds
from zenjax._src.sync import outcome
from zenjax._src.sync import table_sources
from zenjax._src.sync.further_rounds import Target
from zenjax._src.sync.table_sources import Carried
from zenjax._src.sync.table_sources import Listed
from zenjax._src.sync.table_sources import Masked
from zenjax._src.sync.table_sources import Whole


class Result(NamedTuple):
  """The outcome of one exchange; one entry a table in each list."""

  targets: list[Target]  # synced
  outcomes: list[outcome.Outcome]
  first: list[Arrived]  # what the first pull brought
  owned: Any = ()  # what owners keep
  owner: Any = None  # as it knows values of all rows


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
  """Synchronizes local tables over `context.axes`.

  Attributes:
    plans: Sizes for each table.
    scheme: How rows travel.
    context: Axes and operation.
    remembered: For each table, whether it travels dense from the start
      (`[] bool`, equal on all devices). None where there is no memory.
    exact: Whether rows that do not fit the first round follow in loops. If
      False they keep their local values in the tables that come back.
  """

  plans: Sequence[TablePlan]
  scheme: Scheme
  context: Context
  remembered: Sequence[jax.Array] | None = None
  exact: bool = True

  def begin(
    self,
    leaves: Sequence[jax.Array | SparseRows],
    *,
    carried: Sequence[Carried] | None = None,
    rows_only: bool = False,
  ) -> "Begun":
    """Sends the first push.

    Args:
      leaves: Local gradients: `[R, D]`, of which rows of zeros are not sent, or
        SparseRows.
      carried: For each table what waited until now, if rows may wait.
      rows_only: Whether only what arrives is used, and not the tables: these
        are then read and never written.
    """
    nothing = [None] * len(self.plans)
    columns = leaves, self.plans, self._known or nothing, carried or nothing
    with jax.named_scope("zenjax/mask"):
      entered = [_enter(*e, self.context, rows_only) for e in zip(*columns)]
    progress = [
      further_rounds.begin(e.target, plan)
      for e, plan in zip(entered, self.plans)
    ]
    outgoing = [
      Outgoing(e.source, p.start, e.probe) for e, p in zip(entered, progress)
    ]
    sizes = [plan.first.push for plan in self.plans]
    received = self.scheme.send(outgoing, self.plans, sizes, self.context)
    return Begun([e.source for e in entered], progress, received)

  def finish(
    self,
    begun: "Begun",
    *,
    after: jax.Array | None = None,
    owner: further_rounds.Owner | None = None,
    owned: Any = (),
  ) -> Result:
    """Sums what the first push brought, and does all the rest.

    Args:
      begun: What `begin` returned.
      after: Marks what that sum should wait for, see `schemes/transport.py`.
      owner: What owners make of the sums of each push before they are pulled.
        Tables then never take the dense path, where nobody owns anything.
      owned: What it keeps on a device from push to push.
    """
    plans, scheme, context = self.plans, self.scheme, self.context
    sizes = [plan.first.push for plan in plans]
    held = scheme.merge(begun.received, plans, sizes, context, after)
    surveys = jnp.zeros((), jnp.int32)
    if owner:
      with jax.named_scope("zenjax/survey"):
        owner, surveys = self._surveyed(begun, held, owner, owned)
      held, owned = owner(held, owned)
    sizes = [plan.first.pull for plan in plans]
    first = scheme.pull(held, [0] * len(plans), plans, sizes, context)
    may_sum = self.exact and owner is None
    dense = _verdicts(first, plans, scheme, context, self._known, may_sum)
    arrived = [_unless(*ap) for ap in zip(first, dense, plans)]
    progress = [
      further_rounds.advance(*pa)
      for pa in zip(begun.progress, arrived, sizes, plans)
    ]
    loops = context.in_loops()
    rounds = further_rounds.Rounds(begun.sources, plans, scheme, loops, owner)
    turns = rounds.no_turns()
    if self.exact:
      with jax.named_scope("zenjax/rounds"):
        progress, turns, owned = rounds.run(progress, held, dense, owned)
      with jax.named_scope("zenjax/dense"):
        progress = [_sum_where(*pd, context) for pd in zip(progress, dense)]
    turns = turns._replace(pushes=turns.pushes.at[LARGE].add(surveys))
    as_equal = lambda x: compat.as_invariant(x, context.axes)
    targets = [jax.tree.map(as_equal, p.target) for p in progress]
    outcomes = [
      outcome.outcome(*o, turns, scheme, context, self.exact)
      for o in zip(targets, progress, first, dense, plans)
    ]
    return Result(targets, outcomes, first, owned, owner)

  def _surveyed(self, begun, held, owner, owned):
    """The owner with reductions over all rows, and how many pushes it took."""
    loops = self.context.in_loops()
    rounds = further_rounds.Rounds(
      begun.sources, self.plans, self.scheme, loops
    )
    pushes = jnp.zeros((), jnp.int32)
    for level in range(owner.depth):
      add = functools.partial(owner.reduced, level, state=owned)
      parts = add(owner.nothing(level), held)
      parts, more = rounds.visit(begun.progress, held, add, parts)
      owner, pushes = owner.agreed(parts), pushes + more
    return owner, pushes

  @property
  def _known(self) -> Sequence[jax.Array] | None:
    return self.remembered if self.exact else None


class Begun(NamedTuple):
  """An exchange whose first push was sent; one entry a table in each list."""

  sources: list[Masked | Listed]
  progress: list[further_rounds.Progress]
  received: Any  # by `Scheme.send`


class _Entered(NamedTuple):
  """One table on its way in."""

  source: Masked | Listed
  target: Target
  probe: jax.Array  # [] int32, see `Outgoing`


def _enter(
  leaf: jax.Array | SparseRows,
  plan: TablePlan,
  remembered: jax.Array | None,
  carried: Carried | None,
  context: Context,
  rows_only: bool,
) -> _Entered:
  if isinstance(leaf, SparseRows):
    source, probe = table_sources.enter_rows(leaf, plan)
    return _Entered(source, table_sources.room(plan, context.devices), probe)
  source, probe = table_sources.enter_array(leaf, plan, remembered, carried)
  if rows_only:  # Nothing is written over the leaf.
    source = source._replace(table=leaf)
  return _Entered(source, Whole(source.table), probe)


def _verdicts(
  first: Sequence[Arrived],
  plans: Sequence[TablePlan],
  scheme: Scheme,
  context: Context,
  remembered: Sequence[jax.Array] | None,
  may_sum: bool,
) -> list[jax.Array | None]:
  """Which tables take the dense path this time, None where none can."""
  if not may_sum:
    return [None] * len(plans)
  verdicts: list[jax.Array | None] = []
  for i, (arrived, plan) in enumerate(zip(first, plans)):
    if plan.table.look_ups is not None:
      verdicts.append(None)  # There is no array to sum.
      continue
    dense = outcome.above_break_even(arrived.tally, plan, scheme, context)
    if remembered is not None:
      dense = dense | compat.as_invariant(remembered[i], context.axes)
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
  progress: further_rounds.Progress, wanted: jax.Array | None, context: Context
) -> further_rounds.Progress:
  if wanted is None or not isinstance(progress.target, Whole):
    return progress
  table = dense_path.reduce_where(progress.target.table, wanted, context)
  return progress._replace(target=Whole(table))
