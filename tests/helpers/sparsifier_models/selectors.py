"""Which elements each device selects on its own, the whole vector before it.

A selector has `k`, the count wanted of one device (None where it names none),
`threshold(step)`, NaN where there is none, and `select(acc, step, device)`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from . import thresholds


class Selector(Protocol):
  @property
  def k(self) -> int | None: ...

  def threshold(self, step: int) -> float: ...

  def select(self, acc: np.ndarray, step: int, device: int) -> np.ndarray:
    """Ascending indices into `acc`, `[N]`."""
    ...


class TopK:
  """Exactly `k` largest magnitudes.

  Choices, those of `lax.top_k`: among equals the lower index first, NaN before
  Inf. Zeros fill up where fewer than `k` elements are nonzero, so a device
  always selects `k`.
  """

  def __init__(self, k: int):
    self.k = k

  def threshold(self, step: int) -> float:
    del step
    return float("nan")

  def select(self, acc: np.ndarray, step: int, device: int) -> np.ndarray:
    del step, device
    # The last key is the first to sort by; NaN magnitudes would sort last.
    nan = np.isnan(acc)
    magnitude = np.where(nan, acc.dtype.type(0), np.abs(acc))
    order = np.lexsort((-magnitude, ~nan))
    return np.sort(order[: self.k])


class HardThreshold:
  """All magnitudes of at least a threshold, constant or a function of steps.

  Nothing is forced: a selection may be empty. (GRACE lowers the threshold to
  the largest *signed* element, so that something is sent; that is not kept.)
  The threshold is rounded as `thresholds.at_least` says. At 0 it selects
  everything, zeros included. `k` serves the statistics alone.
  """

  def __init__(
    self, threshold: float | Callable[[int], float], k: int | None = None
  ):
    self._threshold, self.k = threshold, k

  def threshold(self, step: int) -> float:
    if callable(self._threshold):
      return float(self._threshold(step))
    return float(self._threshold)

  def select(self, acc: np.ndarray, step: int, device: int) -> np.ndarray:
    del device
    return np.flatnonzero(thresholds.at_least(acc, self.threshold(step)))


class RandomK:
  """Indices drawn elsewhere: `draw(step)[device]`, alike on devices or not.

  Choices: values are not scaled by `N / k` (error feedback returns what was
  left out), and an index drawn twice counts once.
  """

  def __init__(self, draw: Callable[[int], Sequence[np.ndarray]], k: int):
    self._draw, self.k = draw, k

  def threshold(self, step: int) -> float:
    del step
    return float("nan")

  def select(self, acc: np.ndarray, step: int, device: int) -> np.ndarray:
    del acc
    return np.unique(np.asarray(self._draw(step)[device]))
