"""What is expected of `m` of `N` row sets drawn without replacement: exact."""

import numpy as np


def missed(pooled: int, m: int) -> np.ndarray:
  """`[N + 1]`: that `m` of `N` sets miss a row which `c` of them hold."""
  log_factorial = np.concatenate(
    [[0], np.cumsum(np.log(np.arange(1, pooled + 1)))]
  )
  c = np.arange(pooled - m + 1)
  log = log_factorial[pooled - c] - log_factorial[pooled - c - m]
  log += log_factorial[pooled - m] - log_factorial[pooled]
  return np.concatenate([np.exp(log), np.zeros(m)])


def expected(held: np.ndarray, m: int) -> float:
  """Rows in the union of `m` sets; `held[c]` rows are in `c` of the `N`."""
  return float(held @ (1 - missed(len(held) - 1, m)))


def fullest(sizes: np.ndarray, m: int) -> float:
  """Of `m` sets drawn without replacement, the largest; `sizes` ascend."""
  # The largest is number k where the k smaller ones hold all the others.
  none_above = missed(len(sizes), m)[::-1]  # [k]: all m among the k smallest
  return float(sizes @ np.diff(none_above))
