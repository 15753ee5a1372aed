"""Packs small numbers into words, with a scale for each block of them."""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core import wire

# Blocks fill whole words with 2 bits a number.
_MULTIPLE = 32
# The smallest scale. Numbers below 2^-126 are zero on some devices, and so may
# be what is made of such a scale.
_LEAST_POWER = -120
_TINY = 2.0**_LEAST_POWER


def check_block(block: int) -> None:
  """Raises `ValueError` unless blocks fill whole words."""
  if not arguments.is_integer(block) or block <= 0 or block % _MULTIPLE:
    raise ValueError(
      f"`block` must be an int, a positive multiple of {_MULTIPLE}, got"
      f" {block!r}. Give 256."
    )


def packed(codes: jax.Array, bits: int) -> jax.Array:
  """Packs `[m, block] int32` into `[m, words] uint32`, padded with zeros.

  Blocks are transposed, because TPUs pad the last dimension to 128.
  """
  low = lax.bitcast_convert_type(codes, jnp.uint32) & np.uint32(2**bits - 1)
  low = jnp.pad(low.T, ((0, -codes.shape[1] % (32 // bits)), (0, 0)))
  low = low.reshape(-1, 32 // bits, codes.shape[0])
  return jnp.sum(low << wire.shifts(bits), axis=1, dtype=jnp.uint32).T


def unpacked(words: jax.Array, bits: int) -> jax.Array:
  """Inverse of `packed`, for integers with a sign; keeps the padding."""
  high = words.T[:, None] << (np.uint32(32 - bits) - wire.shifts(bits))
  codes = lax.bitcast_convert_type(high, jnp.int32) >> np.int32(32 - bits)
  return codes.reshape(-1, words.shape[0]).T


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


def _to_nearest(x: jax.Array) -> jax.Array:
  return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def encode_integers(
  x: jax.Array,
  bits: int,
  rounded: Callable[[jax.Array], jax.Array] = _to_nearest,
) -> jax.Array:
  """Converts `[m, block] float32` to integers and a scale, `[m, words] uint32`.

  The largest magnitude of a block becomes the largest integer; random rounding
  may miss it by one. Blocks that `checked` marks become zeros.
  """
  most = 2 ** (bits - 1) - 1
  scale = checked(jnp.max(jnp.abs(x), axis=1) / most, x)
  # The inverse of the largest scales would be a subnormal number.
  size = jnp.where(scale > 2.0**100, jnp.float32(2.0**-64), jnp.float32(1))
  # One division for each block: XLA would rewrite others as it likes.
  times = jnp.where(scale > 0, 1 / (scale * size), jnp.zeros_like(scale))
  x = rounded(x * size[:, None] * times[:, None])
  codes = jnp.clip(x, -most, most).astype(jnp.int32)
  return with_scales(packed(codes, bits), scale)


def decode_integers(words: jax.Array, bits: int) -> jax.Array:
  """Inverse of `encode_integers`, up to rounding; keeps the padding."""
  codes, scale = without_scales(words, 1)
  return unpacked(codes, bits).astype(jnp.float32) * scale


def encode_floats(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Converts `[m, block] float32` to floats and a scale, `[m, words] uint32`.

  The scale is a power of two, so that it rounds nothing.
  """
  _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=1))
  # One power less than the largest number has, which may have few digits.
  exponent -= int(jnp.finfo(dtype).maxexp) - 1
  # `checked` would make smaller scales zero, and numbers divided by them NaN.
  scale = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, _LEAST_POWER))
  scale = checked(scale, x)
  codes = wire.integers((x / scale[:, None]).astype(dtype))
  bits = jax.dtypes.itemsize_bits(dtype)
  return with_scales(packed(codes.astype(jnp.int32), bits), scale)


def decode_floats(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Inverse of `encode_floats`, up to rounding; keeps the padding."""
  words, scale = without_scales(words, 1)
  bits = jax.dtypes.itemsize_bits(dtype)
  codes = unpacked(words, bits).astype(f"int{bits}")
  narrow = lax.bitcast_convert_type(codes, dtype)
  return narrow.astype(jnp.float32) * scale
