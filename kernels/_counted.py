"""Buffers of which only the first rows are meant, as many as are counted."""

from collections.abc import Callable, Sequence

import jax
from jax import lax
import jax.numpy as jnp


def clipped(counts: jax.Array, rows: Sequence[jax.Array]) -> jax.Array:
  """`[..., arrays]` counts, none of more rows than its array `[..., C, D]`."""
  most = jnp.asarray([x.shape[-2] for x in rows], jnp.int32)
  return jnp.clip(counts, 0, jnp.broadcast_to(most, counts.shape))


def sent(
  rows: Sequence[jax.Array],
  counts: jax.Array,
  send: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, ...]:
  """What `send` brings of each array, `[n, C, D]`, zero past `[n, arrays]`.

  As unsigned integers: XLA:CPU widens 16-bit floats and quiets NaNs.
  """

  def one(i, x):
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    come = send(bits)
    place = lax.broadcasted_iota(jnp.int32, come.shape, 1)
    kept = jnp.where(place < counts[:, i, None, None], come, 0)
    return lax.bitcast_convert_type(kept, x.dtype)

  return tuple(one(i, x) for i, x in enumerate(rows))
