"""A tree of gradients as one vector, and back."""

from collections.abc import Sequence
import hashlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows


def check_leaves(tree: Any, argument: str) -> None:
  """Raises where a leaf is no array of floating numbers."""
  for name, leaf in leaf_util.named_leaves(tree, is_rows):
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
  """Returns a number of the names and shapes in the vector, in order."""
  named = leaf_util.named_leaves(tree)
  lies = [(name, *map(int, leaf.shape)) for name, leaf in named]
  return hashlib.blake2s(repr(lies).encode(), digest_size=6).hexdigest()


def dtype(tree: Any, wanted: Any) -> jnp.dtype:
  """Returns the vector's dtype: the leaves' where all have the same."""
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


# Rounding that a compiler does not undo.
#
# XLA may keep more bits than a dtype has between two operations. What is sent
# and what is kept must be of the same number, so each rounding is written out.


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """The values that `x` has in `dtype`, in the dtype of `x`."""
  to, have = jnp.finfo(dtype), jnp.finfo(x.dtype)
  if to.nmant >= have.nmant and to.nexp >= have.nexp:
    return x
  high = lax.reduce_precision(x, to.nexp, to.nmant)
  if to.nexp == have.nexp:
    return high
  # `reduce_precision` makes subnormals zero; gradients are as small.
  unit = float(to.smallest_subnormal)
  low = lax.round(x * (1 / unit), lax.RoundingMethod.TO_NEAREST_EVEN) * unit
  return jnp.where(jnp.abs(x) < float(to.tiny), low, high)


def saturated(x: jax.Array, dtype: jnp.dtype, kept: jnp.dtype) -> jax.Array:
  """`x`, of finite values that `dtype` cannot hold the largest that it can.

  Unless `kept`, what the rest would wait in, cannot hold more either.
  """
  most = float(jnp.finfo(dtype).max)
  if float(jnp.finfo(kept).max) <= most:
    return x
  return jnp.where(lax.is_finite(x), jnp.clip(x, -most, most), x)


def finite(x: jax.Array) -> jax.Array:
  """`x` with zeros for what is not finite, which would never leave."""
  return jnp.where(lax.is_finite(x), x, jnp.zeros_like(x))


def total(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """`a + b`, rounded to `dtype` once; 16-bit floats are held in float32."""
  wide = collectives.accumulator(dtype)
  a, b = a.astype(dtype).astype(wide), b.astype(dtype).astype(wide)
  return rounded(a + b, dtype)
