"""Static sizes of an exchange, decided when it is traced.

Letters: `n` devices, `m` row groups times `g` column groups are `n`; `R`
rows, `D` width, `S` slots of a group; `C` rows a source sends a group in one
round (push), `U` rows of one group's union (pull).
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp

from zenjax._partition import Layout

Partition = Literal["auto", "hash", "columns"] | int


class Capacity(NamedTuple):
  """Rows that the buffers of one round hold."""

  push: int  # C
  pull: int  # U


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
  """Static facts of one leaf, seen as `[num_rows, width]`."""

  name: str
  num_rows: int
  width: int
  dtype: jnp.dtype
  wire_dtype: jnp.dtype

  @property
  def nbytes(self) -> int:
    return self.num_rows * self.width * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
  """How one table travels.

  Attributes:
    table: What travels.
    layout: Its row groups.
    column_groups: `g`.
    first: Capacity of the first round, which is unconditional.
    loops: Capacities of the loops that carry the rest, largest first.
  """

  table: Table
  layout: Layout
  column_groups: int
  first: Capacity
  loops: tuple[Capacity, ...]

  @property
  def block_width(self) -> int:
    """`ceil(D / g)`, columns that one owner sums."""
    return -(-self.table.width // self.column_groups)


# Nothing is known of the density when a step is traced. The first round holds
# a union of 1/64 and a local density of 1/256 of the table, which wastes
# little of a dense exchange's time where the gradient is empty; loops with a
# large and a small chunk carry the rest, the large one while it is mostly
# full. Pinned sizes get the first round they ask for and chunks of an eighth.
_FIRST_PULL = 64
_FIRST_PUSH = 256
_LARGE = 4
_SMALL = 4
_PINNED_CHUNK = 8
_MIN_ROWS = 8


def plan_table(
  table: Table,
  *,
  groups: int,
  column_groups: int,
  pinned: Capacity | None,
  seed: int,
  first_word: int,
) -> TablePlan:
  """Sizes for one table; `pinned` is what the user gave in `capacities=`."""
  layout = Layout(
    num_rows=table.num_rows, groups=groups, seed=seed, first_word=first_word
  )
  first = _clip(pinned, layout) if pinned else _guess(layout)
  if pinned:
    loops = [_scaled(first, 1, _PINNED_CHUNK)]
  else:
    loops = [_scaled(first, _LARGE, 1), _scaled(first, 1, _SMALL)]
  complete = first.push >= layout.slots and first.pull >= layout.slots
  return TablePlan(
    table=table,
    layout=layout,
    column_groups=column_groups,
    first=first,
    loops=() if complete else tuple(_clip(c, layout) for c in loops),
  )


def _guess(layout: Layout) -> Capacity:
  slots = layout.slots
  return _clip(
    Capacity(-(-slots // _FIRST_PUSH), -(-slots // _FIRST_PULL)), layout
  )


def _scaled(capacity: Capacity, times: int, over: int) -> Capacity:
  return Capacity(*(-(-c * times // over) for c in capacity))


def _clip(capacity: Capacity, layout: Layout) -> Capacity:
  low = 1 if capacity.pull < _MIN_ROWS else min(_MIN_ROWS, capacity.push)
  push = min(max(capacity.push, low), layout.slots)
  return Capacity(push, min(max(capacity.pull, push), layout.slots))


def choose_column_groups(
  table: Table, devices: int, partition: Partition
) -> int:
  """`g` for a table: a divisor of `devices`.

  `"auto"` takes the fewest bytes by the formula below, for the density that
  the first round is sized for.
  """
  if partition == "hash":
    return 1
  if partition == "columns":
    return devices
  if partition != "auto":
    return int(partition)
  divisors = [g for g in range(1, devices + 1) if devices % g == 0]
  return min(divisors, key=lambda g: expected_bytes(table, devices, g))


# Densities for which `auto` compares partitions: a vocabulary's.
_AUTO_DENSITY = 0.01
_AUTO_UNION = 0.04


def expected_bytes(table: Table, devices: int, column_groups: int) -> float:
  """Bytes a device receives, balls-in-bins imbalance and padding included.

  A group's load of mean `k` exceeds it by about `sqrt(2 k ln(groups))` in the
  fullest one. The push carries an index with every block of columns, the pull
  one for each row, or none where every owner sees all ids (`m = 1`).
  """
  groups = devices // column_groups
  block = -(-table.width // column_groups) * table.wire_dtype.itemsize
  pushed = _fullest(table.num_rows * _AUTO_DENSITY, groups, devices * groups)
  pulled = _fullest(table.num_rows * _AUTO_UNION, groups, groups)
  index = 0 if groups == 1 else 4 / column_groups
  return (devices - 1) * (pushed * (block + 4) + pulled * (block + index))


def _fullest(rows: float, groups: int, draws: int) -> float:
  mean = max(rows / groups, 1.0)
  return mean + math.sqrt(2 * mean * math.log(draws)) if groups > 1 else mean


def plan_group(
  tables: Sequence[Table],
  *,
  row_groups: Sequence[int],
  column_groups: Sequence[int],
  pinned: Sequence[Capacity | None],
  seed: int,
) -> tuple[TablePlan, ...]:
  """Plans for tables that share one exchange and one space of hashed ids."""
  plans: list[TablePlan] = []
  first_word = 0
  for table, m, g, sizes in zip(tables, row_groups, column_groups, pinned):
    plan = plan_table(
      table,
      groups=m,
      column_groups=g,
      pinned=sizes,
      seed=seed,
      first_word=first_word,
    )
    plans.append(plan)
    first_word += plan.layout.words
  return tuple(plans)
