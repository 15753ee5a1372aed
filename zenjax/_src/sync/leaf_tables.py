"""Sparse leaves as tables, and the sizes with which they travel."""

from collections.abc import Sequence
import dataclasses
import warnings

import jax
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core.arguments import Capacity
from zenjax._src.core.wire import has_range_of
from zenjax._src.machine import cost
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import expected_bytes
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import DENSE
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.plans import require_mesh
from zenjax._src.sync.sync_options import Options
from zenjax.kernels import _dispatch


def plans(
  group: Sequence[tuple[str, jax.Array | SparseRows]],
  scheme: Scheme,
  options: Options,
  context: Context,
  column_groups: Sequence[int | None],
  owners: bool = False,
  fits: bool = False,
) -> tuple[buffer_sizes.TablePlan, ...]:
  """Returns static sizes for the sparse leaves of `group`, `(name, leaf)` each.

  `column_groups` holds for each leaf the number that a plan or `scheme="auto"`
  has chosen, or None where `partition` decides. Tables of one width and dtype
  travel as one. They do not where rows may wait for the next step, each leaf's
  in a residual of its own, nor where a kernel may run, which reads one table,
  nor with `owners`, who update what they own: no table of theirs takes the
  dense path. With `fits` first rounds may follow what earlier steps have
  needed.
  """
  tables = [table_of(name, leaf, options) for name, leaf in group]
  pinned = []
  for table in tables:
    given = options.capacities
    if isinstance(given, Capacity):  # Of all leaves; some have fewer rows.
      given = Capacity(*[min(c, table.num_rows) for c in given])
    elif isinstance(given, dict):
      given = given.get(table.name)
    if given is not None and given.pull > table.num_rows:
      raise ValueError(
        f"`capacities` must not exceed the {table.num_rows} rows of leaf"
        f" {table.name!r}, got {tuple(given)}; see `zenjax.report`."
      )
    pinned.append(given)
  sizes = context.sizes
  groups = []
  for table, wanted in zip(tables, column_groups):
    wanted = wanted or buffer_sizes.choose_column_groups(
      table, sizes[-1], options.partition
    )
    if sizes[-1] % wanted:
      raise ValueError(
        "`partition` as a number of column groups must divide the devices"
        f" along {context.axes[-1]!r}, got {wanted} for {sizes[-1]} devices."
      )
    groups.append(scheme.groups(sizes, wanted))
  sizing = _sizing(context)
  planned = buffer_sizes.plan_group(
    tables,
    row_groups=[m for m, _ in groups],
    column_groups=[g for _, g in groups],
    devices=context.devices,
    pinned=pinned,
    seed=options.tuning.hash_seed,
    contiguous=scheme.contiguous,
    sizing=sizing,
    kernels=options.tuning.kernels,
  )
  planned = tuple([scheme.fitted(plan) for plan in planned])
  # What does not fit would wait, and pins are for that; or it does not travel.
  if options.exact and not owners and not context.remote_copies:
    for plan, given in zip(planned, pinned):
      if given:
        by_leaf = isinstance(options.capacities, dict)
        _warn_above_break_even(given, plan, scheme, context, by_leaf)
  found = planned
  # Kernels that are asked for read tables one by one.
  together = not _dispatch.asked_for(options.tuning.kernels)
  if options.exact and together and not owners:
    found = buffer_sizes.stack(planned, devices=context.devices, sizing=sizing)
    found = [scheme.fitted(plan) if plan.members else plan for plan in found]
  if fits:
    # All tables send one part of their buffers: what arrays need, of which one
    # may be nearly full, would decide for rows.
    kinds = {plan.table.look_ups is None for plan in found}
    found = [
      plan
      if plan.table.look_ups is None and len(kinds) > 1
      else buffer_sizes.fitting(plan, context.devices)
      for plan in found
    ]
  return tuple(found)


def go_as_arrays(
  tables: Sequence[Table], options: Options, context: Context
) -> bool:
  """Returns True if SparseRows of these tables travel as arrays.

  They do where the list that comes out would have a place for each row, so that
  the array is no larger, and where it was measured: between processes on CPUs.
  The array has room for a vocabulary's rows, where rows have it for all
  look-ups, and it is summed whole where they are many.

  All of an exchange do, or none: beside rows that travel as rows arrays would
  share their buffers, and have no first round of a size of their own. What the
  user says of rows, by a scheme, a plan or sizes, is said of rows.
  """
  named = options.scheme != "zen" or options.plan or options.capacities
  if named or not options.exact or context.remote_copies:
    return False
  many = [
    table.look_ups is not None
    and table.look_ups * context.devices >= table.num_rows
    for table in tables
  ]
  return bool(many) and all(many) and compat.between_hosts()


def first_rounds_fit(
  scheme: Scheme, options: Options, context: Context
) -> bool:
  """True if first rounds are to be as large as steps have shown.

  A program that sends one of several sizes has its collectives in branches,
  where nothing else can run beside them. It pays where a further round costs
  milliseconds: between processes on CPUs.
  """
  one = len(context.axes) == 1 and not context.remote_copies
  return scheme.fits and options.exact and one and compat.between_hosts()


def _sizing(context: Context) -> buffer_sizes.Sizing:
  """Returns the sizes of chunks, and of first rounds that are not pinned."""
  if context.remote_copies:
    return buffer_sizes.UNPADDED
  if compat.for_cpus() and not compat.between_hosts():
    return buffer_sizes.ONE_SIZE
  return buffer_sizes.TWO_SIZES


