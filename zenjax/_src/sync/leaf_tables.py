"""Sparse leaves as tables, and the sizes with which they travel."""

from collections.abc import Sequence
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core import leaf_util
from zenjax._src.core.arguments import Capacity
from zenjax._src.core.sparse_rows import SparseRows
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes import dense_path
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import expected_bytes
from zenjax._src.schemes.base import Scheme
from zenjax._src.sync.sync_options import Options


def plans(
  group: Sequence[tuple[str, jax.Array | SparseRows]],
  scheme: Scheme,
  options: Options,
  context: Context,
  column_groups: Sequence[int | None],
) -> tuple[buffer_sizes.TablePlan, ...]:
  """Static sizes for the sparse leaves of `group`, `(name, leaf)` each.

  `column_groups` is given where it was chosen already.
  """
  tables = [table_of(name, leaf, options) for name, leaf in group]
  pinned = [_pinned(table, options) for table in tables]
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
  planned = buffer_sizes.plan_group(
    tables,
    row_groups=[m for m, _ in groups],
    column_groups=[g for _, g in groups],
    devices=context.devices,
    pinned=pinned,
    seed=options.tuning.hash_seed,
    contiguous=scheme.contiguous,
    padded=not context.remote_copies,
  )
  planned = tuple(scheme.fitted(plan) for plan in planned)
  # What does not fit would wait, and pins are for that; or it does not travel.
  if options.exact and not context.remote_copies:
    for plan, given in zip(planned, pinned):
      if given:
        by_leaf = isinstance(options.capacities, dict)
        _warn_above_break_even(given, plan, scheme, context, by_leaf)
  return planned


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
    return  # SparseRows take no dense path, and may be few of a small table.
  dense = dense_path.received_bytes(plan.table, context.devices)

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


# Rows, padding and out-of-range markers must fit int32 together.
_MAX_ROWS = np.iinfo(np.int32).max // 2


def table_of(
  name: str, leaf: jax.Array | SparseRows, options: Options
) -> buffer_sizes.Table:
  """A leaf's static facts; raises `ValueError` where it cannot travel."""
  if isinstance(leaf, SparseRows):
    _require_rows(name, options)
  unit = options.unit_of(name)
  if unit == "element" and options.rows_out:
    raise ValueError(
      "`output='rows'` returns rows of a leaf, and a sparsifier before zen_sync"
      f" selects elements of leaf {name!r}; leave `output` out, or give"
      " `unit='row'`, by which all of it is sent."
    )
  rows, width = leaf_util.table_shape(leaf, unit)
  if rows > _MAX_ROWS:
    raise ValueError(
      f"Leaf {name!r} of shape {leaf.shape} has {rows} rows with"
      f" `unit={unit!r}`, more than the {_MAX_ROWS} that int32 slots"
      " count; choose a larger `unit`, split the leaf, or leave it out of"
      " `sparse`."
    )
  dtype = jnp.dtype(leaf.dtype)
  wire = options.wire_of(name) or dtype
  if wire.itemsize > dtype.itemsize:
    raise ValueError(
      f"`wire_dtype` must not be wider than the leaf, got {wire} for leaf"
      f" {name!r} of {dtype}; leave it out for that leaf's own dtype."
    )
  if not arguments.has_range_of(wire, dtype) and not (
    options.mean and options.selected.get(name) == wire
  ):
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


def _pinned(table: buffer_sizes.Table, options: Options) -> Capacity | None:
  sizes = options.capacities
  if isinstance(sizes, Capacity):  # Of all leaves; some have fewer rows.
    return Capacity(*(min(c, table.num_rows) for c in sizes))
  if isinstance(sizes, dict):
    sizes = sizes.get(table.name)
  if sizes is not None and sizes.pull > table.num_rows:
    raise ValueError(
      f"`capacities` must not exceed the {table.num_rows} rows of leaf"
      f" {table.name!r}, got {tuple(sizes)}; see `zenjax.report`."
    )
  return sizes


def check_names(tables: Sequence[buffer_sizes.Table], options: Options) -> None:
  """Raises `ValueError` where `capacities` names what is none of these."""
  if isinstance(options.capacities, dict):
    known = [table.name for table in tables]
    unknown = sorted(set(options.capacities) - set(known))
    if unknown:
      raise ValueError(
        f"`capacities` must name leaves that travel sparse, got {unknown};"
        f" they are {known}."
      )
