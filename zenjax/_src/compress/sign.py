"""Compressors of one sign for each number."""

import dataclasses

import jax
import jax.numpy as jnp

from zenjax._src.compress.compressor import Codec
from zenjax._src.core import packing


@dataclasses.dataclass(frozen=True, slots=True)
class Sign(Codec):
  """Sends one bit a number, and the mean magnitude of each block (EF-signSGD).

  A number arrives as plus or minus the mean magnitude of its block. Errors are
  kept, on the device that sent and on the one that added up.

  Attributes:
    block: Numbers that share a magnitude, a multiple of 32.

  Raises:
    ValueError: `block` is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> sign = zenjax.compress.Sign(block=32)
    >>> x = jnp.zeros((1, 32)).at[0, :2].set(jnp.array([-40.0, 24.0]))
    >>> sign.decode(sign.encode(x, jax.random.key(0)))[0, :3].tolist()
    [-2.0, 2.0, 2.0]

  References:
    Karimireddy et al., [Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes](https://arxiv.org/abs/1901.09847), ICML 2019. Zheng,
    Huang and Kwok, [Communication-Efficient Distributed Blockwise Momentum SGD
    with Error-Feedback](https://arxiv.org/abs/1905.10936), NeurIPS 2019.
  """

  block: int = 1024

  def __post_init__(self):
    packing.check_block(self.block)

  @property
  def words(self) -> int:
    """The words of 32 bits that a block becomes."""
    return self.block // 32 + 1

  def encode(self, x: jax.Array, key: jax.Array) -> jax.Array:
    """Converts `[m, block] float32` to `[m, words] uint32`."""
    del key
    # Divided first: the sum of the largest numbers overflows.
    scale = packing.checked(jnp.sum(jnp.abs(x) / self.block, axis=1), x)
    codes = (x < 0).astype(jnp.int32)
    return packing.with_scales(packing.packed(codes, 1), scale)

  def decode(self, words: jax.Array) -> jax.Array:
    """Converts `[m, words] uint32` to `[m, block] float32`."""
    codes, scale = packing.without_scales(words, 1)
    # A set bit is -1 as an integer of one bit with a sign.
    return jnp.where(packing.unpacked(codes, 1) < 0, -scale, scale)


@dataclasses.dataclass(frozen=True, slots=True)
class SignVote(Codec):
  """Sends signs, and returns the sign of the majority (SignSGD).

  All results are -1, 0 or 1, so the learning rate alone is the size of a step.
  A number takes two bits, because zero is a vote as well, and NaN is told. No
  error is kept.

  Attributes:
    block: Numbers that are packed together, a multiple of 32.

  Raises:
    ValueError: `block` is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> vote = zenjax.compress.SignVote(block=32)
    >>> x = jnp.zeros((1, 32)).at[0, :2].set(jnp.array([-40.0, 0.5]))
    >>> vote.decode(vote.encode(x, jax.random.key(0)))[0, :3].tolist()
    [-1.0, 1.0, 0.0]

  References:
    Bernstein et al., [signSGD with Majority
    Vote](https://arxiv.org/abs/1810.05291), ICLR 2019.
  """

  error_feedback = False
  approximates = False

  block: int = 256

  def __post_init__(self):
    packing.check_block(self.block)

  @property
  def words(self) -> int:
    """The words of 32 bits that a block becomes."""
    return self.block // 16

  def encode(self, x: jax.Array, key: jax.Array) -> jax.Array:
    """Converts `[m, block] float32` to `[m, words] uint32`."""
    del key
    codes = jnp.where(jnp.isnan(x), -2, jnp.sign(x)).astype(jnp.int32)
    return packing.packed(codes, 2)

  def decode(self, words: jax.Array) -> jax.Array:
    """Converts `[m, words] uint32` to `[m, block] float32`."""
    codes = packing.unpacked(words, 2)
    return jnp.where(codes == -2, jnp.nan, codes.astype(jnp.float32))


@dataclasses.dataclass(frozen=True, slots=True)
class OneBit(Codec):
  """Sends one bit a number, and two means for each block (1-bit SGD).

  A number that is not negative arrives as the mean of all such numbers of its
  block, and a negative one as the mean of the others. Errors are kept. The
  paper's blocks are the columns of a matrix.

  Attributes:
    block: Numbers that share the two means, a multiple of 32.

  Raises:
    ValueError: `block` is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> one_bit = zenjax.compress.OneBit(block=32)
    >>> x = jnp.zeros((1, 32)).at[0, :3].set(jnp.array([-4.0, -2.0, 60.0]))
    >>> one_bit.decode(one_bit.encode(x, jax.random.key(0)))[0, :4].tolist()
    [-3.0, -3.0, 2.0, 2.0]

  References:
    Seide et al., [1-Bit Stochastic Gradient
    Descent](https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent-and-application-to-data-parallel-distributed-training-of-speech-dnns/),
    Interspeech 2014.
  """

  block: int = 512

  def __post_init__(self):
    packing.check_block(self.block)

  @property
  def words(self) -> int:
    """The words of 32 bits that a block becomes."""
    return self.block // 32 + 2

  def encode(self, x: jax.Array, key: jax.Array) -> jax.Array:
    """Converts `[m, block] float32` to `[m, words] uint32`."""
    del key
    negative = x < 0
    low = packing.checked(_mean(x, negative), x)
    high = packing.checked(_mean(x, ~negative), x)
    codes = packing.packed(negative.astype(jnp.int32), 1)
    return packing.with_scales(codes, low, high)

  def decode(self, words: jax.Array) -> jax.Array:
    """Converts `[m, words] uint32` to `[m, block] float32`."""
    codes, low, high = packing.without_scales(words, 2)
    return jnp.where(packing.unpacked(codes, 1) < 0, low, high)


def _mean(x: jax.Array, where: jax.Array) -> jax.Array:
  """Returns the mean of some numbers of each block; zero if there are none."""
  count = jnp.maximum(jnp.sum(where, axis=1).astype(jnp.float32), 1)
  share = jnp.where(where, x, jnp.zeros_like(x)) / count[:, None]
  return jnp.sum(share, axis=1)
