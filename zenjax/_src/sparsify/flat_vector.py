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
  """Raises `TypeError` unless all leaves are arrays of floating numbers."""
  for name, leaf in leaf_util.named_leaves(tree, is_rows):
    if is_rows(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
      kind = "SparseRows" if is_rows(leaf) else f"dtype {leaf.dtype}"
      raise TypeError(
        f"`{argument}` must hold floating arrays, got {kind} in leaf {name!r}."
        " Give this leaf to `zenjax.zen_sync` with `optax.partition`."
      )


def fingerprint(tree: Any) -> str:
  """Returns a hash of the names and shapes in the vector, in order."""
  named = leaf_util.named_leaves(tree)
  shapes = [(name, *map(int, leaf.shape)) for name, leaf in named]
  return hashlib.blake2s(repr(shapes).encode(), digest_size=6).hexdigest()


def flatten(leaves: Sequence[jax.Array], kind: jnp.dtype) -> jax.Array:
  """`[N]` of all leaves in order."""
  return jnp.concatenate([leaf.reshape(-1).astype(kind) for leaf in leaves])


def unflatten(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
  """Inverse of `flatten`, in the leaves' own dtypes."""
  parts = jnp.split(vector, np.cumsum([leaf.size for leaf in like])[:-1])
  return [x.reshape(y.shape).astype(y.dtype) for x, y in zip(parts, like)]


# Rounding that a compiler does not undo: between two operations XLA may keep
# more bits than a dtype has. The values sent and kept must add up to the same
# number, so each rounding is written out.


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Rounds `x` to `dtype` and returns it in its own dtype."""
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
  """Clips finite values to the largest of `dtype`.

  Unless `kept`, the dtype that the rest would wait in, holds no more either.
  """
  largest = float(jnp.finfo(dtype).max)
  if float(jnp.finfo(kept).max) <= largest:
    return x
  return jnp.where(lax.is_finite(x), jnp.clip(x, -largest, largest), x)


def finite(x: jax.Array) -> jax.Array:
  """`x` with zeros for what is not finite, which would never leave."""
  return jnp.where(lax.is_finite(x), x, jnp.zeros_like(x))


def total(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """`a + b`, rounded to `dtype` once; 16-bit floats are held in float32."""
  wide = collectives.accumulator(dtype)
  a, b = a.astype(dtype).astype(wide), b.astype(dtype).astype(wide)
  return rounded(a + b, dtype)
