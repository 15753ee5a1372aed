"""Packs small integers into words, and scales beside them."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import arguments

# Blocks fill whole words with 2 bits a number.
_MULTIPLE = 32
# The smallest scale. Numbers below 2^-126 are zero on some devices, and so may
# be what is made of such a scale.
_TINY = 2.0**-120


def check_block(block: int) -> None:
  """Raises `ValueError` unless blocks fill whole words."""
  if not arguments.is_integer(block) or block <= 0 or block % _MULTIPLE:
    raise ValueError(
      f"`block` must be an int, a positive multiple of {_MULTIPLE}, got"
      f" {block!r}. Give 256."
    )


def packed(codes: jax.Array, bits: int) -> jax.Array:
  """Packs `[m, block] int32` into `[m, block * bits / 32] uint32`."""
  low = lax.bitcast_convert_type(codes, jnp.uint32) & np.uint32(2**bits - 1)
  low = low.reshape(codes.shape[0], -1, 32 // bits)
  return jnp.sum(low << _shifts(bits), axis=2, dtype=jnp.uint32)


def unpacked(words: jax.Array, bits: int) -> jax.Array:
  """Inverse of `packed`, for integers with a sign."""
  high = words[:, :, None] << (np.uint32(32 - bits) - _shifts(bits))
  codes = lax.bitcast_convert_type(high, jnp.int32) >> np.int32(32 - bits)
  return codes.reshape(words.shape[0], -1)


def _shifts(bits: int) -> jax.Array:
  """Returns where the integers of a word begin, `[1, 1, 32 / bits]`."""
  return jnp.arange(0, 32, bits, dtype=jnp.uint32).reshape(1, 1, -1)


def checked(scale: jax.Array, x: jax.Array) -> jax.Array:
  """Returns scales of blocks, `[m]`, as they can be sent.

  A scale is NaN if its block has a number that is not finite. XLA on CPU does
  not keep NaN in a maximum, so this is asked of the numbers themselves. It is
  zero below 2^-120.
  """
  scale = jnp.where(jnp.abs(scale) < _TINY, jnp.zeros_like(scale), scale)
  finite = jnp.all(lax.is_finite(x), axis=1)
  return jnp.where(finite, scale, jnp.full_like(scale, jnp.nan))


def with_scales(words: jax.Array, *scales: jax.Array) -> jax.Array:
  """Appends `[m] float32` each to `[m, words] uint32`."""
  columns = [lax.bitcast_convert_type(x, jnp.uint32)[:, None] for x in scales]
  return jnp.concatenate([words, *columns], axis=1)


def without_scales(words: jax.Array, count: int) -> tuple[jax.Array, ...]:
  """Inverse of `with_scales`; scales are `[m, 1]`."""
  scales = lax.bitcast_convert_type(words[:, -count:], jnp.float32)
  return words[:, :-count], *jnp.split(scales, count, axis=1)
