"""A step of an optimizer on rows, some of them at a time: for CPUs.

Rows come with room for as many as there may be. Chunks end where the real ones
do, and stay in the cache while all of an optimizer's passes go over them.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._rows import _on_rows
from zenjax._rows import _trees
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
  merged: Any,
  state: Any,
  params: Any,
  extra: dict[str, Any],
) -> tuple[Any, Any]:
  """As `_on_rows.update`, of an `inner` that is `separable`.

  Returns:
    The values of the updates, `[K, D]` in the place of SparseRows, and the
    state.
  """
  leaves, structure = jax.tree.flatten(merged, is_leaf=is_rows)
  tables = [i for i, x in enumerate(leaves) if is_rows(x)]
  trips = jnp.stack([_trips(leaves[i]) for i in tables]).max()

  def step(state, values, chunks):
    """Updates of one chunk of each table; the state with its rows alone."""
    at = [
      chunks[i].at if i in chunks else _on_rows.touched(x)
      for i, x in enumerate(leaves)
    ]
    at = structure.unflatten(at)
    tags = _trees.tagged(inner, state, at, _on_rows.At())
    few = jax.tree.map(_on_rows.gather, state, tags)
    few_params = params
    if params is not None:
      few_params = jax.tree.map(_on_rows.gather, params, at)
    grads = structure.unflatten(values)
    out, new = inner.update(grads, few, few_params, **extra)
    return structure.flatten_up_to(out), new, tags

  def body(trip, carry):
    state, values = carry
    chunks = {i: _Chunk(leaves[i], trip) for i in tables}
    some = [
      chunks[i].read(x) if i in chunks else x for i, x in enumerate(values)
    ]
    out, new, tags = step(state, some, chunks)
    values = [
      chunks[i].written(x, out[i]) if i in chunks else x
      for i, x in enumerate(values)
    ]
    put = lambda old, few, at: (
      _on_rows.scatter(old, few, at) if at.has(old) else old
    )
    return jax.tree.map(put, state, new, tags), values

  first = structure.flatten_up_to(_trees.values(merged))
  rows_state, values = lax.fori_loop(0, trips, body, (state, first))
  # What belongs to no table, once: as if no row were touched.
  nothing = {i: _Chunk(leaves[i], None) for i in tables}
  none = [
    nothing[i].read(x) if i in nothing else x for i, x in enumerate(first)
  ]
  out, rest, tags = step(state, none, nothing)
  state = jax.tree.map(
    lambda loop, once, at: loop if at.has(loop) else once,
    rows_state,
    rest,
    tags,
  )
  values = [values[i] if i in nothing else x for i, x in enumerate(out)]
  return structure.unflatten(values), state


class _Chunk:
  """Which rows of a table a turn of the loop is for; none without a turn."""

  def __init__(self, rows: SparseRows, trip: Any):
    self._size = _chunk(rows) if trip is not None else 0
    begin = trip * self._size if trip is not None else 0
    # The last chunk overlaps the one before: its first rows are done already.
    self._start = jnp.minimum(begin, rows.capacity - self._size)
    offset = jnp.arange(self._size, dtype=jnp.int32)
    self._fresh = self._start + offset >= begin
    ids = self.read(rows.indices)
    ids = jnp.where(self._fresh, ids, rows.num_rows)
    distinct = _on_rows.distinct(ids, rows.num_rows)
    self.at = _on_rows.At(distinct, rows.num_rows)

  def read(self, x: jax.Array) -> jax.Array:
    # Read once and for all: where a loop writes what it reads, XLA would copy
    # the whole of it for readers that come after.
    part = lax.dynamic_slice_in_dim(x, self._start, self._size)
    return lax.optimization_barrier(part)

  def written(self, x: jax.Array, new: jax.Array) -> jax.Array:
    at = self._start + jnp.arange(self._size, dtype=jnp.int32)
    past = at + x.shape[0]  # Out of range and all different.
    at = jnp.where(self._fresh, at, past)
    return x.at[at].set(new, mode="drop", unique_indices=True)


def _trips(rows: SparseRows) -> jax.Array:
  """Chunks up to the last row that is none of padding."""
  number = jnp.arange(1, rows.capacity + 1, dtype=jnp.int32)
  end = jnp.max(jnp.where(rows.indices < rows.num_rows, number, 0))
  return -(-end // _chunk(rows))


def separable(
  inner: optax.GradientTransformationExtraArgs, merged: Any, params: Any
) -> bool:
  """Whether `inner` does to rows what it does to each alone.

  Found by trying it on four rows, on two of them, and on none: a norm over all
  updates tells them apart, and noise does.
  """
  rng = np.random.default_rng(0)
  leaves, structure = jax.tree.flatten(merged, is_leaf=is_rows)

  def drawn():
    shapes = [[4, 3] if is_rows(x) else [1] * jnp.ndim(x) for x in leaves]
    return [
      jnp.array(rng.standard_normal(shape), jnp.result_type(x.dtype))
      for shape, x in zip(shapes, leaves)
    ]

  tables = [is_rows(x) for x in leaves]
  with jax.ensure_compile_time_eval():
    grads, full = drawn(), drawn()
    tree = structure.unflatten
    try:
      state = inner.init(tree(full))
      at = lambda size: tree([_few(is_, size) for is_ in tables])
      run = lambda size: _run(inner, tree(grads), state, params, full, at(size))
      whole = run(4)
      return all(_agree(whole, run(size), at(size)) for size in (2, 0))
    except Exception:  # Whatever it is, it is not known to be separable.
      return False


def _few(is_table: bool, size: int) -> _on_rows.At:
  return _on_rows.At(jnp.arange(size), 4) if is_table else _on_rows.At()


def _run(inner, grads, state, params, full, at):
  """A step on the rows of `at`, with parameters only where they are given."""
  tags = _trees.tagged(inner, state, at, _on_rows.At())
  few = jax.tree.map(_on_rows.gather, state, tags)
  structure = jax.tree.structure(grads)
  some = lambda tree: jax.tree.map(_on_rows.gather, tree, at)
  given = None if params is None else some(structure.unflatten(full))
  return inner.update(some(grads), few, given), tags


def _agree(whole: Any, part: Any, at: Any) -> bool:
  """Whether rows, and all that has none, are the same with fewer rows."""
  (out, state), tags = whole
  (few_out, few_state), _ = part
  same: list[bool] = []

  def compare(all_, few, at):
    rows = few.shape[0] if at.ids is not None and jnp.ndim(few) else None
    want = all_[:rows] if rows is not None else all_
    same.append(
      want.dtype == few.dtype
      and np.allclose(want, few, rtol=1e-3, atol=1e-6, equal_nan=True)
    )

  for all_, few, which in ((out, few_out, at), (state, few_state, tags)):
    jax.tree.map(compare, all_, few, which)
  return all(same)


def in_chunks_or_whole(
  inner: optax.GradientTransformationExtraArgs,
  merged: Any,
  state: Any,
  params: Any,
  extra: dict[str, Any],
) -> tuple[Any, Any]:
  """As `_on_rows.update`: on CPUs in chunks, if that makes no difference."""
  if extra or not worth_it(merged) or not separable(inner, merged, params):
    return _on_rows.update(inner, merged, state, params, extra)

  def whole(merged, state, params):
    out, state = _on_rows.update(inner, merged, state, params, extra)
    return _trees.values(out), state

  values, state = lax.platform_dependent(
    merged,
    state,
    params,
    cpu=lambda g, s, p: update(inner, g, s, p, extra),
    default=whole,
  )
  return _trees.with_values(merged, values), state
