"""A step of an optimizer on the touched rows of tables."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.rows import leaf_util
from zenjax._src.rows import trees
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import padded
from zenjax._src.rows.sparse_rows import require_one
from zenjax._src.tables import table_update


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


def of_state(analysis: RowAnalysis, state: Any, at: Any) -> Any:
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
      updates, lambda x: is_rows(x) or table_update.is_update(x)
    ),
    jax.tree.leaves(params),
  ):
    if is_rows(u) and u.by_owner:
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
