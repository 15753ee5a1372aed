"""Divides the flat vector into a contiguous part for each device.

Comparisons of the published rules are made in integers, so that they are the
same on every backend and equal to the authors' doubles.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# The number of blocks of ExDyna, and the unit of their size, as published.
BLOCKS = 1024
ALIGN = 32


def even(total: int, n: int) -> np.ndarray:
  """Divides `total` into `n` even parts, the first ones larger by one."""
  quotient, remainder = divmod(total, n)
  return np.array([quotient + (i < remainder) for i in range(n)], np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Even:
  """The fixed even partitions of MiCRO, by elements."""

  size: int
  n: int

  def __post_init__(self):
    if self.size < self.n:
      raise ValueError(
        f"`params` have {self.size} elements for {self.n} devices, and each"
        " needs one. Leave so small a model to `zenjax.zen_sync`."
      )

  @property
  def unit(self) -> str:
    """The unit of lengths, in words. It names the size of the vector."""
    return f"of {self.size} elements"

  @property
  def longest(self) -> int:
    """The largest number of elements that a partition can have."""
    return -(-self.size // self.n)

  def start(self) -> np.ndarray:
    """Returns the first partitions, `[n] int32`."""
    return even(self.size, self.n)

  def bounds(self, parts: jax.Array) -> jax.Array:
    """Partition `p` has the elements `[bounds[p], bounds[p + 1])`."""
    return _ends(parts)

  def moved(self, parts: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the next partitions, by the selected elements in each."""
    del counts
    return parts


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
  """The partitions of ExDyna, which pass single blocks to their neighbours.

  The last partition also has the elements after the last block.
  """

  size: int
  n: int
  blocks: int = BLOCKS

  def __post_init__(self):
    if self.n > self.blocks:
      raise ValueError(
        f"`axis_name` names {self.n} devices, and ExDyna has {self.blocks}"
        " blocks for them. Use `zenjax.compress.MiCRO`, which has no blocks."
      )
    if not self.block:
      raise ValueError(
        f"`params` have {self.size} elements to compress, and ExDyna needs"
        f" {self.blocks * ALIGN}. Use `zenjax.compress.MiCRO`."
      )

  @property
  def block(self) -> int:
    """Elements of a block."""
    return self.size // self.blocks // ALIGN * ALIGN

  @property
  def unit(self) -> str:
    return f"of {self.blocks} blocks, {self.size} elements"

  @property
  def fewest(self) -> int:
    """Blocks that a partition keeps: at least `blocks / (4 n)`."""
    return -(-self.blocks // (4 * self.n))

  @property
  def longest(self) -> int:
    most = self.blocks - (self.n - 1) * self.fewest
    return most * self.block + self.size - self.blocks * self.block

  def start(self) -> np.ndarray:
    return even(self.blocks, self.n)

  def bounds(self, parts: jax.Array) -> jax.Array:
    return (_ends(parts) * self.block).at[-1].set(self.size)

  def moved(self, parts: jax.Array, counts: jax.Array) -> jax.Array:
    """Compares neighbours in one sweep from left to right.

    If the left one is heavy and the right one light, one block goes right; in
    the reverse case, one goes left. Counts include the moves further left.
    """
    total = jnp.sum(counts, dtype=jnp.int32)
    fair = lax.div(total, jnp.int32(self.n))
    # Counts above `1.05 fair` are heavy.
    heavy, light = fair + lax.div(fair, jnp.int32(20)), _below(fair)
    worth = self._worth(total)

    def compare(i, carry):
      parts, counts = carry
      left, right = counts[i], counts[i + 1]
      to_right = (left > heavy) & (right < light) & (parts[i] > self.fewest)
      to_left = (left < light) & (right > heavy) & (parts[i + 1] > self.fewest)
      step = to_right.astype(jnp.int32) - to_left.astype(jnp.int32)
      step = jnp.where(fair > 0, step, 0)
      parts = parts.at[i].add(-step).at[i + 1].add(step)
      counts = counts.at[i].add(-step * worth).at[i + 1].add(step * worth)
      return parts, counts

    return lax.fori_loop(0, self.n - 1, compare, (parts, counts))[0]

  def _worth(self, total: jax.Array) -> jax.Array:
    """Returns `block * total // size`: an estimate, corrected by its remainder.

    The remainder is small, so it is right although its terms wrap around.
    """
    share = np.float32(self.block / self.size)
    guess = (total.astype(jnp.float32) * share).astype(jnp.int32)
    remainder = total * jnp.int32(self.block) - guess * jnp.int32(self.size)
    more, less = remainder >= self.size, remainder < 0
    return guess + more.astype(jnp.int32) - less.astype(jnp.int32)


Division = Even | Blocks


def _ends(lengths: jax.Array) -> jax.Array:
  return jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0))


def _below(fair: jax.Array) -> jax.Array:
  """Returns the bound of light counts, `0.95238 fair` rounded up."""
  fair = fair.astype(jnp.uint32)
  unit, part = jnp.uint32(50_000), jnp.uint32(47_619)
  whole, rest = lax.div(fair, unit), lax.rem(fair, unit)
  return (
    part * whole + lax.div(part * rest + (unit - jnp.uint32(1)), unit)
  ).astype(jnp.int32)
