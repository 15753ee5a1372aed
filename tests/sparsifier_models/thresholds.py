"""Thresholds that follow the density got. `peers.md` 4.2 and 4.3b."""

import math

import numpy as np


def wanted(density: float, size: int) -> int:
  """How many elements a density asks for: truncated, as the authors do."""
  k = int(density * size)
  if not 0 < density <= 1 or k == 0:
    raise ValueError(f"int({density=} * {size=}) = {k} selects nothing")
  return k


def at_least(acc: np.ndarray, threshold) -> np.ndarray:
  """Where `|acc| >= threshold`, bool; NaN counts as large.

  Compared in the dtype of `acc`, the threshold rounded to it (as PyTorch does
  with the authors' double), but never in fewer bits than float32: a 16-bit
  threshold could not move by 0.125 %.
  """
  dtype = np.result_type(acc.dtype, np.float32)
  with np.errstate(over="ignore"):
    bar = np.asarray(threshold).astype(dtype)
  return ~(np.abs(acc).astype(dtype) < bar)


class PaperThreshold:
  """Online threshold scaling, the same in ExDyna and MiCRO.

  Starts at `1 / (2 sqrt(k))`. Before each later step, with the count of the
  step before over `k`: above 1.1 times 1.005; above 0.909 times 1.00125; else
  times 0.995. The middle one also raises, as published. No clamp, as published:
  counts held above `k` drive it to infinity, all-zero gradients to 0.

  `dtype` is what the threshold is kept in: float64 as published, or float32
  for a program that has no doubles; each product is rounded to it.
  """

  def __init__(self, k: int, start: float | None = None, dtype=np.float64):
    self.k = k
    start = 1.0 / (2.0 * math.sqrt(k)) if start is None else start
    self.value = np.dtype(dtype).type(start)

  def update(self, count: int) -> None:
    """Moves the threshold by what was sent last, all devices together."""
    ratio = count / self.k
    factor = 1.005 if ratio > 1.1 else 1.00125 if ratio > 0.909 else 0.995
    with np.errstate(over="ignore", under="ignore"):
      self.value = self.value * type(self.value)(factor)


class DampedThreshold:
  """`log threshold += clip(0.03 log(count / k), -0.05, 0.05)`.

  Not published: the rule of `peers.md` 4.3b, for the default controller. The
  start, a sampled quantile, is given. A count of 0 moves by -0.05. Computed in
  float64 and rounded to `dtype`: logarithms differ between programs in the
  last bit, so this is to be compared up to rounding.
  """

  def __init__(
    self,
    k: int,
    start: float,
    dtype=np.float64,
    gain: float = 0.03,
    limit: float = 0.05,
  ):
    self.k, self.gain, self.limit = k, gain, limit
    self.value = np.dtype(dtype).type(start)

  def update(self, count: int) -> None:
    """Moves the threshold by what was sent last, all devices together."""
    step = self.gain * math.log(count / self.k) if count else -self.limit
    step = min(max(step, -self.limit), self.limit)
    self.value = type(self.value)(float(self.value) * math.exp(step))
