"""Runs an optimizer at the owners of rows, on gradients that they have summed.

An owner holds the optimizer's state of its own rows only, `[S, D]` for a table
`[R, D]`. This is ZeRO, with the owners that sum the gradients anyway. The
optimizer sees each of these tables as a `ShardedTable`, so its state has them
too.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.rows import touched_rows
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.rows.touched_rows import FEWEST
from zenjax._src.rows.touched_rows import Touched
from zenjax._src.schemes.base import Sums
from zenjax._src.tables.sharded_table import ShardedTable


class Listed(NamedTuple):
  """Some rows of an owner's part of a table, followed by padding."""

  slots: jax.Array  # [k] int32, S as padding
  rows: jax.Array  # [k, D]

  @classmethod
  def empty(cls, room: int, table: ShardedTable) -> "Listed":
    """Returns a list without rows, with room for `room` rows of a table."""
    slots = jnp.full(room, table.layout.slots, jnp.int32)
    return cls(slots, jnp.zeros((room, *table.value.shape[1:]), table.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
  """One step of an optimizer on the rows that pushes bring.

  Attributes:
    analysis: How the optimizer updates whole tables.
    structure: The tree of parameters and gradients as the optimizer sees it.
    tables: The tables that have owners, by the leaf's number; their values are
      types `[S, D]`.
    grads: Leaves: anything for tables, the mean over devices for all others.
    params: Leaves: `[S, D]` for sharded tables; None if the caller gave none.
    extra: Further arguments of the optimizer's `update`.
    axis: The axis along which owners are.
    scaled: Returns the mean of a sum, or the sum.
    sharded: Numbers of the leaves of which a device has only its own rows.
    clip_norm: The largest norm of all gradients; None for no limit.
    norm: The norm of all gradients, once it is known.
  """

  analysis: RowAnalysis
  structure: Any
  tables: dict[int, ShardedTable]
  grads: Sequence[Any]
  params: Sequence[Any] | None
  extra: dict[str, Any]
  axis: str
  scaled: Callable[[jax.Array], jax.Array]
  sharded: frozenset[int] = frozenset()
  clip_norm: float | None = None
  norm: jax.Array | None = None

  @property
  def no_squares(self) -> jax.Array:
    """Zero, the sum of squares before the first row."""
    return compat.cast_like(jnp.zeros(()), lax.axis_index(self.axis))

  def add_squares(
    self, sums: list[Sums], squares: jax.Array
  ) -> tuple[list[Sums], jax.Array]:
    """Adds the squares of the rows that a push brought."""
    rows = [self.scaled(x.union.rows) for x in sums]
    return sums, squares + sum(map(_squares, rows))

  def agreed(self, squares: jax.Array) -> "Owner":
    """Returns the owner with the norm of all gradients.

    All owners add in the same order, so that they have the same bits.
    """
    total = jnp.sum(collectives.all_gather(squares, (self.axis,)))
    for i, x in enumerate(self.grads):
      if i not in self.tables:
        total += _squares(x.values if is_rows(x) else x)
    return dataclasses.replace(self, norm=jnp.sqrt(total))

  def _clipped(self, x: jax.Array) -> jax.Array:
    if self.norm is None or self.clip_norm is None:
      return x
    small = self.norm < self.clip_norm
    return jnp.where(small, x, x / self.norm.astype(x.dtype) * self.clip_norm)

  def __call__(self, sums: list[Sums], state: Any) -> tuple[list[Sums], Any]:
    """Returns updates in place of sums, and the state after a step on them.

    Every round calls it, so only rows of the state change here. `finish` makes
    everything else once, for example step counts.
    """
    at, grads = {}, {}
    for (i, table), held in zip(self.tables.items(), sums):
      end, slots, rows = table.layout.slots, held.union.slots, held.union.rows
      if len(slots) < FEWEST:
        missing = FEWEST - len(slots)
        slots = jnp.pad(slots, (0, missing), constant_values=end)
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
      at[i] = Touched.of(slots, end)
      grads[i] = self._clipped(self.scaled(rows)).astype(table.dtype)
    for i, x in self._small.items():
      at[i] = _nowhere(x.num_rows)
      grads[i] = jnp.zeros((FEWEST, x.shape[1]), x.dtype)
    out, few, places = self._step(state, grads, at)
    state = touched_rows.put(state, few, places, rows_only=True)
    updates = []
    for (i, table), held in zip(self.tables.items(), sums):
      slots, rows = held.union.slots, held.union.rows
      real = (slots < table.layout.slots)[:, None]
      new = jnp.where(real, out[i][: len(slots)].astype(rows.dtype), 0)
      updates.append(held._replace(union=held.union._replace(rows=new)))
    return updates, state

  def keeping(
    self, sums: list[Sums], kept: tuple[Any, list[Listed]]
  ) -> tuple[list[Sums], tuple[Any, list[Listed]]]:
    """Appends the updates to lists, for sums that are not pulled.

    Returns the sums unchanged, so that their counts need not wait for the step.
    """
    state, lists = kept
    updates, state = self(sums, state)
    lists = [
      _appended(listed, update, table.layout.slots)
      for listed, update, table in zip(lists, updates, self.tables.values())
    ]
    return sums, (state, lists)

  def finish(self, state: Any) -> tuple[list[Any], Any]:
    """Returns updates of leaves without owners, and the state after them.

    Row gradients of small tables, which every device has, update rows too. So
    lookups decide which rows are updated, and the size of a table does not.
    """
    at, grads = {}, {}
    for i, table in self.tables.items():
      at[i] = _nowhere(table.layout.slots)
      grads[i] = jnp.zeros((FEWEST, *table.value.shape[1:]), table.dtype)
    for i, x in self._small.items():
      x = touched_rows.distinct(x, FEWEST)
      at[i] = Touched.of(x.indices, x.num_rows)
      grads[i] = self._clipped(x.values)
    out, few, places = self._step(state, grads, at)
    for i, x in self._small.items():
      out[i] = at[i].put(jnp.zeros(x.shape, out[i].dtype), out[i])
    return out, touched_rows.put(state, few, places)

  @property
  def _small(self) -> dict[int, SparseRows]:
    """Row gradients of tables without owners, by the leaf's number."""
    leaves = enumerate(self.grads)
    return {i: x for i, x in leaves if is_rows(x) and i not in self.tables}

  def _step(self, state, grads, at):
    grads = [
      grads[i] if i in grads else self._clipped(x)
      for i, x in enumerate(self.grads)
    ]
    params = self.params and [
      self._rows_of(i, x, at[i]) if i in at else x
      for i, x in enumerate(self.params)
    ]
    return touched_rows.step(
      self.analysis, self.structure, grads, params, state, at, self.extra
    )

  def _rows_of(self, i, table, at):
    if i in self.sharded or i not in self.tables:
      return at.take(table)
    return own_rows(table, at.ids, self.tables[i])


def _squares(x: jax.Array) -> jax.Array:
  return jnp.sum(jnp.square(x.astype(collectives.accumulator(x.dtype))))


def _appended(listed: Listed, update: Sums, end: int) -> Listed:
  """Returns a list with the rows of an update, which come before padding."""
  slots, rows = update.union.slots, update.union.rows
  used = jnp.sum(listed.slots < end, dtype=jnp.int32)
  index = used + jnp.arange(len(slots), dtype=jnp.int32)
  # Padding gets an index past the end, and is dropped.
  index = jnp.where(slots < end, index, len(listed.slots) + index)
  return Listed(
    slots=indexing.put(listed.slots, index, slots),
    rows=indexing.put(listed.rows, index, rows.astype(listed.rows.dtype)),
  )


def _nowhere(num_rows: int) -> Touched:
  """Returns padding only."""
  return Touched.of(jnp.full(FEWEST, num_rows, jnp.int32), num_rows)


def own_rows(
  table: jax.Array, slots: jax.Array, sharded: ShardedTable
) -> jax.Array:
  """Returns this owner's rows at `slots: [k]`, and zeros for padding."""
  row = sharded.layout.row(lax.axis_index(sharded.axes), slots)
  return indexing.take_or(table, row, 0)
