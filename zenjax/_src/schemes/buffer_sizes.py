"""Chooses the static sizes of an exchange when it is traced.

Letters: `n` devices; `m` row groups and `g` column groups, whose product is
the number of devices along the fastest axis, or 1 if all devices hold all rows,
as in `all_gather`; `R` rows, `D` columns, `S` slots of a group; `C` rows that a
source sends a group in one round (push), `U` rows of a group's union in one
round (pull).
"""

from collections.abc import Sequence
import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from zenjax._src.core.arguments import Capacity
from zenjax._src.core.arguments import Kernels
from zenjax._src.core.partition import Layout
from zenjax._src.core.row_wire import RowWire

# Rows, padding and out-of-range markers must fit int32 together.
MAX_ROWS = np.iinfo(np.int32).max // 2


def require_rows(name: str, rows: int) -> None:
  """Raises ValueError if a table has too many rows."""
  if rows > MAX_ROWS:
    raise ValueError(
      f"Tables must have fewer than 2**30 rows, but {name} has {rows}. Split it"
      " into several parameters."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
  """Static properties of one leaf as a table `[num_rows, width]`.

  Attributes:
    name: Name of the leaf.
    num_rows: `R`.
    width: `D`.
    dtype: Dtype of the elements.
    wire_dtype: Dtype in which rows are sent.
    look_ups: `K`, the most rows that a device holds, for SparseRows. None for
      an array, which may hold all rows.
  """

  name: str
  num_rows: int
  width: int
  dtype: jnp.dtype
  wire_dtype: jnp.dtype
  look_ups: int | None = None

  def row_wire(self, column_groups: int = 1) -> RowWire:
    """Returns how the part of a row for one column group is sent."""
    whole = RowWire.of(self.dtype, self.wire_dtype, self.width)
    columns = -(-self.width // column_groups)
    return dataclasses.replace(whole, columns=columns)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
  """The owners of the rows of one table, and the buffer sizes to exchange it.

  Leaves of one width and dtype share a plan if they are SparseRows or small
  arrays. Their rows are then concatenated to one table.

  Attributes:
    table: The table to exchange.
    layout: The row groups of the table.
    column_groups: `g`.
    row_wire: How the `ceil(D / g)` columns that one owner sums are sent.
    push: `C`, rows from one device to one row group in a round.
    pull: `U`, summed rows from one row group in a round.
    most_push: The most rows that a device may have for one row group.
    most_pull: The most rows that the union of a row group may have.
    tables: The leaves that are concatenated to this table, in order.
    rooms: For SparseRows, how many rows of each of `tables` all devices
      together may hold; empty for an array.
    kernels: Which implementation does local work: `kernels=` of `zen_sync`.
  """

  table: Table
  layout: Layout
  column_groups: int
  row_wire: RowWire
  push: int
  pull: int
  most_push: int
  most_pull: int
  tables: tuple[Table, ...]
  rooms: tuple[int, ...] = ()
  kernels: Kernels = "xla"

  @property
  def first_rows(self) -> np.ndarray:
    """The first row of each of `tables`, `[p] int32`."""
    heights = [table.num_rows for table in self.tables]
    return np.cumsum([0, *heights[:-1]]).astype(np.int32)


# Before `zenjax.tune` the density is unknown. For an array, a round then holds
# 1/128 of the rows, and a union of up to 1/16. With these sizes an empty
# gradient wastes little compared with a dense exchange, and a gradient near
# break-even takes few rounds. SparseRows have at most one row per lookup, and
# batches repeat ids, so a quarter is assumed to be distinct.
ARRAY_PART, UNION_PART = 128, 16
ROWS_PART = 4
# Arrays up to this size are copied into one table and back, because compiling
# once for all of them is worth more than these two passes.
JOINED_ELEMENTS = 1 << 20
# For fewer bytes to one device, latency dominates, so buffers are larger.
_LEAST_BYTES = 48 << 10
_MOST_LONGER = 8
_MIN_ROWS = 8
# The union of n devices has about n ** GROWTH times the rows of one.
GROWTH = 0.75


def plan_table(
  tables: Sequence[Table],
  *,
  groups: int,
  column_groups: int,
  devices: int,
  sizes: Sequence[Capacity | None],
  seed: int = 0,
  hash_offset: int = 0,
  contiguous: bool = False,
  kernels: Kernels = "xla",
) -> ExchangePlan:
  """Plans tables that are concatenated to one, or a single table.

  `sizes` has the buffer sizes of each table, from the user or `zenjax.tune`.
  Tables without sizes get their part of the default.
  """
  table = dataclasses.replace(
    tables[0],
    name=", ".join([table.name for table in tables]),
    num_rows=sum([table.num_rows for table in tables]),
    look_ups=sum([table.look_ups or 0 for table in tables]) or None,
  )
  layout = Layout(
    num_rows=table.num_rows,
    groups=groups,
    seed=seed,
    hash_offset=hash_offset,
    contiguous=contiguous,
  )
  most_push = most_pull = min(table.num_rows, layout.slots)
  rooms = ()
  if table.look_ups is not None:
    held = [(x.num_rows, x.look_ups or 0) for x in tables]
    rooms = tuple([min(rows, devices * ids) for rows, ids in held])
    most_push = min(most_push, table.look_ups)
    most_pull = min(most_pull, devices * table.look_ups)
  row_wire = table.row_wire(column_groups)
  default = _default_sizes(table, layout, row_wire, devices)
  weights = [x.look_ups or x.num_rows for x in tables]
  shares = np.array(weights)[:, None] / sum(weights) * default
  wanted = np.array([x or share for x, share in zip(sizes, shares)]).sum(0)
  most = most_push, most_pull
  push, pull = np.minimum(np.rint(wanted), most).astype(int).tolist()
  return ExchangePlan(
    table=table,
    layout=layout,
    column_groups=column_groups,
    row_wire=row_wire,
    push=push,
    pull=pull,
    most_push=most_push,
    most_pull=most_pull,
    tables=tuple(tables),
    rooms=rooms,
    kernels=kernels,
  )


def _default_sizes(
  table: Table, layout: Layout, row_wire: RowWire, devices: int
) -> Capacity:
  """Returns sizes for a table of which no step is known.

  Up to eight times the expected rows, while a message is shorter than 48 KiB.
  """
  row_bytes = row_wire.nbytes + 4
  if table.look_ups is None:
    push, most = layout.slots / ARRAY_PART, layout.slots / UNION_PART
  else:
    push, most = table.look_ups / layout.groups / ROWS_PART, layout.slots
  pull = min(push * devices**GROWTH, most)

  def at_least(rows: float) -> int:
    rows = math.ceil(rows)
    longer = min(_LEAST_BYTES // row_bytes, rows * _MOST_LONGER)
    return max(rows, longer, _MIN_ROWS)

  return Capacity(at_least(push), at_least(pull))


# The density of a vocabulary, which predictions assume without measurements.
_DENSITY = 0.01
_DISTINCT = 0.25


def assumed_rows(table: Table, devices: int) -> tuple[float, float]:
  """Returns the assumed rows of a device and of the union."""
  if table.look_ups is None:
    rows = table.num_rows * _DENSITY
  else:
    rows = min(table.look_ups * _DISTINCT, table.num_rows)
  return rows, min(rows * devices**GROWTH, table.num_rows)


def fullest(rows: float, groups: int, draws: int) -> float:
  """Returns the expected rows of the fullest group that a hash fills.

  Args:
    rows: Rows of all groups.
    groups: Number of groups.
    draws: Number of groups over which the maximum is taken.
  """
  mean = max(rows / groups, 1.0)
  return mean + math.sqrt(2 * mean * math.log(draws)) if groups > 1 else mean
