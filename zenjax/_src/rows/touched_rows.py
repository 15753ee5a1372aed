"""A step of an optimizer on the touched rows of tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.rows import leaf_util
from zenjax._src.rows import sparse_rows
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one
from zenjax._src.rows.sparse_rows import SparseRows

# A program for one row may differ from that for several: nothing is repeated.
FEWEST = 2


class At(NamedTuple):
  """Which rows of a table are touched.

  Attributes:
    ids: All different; padding is beyond the table.
    num_rows: Rows of the table.
  """

  ids: jax.Array
  num_rows: int

  @classmethod
  def of(cls, ids: jax.Array, num_rows: int) -> "At":
    """Returns the rows at `ids`, which repeat for padding alone."""
    beyond = num_rows + jnp.arange(len(ids), dtype=jnp.int32)
    return cls(jnp.where(ids < num_rows, ids, beyond), num_rows)

  def take(self, table: jax.Array) -> jax.Array:
    """Returns the rows; for padding, the last row of the table.

    So padding computes what a row without a gradient would: a zero beside an
    empty state could divide by zero.
    """
    if not self.num_rows:  # JAX gathers nothing from nothing.
      return jnp.zeros((len(self.ids), *table.shape[1:]), table.dtype)
    return table.at[self.ids].get(mode="clip")

  def put(self, table: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the table with these rows in it; padding is dropped."""
    return table.at[self.ids].set(rows, mode="drop", unique_indices=True)


def distinct(rows: SparseRows, capacity: int) -> SparseRows:
  """Returns rows with every index once, and room for at least so many."""
  rows = sparse_rows.merged(rows)
  return sparse_rows.resized(rows, max(capacity, rows.capacity))


def combined(
  tree: Any, capacity: int = 0
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
  """Takes the leaves of a tree, with every index of SparseRows once.

  Args:
    tree: Arrays and SparseRows.
    capacity: Of SparseRows, at least.

  Returns:
    The leaves, and a function that puts new values of all leaves in their
    place. It keeps the types of `tree`: a transformation that returns another
    structure than it was given could not be a branch of `lax.cond`, as inside
    `optax.apply_if_finite`.
  """
  given, structure = jax.tree.flatten(tree, is_leaf=is_rows)
  leaves = [distinct(x, capacity) if is_rows(x) else x for x in given]

  def back(values: Sequence[Any]) -> Any:
    new = list(values)
    for i, (like, x) in enumerate(zip(given, leaves, strict=True)):
      if is_rows(like):
        rows = sparse_rows.resized(x.with_values(new[i]), like.capacity)
        new[i] = rows.as_unique(like.unique)
    return structure.unflatten(new)

  return leaves, back


def values(leaves: Sequence[Any]) -> list[jax.Array]:
  """Returns arrays alone: `[K, D]` in the place of SparseRows."""
  return [x.values if is_rows(x) else x for x in leaves]


def step(
  analysis: RowAnalysis,
  structure: Any,
  grads: Sequence[Any],
  params: Sequence[Any] | None,
  state: Any,
  at: Mapping[int, At],
  extra: dict[str, Any],
) -> tuple[list[Any], Any, list[At | None]]:
  """Runs an optimizer on some rows of tables.

  Args:
    analysis: Of the optimizer's update of whole tables.
    structure: Of gradients and parameters.
    grads: Leaves, of tables their touched rows.
    params: Likewise, or None.
    state: Of the optimizer, whole.
    at: Which rows these are, by the number of the leaf.
    extra: Further arguments of the optimizer's `update`.

  Returns:
    Leaves of updates, the new state with the touched rows alone, and where
    these are for each of its leaves.
  """
  leaves, tree = jax.tree.flatten(state)
  places = [None if i is None else at[i] for i in analysis.state_rows]
  few = tree.unflatten(
    [place.take(x) if place else x for x, place in zip(leaves, places)]
  )
  given = None if params is None else structure.unflatten(params)
  out, few = analysis.update(structure.unflatten(grads), few, given, extra)
  return structure.flatten_up_to(out), few, places


def put(
  state: Any, few: Any, places: Sequence[At | None], rows_only: bool = False
) -> Any:
  """Returns a state after a step on some rows.

  Args:
    state: As it was before.
    few: What `step` has returned, like `places`.
    places: Where these rows are.
    rows_only: Whether leaves without rows stay as they were.
  """
  leaves, tree = jax.tree.flatten(state)
  each = zip(leaves, jax.tree.leaves(few), places, strict=True)
  return tree.unflatten(
    [
      place.put(x, new) if place else x if rows_only else new
      for x, new, place in each
    ]
  )


def require_shapes(updates: Any, params: Any) -> None:
  """Raises ValueError for rows of another table than the parameter."""
  named = leaf_util.named_leaves(params)
  of = jax.tree.structure(params).flatten_up_to(updates)
  for (name, p), u in zip(named, of):
    if not is_rows(u):
      continue
    if u.by_owner:
      raise ValueError(
        f"`updates` must not hold a gradient as it is, and {name!r} is that of"
        " a ShardedTable, whose rows have owners; update it by"
        " `zenjax.sharded_optimizer`."
      )
    require_one(f"the update of {name!r}", u)
    if u.shape != jnp.shape(p):
      raise ValueError(
        f"SparseRows of {name!r} must be rows of the parameter: it is"
        f" {jnp.shape(p)}, they are of {u.shape}; `num_rows` is the"
        " parameter's first dimension."
      )
