"""Trees in which some leaves are SparseRows, seen by their values."""

from typing import Any

import jax
import optax

from zenjax._src.rows import sparse_rows
from zenjax._src.rows.sparse_rows import is_rows


def combined(tree: Any) -> Any:
  """The same with every index of SparseRows once."""
  return jax.tree.map(
    lambda x: sparse_rows.merged(x) if is_rows(x) else x, tree, is_leaf=is_rows
  )


def values(tree: Any) -> Any:
  """Arrays alone: `[K, D]` in the place of SparseRows."""
  return jax.tree.map(
    lambda x: x.values if is_rows(x) else x, tree, is_leaf=is_rows
  )


def with_values(tree: Any, new: Any) -> Any:
  """`tree` with other values, given as `values` gives them."""

  def put(leaf, value):
    if is_rows(leaf):
      return leaf.with_values(value)
    return value

  return jax.tree.map(put, tree, new, is_leaf=is_rows)


def with_types_of(updates: Any, new: Any) -> Any:
  """`new` in the structure and with the shapes of `updates`.

  A transformation that returns what it was given in another structure could not
  be a branch of `lax.cond`, as inside `optax.apply_if_finite`.
  """
  like = lambda u, x: sparse_rows.padded(x, u.capacity).as_unique(u.unique)
  return jax.tree.map(
    lambda u, x: like(u, x) if is_rows(u) else x,
    updates,
    new,
    is_leaf=is_rows,
  )


def is_masked(node: Any) -> bool:
  """True if optax left a parameter out here, as `multi_transform` does."""
  return isinstance(node, optax.MaskedNode)
