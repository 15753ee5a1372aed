"""A step of an optimizer on rows, some of them at a time: for CPUs.

Rows come with room for as many as there may be. Chunks end where the real ones
do, and stay in the cache while all of an optimizer's passes go over them.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax._rows import _on_rows
from zenjax._rows import _trees
from zenjax._rows._row_program import RowProgram
from zenjax._rows._row_program import Totals
from zenjax._rows._sparse_rows import is_rows
from zenjax._rows._sparse_rows import SparseRows

# Of one array of a chunk: an optimizer holds a handful of them.
_BYTES = 1 << 17
_MIN_ROWS = 256


def worth_it(merged: Any) -> bool:
  """Whether some table has room for more rows than a chunk."""
  leaves = jax.tree.leaves(merged, is_leaf=is_rows)
  return any(is_rows(x) and x.capacity > 2 * _chunk(x) for x in leaves)


def _chunk(rows: SparseRows) -> int:
  row = max(1, rows.values.shape[1] * rows.dtype.itemsize)
  return min(rows.capacity, max(_MIN_ROWS, _BYTES // row))


def update(
  inner: optax.GradientTransformationExtraArgs,
  program: RowProgram,
  merged: Any,
  state: Any,
  params: Any,
  extra: dict[str, Any],
) -> tuple[Any, Any]:
  """As `_on_rows.update`, some rows at a time.

  Returns:
    The values of the updates, `[K, D]` in the place of SparseRows, and the
    state.
  """
  leaves, structure = jax.tree.flatten(merged, is_leaf=is_rows)
  tables = [i for i, x in enumerate(leaves) if is_rows(x)]
  trips = jnp.stack([_trips(leaves[i]) for i in tables]).max()
  first = structure.flatten_up_to(_trees.values(merged))

  def cut(values, chunks):
    """One chunk of each table: which rows, gradients and parameters."""
    at = [
      chunks[i].at if i in chunks else _on_rows.ALL for i in range(len(leaves))
    ]
    at = structure.unflatten(at)
    grads = [
      chunks[i].read(x) if i in chunks else x for i, x in enumerate(values)
    ]
    return at, structure.unflatten(grads), _on_rows.gathered(params, at)

  def chunks_of(trip):
    return {i: _Chunk(leaves[i], trip, program.fewest) for i in tables}

  totals: Totals = {}
  for level in range(program.depth):

    def reduce(trip, parts, level=level, totals=totals):
      at, grads, few = cut(first, chunks_of(trip))
      more = _on_rows.parts(
        program, level, at, grads, state, few, extra, totals
      )
      return program.joined(parts, more)

    parts = lax.fori_loop(
      0, trips, reduce, program.none(level, leaves[tables[0]].values)
    )
    real = {i: leaves[i].indices < leaves[i].num_rows for i in tables}
    parts = program.finished(parts, _on_rows.counted(real))
    totals = {**totals, **parts}

  def step(state, values, chunks):
    """Updates of one chunk of each table; the state with its rows alone."""
    at, grads, few = cut(values, chunks)
    out, new, tags = _on_rows.step(
      inner, program, at, grads, state, few, extra, totals
    )
    return structure.flatten_up_to(out), new, tags

  def body(trip, carry):
    state, values = carry
    chunks = chunks_of(trip)
    out, new, tags = step(state, values, chunks)
    values = [
      chunks[i].written(x, out[i]) if i in chunks else x
      for i, x in enumerate(values)
    ]
    return _on_rows.with_rows(state, new, tags), values

  rows_state, values = lax.fori_loop(0, trips, body, (state, first))
  # What belongs to no table, once: as if no row were touched.
  nothing = chunks_of(None)
  out, rest, tags = step(state, first, nothing)
  state = _on_rows.with_rest(rows_state, rest, tags)
  values = [values[i] if i in nothing else x for i, x in enumerate(out)]
  return structure.unflatten(values), state


class _Chunk:
  """Which rows of a table a turn of the loop is for; none without a turn."""

  def __init__(self, rows: SparseRows, trip: Any, fewest: int):
    size = _chunk(rows) if trip is not None else min(fewest, rows.capacity)
    begin = trip * size if trip is not None else rows.capacity
    # The last chunk overlaps the one before: its first rows are done already.
    start = jnp.minimum(begin, rows.capacity - size)
    self._place = start + jnp.arange(size, dtype=jnp.int32)
    self._fresh = self._place >= begin
    ids = self.read(rows.indices)
    ids = jnp.where(self._fresh, ids, rows.num_rows)
    distinct = _on_rows.distinct(ids, rows.num_rows)
    self.at = _on_rows.At(distinct, rows.num_rows)

  def read(self, x: jax.Array) -> jax.Array:
    """The chunk's part of `x: [K, ...]`."""
    # A gather is done once. A slice is done by each who uses it, some of them
    # after the loop wrote the chunk: for these XLA would copy all of `x`, that
    # of JAX 0.10 whatever barrier stands behind the slice.
    return x.at[self._place].get(mode="promise_in_bounds", unique_indices=True)

  def written(self, x: jax.Array, new: jax.Array) -> jax.Array:
    """`x: [K, D]` with that part replaced, but for what is done already."""
    past = self._place + x.shape[0]  # Out of range and all different.
    at = jnp.where(self._fresh, self._place, past)
    return x.at[at].set(new, mode="drop", unique_indices=True)


def _trips(rows: SparseRows) -> jax.Array:
  """Chunks up to the last row that is none of padding."""
  number = jnp.arange(1, rows.capacity + 1, dtype=jnp.int32)
  last = jnp.where(rows.indices < rows.num_rows, number, 0)
  return -(-jnp.max(last, initial=0) // max(1, _chunk(rows)))


def in_chunks_or_whole(
  inner: optax.GradientTransformationExtraArgs,
  program: RowProgram,
  merged: Any,
  state: Any,
  params: Any,
  extra: dict[str, Any],
) -> tuple[Any, Any]:
  """As `_on_rows.update`: on CPUs in chunks."""
  if not worth_it(merged):
    return _on_rows.update(inner, program, merged, state, params, extra)

  def whole(merged, state, params):
    out, state = _on_rows.update(inner, program, merged, state, params, extra)
    return _trees.values(out), state

  values, state = lax.platform_dependent(
    merged,
    state,
    params,
    cpu=lambda g, s, p: update(inner, program, g, s, p, extra),
    default=whole,
  )
  return _trees.with_values(merged, values), state
