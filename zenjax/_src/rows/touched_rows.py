"""A step of an optimizer on the touched rows of tables."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax._src.rows import leaf_util
from zenjax._src.rows import sharded_tables
from zenjax._src.rows import trees
from zenjax._src.rows.row_analysis import arguments
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.row_program import RowProgram
from zenjax._src.rows.row_program import Totals
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import padded
from zenjax._src.rows.sparse_rows import require_one


def update(
  analysis: RowAnalysis,
  merged: Any,
  state: Any,
  params: Any,
  extra: dict[str, Any],
) -> tuple[Any, Any]:
  """Runs an optimizer on the rows of `merged` alone.

  Args:
    analysis: Of the optimizer's update of whole tables.
    merged: Updates in which every index of SparseRows stands once.
    state: Of the optimizer, whole.
    params: Whole, or None.
    extra: Further arguments of its `update`.

  Returns:
    Updates in the structure of `merged`, and the state.
  """
  roomy = jax.tree.map(with_room, merged, is_leaf=is_rows)
  at = jax.tree.map(touched, roomy, is_leaf=is_rows)
  tags = of_state(analysis, state, at)
  few = jax.tree.map(gather, state, tags)
  few_params = None if params is None else jax.tree.map(gather, params, at)
  out, few = analysis.update(trees.values(roomy), few, few_params, extra)
  state = jax.tree.map(scatter, state, few, tags)
  out = jax.tree.map(
    lambda rows, x: x[: rows.capacity] if is_rows(rows) else x,
    merged,
    out,
    is_leaf=is_rows,
  )
  return trees.with_values(merged, out), state


def with_room(leaf: Any) -> Any:
  """SparseRows with room for two rows at least.

  A program for one row may differ from that for several: nothing is repeated.
  """
  return padded(leaf, 2) if is_rows(leaf) else leaf


class RowRun:
  """A program on some rows of the tables in trees of arrays."""

  def __init__(
    self,
    program: RowProgram,
    grads: Any,
    state: Any,
    params: Any,
    extra: dict[str, Any],
  ):
    leaves, self._grads = jax.tree.flatten(grads)
    arrays, _ = arguments(extra)
    state, self._state = jax.tree.flatten(state)
    params = None if params is None else jax.tree.leaves(params)
    args = leaves, state, params, arrays
    self._update = program.on(*jax.tree.map(jnp.asarray, args))

  @property
  def is_plain(self) -> bool:
    """Returns True if the optimizer itself does the same to these rows."""
    return self._update.is_plain

  def parts(
    self, level: int, real: dict[int, jax.Array], totals: Totals
  ) -> dict[int, jax.Array]:
    """Reduces these rows in the reductions of one level."""
    return self._update.parts(level, real, totals)

  def outputs(self, totals: Totals) -> tuple[Any, Any]:
    """Returns the updates and the state of these rows."""
    out = self._update.outputs(totals)
    number = self._grads.num_leaves
    updates = self._grads.unflatten(out[:number])
    return updates, self._state.unflatten(out[number:])


def _other_than(program, grads, state, params, extra) -> RowRun | None:
  """The program on these rows, where the optimizer itself would not do."""
  if program.is_plain and not all(map(jnp.size, jax.tree.leaves(grads))):
    return None  # JAX leaves out operations on no elements.
  run = RowRun(program, grads, state, params, extra)
  return None if run.is_plain else run


def step(
  inner: optax.GradientTransformationExtraArgs,
  program: RowProgram,
  at: Any,
  grads: Any,
  state: Any,
  few_params: Any,
  extra: dict[str, Any],
  totals: Totals,
) -> tuple[Any, Any, Any]:
  """Runs `inner.update` on some rows of the state, and writes nothing back.

  Args:
    inner: The transformation.
    program: Of its update of whole tables.
    at: Which rows, in the structure of the parameters.
    grads: `[K, D]` where `at` has rows.
    state: Of `inner`, whole.
    few_params: As `grads`, or None.
    extra: Further arguments of `inner.update`.
    totals: Reductions over all rows.

  Returns:
    Updates like `grads`, the state of these rows, and which rows those are in
    each of its leaves: for `with_rows` and `with_rest`.
  """
  tags = of_state(program, state, at)
  few = jax.tree.map(gather, state, tags)
  run = _other_than(program, grads, few, few_params, extra)
  if run is None:
    out, few = inner.update(grads, few, few_params, **extra)
  else:
    out, few = run.outputs(totals)
  return out, few, tags


def parts(
  program: RowProgram,
  level: int,
  at: Any,
  grads: Any,
  state: Any,
  few_params: Any,
  extra: dict[str, Any],
  totals: Totals,
) -> dict[int, jax.Array]:
  """Reduces some rows in the reductions of one level: see `step`."""
  few = jax.tree.map(gather, state, of_state(program, state, at))
  run = RowRun(program, grads, few, few_params, extra)
  return run.parts(level, real_rows(at), totals)


def real_rows(at: Any) -> dict[int, jax.Array]:
  """Returns which rows are none of padding, `[K] bool`, by table."""
  leaves = enumerate(jax.tree.leaves(at))
  return {i: ~x.pads for i, x in leaves if x.ids is not None}


def counted(real: dict[int, jax.Array]) -> dict[int, jax.Array]:
  """Returns how many rows these are, `[] int32`."""
  return {i: jnp.sum(x, dtype=jnp.int32) for i, x in real.items()}


def gathered(params: Any, at: Any) -> Any:
  """Touched rows of all parameters, if there are any."""
  return None if params is None else jax.tree.map(gather, params, at)


def with_rows(state: Any, few: Any, tags: Any) -> Any:
  """Touched rows are written; what has no rows stays old."""
  put = lambda old, few, at: scatter(old, few, at) if at.has(old) else old
  return jax.tree.map(put, state, few, tags)


def with_rest(state: Any, few: Any, tags: Any) -> Any:
  """Takes the new of all that has no rows, and the old of all that has."""
  put = lambda old, few, at: old if at.has(old) else few
  return jax.tree.map(put, state, few, tags)


def of_state(analysis: RowAnalysis | RowProgram, state: Any, at: Any) -> Any:
  """Returns which rows of each leaf of a state are touched."""
  tables = jax.tree.leaves(at)
  structure = jax.tree.structure(state)
  return structure.unflatten(
    [ALL if table is None else tables[table] for table in analysis.state_rows]
  )


@dataclasses.dataclass(frozen=True, eq=False)
class At:
  """Which rows of a leaf are touched; None for all of it."""

  ids: jax.Array | None = None
  num_rows: int = -1

  @property
  def pads(self) -> Any:
    """Where `ids` are of no row."""
    return self.ids is not None and self.ids >= self.num_rows

  def has(self, leaf: jax.Array) -> bool:
    """Returns True if `leaf` holds something for each row of the table."""
    shape = jnp.shape(leaf)
    return self.ids is not None and shape[:1] == (self.num_rows,)


ALL = At()


def touched(leaf: Any) -> At:
  """The rows that an update touches."""
  if not is_rows(leaf):
    return ALL
  require_one("an update", leaf)
  return At(distinct(leaf.indices, leaf.num_rows), leaf.num_rows)


def distinct(ids: jax.Array, num_rows: int) -> jax.Array:
  """`ids` with padding that is out of range and all different.

  Every index stands once then, if every row does.
  """
  beyond = num_rows + jnp.arange(len(ids), dtype=jnp.int32)
  return jnp.where(ids < num_rows, ids, beyond)


def gather(leaf: Any, at: At) -> Any:
  """Touched rows of what has rows; for padding, the last row.

  So padding computes what a row without a gradient would: a zero beside an
  empty state could divide by zero.
  """
  if not at.has(leaf):
    return leaf
  if not at.num_rows:  # JAX gathers nothing from nothing.
    number = 0 if at.ids is None else len(at.ids)
    return jnp.zeros((number, *leaf.shape[1:]), leaf.dtype)
  return leaf.at[at.ids].get(mode="clip")


def scatter(leaf: Any, few: Any, at: At) -> Any:
  """Inverse of `gather`; `few` where it took all."""
  if not at.has(leaf):
    return few
  return leaf.at[at.ids].set(few, mode="drop", unique_indices=True)


def require_shapes(updates: Any, params: Any) -> None:
  """Raises ValueError for rows of another table than the parameter."""
  for (name, u), p in zip(
    leaf_util.named_leaves(
      updates, lambda x: is_rows(x) or sharded_tables.is_new_value(x)
    ),
    jax.tree.leaves(params),
  ):
    if is_rows(u) and u.lookups is not None:
      raise ValueError(
        f"`updates` must not hold a gradient as it is, and {name!r} is that of"
        " a ShardedTable, whose rows have owners; update it by"
        " `zenjax.sharded_optimizer`."
      )
    if is_rows(u):
      require_one(f"the update of {name!r}", u)
    if is_rows(u) and u.shape != jnp.shape(p):
      raise ValueError(
        f"SparseRows of {name!r} must be rows of the parameter: it is"
        f" {jnp.shape(p)}, they are of {u.shape}; `num_rows` is the"
        " parameter's first dimension."
      )