def _warn_above_break_even(
  given: Capacity,
  plan: buffer_sizes.TablePlan,
  scheme: Scheme,
  context: Context,
  by_leaf: bool,
) -> None:
  """Says which pinned first round pays in no step.

  By the formula that sends a step down the dense path, so that what
  `zenjax.advise` says passes. Silent where a guess would be as large, as for
  tables of a few rows: to pin nothing would be no remedy.
  """
  if plan.table.look_ups is not None:
    return  # SparseRows may be few of a small table.
  dense = dense_sum.received_bytes(plan.table, context.devices)

  def needed(size: Capacity) -> float:
    # The formulas serve traced numbers as well: these are none.
    with jax.ensure_compile_time_eval():
      push, pull = float(size.push), float(size.pull)
      return float(expected_bytes(scheme, plan, push, pull, context))

  guess = buffer_sizes.plan_table(
    plan.table,
    groups=plan.layout.groups,
    column_groups=plan.column_groups,
    devices=context.devices,
    pinned=None,
    seed=plan.layout.seed,
    first_word=plan.layout.first_word,
    contiguous=scheme.contiguous,
    sizing=_sizing(context),
  )
  first = needed(plan.first)
  if first <= max(dense * scheme.break_even, needed(guess.first)):
    return
  warnings.warn(
    f"`capacities` of leaf {plan.table.name!r} should keep the first round"
    f" below break-even, {scheme.break_even:.0%} of a dense exchange's bytes,"
    f" and {tuple(given)} make it {first / dense:.0%} with"
    f" scheme={scheme.name!r}: steps that need so much take the dense path on"
    " top of it, and all others send more than they need."
    f" {'Leave' if by_leaf else 'Give `capacities` by leaf, leave'} the leaf"
    " out, or pin what `zenjax.advise` says after steps with this scheme.",
    stacklevel=2,
  )


def table_of(
  name: str, leaf: jax.Array | SparseRows, options: Options
) -> buffer_sizes.Table:
  """A leaf's static facts; raises `ValueError` where it cannot travel."""
  if isinstance(leaf, SparseRows):
    _require_rows(name, options)
  unit = options.unit
  rows, width = leaf_util.table_shape(leaf, unit)
  if rows > buffer_sizes.MAX_ROWS:
    raise ValueError(
      f"Leaf {name!r} of shape {leaf.shape} has {rows} rows with"
      f" `unit={unit!r}`, more than the {buffer_sizes.MAX_ROWS} that int32"
      " slots count; choose a larger `unit`, split the leaf, or leave it out of"
      " `sparse`."
    )
  dtype = jnp.dtype(leaf.dtype)
  wire = options.wire_of(name) or dtype
  if wire.itemsize > dtype.itemsize:
    raise ValueError(
      f"`wire_dtype` must not be wider than the leaf, got {wire} for leaf"
      f" {name!r} of {dtype}; leave it out for that leaf's own dtype."
    )
  if not has_range_of(wire, dtype) and not (options.mean and unit == "element"):
    info = jnp.finfo(wire)
    raise ValueError(
      f"`wire_dtype` must have the range of the leaf, and {wire} holds nothing"
      f" beyond {float(info.max):g} or below"
      f" {float(info.smallest_subnormal):.1g}: such values of leaf {name!r} of"
      f" {dtype} would come out as Inf or zero; give jnp.bfloat16, or leave it"
      " out."
    )
  return buffer_sizes.Table(
    name=name,
    num_rows=rows,
    width=width,
    dtype=dtype,
    wire_dtype=wire,
    # None at all travel as one of padding: arrays of nothing help nobody.
    look_ups=max(1, leaf.capacity) if isinstance(leaf, SparseRows) else None,
  )


def _require_rows(name: str, options: Options) -> None:
  if options.unit != "row":
    raise ValueError(
      f"`unit` must be 'row' for SparseRows, which leaf {name!r} is, got"
      f" unit={options.unit!r} with scheme={options.scheme!r}; leave `unit`"
      " out, and take another scheme than 'block_sparse'."
    )
  if not options.exact:
    raise ValueError(
      "`on_overflow='carry'` keeps a residual of a table's size on each device,"
      f" which SparseRows are to spare, and leaf {name!r} is one; leave it out:"
      " rows that do not fit the first round follow in further rounds."
    )


# Which way every table takes: as asked, as planned, or as predicted here.
#
# `scheme="auto"` decides when it is traced.

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
    group: Leaves of one scheme and one such number share an exchange.
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
  scheme = options.scheme
  if _needs_no_owners(tables, options, context):
    scheme = "all_gather"
  choices = [Choice(scheme)] * len(tables)
  if scheme == "auto":
    choices = _predicted(tables, options, context)
  if not options.tuning.overlap:
    return choices
  return [dataclasses.replace(c, group=i) for i, c in enumerate(choices)]


def _needs_no_owners(
  tables: Sequence[Table], options: Options, context: Context
) -> bool:
  """Returns True for arrays of two devices, of which nothing names owners.

  Of `k` rows each, owners push `k / 2` and pull half of the union, which is no
  less than the `k` of an all-gather. Pins say what owners send, and so what
  waits.
  """
  asked = options.scheme != "zen" or options.partition != "auto"
  asked |= bool(options.capacities) or context.remote_copies
  if asked or not options.exact or context.devices != 2:
    return False
  return all([table.look_ups is None for table in tables])


def _predicted(
  tables: Sequence[Table], options: Options, context: Context
) -> list[Choice]:
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
  sparse = listed or options.output == "rows" or not options.exact
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
