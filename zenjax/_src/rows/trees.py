"""Trees in which some leaves are SparseRows, seen by their values."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows


def combined(tree: Any) -> Any:
  """The same with every index of SparseRows once."""
  return jax.tree.map(
    lambda x: x.combine() if is_rows(x) else x, tree, is_leaf=is_rows
  )


def with_room(tree: Any, least: int) -> Any:
  """Returns the tree with room for at least so many rows in SparseRows."""

  def padded(x):
    if not is_rows(x) or x.capacity >= least:
      return x
    missing = least - x.capacity
    ids = jnp.pad(x.indices, (0, missing), constant_values=x.num_rows)
    values = jnp.pad(x.values, ((0, missing), (0, 0)))
    return SparseRows(ids, values, x.num_rows).with_facts(x.facts)

  return jax.tree.map(padded, tree, is_leaf=is_rows)


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


def is_masked(node: Any) -> bool:
  """True if optax left a parameter out here, as `multi_transform` does."""
  return isinstance(node, optax.MaskedNode)
