"""Static sizes of an exchange, decided when it is traced.

Letters: `n` devices; `m` row groups and `g` column groups, whose product is
the devices along the fastest axis, and 1 where everyone holds all rows, as in
`all_gather`; `R` rows, `D` width, `S` slots of a group; `C` rows a source sends
a group in one round (push), `U` rows of one group's union (pull).
"""

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from zenjax._src.core import wire
from zenjax._src.core.arguments import Capacity
from zenjax._src.core.arguments import Kernels
from zenjax._src.core.arguments import Partition
from zenjax._src.core.partition import Layout

# Indices of `TablePlan.chunks`.
LARGE, SMALL = 0, 1
# Rows, padding and out-of-range markers must fit int32 together.
MAX_ROWS = np.iinfo(np.int32).max // 2
# The most tables of a stack. A row of stacked arrays is looked for in all of
# them: next to what reads the arrays it is little where rows are wide, and too
# much for single elements.
_MOST_MEMBERS = 32
_MEMBERS_A_COLUMN = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
  """Static facts of one leaf, seen as `[num_rows, width]`.

  Attributes:
    name: Of the leaf.
    num_rows: `R`.
    width: `D`.
    dtype: Of its elements.
    wire_dtype: In which they travel.
    look_ups: `K`, rows that a device holds of it at most: those of SparseRows.
      None for an array, which may hold all.
  """

  name: str
  num_rows: int
  width: int
  dtype: jnp.dtype
  wire_dtype: jnp.dtype
  look_ups: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
  """How one table travels.

  Attributes:
    table: What travels.
    layout: Its row groups.
    column_groups: `g`.
    most: Upper bounds: of rows from a device to a group, and from a group.
    first: Capacity of the first push and pull, which are unconditional; with a
      `guess` their room, of which a part is sent.
    pinned: Whether the user gave it.
    guess: Where the first push and pull send as much of their buffers as
      earlier steps have needed, how much that is before there were any; else
      None.
    chunks: Capacity of those in the loops: `LARGE` while much is left, then
      `SMALL`.
    rooms: Rows of each table that all devices together may hold: those of
      SparseRows. Empty for arrays.
    members: Of the tables that are stacked into this one, if it is of several.
    tables: The leaves that travel as this table, in the order of their slots.
    kernels: What its local work runs by: `kernels=` of its operations.
  """

  table: Table
  layout: Layout
  column_groups: int
  most: Capacity
  first: Capacity
  pinned: bool
  chunks: tuple[Capacity, Capacity]
  guess: Capacity | None = None
  rooms: tuple[int, ...] = ()
  members: tuple["TablePlan", ...] = ()
  tables: tuple[Table, ...]
  kernels: Kernels = "auto"

  @property
  def first_rows(self) -> list[int]:
    """The row of each of `members` that comes first in this table."""
    ends = itertools.accumulate(
      [plan.layout.slots * plan.layout.groups for plan in self.members],
      initial=0,
    )
    return list(ends)[:-1]

  @property
  def block_width(self) -> int:
    """`ceil(D / g)`, columns that one owner sums."""
    return -(-self.table.width // self.column_groups)


class _Size(NamedTuple):
  """How large a push or pull is that knows nothing of the density."""

  part: float  # of the rows that there may be, as a divisor
  least_bytes: int  # to one device: what takes no longer than less would


class Sizing(NamedTuple):
  """Sizes of a first round, of large and of small chunks: (push, pull) each."""

  arrays: Sequence[tuple[_Size, _Size]]
  rows: Sequence[tuple[_Size, _Size]]  # of SparseRows
  # Chunks' parts of a first round that the user gave, as divisors.
  pinned: Sequence[tuple[int, int]]


# Nothing is known of the density when a step is traced. The first round holds
# a local density of 1/128 of the table and a union of 1/64, which wastes
# little of a dense exchange's time where the gradient is empty. Large chunks
# keep turns few for gradients near break-even, small ones waste little at the
# end. Where these are messages so short that latency decides, they are longer.
# Rows of look-ups are at most so many, and text repeats its words: what is
# distinct is a quarter to a tenth. All that there may be is a mean over groups.
# A pinned pull is a low percentile of what is needed, so that small chunks
# follow at nearly every step.
TWO_SIZES = Sizing(
  arrays=(
    (_Size(128, 48 << 10), _Size(64, 48 << 10)),
    (_Size(48, 48 << 10), _Size(32, 128 << 10)),
    (_Size(192, 16 << 10), _Size(128, 32 << 10)),
  ),
  rows=(
    (_Size(4, 48 << 10), _Size(4, 48 << 10)),
    (_Size(8, 48 << 10), _Size(8, 128 << 10)),
    (_Size(32, 16 << 10), _Size(32, 32 << 10)),
  ),
  pinned=((1, 8), (8, 64)),
)
# Rounds of one size share kernels, see `compat.from_memory`. Within one process
# a turn more takes little.
ONE_SIZE = Sizing(
  arrays=((_Size(128, 48 << 10), _Size(128, 48 << 10)),) * 3,
  rows=((_Size(4, 48 << 10), _Size(4, 48 << 10)),) * 3,
  pinned=((1, 1), (1, 1)),
)
# Padding that does not travel costs memory and local work: a first round of a
# few times as many rows, and further ones no smaller. Not measured.
UNPADDED = Sizing(
  arrays=((_Size(32, 48 << 10), _Size(16, 48 << 10)),) * 3,
  rows=((_Size(2, 48 << 10), _Size(2, 48 << 10)),) * 3,
  pinned=((1, 1), (1, 1)),
)
_MOST_LONGER = 8
# With few slots a second size would cost more to compile than it saves.
_ONE_SIZE_UP_TO = 1024
_MIN_ROWS = 8


def plan_table(
  table: Table,
  *,
  groups: int,
  column_groups: int,
  devices: int,
  pinned: Capacity | None,
  seed: int,
  first_word: int,
  contiguous: bool = False,
  sizing: Sizing = TWO_SIZES,
  kernels: Kernels = "auto",
  members: Sequence[TablePlan] = (),
) -> TablePlan:
  """Sizes for one table; `pinned` is what the user gave in `capacities=`."""
  layout = Layout(
    num_rows=table.num_rows,
    groups=groups,
    seed=seed,
    first_word=first_word,
    contiguous=contiguous,
  )
  # Rows that one device may hold, and all together.
  held = [table.num_rows] * 2
  rooms = ()
  if table.look_ups is not None:
    held = [table.look_ups, devices * table.look_ups]
    rooms = (min(table.num_rows, devices * table.look_ups),)
  most = Capacity(*[min(table.num_rows, layout.slots, x) for x in held])
  if members:
    most = Capacity(*[sum(c) for c in zip(*[plan.most for plan in members])])
    rooms = sum([plan.rooms for plan in members], ())
  if pinned:
    first = Capacity(*[min(c, m) for c, m in zip(pinned, most)])
    chunks = [
      Capacity(*[-(-size // part) for size, part in zip(first, parts)])
      for parts in sizing.pinned
    ]
  else:
    block = -(-table.width // column_groups) * table.wire_dtype.itemsize
    # Rows of a group of which sizes are parts.
    sizes, push_of, pull_of = sizing.arrays, layout.slots, layout.slots
    if table.look_ups is not None:
      sizes = sizing.rows
      union = table.look_ups * devices**GROWTH
      push_of = table.look_ups / groups
      pull_of = min(union / groups, layout.slots)
    first, *chunks = [
      Capacity(
        _unpinned(push, push_of, block + 4),
        _unpinned(pull, pull_of, block),
      )
      for push, pull in sizes
    ]
  # At least a few rows, which cost nothing, and no more than there may be.
  clipped = [
    Capacity(*[min(max(c, _MIN_ROWS), m) for c, m in zip(capacity, most)])
    for capacity in (first, *chunks)
  ]
  large, small = clipped[1:]
  if max(most) <= _ONE_SIZE_UP_TO:
    small = large
  return TablePlan(
    table=table,
    layout=layout,
    column_groups=column_groups,
    most=most,
    first=first if pinned else clipped[0],
    pinned=pinned is not None,
    chunks=(large, small),
    rooms=rooms,
    members=tuple(members),
    tables=tuple([plan.table for plan in members]) or (table,),
    kernels=kernels,
  )


# First rounds that follow what was seen have room for all look-ups, as a hash
# spreads them, and send the part that earlier steps needed. With room for half
# of them batches of more distinct rows took longer than with a guess. Room is
# local work, used or not: arrays, whose rows may be any number, took 1.15 times
# as long with four times the room of a guess, between four hosts: they have
# room for a little more than a vocabulary's rows. Where room is less than so
# many bytes to one device a smaller part takes no less time. Slices of rows are
# whole words.
_MORE = 1.25, 1.1  # Of a device, and of the union.
_LEAST_GAIN = 1.25  # Of room over a guess, for arrays: parts take compiling.
_LEAST_BYTES = 16 << 10
_SLICED = 4 * wire.SLICES


def fitting(plan: TablePlan, devices: int) -> TablePlan:
  """`plan` with a first round that follows what was seen, if that may pay."""
  table, groups = plan.table, plan.layout.groups
  if plan.pinned or min(plan.most) < 2 * _SLICED:
    return plan
  if any([size >= most for size, most in zip(plan.first, plan.most)]):
    return plan
  if table.look_ups is None:
    rows, union = assumed_rows(table, devices)
    rows, union = rows * _MORE[0], union * _MORE[1]
  else:
    rows = table.look_ups
    union = min(table.look_ups * devices**GROWTH, table.num_rows)
  room = [
    max(fullest(rows, groups, devices * groups), plan.first.push),
    max(fullest(union, groups, groups), plan.first.pull),
  ]
  if min(room) * plan.block_width * table.wire_dtype.itemsize < _LEAST_BYTES:
    return plan
  gains = [more > _LEAST_GAIN * size for more, size in zip(room, plan.first)]
  if table.look_ups is None and not any(gains):
    return plan
  room = [min(rows, most) for rows, most in zip(room, plan.most)]
  room = Capacity(*[math.ceil(rows / _SLICED) * _SLICED for rows in room])
  return dataclasses.replace(plan, first=room, guess=plan.first)


def _unpinned(size: _Size, of: float, row_bytes: int) -> int:
  rows = math.ceil(of / size.part)
  return max(rows, min(size.least_bytes // row_bytes, rows * _MOST_LONGER))


def choose_column_groups(
  table: Table, devices: int, partition: Partition
) -> int:
  """`g` for a table: a divisor of `devices`.

  `"auto"` takes the fewest bytes by the formula below, for the densities of
  a vocabulary.
  """
  if partition == "hash":
    return 1
  if partition == "columns":
    return devices
  if partition != "auto":
    return int(partition)
  if table.dtype.itemsize > 4:
    # Owners of float64 are those of float32, whose state `zenjax.check_step`
    # widens.
    narrow = jnp.dtype(jnp.float32)
    table = dataclasses.replace(table, dtype=narrow, wire_dtype=narrow)
  # Blocks of a few bytes cost more in local work than balance saves.
  row = table.width * table.dtype.itemsize
  divisors = [
    g
    for g in range(1, devices + 1)
    if devices % g == 0 and (g == 1 or row >= g * _MIN_BLOCK_BYTES)
  ]
  costs = [assumed_bytes(table, devices, g) for g in divisors]
  return divisors[costs.index(min(costs))]


# What is assumed of gradients of which nothing is known: a vocabulary's density
# and how the union of devices grows; of look-ups, how many are of other rows.
_DENSITY = 0.01
_DISTINCT = 0.25
GROWTH = 0.75
_MIN_BLOCK_BYTES = 64


def assumed_rows(table: Table, devices: int) -> tuple[float, float]:
  """Rows of a device, and of the union of all."""
  if table.look_ups is None:
    rows = table.num_rows * _DENSITY
  else:
    rows = min(table.look_ups * _DISTINCT, table.num_rows)
  return rows, min(rows * devices**GROWTH, table.num_rows)


def assumed_bytes(table: Table, devices: int, column_groups: int) -> float:
  """Bytes a device receives of `assumed_rows`, imbalance and padding included.

  A group's load of mean `k` exceeds it by about `sqrt(2 k ln(groups))` in the
  fullest one. The push carries an index to every column group, the pull one
  for each row, or none where every owner sees all ids (`m = 1`).
  """
  groups = devices // column_groups
  block = -(-table.width // column_groups) * table.wire_dtype.itemsize
  rows, union = assumed_rows(table, devices)
  pushed = fullest(rows, groups, devices * groups)
  pulled = fullest(union, groups, groups)
  index = 0 if groups == 1 else 4 / column_groups
  return (devices - 1) * (pushed * (block + 4) + pulled * (block + index))


def fullest(rows: float, groups: int, draws: int) -> float:
  """Rows of the fullest of so many groups that a hash fills."""
  mean = max(rows / groups, 1.0)
  return mean + math.sqrt(2 * mean * math.log(draws)) if groups > 1 else mean


def plan_group(
  tables: Sequence[Table],
  *,
  row_groups: Sequence[int],
  column_groups: Sequence[int],
  devices: int,
  pinned: Sequence[Capacity | None],
  seed: int,
  contiguous: bool = False,
  sizing: Sizing = TWO_SIZES,
  kernels: Kernels = "auto",
) -> tuple[TablePlan, ...]:
  """Plans for tables that share one exchange and one space of hashed ids."""
  plans: list[TablePlan] = []
  first_word = 0
  for table, m, g, sizes in zip(tables, row_groups, column_groups, pinned):
    plan = plan_table(
      table,
      groups=m,
      column_groups=g,
      devices=devices,
      pinned=sizes,
      seed=seed,
      first_word=first_word,
      contiguous=contiguous,
      sizing=sizing,
      kernels=kernels,
    )
    plans.append(plan)
    first_word += plan.layout.words
  return tuple(plans)


# Tables of one width and dtype, stacked into one of the sum of their rows.
#
# Each takes whole words of a group's slots, one after another. XLA compiles
# once for all of them.


def stack(
  plans: Sequence[TablePlan], *, devices: int, sizing: Sizing = TWO_SIZES
) -> tuple[TablePlan, ...]:
  """Plans of what travels in the place of these, tables alike as one."""
  alike: dict[Any, list[list[TablePlan]]] = {}
  for plan in plans:
    table, layout = plan.table, plan.layout
    kind = (
      table.look_ups is None,
      table.width,
      table.dtype,
      table.wire_dtype,
      plan.column_groups,
      layout.groups,
      plan.pinned,
      # Ranges of a stack would be other ranges.
      table.name if layout.contiguous else None,
    )
    parts = alike.setdefault(kind, [[]])
    slots = [p.layout.slots * p.layout.groups for p in (*parts[-1], plan)]
    most = _MOST_MEMBERS
    if table.look_ups is None:
      narrow = table.width == 1
      most = 1 if narrow else min(most, _MEMBERS_A_COLUMN * table.width)
    if sum(slots) > MAX_ROWS or len(slots) > most:
      parts.append([])
    parts[-1].append(plan)
  stacked: list[TablePlan] = []
  first_word = 0
  for members in [part for parts in alike.values() for part in parts if part]:
    layout = dataclasses.replace(members[0].layout, first_word=first_word)
    if len(members) == 1:
      plan = dataclasses.replace(members[0], layout=layout)
    else:
      plan = _stacked(members, layout, devices, sizing)
    stacked.append(plan)
    first_word += plan.layout.words
  return tuple(stacked)


def _stacked(
  members: Sequence[TablePlan], layout: Layout, devices: int, sizing: Sizing
) -> TablePlan:
  tables = [plan.table for plan in members]
  listed = [table.look_ups for table in tables if table.look_ups is not None]
  table = dataclasses.replace(
    tables[0],
    name=", ".join([table.name for table in tables]),
    num_rows=sum([p.layout.slots * p.layout.groups for p in members]),
    look_ups=sum(listed) if listed else None,
  )
  pinned = None
  if members[0].pinned:
    pinned = Capacity(*[sum(c) for c in zip(*[p.first for p in members])])
  return plan_table(
    table,
    groups=layout.groups,
    column_groups=members[0].column_groups,
    devices=devices,
    pinned=pinned,
    seed=layout.seed,
    first_word=layout.first_word,
    sizing=sizing,
    kernels=members[0].kernels,
    members=members,
  )
