"""Plans how sparse leaves are exchanged, and with which buffers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.core import row_wire
from zenjax._src.core.arguments import Capacity
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
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
  table: Table,
  options: Options,
  tuned: Mapping[str, LeafChoice],
  context: Context,
) -> Choice:
  """Chooses how a sparse leaf is exchanged.

  A plan decides the scheme, and the first sizes, which `zenjax.tune` may
  change. Without one, your arguments decide, and `tune` decides what they leave
  open: sizes, and the scheme if it is the default.
  """
  tuned_leaf = tuned.get(table.name, LeafChoice(options.scheme))
  if options.plan:
    require_mesh(options.plan, tuple(zip(context.axes, context.sizes)))
    leaf = options.plan.by_name[table.name]
    sizes = Capacity(*leaf.capacities) if leaf.capacities else None
    if tuned_leaf.scheme == leaf.scheme:
      sizes = tuned_leaf.capacities or sizes
    choice = Choice(leaf.scheme, leaf.column_groups, sizes, leaf.group)
  else:
    sizes = options.capacities
    if isinstance(sizes, dict):
      sizes = sizes.get(table.name)
    elif sizes is not None:  # They are for all leaves, also for small ones.
      sizes = Capacity(*[min(size, table.num_rows) for size in sizes])
    named: dict[Any, int] = {"hash": 1, "columns": context.sizes[-1]}
    scheme = tuned_leaf.scheme if options.scheme == "zen" else options.scheme
    if tuned_leaf.scheme == scheme:
      sizes = sizes or tuned_leaf.capacities
    choice = Choice(
      scheme=scheme,
      column_groups=named.get(options.partition) or int(options.partition),
      capacities=sizes,
    )
  if choice.scheme == DENSE:  # It has neither buffers nor owners.
    return choice
  if choice.capacities and choice.capacities.pull > table.num_rows:
    raise ValueError(
      f"`capacities` of leaf {table.name!r} are {tuple(choice.capacities)}, but"
      f" it has {table.num_rows} rows. Give at most that many."
    )
  if context.sizes[-1] % choice.column_groups:
    raise ValueError(
      f"`partition` is {choice.column_groups} column groups, which does not"
      f" divide the {context.sizes[-1]} devices along {context.axes[-1]!r}."
      " Give a divisor, or 'hash'."
    )
  scheme = SPARSE[choice.scheme]
  _, groups = scheme.groups(context.sizes, choice.column_groups)
  sent = table.row_wire(groups)
  if sent.scaled and sent.nbytes >= sent.columns * table.dtype.itemsize:
    raise ValueError(
      f"`wire_dtype` {sent.dtype} needs a scale of 4 bytes for each column"
      f" group of a row. Leaf {table.name!r} has {groups} groups"
      f" of {sent.columns} columns, which makes them no shorter. Give"
      " partition='hash', or leave `wire_dtype` out."
    )
  return choice


def plans(
  tables: Sequence[Table],
  choices: Sequence[Choice],
  scheme: Scheme,
  options: Options,
  context: Context,
  *,
  owners: bool = False,
) -> list[ExchangePlan]:
  """Plans the tables of leaves that share an exchange.

  SparseRows, and small arrays, of one width and dtype are joined to one table,
  whose exchange is compiled once. With `owners`, who keep the optimizer's state
  of each leaf, and for Pallas kernels, every leaf has a table of its own.
  """
  joins = not (owners or scheme.contiguous or options.kernels == "pallas")
  groups: dict[object, list[int]] = {}
  for i, (table, choice) in enumerate(zip(tables, choices)):
    is_list = table.look_ups is not None
    is_small = table.num_rows * table.width <= buffer_sizes.JOINED_ELEMENTS
    key: object = i
    if joins and (is_list or is_small):
      kind = is_list, table.width, table.dtype, table.wire_dtype
      key = kind, choice.column_groups
    members = groups.setdefault(key, [])
    rows = sum([tables[j].num_rows for j in members])
    if members and rows + table.num_rows > buffer_sizes.MAX_ROWS:
      members = groups.setdefault(i, [])
    members.append(i)
  planned: list[ExchangePlan] = []
  hash_offset = 0
  for members in groups.values():
    sizes = [choices[i].capacities for i in members]
    if scheme.dense_push:
      whole = [tables[i].num_rows for i in members]
      sizes = [x or Capacity(rows, rows) for x, rows in zip(sizes, whole)]
    row_groups, column_groups = scheme.groups(
      context.sizes, choices[members[0]].column_groups
    )
    plan = buffer_sizes.plan_table(
      [tables[i] for i in members],
      groups=row_groups,
      column_groups=column_groups,
      devices=context.devices,
      sizes=sizes,
      seed=options.hash_seed,
      hash_offset=hash_offset,
      contiguous=scheme.contiguous,
      kernels=options.kernels,
    )
    planned.append(plan)
    hash_offset += plan.layout.words
  return planned


def table_of(
  name: str, leaf: jax.Array | SparseRows, options: Options
) -> Table:
  """Returns a leaf's static facts; raises `ValueError` if it cannot be sent."""
  unit = options.unit
  if isinstance(leaf, SparseRows) and unit != "row":
    raise ValueError(
      f"`unit` must be 'row' for SparseRows, got {unit=} with"
      f" scheme={options.scheme!r} for leaf {name!r}. Leave `unit` out, and"
      " take another scheme than 'block_sparse'."
    )
  rows, width = leaf_util.table_shape(leaf, unit)
  buffer_sizes.require_rows(f"{name!r} with {unit=}", rows)
  dtype, wire_dtype = jnp.dtype(leaf.dtype), options.wire_dtype
  if isinstance(wire_dtype, dict):
    wire_dtype = wire_dtype.get(name)
  wire_dtype = wire_dtype or dtype
  row_wire.require(name, dtype, wire_dtype, width)
  return Table(
    name=name,
    num_rows=rows,
    width=width,
    dtype=dtype,
    wire_dtype=wire_dtype,
    # Without any lookup one row of padding is sent.
    look_ups=max(1, leaf.capacity) if isinstance(leaf, SparseRows) else None,
  )
