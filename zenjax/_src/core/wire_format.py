"""What a buffer on the wire holds: one flat run of uint32 for everything.

Indices, counts and rows of all tables travel in one integer buffer. XLA:CPU
widens every 16-bit float collective to 32 bits and XLA:TPU turns some tiled
gathers into all-reduces; integers travel as they are, and 26 tables cost one
latency instead of 26.
"""

from collections.abc import Callable, Sequence
import math

import jax
from jax import lax
import jax.numpy as jnp


def words_for(count: int, dtype: jnp.dtype) -> int:
  """Words that `count` elements of `dtype` take."""
  return -(-count * jnp.dtype(dtype).itemsize // 4)


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
  """`x`, of which no derivative is asked: bits have none."""
  return x


@_constant.defjvp
def _refuse_derivative(primals, tangents):
  del primals, tangents
  raise NotImplementedError(
    "Rows that owner_update exchanges have no derivative; differentiate a step"
    " with `zenjax.zen_sync`, whose derivative is that of `lax.pmean`, or put"
    " jax.lax.stop_gradient around what goes into `update`."
  )


def to_words(x: jax.Array) -> jax.Array:
  """`[b, ...]` of any dtype to `[b, words] uint32`, padded with zeros."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    x = _constant(x)
  flat = x.reshape(x.shape[0], -1)
  size = flat.dtype.itemsize
  if size >= 4:
    words = lax.bitcast_convert_type(flat, jnp.uint32)
    return words.reshape(x.shape[0], -1)
  each = 4 // size
  flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % each)))
  return lax.bitcast_convert_type(
    flat.reshape(x.shape[0], -1, each), jnp.uint32
  )


def from_words(
  words: jax.Array, shape: Sequence[int], dtype: jnp.dtype
) -> jax.Array:
  """Inverse of `to_words`: `[b, words] uint32` to `[b, *shape]`."""
  batch, size = words.shape[0], jnp.dtype(dtype).itemsize
  if size == 8:
    words = words.reshape(batch, -1, 2)
  flat = lax.bitcast_convert_type(words, dtype).reshape(batch, -1)
  return flat[:, : math.prod(shape)].reshape(batch, *shape)


def join(sections: Sequence[jax.Array]) -> jax.Array:
  """Concatenates `[b, k_i] uint32` sections to `[b, sum k_i]`."""
  return jnp.concatenate(sections, axis=1)


def exchange(
  sections: Sequence[jax.Array],
  ahead: Sequence[bool],
  send: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
  """What `send` brings of sections: `[n, k_i]` of each `[b, k_i]`.

  All go in one buffer, but for those `ahead`, which have one before it.
  """
  out = list(sections)
  for early in (True, False):
    at = [i for i, first in enumerate(ahead) if first is early]
    if at:
      chosen = [sections[i] for i in at]
      received = send(join(chosen))
      parts = split(received, [section.shape[1] for section in chosen])
      for i, part in zip(at, parts):
        out[i] = part
  return out


def split(buffer: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
  """Inverse of `join`, given the static `lengths`."""
  parts, start = [], 0
  for length in lengths:
    parts.append(lax.slice_in_dim(buffer, start, start + length, axis=1))
    start += length
  return parts
