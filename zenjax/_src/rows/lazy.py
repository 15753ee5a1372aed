"""`lazy_rows`: an optimizer that touches the rows of its updates only."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax._src.rows import by_rows
from zenjax._src.rows import sharded_tables
from zenjax._src.rows import touched_rows
from zenjax._src.rows import trees
from zenjax._src.rows.row_program import RowProgram
from zenjax._src.rows.row_program import Totals
from zenjax._src.rows.sparse_rows import added
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows


def lazy_rows(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Runs `inner` on the rows of SparseRows instead of on whole tables.

  Rows of one index are added up, the touched rows of every state leaf and of
  the parameters gathered, `inner` sees arrays `[K, D]`, and what it makes of
  the state is written back: a step costs by the rows, not by the table. Arrays
  in the tree go through `inner` as they are. Donate parameters and state, and
  apply what comes out with `optax.apply_updates` or `zenjax.apply_updates`. For
  TPU, tables whose width 128 does not divide are stored by `zenjax.packed`, or
  each step copies them.

  Transformations of optax that compute with leaves raise an error on
  SparseRows, before it in a chain and behind it: put them inside. To clip,
  `zenjax.rows.clip_by_global_norm` may stand before it.
  `optax.MultiSteps` needs gradients that are arrays; add SparseRows of several
  batches with `+`.

  Rows that a step does not touch keep their state and their parameters. For
  SGD, Adagrad and all else that does nothing where the gradient is zero, this
  equals `inner` on dense gradients to rounding. Adam and momentum would go on
  decaying moments and moving such rows; here moments wait as they are for the
  row's next gradient, and Adam corrects their bias by the number of all steps
  (LazyAdam). Weight decay acts on touched rows only: a `UserWarning` says so.

  How `inner` treats rows is read off its program. Reductions over all
  gradients come out as on arrays, in however many parts rows are updated: a
  global norm, a mean, a maximum, a flag that all is finite
  (`optax.clip_by_global_norm`, `clip_by_block_rms`, `apply_if_finite`,
  NovoGrad). An optimizer that needs
  other rows in another way is refused, and the error names the line: what
  reads the state or the parameters of rows without a gradient (LAMB, Adafactor,
  a norm taken behind Adam), draws or numbers rows, or empties at some steps
  what waits in all of them. `python tests/helpers/optax_table.py` prints
  what each transformation of optax does.

  For exact Adam on all rows use `zen_sync(output="dense")` without `lazy_rows`.

  Args:
    inner: Any transformation that updates a row by that row's gradient, state
      and parameters, and by values of all gradients; `chain` as usual.

  Returns:
    A transformation of trees that may hold SparseRows. Its state is that of
    `inner`, made for dense parameters.

  Raises:
    ValueError: `inner` accumulates gradients (`optax.MultiSteps`), or updates
      rows by others (LAMB, Adafactor). `init` says so; where `inner` needs
      more arguments than updates, parameters and `value`, and where leaves of
      two dimensions are treated unlike, `update` does.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> table = jnp.zeros((1000, 1))
    >>> tx = zenjax.lazy_rows(optax.adagrad(1.0, initial_accumulator_value=0.0))
    >>> state = tx.init(table)
    >>> grads = zenjax.SparseRows(jnp.array([7]), jnp.array([[4.0]]), 1000)
    >>> updates, state = tx.update(grads, state, table)
    >>> zenjax.apply_updates(table, updates)[6:8].round(3).tolist()
    [[0.0], [-1.0]]

  References:
    TensorFlow Addons' `LazyAdam`.
  """
  inner = optax.with_extra_args_support(inner)
  programs = by_rows.Programs(inner)

  def init(params):
    sharded_tables.refuse(params, "params", "lazy_rows")
    by_rows.require_row_by_row(inner, params)
    return inner.init(params)

  def update(updates, state, params=None, **extra):
    sharded_tables.refuse(updates, "updates", "lazy_rows")
    merged = trees.combined(updates)
    if params is not None:
      touched_rows.require_shapes(merged, params)
    program = by_rows.of_rows(programs, merged, state, params, extra)
    if program is None:
      return inner.update(updates, state, params, **extra)
    merged = trees.with_room(merged, program.fewest)
    out, state = in_chunks_or_whole(
      inner, program, merged, state, params, extra
    )
    return trees.with_types_of(updates, out), state

  return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
  """`optax.apply_updates` for updates that may hold SparseRows.

  Args:
    params: A tree of arrays.
    updates: The same with SparseRows for tables, or None for what stays, as
      does what has a gradient of float0, by `jax.grad(.., allow_int=True)`.

  Returns:
    The sums, in the dtypes of `params`; in place where these are donated.

  Raises:
    ValueError: SparseRows of another shape than the parameter.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> rows = zenjax.SparseRows(jnp.array([1, 1]), jnp.ones((2, 1)), 2)
    >>> zenjax.apply_updates(jnp.array([[5.0], [5.0]]), rows).tolist()
    [[5.0], [7.0]]
  """
  touched_rows.require_shapes(updates, params)

  def apply(u, p):
    if u is None or u.dtype == jax.dtypes.float0:
      return p
    if is_rows(u):
      return added(p, u)
    if sharded_tables.is_new_value(u):
      return u.value
    return optax.apply_updates(p, u)

  return jax.tree.map(
    apply,
    updates,
    params,
    is_leaf=lambda x: x is None or is_rows(x) or sharded_tables.is_new_value(x),
  )


