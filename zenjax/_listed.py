"""SparseRows as they enter and leave an exchange.

Nothing here, or after it, has the size of the table: rows are sorted by the
place that they have in a layout, sent from that list, and what comes back is
appended to another, with room for as many as all devices together hold.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from zenjax._plan import TablePlan
from zenjax._rows._sparse_rows import SparseRows
from zenjax._schemes.base import Arrived


class Listed(NamedTuple):
  """Rows in the order of groups and slots, each once; see `base.Source`."""

  place: jax.Array  # [K] int32 ascending, group * S + slot; m * S past the last
  values: jax.Array  # [K, D]

  def rows_from(
    self, start: jax.Array, plan: TablePlan, capacity: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_slots = plan.layout.slots
    begin = jnp.arange(plan.layout.groups, dtype=jnp.int32) * num_slots
    first, end = self._before(begin + start), self._before(begin + num_slots)
    at = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
    there = at < end[:, None]
    at = jnp.where(there, at, self.place.shape[0])
    place = self.place.at[at].get(mode="fill", fill_value=0)
    slots = jnp.where(there, place - begin[:, None], num_slots)
    rows = self.values.at[at].get(mode="fill", fill_value=0)
    return slots, rows, end - first

  def after(self, target: "Appended") -> "Listed":
    """The same: sums are written elsewhere."""
    del target
    return self

  def _before(self, place: jax.Array) -> jax.Array:
    """Rows before each `place: [m] int32`: `[m] int32`."""
    earlier = self.place[None] < place[:, None]
    return jnp.sum(earlier, axis=1, dtype=jnp.int32)


class Appended(NamedTuple):
  """Rows that came back, in the order in which they came."""

  row: jax.Array  # [k] int32, R past the last one
  values: jax.Array  # [k, D], zero there
  total: jax.Array  # [] int32, how many there are

  def written(self, arrived: Arrived, plan: TablePlan) -> "Appended":
    """With sums behind those that came before."""
    real = arrived.row < plan.table.num_rows
    count = jnp.cumsum(real, dtype=jnp.int32)
    # Out of range and all different, so that no index stands twice.
    past = self.row.shape[0] + jnp.arange(real.shape[0], dtype=jnp.int32)
    at = jnp.where(real, self.total + count - 1, past)

    def put(x, new):
      return x.at[at].set(new, mode="drop", unique_indices=True)

    return Appended(
      row=put(self.row, arrived.row),
      values=put(self.values, arrived.values),
      total=self.total + count[-1],
    )

  def rows(self, num_rows: int) -> SparseRows:
    """All of them, of a table of so many rows."""
    return SparseRows(self.row, self.values, num_rows).as_unique()


def enter(rows: SparseRows, plan: TablePlan) -> tuple[Listed, jax.Array]:
  """What is sent of `rows`, duplicates added up, and a count of nothing."""
  layout = plan.layout
  if not rows.capacity:
    padding = jnp.pad(rows.indices, (0, 1), constant_values=rows.num_rows)
    zero = jnp.pad(rows.values, ((0, 1), (0, 0)))
    rows = SparseRows(padding, zero, rows.num_rows)
  ids = rows.indices
  # As everywhere in JAX, what is negative counts from the end.
  ids = jnp.where(ids < 0, ids + rows.num_rows, ids)
  real = (ids >= 0) & (ids < rows.num_rows)
  group, slot = layout.place(jnp.where(real, ids, 0))
  nowhere = layout.groups * layout.slots
  place = jnp.where(real, group * layout.slots + slot, nowhere)
  merged = SparseRows(place, rows.values, nowhere).combine()
  probe = jnp.zeros_like(place, shape=())
  return Listed(merged.indices, merged.values), probe


def room(plan: TablePlan, devices: int) -> Appended:
  """For all rows that any devices may send."""
  table = plan.table
  if table.look_ups is None:
    raise AssertionError("arrays are written over, not listed")
  size = min(table.num_rows, devices * table.look_ups)
  return Appended(
    row=jnp.full(size, table.num_rows, jnp.int32),
    values=jnp.zeros((size, table.width), table.dtype),
    total=jnp.zeros((), jnp.int32),
  )
