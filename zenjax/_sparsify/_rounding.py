"""Rounding that a compiler does not undo.

XLA may keep more bits than a dtype has between two operations. What is sent and
what is kept must be of the same number, so each rounding is written out.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax import _collectives


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
  limit = np.asarray(most).astype(x.dtype)
  if float(limit) > most:
    limit = np.nextafter(limit, np.zeros_like(limit))
  return jnp.where(lax.is_finite(x), jnp.clip(x, -limit, limit), x)


def total(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """`a + b`, rounded to `dtype` once; 16-bit floats are held in float32."""
  wide = _collectives.accumulator(dtype)
  a, b = a.astype(dtype).astype(wide), b.astype(dtype).astype(wide)
  return rounded(a + b, dtype)
