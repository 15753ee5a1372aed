"""Thresholds that follow the density got. `peers.md` 4.2 and 4.3b."""

import math
from typing import Any

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
  """`log threshold += clip(0.03 log(ratio) + drift, -0.05, 0.05)`.

  `ratio` is `count / k`. Not published: the rule of `peers.md` 4.3b, for the
  default controller, and a `drift`, which adds up `0.001 clip(ratio - 1, -0.25,
  0.25)`. In this order:

  1. The threshold moves, by the drift of the step before.
  2. The drift adds up, but for a step that was cut to a limit. With a ratio
     above 2 or below 1/2 it is 0 instead.

  A program that samples thresholds does so where this rule is far off, before
  it selects. That is not in this model.

  The start, a sampled quantile, is given. Everything is computed in `dtype`,
  an operation at a time. Logarithms differ between programs in the last bit, so
  this is to be compared up to rounding.
  """

  def __init__(
    self,
    k: int,
    start: float,
    dtype: Any = np.float64,
    gain: float = 0.03,
    drift_gain: float = 0.001,
    drift_limit: float = 0.25,
    limit: float = 0.05,
    far: float = 2.0,
  ):
    self.k = k
    self._type = np.dtype(dtype).type
    self.value, self.drift = self._type(start), self._type(0)
    self._gain, self._drift_gain = self._type(gain), self._type(drift_gain)
    self._drift_limit = self._type(drift_limit)
    self._limit, self._far = self._type(limit), self._type(far)

  def update(self, count: int) -> None:
    """Moves the threshold by what was sent last, all devices together."""
    one = self._type(1)
    ratio = self._type(count) / self._type(self.k)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
      wanted = self._gain * np.log(ratio) + self.drift
      step = min(max(wanted, -self._limit), self._limit)
      self.value = self.value * np.exp(step)
    if ratio > self._far or ratio < one / self._far:
      self.drift = self._type(0)
    elif abs(wanted) <= self._limit:
      error = min(max(ratio - one, -self._drift_limit), self._drift_limit)
      self.drift = self.drift + self._drift_gain * error
