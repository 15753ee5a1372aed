"""Runs an optimizer at the owners of rows, on gradients that they have summed.

An owner holds the optimizer's state of its rows and of no others, `[S, D]`
where a table is `[R, D]`: as in ZeRO, but by the owners that sum the gradients
anyway. To the optimizer each of these tables is a `ShardedTable`, and so its
state is.
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
  """Rows of an owner's part of a table, behind these padding."""

  slots: jax.Array  # [k] int32, S as padding
  rows: jax.Array  # [k, D]

  @classmethod
  def empty(cls, room: int, table: ShardedTable) -> "Listed":
    """A list of no rows of a table, whose value has the shape `[S, D]`."""
    slots = jnp.full(room, table.layout.slots, jnp.int32)
    return cls(slots, jnp.zeros((room, *table.value.shape[1:]), table.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
  """One step of `inner` on the rows that pushes bring.

  Attributes:
    analysis: Of the optimizer's update of whole tables.
    structure: Of parameters and gradients as the optimizer sees them.
    tables: Types of the tables that have owners, by the leaf's number; values
      are types `[S, D]`.
    grads: Leaves; of tables anything, of all others the mean over devices.
    params: Leaves, of sharded tables `[S, D]`; None if the caller gave none.
    extra: Further arguments of `inner.update`.
    axis: Along which owners lie.
    scaled: The mean of a sum, or the sum.
    sharded: Leaves of which a device has its own rows alone.
    clip_norm: Largest norm of all gradients; None for no limit.
    norm: Norm of all gradients, once it is known.
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
    """The sum of squares of no rows."""
    return compat.cast_like(jnp.zeros(()), lax.axis_index(self.axis))

  def add_squares(
    self, sums: list[Sums], squares: jax.Array
  ) -> tuple[list[Sums], jax.Array]:
    """Adds the squares of the rows that a push brought."""
    rows = [own.union.rows for own in sums]
    return sums, squares + sum([_squares(self.scaled(x)) for x in rows])

  def agreed(self, squares: jax.Array) -> "Owner":
    """Returns this with the norm of the gradients of all owners.

    Owners add in one order, so that all have the same bits.
    """
    total = jnp.sum(collectives.all_gather(squares, (self.axis,)))
    for i, x in enumerate(self.grads):
      if i not in self.tables:
        total += _squares(x.values if is_rows(x) else x)
    return dataclasses.replace(self, norm=jnp.sqrt(total))

  def _clipped(self, x: jax.Array) -> jax.Array:
    if self.norm is None or self.clip_norm is None:
      return x
    few = self.norm < self.clip_norm
    return jnp.where(few, x, x / self.norm.astype(x.dtype) * self.clip_norm)

  def __call__(self, held: list[Sums], state: Any) -> tuple[list[Sums], Any]:
    """Sums become updates; the state has a step of these rows more."""
    at, grads = {}, {}
    for (i, table), own in zip(self.tables.items(), held):
      end, slots, rows = table.layout.slots, own.union.slots, own.union.rows
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
    found = []
    for (i, table), own in zip(self.tables.items(), held):
      slots, rows = own.union.slots, own.union.rows
      real = (slots < table.layout.slots)[:, None]
      new = jnp.where(real, out[i][: len(slots)].astype(rows.dtype), 0)
      found.append(own._replace(union=own.union._replace(rows=new)))
    return found, state

  def keeping(
    self, held: list[Sums], kept: tuple[Any, list[Listed]]
  ) -> tuple[list[Sums], tuple[Any, list[Listed]]]:
    """Keeps the updates in lists, for sums that are not pulled.

    Returns the sums unchanged, so that their counts need not wait for the step.
    """
    state, lists = kept
    updated, state = self(held, state)
    each = zip(updated, lists, self.tables.values())
    lists = [_appended(own, to, table.layout.slots) for own, to, table in each]
    return held, (state, lists)

  def finish(self, state: Any) -> tuple[list[Any], Any]:
    """Updates of what has no owner, and the state with all but owners' rows.

    Row gradients of small tables, which every device has, are rows here too:
    which rows `inner` updates depends on lookups, not on sizes.
    """
    at, grads = {}, {}
    for i, table in self.tables.items():
      at[i] = _nowhere(table.layout.slots)
      grads[i] = jnp.zeros((FEWEST, *table.value.shape[1:]), table.dtype)
    for i, x in self._small.items():
      x = touched_rows.distinct(x, FEWEST)
      at[i], grads[i] = (
        Touched.of(x.indices, x.num_rows),
        self._clipped(x.values),
      )
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
  return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _appended(own: Sums, to: Listed, end: int) -> Listed:
  """Appends the real rows, which come first, to a list."""
  slots, rows = own.union.slots, own.union.rows
  used = jnp.sum(to.slots < end, dtype=jnp.int32)
  at = used + jnp.arange(len(slots), dtype=jnp.int32)
  # Padding comes past the end, and is dropped.
  at = jnp.where(slots < end, at, len(to.slots) + at)
  return Listed(
    slots=indexing.put(to.slots, at, slots),
    rows=indexing.put(to.rows, at, rows.astype(to.rows.dtype)),
  )


def _nowhere(num_rows: int) -> Touched:
  """Padding alone."""
  return Touched.of(jnp.full(FEWEST, num_rows, jnp.int32), num_rows)


def own_rows(table: jax.Array, slots: jax.Array, of: ShardedTable) -> jax.Array:
  """Returns this owner's rows at `slots: [k]`, zeros where there is none."""
  row = of.layout.row(lax.axis_index(of.axes), slots)
  return indexing.take_or(table, row, 0)
