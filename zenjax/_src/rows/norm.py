"""Norms and clipping of gradients, some of which are SparseRows."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax._src.rows import leaf_util
from zenjax._src.rows import touched_rows
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one


def global_norm(updates: Any) -> jax.Array:
  """Returns the global norm of gradients that may be SparseRows.

  Use it in place of `optax.global_norm`. Rows of the same index are summed
  first.

  Args:
    updates: A tree of arrays and SparseRows.
  """
  leaves, _ = touched_rows.combined(updates)
  arrays = touched_rows.values(leaves)
  return jnp.sqrt(sum(jnp.sum(jnp.abs(x) ** 2) for x in arrays))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
  """Clips updates like `optax.clip_by_global_norm`, also SparseRows.

  Use it after `zen_sync` in a chain, so that all devices scale by the same
  factor. Inside `lazy_rows`, optax's own clip works too.

  Args:
    max_norm: The largest norm that updates may have.

  Returns:
    A stateless transformation. In its results, every index of SparseRows occurs
    once.

  Raises:
    ValueError: `max_norm` is not positive; or, in `update`, a leaf is a stack
      of SparseRows.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> rows = zenjax.SparseRows(jnp.array([2]), jnp.array([[4.0]]), num_rows=7)
    >>> clip = zenjax.rows.clip_by_global_norm(1.0)
    >>> clip.update(rows, clip.init(rows))[0].values.tolist()
    [[1.0]]
  """
  if not max_norm > 0:
    raise ValueError(f"`max_norm` must be positive, got {max_norm!r}.")
  clip = optax.clip_by_global_norm(max_norm)

  def update(updates, state, params=None):
    del params
    for name, leaf in leaf_util.named_leaves(updates, is_rows):
      if is_rows(leaf):
        require_one(f"leaf {name!r}", leaf)
    leaves, back = touched_rows.combined(updates)
    clipped: Any
    clipped, state = clip.update(touched_rows.values(leaves), state)
    return back(clipped), state

  return optax.GradientTransformation(lambda params: clip.init({}), update)
