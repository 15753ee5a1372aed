"""Which way every table takes: as asked, as planned, or as predicted here.

`scheme="auto"` decides when it is traced.
"""

from collections.abc import Sequence
import dataclasses

import jax

from zenjax._src.machine import cost
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import DENSE
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.plans import require_mesh
from zenjax._src.sync.sync_options import Options

# Where the user says nothing: 100 Gbit/s, as machines in a data centre have.
_LINK = Link(bandwidth=12.5e9, latency_s=10e-6)

# Predictions err: what is less than this part of the dense exchange's time is
# taken for a gain.
_WORTH = 0.8
# And what is within this of the fastest as fast. Each collective waits for the
# last device, which no formula here knows: the fewest are the safest.
_TIE = 1.05


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
  """How one table travels, and what else was considered.

  Attributes:
    scheme: Its name.
    column_groups: Of zen; None as `partition` says.
    group: Leaves of other numbers do not share its exchange.
    predictions: Of `scheme="auto"`, the fastest first; empty elsewhere.
  """

  scheme: str
  column_groups: int | None = None
  group: int = 0
  predictions: tuple[Prediction, ...] = ()


def choose(
  tables: Sequence[Table], options: Options, context: Context
) -> list[Choice]:
  """A choice for each of the sparse leaves.

  Raises:
    ValueError: `profile` names what is no sparse leaf.
  """
  if options.plan:
    return _as_planned(tables, options.plan, context)
  choices = _choose_each(tables, options, context)
  if not options.tuning.overlap:
    return choices
  return [dataclasses.replace(c, group=i) for i, c in enumerate(choices)]


def _choose_each(
  tables: Sequence[Table], options: Options, context: Context
) -> list[Choice]:
  if options.scheme != "auto":
    return [Choice(options.scheme)] * len(tables)
  profiles = options.tuning.profile or {}
  unknown = sorted(set(profiles) - {table.name for table in tables})
  if unknown:
    raise ValueError(
      f"`profile` must name leaves that travel sparse, got {unknown}; they are"
      f" {[table.name for table in tables]}: give what `zenjax.planner.profile`"
      " returned for a state of the same parameters."
    )
  return [
    _choose_one(table, profiles.get(table.name), options, context)
    for table in tables
  ]


def _choose_one(
  table: Table, profile: Profile | None, options: Options, context: Context
) -> Choice:
  profile = profile or cost.assumed(table, context.devices)
  # The schemes' formulas serve traced numbers as well: these are none.
  with jax.ensure_compile_time_eval():
    found = cost.choices(table, profile, context, options.tuning.link or _LINK)
  # Rows to come out, or to wait, need an exchange of rows.
  listed = table.look_ups is not None
  sparse = listed or options.rows_out or not options.exact
  fastest = next(p for p in found if not (sparse and p.scheme in DENSE))
  usual = buffer_sizes.choose_column_groups(table, context.sizes[-1], "auto")
  best = min(
    (
      p
      for p in found
      if p.scheme not in DENSE and p.seconds <= _TIE * fastest.seconds
    ),
    key=lambda p: (p.collectives, p.column_groups != usual, p.seconds),
    default=fastest,
  )
  dense = next(p for p in found if p.scheme in DENSE)
  if not sparse and best.seconds > _WORTH * dense.seconds:
    best = dense
  return Choice(best.scheme, best.column_groups, predictions=tuple(found))


def _as_planned(
  tables: Sequence[Table], plan: Plan, context: Context
) -> list[Choice]:
  require_mesh(plan, tuple(zip(context.axes, context.sizes)))
  leaves = [plan.by_name[table.name] for table in tables]
  return [
    Choice(leaf.scheme, leaf.column_groups, leaf.group) for leaf in leaves
  ]