# A step of an optimizer on rows, some of them at a time: for CPUs.
#
# Rows come with room for as many as there may be. Chunks end where the real
# ones do, and stay in the cache while all of an optimizer's passes go over
# them.


# Of one array of a chunk: an optimizer holds a handful of them.
_BYTES = 1 << 17
_MIN_ROWS = 256


def worth_it(merged: Any) -> bool:
  """Returns True if some table has room for more rows than two chunks."""
  leaves = jax.tree.leaves(merged, is_leaf=is_rows)
  return any(is_rows(x) and x.capacity > 2 * _chunk(x) for x in leaves)


def _chunk(rows: SparseRows) -> int:
  row = max(1, rows.values.shape[1] * rows.dtype.itemsize)
  return min(rows.capacity, max(_MIN_ROWS, _BYTES // row))


def update_in_chunks(
  inner: optax.GradientTransformationExtraArgs,
  program: RowProgram,
  merged: Any,
  state: Any,
  params: Any,
  extra: dict[str, Any],
) -> tuple[Any, Any]:
  """As `touched_rows.update`, some rows at a time.

  Returns:
    The values of the updates, `[K, D]` in the place of SparseRows, and the
    state.
  """
  leaves, structure = jax.tree.flatten(merged, is_leaf=is_rows)
  tables = [i for i, x in enumerate(leaves) if is_rows(x)]
  trips = jnp.stack([_trips(leaves[i]) for i in tables]).max()
  first = structure.flatten_up_to(trees.values(merged))

  def cut(values, chunks):
    """One chunk of each table: which rows, gradients and parameters."""
    at = [
      chunks[i].at if i in chunks else touched_rows.ALL
      for i in range(len(leaves))
    ]
    at = structure.unflatten(at)
    grads = [
      chunks[i].read(x) if i in chunks else x for i, x in enumerate(values)
    ]
    return at, structure.unflatten(grads), touched_rows.gathered(params, at)

  def chunks_of(trip):
    return {i: _Chunk(leaves[i], trip, program.fewest) for i in tables}

  totals: Totals = {}
  for level in range(program.depth):

    def reduce(trip, parts, level=level, totals=totals):
      at, grads, few = cut(first, chunks_of(trip))
      more = touched_rows.parts(
        program, level, at, grads, state, few, extra, totals
      )
      return program.joined(parts, more)

    parts = lax.fori_loop(
      0, trips, reduce, program.none(level, leaves[tables[0]].values)
    )
    real = {i: leaves[i].indices < leaves[i].num_rows for i in tables}
    parts = program.finished(parts, touched_rows.counted(real))
    totals = {**totals, **parts}

  def step(state, values, chunks):
    """Updates of one chunk of each table; the state with its rows alone."""
    at, grads, few = cut(values, chunks)
    out, new, tags = touched_rows.step(
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
    return touched_rows.with_rows(state, new, tags), values

  rows_state, values = lax.fori_loop(0, trips, body, (state, first))
  # What belongs to no table, once: as if no row were touched.
  nothing = chunks_of(None)
  out, rest, tags = step(state, first, nothing)
  state = touched_rows.with_rest(rows_state, rest, tags)
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
    distinct = touched_rows.distinct(ids, rows.num_rows)
    self.at = touched_rows.At(distinct, rows.num_rows)

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
  """As `touched_rows.update`: on CPUs in chunks."""
  if not worth_it(merged):
    return touched_rows.update(inner, program, merged, state, params, extra)

  def whole(merged, state, params):
    out, state = touched_rows.update(
      inner, program, merged, state, params, extra
    )
    return trees.values(out), state

  values, state = lax.platform_dependent(
    merged,
    state,
    params,
    cpu=lambda g, s, p: update_in_chunks(inner, program, g, s, p, extra),
    default=whole,
  )
  return trees.with_values(merged, values), state
