"""Which device searches which contiguous part of the flat vector.

`peers.md` 4.2, 4.3, 4.3b; `tried_field.md` 4 points 5 and 6.
"""

from collections.abc import Sequence

import numpy as np

# Shares of the fair count above and below which a partition is too heavy or
# too light. The authors write the lower one out to five digits.
HEAVY = 1.05
LIGHT = 0.95238


def assignment(step: int, n: int) -> np.ndarray:
  """The partition of every device at a step, `[n]`: a cyclic shift."""
  return (step % n + np.arange(n)) % n


def _even(total: int, n: int) -> list[int]:
  quotient, remainder = divmod(total, n)
  return [quotient + (i < remainder) for i in range(n)]


class StaticPartitions:
  """MiCRO: even by elements; the first `N mod n` partitions have one more."""

  def __init__(self, size: int, n: int):
    if size < n:
      raise ValueError(f"{n} partitions of {size} elements: one would be empty")
    self._bounds = np.cumsum([0, *_even(size, n)])

  def bounds(self) -> np.ndarray:
    return self._bounds.copy()

  def rebalance(self, counts: Sequence[int]) -> None:
    """Static partitions stay as they are."""
    del counts


class BlockPartitions:
  """ExDyna: whole blocks, and one block moves between neighbours at a time.

  Block-based partitioning: a block has `N // blocks` elements, rounded down to
  a multiple of `align`; what remains of the vector belongs to the last
  partition, always, and to no block. The first `blocks mod n` partitions start
  with one block more.

  Dynamic partition allocation, once a step, from the last step's counts: one
  sweep from left to right over neighbours `i`, `i + 1`.

  - Both loads, `count_i / fair` and `count_(i + 1) / fair`, are taken before
    either moves, but after the moves further left. `fair = total // n`.
  - Left too heavy and right too light: one block goes right; the reverse: one
    goes left. Both comparisons are strict.
  - Nothing moves if the giver would keep fewer than `blocks / (4 n)` blocks.
    That is not rounded: 1,024 blocks over 3 devices keep at least 86.
  - A move takes `block_size * total // N` from the giver's count and adds it
    to the other's; a count may go below 0. The remainder plays no part.

  Choices: the authors compute the last figure in floating point and truncate,
  which differs from the quotient of integers only where that is exact and the
  product rounds below it; here it is the integer. If fewer than `n` elements
  were selected, which cannot happen with the authors' forced index, `fair` is
  0 and nothing moves.
  """

  def __init__(self, size: int, n: int, blocks: int = 1024, align: int = 32):
    self.size = size
    self.block_size = size // blocks // align * align
    self.blocks = _even(blocks, n)
    self.minimum = blocks / (4 * n)
    if n > blocks:
      raise ValueError(f"{n} partitions of {blocks} blocks: some have none")
    if self.block_size == 0:
      raise ValueError(
        f"{blocks} blocks of at least {align} elements need {blocks * align}"
        f" elements; got {size}"
      )

  def bounds(self) -> np.ndarray:
    bounds = np.cumsum([0, *self.blocks]) * self.block_size
    bounds[-1] = self.size
    return bounds

  def rebalance(self, counts: Sequence[int]) -> None:
    """Moves blocks, given what was selected in each partition last."""
    counts = [int(count) for count in counts]
    total = sum(counts)
    fair = total // len(counts)
    if fair == 0:
      return
    moved = self.block_size * total // self.size
    for i in range(len(counts) - 1):
      left, right = counts[i] / fair, counts[i + 1] / fair
      if left > HEAVY and right < LIGHT:
        giver, taker = i, i + 1
      elif left < LIGHT and right > HEAVY:
        giver, taker = i + 1, i
      else:
        continue
      if self.blocks[giver] - 1 < self.minimum:
        continue
      self.blocks[giver] -= 1
      self.blocks[taker] += 1
      counts[giver] -= moved
      counts[taker] += moved
