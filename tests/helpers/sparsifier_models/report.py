"""What a step reports."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np


class Step(TypedDict):
  """What one step did, on all devices.

  Build-up and imbalance are the definitions of the issue: the union over the
  `k` wanted, and the largest count times `n` over the sum of counts (the
  authors log that minus 1 as "inefficiency").
  """

  updates: np.ndarray  # [N] float64, the mean over devices of what was sent
  selected: list[np.ndarray]  # per device, ascending indices
  threshold: float  # what this step selected with; NaN where there is none
  residuals: np.ndarray  # [n, N] after the step
  density: float  # see `ExDyna` and `ErrorFeedback`: they count differently
  build_up: float
  imbalance: float


class PartitionedStep(Step):
  partitions: np.ndarray  # [n + 1] boundaries that this step used
  assignment: np.ndarray  # [n] the partition that each device searched


class MomentumStep(Step):
  momenta: np.ndarray  # [n, N] after the step


def build_up(selected: Sequence[np.ndarray], k: int | None) -> float:
  """Size of the union over the count wanted; NaN where none was named."""
  return len(np.unique(np.concatenate(selected))) / k if k else float("nan")


def imbalance(selected: Sequence[np.ndarray]) -> float:
  """Largest count times `n` over the sum: 1 is even, also if all are empty."""
  counts = [len(indices) for indices in selected]
  return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
