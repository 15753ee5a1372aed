"""Sparse leaves as tables: how each is exchanged, and with which buffers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.core.arguments import Capacity
from zenjax._src.core.wire import has_range_of
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.plans import require_mesh
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_state import LeafChoice


class Choice(NamedTuple):
  """How one leaf is exchanged: with others of its `scheme` and `group`."""

  scheme: str
  column_groups: int
  capacities: Capacity | None = None
  group: int = 0


def choose(
  tables: Sequence[Table],
  options: Options,
  tuned: Mapping[str, LeafChoice],
  context: Context,
) -> list[Choice]:
  """Returns a choice for each sparse leaf, from the plan or from `tune`.

  Arguments of the user take precedence over `tune`.
  """
  if options.plan:
    return _as_planned(tables, options.plan, context)
  found = []
  for table in tables:
    known = tuned.get(table.name, LeafChoice(options.scheme))
    sizes = options.capacities
    if isinstance(sizes, dict):
      sizes = sizes.get(table.name)
    elif sizes is not None:  # For all leaves, of which some have fewer rows.
      sizes = Capacity(*[min(size, table.num_rows) for size in sizes])
    sizes = sizes or known.capacities
    groups = buffer_sizes.column_groups_of(options.partition, context.sizes[-1])
    scheme = known.scheme if options.scheme == "zen" else options.scheme
    found.append(Choice(scheme, groups, sizes))
  return found


def _as_planned(
  tables: Sequence[Table], plan: Plan, context: Context
) -> list[Choice]:
  require_mesh(plan, tuple(zip(context.axes, context.sizes)))
  found = []
  for table in tables:
    leaf = plan.by_name[table.name]
    sizes = Capacity(*leaf.capacities) if leaf.capacities else None
    found.append(Choice(leaf.scheme, leaf.column_groups, sizes, leaf.group))
  return found


def plans(
  tables: Sequence[Table],
  choices: Sequence[Choice],
  scheme: Scheme,
  options: Options,
  context: Context,
  *,
  owners: bool = False,
) -> tuple[buffer_sizes.TablePlan, ...]:
  """Returns the plans of leaves that share an exchange.

  Small arrays of the same kind are sent as one table, and so are SparseRows.
  With `owners` or kernels every leaf is a table of its own, because owners keep
  an optimizer's state by table, and kernels read tables one by one.
  """
  sizes = context.sizes
  groups = []
  for table, choice in zip(tables, choices):
    if choice.capacities and choice.capacities.pull > table.num_rows:
      raise ValueError(
        f"`capacities` must not exceed the {table.num_rows} rows of leaf"
        f" {table.name!r}, got {tuple(choice.capacities)}; see `zenjax.report`."
      )
    if sizes[-1] % choice.column_groups:
      raise ValueError(
        "`partition` as a number of column groups must divide the devices"
        f" along {context.axes[-1]!r}, got {choice.column_groups} for"
        f" {sizes[-1]} devices."
      )
    groups.append(scheme.groups(sizes, choice.column_groups))
  return buffer_sizes.plan_group(
    tables,
    row_groups=[m for m, _ in groups],
    column_groups=[g for _, g in groups],
    devices=context.devices,
    pinned=[choice.capacities for choice in choices],
    seed=options.hash_seed,
    contiguous=scheme.contiguous,
    kernels=options.kernels,
    together=not owners and options.kernels != "pallas",
  )


def table_of(
  name: str, leaf: jax.Array | SparseRows, options: Options
) -> Table:
  """Returns a leaf's static facts; raises `ValueError` if it cannot be sent."""
  if isinstance(leaf, SparseRows) and options.unit != "row":
    raise ValueError(
      f"`unit` must be 'row' for SparseRows, which leaf {name!r} is, got"
      f" unit={options.unit!r} with scheme={options.scheme!r}; leave `unit`"
      " out, and take another scheme than 'block_sparse'."
    )
  unit = options.unit
  rows, width = leaf_util.table_shape(leaf, unit)
  buffer_sizes.require_rows(f"{name!r} with `unit={unit!r}`", rows)
  return Table(
    name=name,
    num_rows=rows,
    width=width,
    dtype=jnp.dtype(leaf.dtype),
    wire_dtype=_wire_dtype(name, jnp.dtype(leaf.dtype), options),
    # Without any lookup one row of padding is sent.
    look_ups=max(1, leaf.capacity) if isinstance(leaf, SparseRows) else None,
  )


def _wire_dtype(name: str, dtype: jnp.dtype, options: Options) -> jnp.dtype:
  wire = options.wire_of(name) or dtype
  if wire.itemsize > dtype.itemsize:
    raise ValueError(
      f"`wire_dtype` must not be wider than the leaf, got {wire} for leaf"
      f" {name!r} of {dtype}; leave it out for that leaf's own dtype."
    )
  rounded_before = options.mean and options.unit == "element"
  if not has_range_of(wire, dtype) and not rounded_before:
    info = jnp.finfo(wire)
    raise ValueError(
      f"`wire_dtype` must have the range of the leaf, and {wire} holds nothing"
      f" beyond {float(info.max):g} or below"
      f" {float(info.smallest_subnormal):.1g}: such values of leaf {name!r} of"
      f" {dtype} would come out as Inf or zero; give jnp.bfloat16, or leave it"
      " out."
    )
  return wire
