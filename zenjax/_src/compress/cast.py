"""`Cast`: floats of 16 or 8 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.compress.compressor import Codec
from zenjax._src.core import arguments
from zenjax._src.core import packing
from zenjax._src.core import wire

_KINDS = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2
DTYPES = tuple(map(jnp.dtype, _KINDS))


@dataclasses.dataclass(frozen=True, slots=True)
class Cast(Codec):
  """Rounds gradients to a floating dtype of 16 or 8 bits.

  bfloat16 has the range of float32. The numbers of other dtypes are scaled by a
  power of two for each block, so that none is too large.

  Attributes:
    dtype: `jnp.bfloat16`, `jnp.float16`, `jnp.float8_e4m3fn` or
      `jnp.float8_e5m2`.
    block: Numbers that share a scale, a multiple of 32.

  Raises:
    TypeError: `dtype` is not a floating dtype.
    ValueError: It is another one, or `block` is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> half = zenjax.compress.Cast(jnp.float16, block=32)
    >>> x = jnp.full((1, 32), 2.0**40)
    >>> half.decode(half.encode(x, jax.random.key(0)))[0, 0].item()
    1099511627776.0
  """

  dtype: Any
  block: int = 256

  def __post_init__(self):
    dtype = arguments.floating("dtype", self.dtype)
    if dtype not in DTYPES:
      raise ValueError(
        f"`dtype` must be one of {[x.name for x in DTYPES]}, got"
        f" {self.dtype!r}."
      )
    object.__setattr__(self, "dtype", dtype)
    packing.check_block(self.block)

  @property
  def _scaled(self) -> bool:
    return not wire.has_range_of(self.dtype, jnp.dtype(jnp.float32))

  @property
  def words(self) -> int:
    """The words of 32 bits that a block becomes."""
    return self.block * self.dtype.itemsize // 4 + self._scaled

  def encode(self, x: jax.Array, key: jax.Array) -> jax.Array:
    """Converts `[m, block] float32` to `[m, words] uint32`."""
    del key
    if not self._scaled:
      return wire.to_words(x.astype(self.dtype))
    return packing.encode_floats(x, self.dtype)

  def decode(self, words: jax.Array) -> jax.Array:
    """Converts `[m, words] uint32` to `[m, block] float32`."""
    if not self._scaled:
      narrow = wire.from_words(words, (self.block,), self.dtype)
      return narrow.astype(jnp.float32)
    return packing.decode_floats(words, self.dtype)
