"""Runs an optimizer at the owners of rows, on gradients that they have summed.

An owner holds the optimizer's state of its rows and of no others, `[S, D]`
where a table is `[R, D]`: as in ZeRO, but by the owners that sum the gradients
anyway. To the optimizer each of these tables is a `ShardedTable`, and so its
state is.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.rows import sparse_rows
from zenjax._src.rows import touched_rows
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.rows.touched_rows import At
from zenjax._src.rows.touched_rows import FEWEST
from zenjax._src.schemes import base
from zenjax._src.tables.push import Counts
from zenjax._src.tables.push import Push
from zenjax._src.tables.push import Sums
from zenjax._src.tables.sharded_table import ShardedTable
from zenjax._src.tables.table_update import TableUpdate


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
  def depth(self) -> int:
    """How often owners must agree on a value of all rows before they step."""
    return int(self.clip_norm is not None)

  @property
  def no_squares(self) -> jax.Array:
    """The sum of squares of no rows."""
    return compat.cast_like(jnp.zeros(()), lax.axis_index(self.axis))

  def add_squares(
    self, sums: list[base.Sums], squares: jax.Array
  ) -> tuple[list[base.Sums], jax.Array]:
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

  def __call__(
    self, held: list[base.Sums], state: Any
  ) -> tuple[list[base.Sums], Any]:
    """Sums become updates; the state has a step of these rows more."""
    sums = [Sums(own.union.slots, own.union.rows) for own in held]
    rows, state = self.step(sums, state)
    found = []
    for (i, table), own in zip(self.tables.items(), held):
      real = (own.union.slots < table.layout.slots)[:, None]
      new = jnp.where(real, rows[i].astype(own.union.rows.dtype), 0)
      found.append(own._replace(union=own.union._replace(rows=new)))
    return found, state

  def step(
    self, sums: Sequence[Sums], state: Any
  ) -> tuple[dict[int, jax.Array], Any]:
    """Returns updates of rows, by the leaf's number, and the state."""
    at, grads = {}, {}
    for (i, table), (slots, rows) in zip(self.tables.items(), sums):
      end = table.layout.slots
      if len(slots) < FEWEST:
        missing = FEWEST - len(slots)
        slots = jnp.pad(slots, (0, missing), constant_values=end)
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
      at[i] = At.of(slots, end)
      grads[i] = self._clipped(self.scaled(rows)).astype(table.dtype)
    for i, x in self._small.items():
      at[i] = _nowhere(x.num_rows)
      grads[i] = jnp.zeros((FEWEST, x.shape[1]), x.dtype)
    out, few, places = self._step(state, grads, at)
    state = touched_rows.put(state, few, places, rows_only=True)
    each = zip(self.tables, sums)
    return {i: out[i][: len(slots)] for i, (slots, _) in each}, state

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
      x = sparse_rows.padded(sparse_rows.merged(x), FEWEST)
      at[i], grads[i] = At.of(x.indices, x.num_rows), self._clipped(x.values)
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

  def on_own_tables(
    self, push: Push, state: Any
  ) -> tuple[dict[int, TableUpdate], Any, list[Counts], jax.Array, "Owner"]:
    """Takes a step on sharded tables, in as many rounds as it takes.

    Returns:
      Updates by the leaf's number, the state, the counts of each table, the
      number of rounds, and this with what it knows of all gradients.
    """
    unsent = lambda counts: jnp.any(
      jnp.stack([x.start for x in counts]) < push.ends
    )

    def after(sums, counts):
      # A round changes nothing that it reads: XLA may not run it before.
      sums, starts = lax.optimization_barrier(
        (sums, jnp.stack([x.start for x in counts]))
      )
      del sums
      new, told = push.round(starts)
      union = [x.union + y.union for x, y in zip(counts, told)]
      return new, [x._replace(union=y) for x, y in zip(told, union)]

    with jax.named_scope("zenjax/push"):
      sums, counts = push.round(push.first)
    owner = self
    if self.depth:

      def add(flow):
        sums, counts, squares = flow
        sums, counts = after(sums, counts)
        return sums, counts, squares + self._squares_of(sums)

      squares = self._squares_of(sums)
      flow = sums, counts, squares
      *_, squares = lax.while_loop(lambda x: unsent(x[1]), add, flow)
      owner = self.agreed(squares)

    def turn(flow):
      _, sums, counts, state, lists, rounds = flow
      rows, state = owner.step(sums, state)
      each = zip(sums, rows.values(), lists)
      lists = [
        _written(x.slots, new, to, table.layout.slots)
        for (x, new, to), table in zip(each, owner.tables.values())
      ]
      left = unsent(counts)
      sums, counts = lax.cond(left, after, lambda *x: x, sums, counts)
      return left, sums, counts, state, lists, rounds + 1

    lists = []
    each = zip(self.tables.values(), push.most, push.tables)
    for table, most, part in each:
      end, like = table.layout.slots, part.value
      slots = compat.cast_like(jnp.full(most, end, jnp.int32), like)
      rows = jnp.zeros((most, *table.value.shape[1:]), table.dtype)
      lists.append((slots, compat.cast_like(rows, like)))
    flow = jnp.ones((), bool), sums, counts, state, lists, jnp.int32(0)
    with jax.named_scope("zenjax/owners"):
      flow = lax.while_loop(lambda flow: flow[0], turn, flow)
    *_, counts, state, lists, rounds = flow
    updates = {
      i: TableUpdate(slots, rows, table.layout.slots, table.axes)
      for (i, table), (slots, rows) in zip(self.tables.items(), lists)
    }
    return updates, state, counts, rounds, owner

  def _squares_of(self, sums: Sequence[Sums]) -> jax.Array:
    return sum([_squares(self.scaled(x.rows)) for x in sums], self.no_squares)


def _squares(x: jax.Array) -> jax.Array:
  return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _written(
  slots: jax.Array,
  rows: jax.Array,
  to: tuple[jax.Array, jax.Array],
  end: int,
) -> tuple[jax.Array, jax.Array]:
  """Appends rows at `slots: [k]`, the first of them real, to a list."""
  listed, before = to
  used = jnp.sum(listed < end, dtype=jnp.int32)
  real = slots < end
  at = used + jnp.arange(len(slots), dtype=jnp.int32)
  # Padding comes past the end, and is dropped.
  at = jnp.where(real, at, len(listed) + at)
  rows = rows.astype(before.dtype)
  return indexing.put(listed, at, slots), indexing.put(before, at, rows)


def _nowhere(num_rows: int) -> At:
  """Padding alone."""
  return At.of(jnp.full(FEWEST, num_rows, jnp.int32), num_rows)


def own_rows(table: jax.Array, slots: jax.Array, of: ShardedTable) -> jax.Array:
  """Returns this owner's rows at `slots: [k]`, zeros where there is none."""
  row = of.layout.row(lax.axis_index(of.axes), slots)
  return indexing.take_or(table, row, 0)
