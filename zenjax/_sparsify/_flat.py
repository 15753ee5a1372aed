"""A tree of gradients as one vector, and back."""

from collections.abc import Sequence
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenjax import _select
from zenjax._rows._sparse_rows import is_rows


def check_leaves(tree: Any, argument: str) -> None:
  """Raises where a leaf is no array of floating numbers."""
  for name, leaf in _select.named_leaves(tree, is_rows):
    if is_rows(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
      kind = "SparseRows" if is_rows(leaf) else f"dtype {leaf.dtype}"
      raise TypeError(
        f"`{argument}` must hold arrays of floating numbers, got {kind} in"
        f" leaf {name!r}; keep it out by `optax.multi_transform`, and give it"
        " to `zenjax.zen_sync`."
      )


def size(tree: Any) -> int:
  """Elements of all leaves."""
  return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def fingerprint(tree: Any) -> str:
  """Of what lies where in the vector: names and shapes, in order."""
  named = _select.named_leaves(tree)
  lies = [(name, *map(int, leaf.shape)) for name, leaf in named]
  return hashlib.blake2s(repr(lies).encode(), digest_size=6).hexdigest()


def dtype(tree: Any, wanted: Any) -> jnp.dtype:
  """What the vector is kept in: the leaves' dtype where all have the same."""
  if wanted is not None:
    return jnp.dtype(wanted)
  kinds = {jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)}
  if len(kinds) == 1:
    return kinds.pop()
  wide = jnp.dtype(jnp.float64) in kinds
  return jnp.dtype(jnp.float64 if wide else jnp.float32)


def flatten(leaves: Sequence[jax.Array], kind: jnp.dtype) -> jax.Array:
  """`[N]` of all leaves in order."""
  return jnp.concatenate([leaf.reshape(-1).astype(kind) for leaf in leaves])


def unflatten(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
  """Inverse of `flatten`, in the leaves' own dtypes."""
  out, start = [], 0
  for leaf in like:
    part = vector[start : start + leaf.size]
    out.append(part.reshape(leaf.shape).astype(leaf.dtype))
    start += leaf.size
  return out
