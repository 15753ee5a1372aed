"""`LowBit`: integers of 8, 4 or 2 bits, with a scale for each block."""

import dataclasses
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.compress import packing
from zenjax._src.compress.compressor import Codec
from zenjax._src.core import arguments

Rounding = Literal["nearest", "stochastic"]


@dataclasses.dataclass(frozen=True, slots=True)
class LowBit(Codec):
  """Rounds gradients to integers of 8, 4 or 2 bits, block by block.

  The largest magnitude of a block becomes the largest integer: 127, 7 or 1. The
  block is sent as integers and one float32 scale. Against float32 that is 3.9,
  7.8 or 15.1 times fewer bytes with blocks of 256. With 2 bits, blocks of 32
  lose much less, for 10.7 times fewer bytes.

  With `rounding="stochastic"` a number is rounded up or down at random, so that
  its mean is right. Errors are then not kept, and the rule is QSGD with the
  largest magnitude as scale, or TernGrad with 2 bits.

  Attributes:
    bits: 8, 4 or 2.
    rounding: `"nearest"` or `"stochastic"`.
    block: Numbers that share a scale, a multiple of 32.

  Raises:
    ValueError: An argument is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> int4 = zenjax.compress.LowBit(bits=4, block=32)
    >>> x = jnp.zeros((1, 32)).at[0, :4].set(jnp.array([7.0, -3.2, 0.4, 2.6]))
    >>> words = int4.encode(x, jax.random.key(0))
    >>> words.shape, int4.decode(words)[0, :4].tolist()
    ((1, 5), [7.0, -3.0, 0.0, 3.0])

  References:
    Alistarh et al., [QSGD](https://arxiv.org/abs/1610.02132), NeurIPS 2017.
    Wen et al., [TernGrad](https://arxiv.org/abs/1705.07878), NeurIPS 2017.
    Renggli et al., [SparCML](https://arxiv.org/abs/1802.08021), SC 2019.
  """

  bits: int = 8
  rounding: Rounding = "nearest"
  block: int = 256

  def __post_init__(self):
    if not arguments.is_integer(self.bits) or self.bits not in (8, 4, 2):
      raise ValueError(f"`bits` must be 8, 4 or 2, got {self.bits!r}.")
    arguments.one_of("rounding", self.rounding, ["nearest", "stochastic"])
    packing.check_block(self.block)

  @property
  def error_feedback(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
    """False if the rounding has no error in the mean."""
    return self.rounding == "nearest"

  @property
  def words(self) -> int:
    """The words of 32 bits that a block becomes."""
    return self.block * self.bits // 32 + 1

  @property
  def _most(self) -> int:
    return 2 ** (self.bits - 1) - 1

  def encode(self, x: jax.Array, key: jax.Array) -> jax.Array:
    """Converts `[m, block] float32` to `[m, words] uint32`."""
    scale = packing.checked(jnp.max(jnp.abs(x), axis=1) / self._most, x)
    # The inverse of the largest scales would be a subnormal number.
    size = jnp.where(scale > 2.0**100, jnp.float32(2.0**-64), jnp.float32(1))
    # One division for each block: XLA would rewrite others as it likes.
    times = jnp.where(scale > 0, 1 / (scale * size), jnp.zeros_like(scale))
    x = x * size[:, None] * times[:, None]
    if self.rounding == "nearest":
      x = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    else:
      x = jnp.floor(x + jax.random.uniform(key, x.shape))
    codes = jnp.clip(x, -self._most, self._most).astype(jnp.int32)
    return packing.with_scales(packing.packed(codes, self.bits), scale)

  def decode(self, words: jax.Array) -> jax.Array:
    """Converts `[m, words] uint32` to `[m, block] float32`."""
    codes, scale = packing.without_scales(words, 1)
    return packing.unpacked(codes, self.bits).astype(jnp.float32) * scale
