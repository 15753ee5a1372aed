"""Binary search, of which `jnp.searchsorted` is not capable everywhere.

It fails inside a `shard_map` that is manual over some axes only (JAX 0.10 and
0.12).
"""

import math

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _compat


def lower_bound(ascending: jax.Array, x: jax.Array) -> jax.Array:
  """How many of `ascending: [k]` are less than each `x: [...]`: int32."""
  size = ascending.shape[0]
  steps = max(1, math.ceil(math.log2(size + 1)))

  def halve(i, low):
    # All before `low` are less; the largest power of two first.
    step = jnp.left_shift(jnp.int32(1), jnp.asarray(steps - 1 - i, jnp.int32))
    ahead = jnp.minimum(low + step, size)
    value = ascending.at[ahead - 1].get(mode="promise_in_bounds")
    return jnp.where(value < x, ahead, low)

  # What is a constant so far varies as its input does.
  start = jnp.zeros_like(x, jnp.int32)
  start = _compat.cast_like(_compat.cast_like(start, ascending), x)
  return lax.fori_loop(0, steps, halve, start)
