"""Runs a step of an optimizer on the touched rows of tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.rows import leaf_util
from zenjax._src.rows import sparse_rows
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows

# The fewest rows that a step runs on. A program for one row may differ from the
# program for several, because it need not repeat anything.
FEWEST = 2


class Touched(NamedTuple):
  """The rows of a table that a step touches.

  Attributes:
    ids: Row ids, all different; padding is out of range.
    num_rows: The number of rows of the table.
  """

  ids: jax.Array
  num_rows: int

  @classmethod
  def of(cls, ids: jax.Array, num_rows: int) -> "Touched":
    """Returns the rows at `ids`, of which only padding may repeat."""
    beyond = num_rows + jnp.arange(len(ids), dtype=jnp.int32)
    return cls(jnp.where(ids < num_rows, ids, beyond), num_rows)

  def take(self, table: jax.Array) -> jax.Array:
    """Returns the rows; for padding, the last row of the table.

    So padding computes what a row without a gradient would compute. With zeros,
    it could divide by a state of zero.
    """
    if not self.num_rows:  # JAX does not gather from an empty array.
      return jnp.zeros((len(self.ids), *table.shape[1:]), table.dtype)
    return table.at[self.ids].get(mode="clip")

  def put(self, table: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the table with these rows in it; padding is dropped."""
    return table.at[self.ids].set(rows, mode="drop", unique_indices=True)


def distinct(rows: SparseRows, capacity: int) -> SparseRows:
  """Returns rows with every index once, padded to at least `capacity`."""
  rows = sparse_rows.merged(rows)
  return sparse_rows.resized(rows, max(capacity, rows.capacity))


def combined(
  tree: Any, capacity: int = 0
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
  """Flattens a tree, with every index of SparseRows once.

  Args:
    tree: Arrays and SparseRows.
    capacity: The fewest rows that SparseRows are padded to.

  Returns:
    The leaves, and a function that makes the tree of new values for all leaves.
    It keeps the structure of `tree`, because `optax.apply_if_finite` runs a
    transformation as a branch of `lax.cond`.
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
  """Returns the leaves with arrays `[K, D]` in place of SparseRows."""
  return [x.values if is_rows(x) else x for x in leaves]


def step(
  analysis: RowAnalysis,
  structure: Any,
  grads: Sequence[Any],
  params: Sequence[Any] | None,
  state: Any,
  touched: Mapping[int, Touched],
  extra: dict[str, Any],
) -> tuple[list[Any], Any, list[Touched | None]]:
  """Runs an optimizer on some rows of tables.

  Args:
    analysis: The analysis of the optimizer's update of whole tables.
    structure: The structure of gradients and parameters.
    grads: Leaves, with the touched rows in place of tables.
    params: Leaves in the same form, or None.
    state: The whole state of the optimizer.
    touched: The touched rows of each table, by the number of its leaf.
    extra: Further arguments of the optimizer's `update`.

  Returns:
    The leaves of updates, the new state with only the touched rows, and for
    each leaf of the state which rows these are.
  """
  leaves, tree = jax.tree.flatten(state)
  places = [None if i is None else touched[i] for i in analysis.state_rows]
  few = tree.unflatten(
    [place.take(x) if place else x for x, place in zip(leaves, places)]
  )
  given = None if params is None else structure.unflatten(params)
  out, few = analysis.update(structure.unflatten(grads), few, given, extra)
  return structure.flatten_up_to(out), few, places


def put(
  state: Any,
  few: Any,
  places: Sequence[Touched | None],
  rows_only: bool = False,
) -> Any:
  """Returns the whole state after a step on some rows.

  Args:
    state: The state before the step.
    few: The new state of the touched rows, from `step`.
    places: Which rows these are, from `step`.
    rows_only: Whether leaves without rows keep their old values.
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
  """Raises ValueError if SparseRows do not fit their parameter."""
  named = leaf_util.named_leaves(params)
  leaves = jax.tree.structure(params).flatten_up_to(updates)
  for (name, param), update in zip(named, leaves):
    if is_rows(update):
      sparse_rows.require_update(update, jnp.shape(param), f" of {name!r}")
