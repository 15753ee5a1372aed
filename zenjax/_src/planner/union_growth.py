"""How the union of nonzero rows grows with the devices, from few that ran.

`T` recorded steps of `n` devices are pooled: each of their `N = n T` row sets
stands for what some device touches in some step. The union of `m` devices is
then expected to be that of `m` sets drawn from the pool without replacement,
which needs no sampling: a row that `c` of `N` sets hold is missed by `m` of
them with the hypergeometric probability `C(N - c, m) / C(N, m)`.

The assumption: devices of one step are as alike as devices of two recorded
steps. It holds for shuffled data. Where every host reads a text of its own from
front to back, neighbouring steps of a host are more alike than hosts, and the
union is predicted too small: record steps that lie far apart.
`python -m benchmarks.run growth` measures the error.
"""

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from zenjax._src.machine import cost
from zenjax.traces import DeviceRows


def missed(pooled: int, m: int) -> np.ndarray:
  """Returns `[N + 1]`: that `m` of `N` sets miss a row which `c` hold."""
  log_factorial = np.concatenate(
    [[0], np.cumsum(np.log(np.arange(1, pooled + 1)))]
  )
  c = np.arange(pooled - m + 1)
  log = log_factorial[pooled - c] - log_factorial[pooled - c - m]
  log += log_factorial[pooled - m] - log_factorial[pooled]
  return np.concatenate([np.exp(log), np.zeros(m)])


def expected_union(held: np.ndarray, m: int) -> float:
  """Returns rows in the union of `m` sets; `held[c]` rows are in `c` of `N`."""
  return float(held @ (1 - missed(len(held) - 1, m)))


def expected_largest(sizes: np.ndarray, m: int) -> float:
  """Returns the expected largest of `m` sets; `sizes` ascend."""
  # The largest is number k where the k smaller ones hold all the others.
  none_above = missed(len(sizes), m)[::-1]  # [k]: all m among the k smallest
  return float(sizes @ np.diff(none_above))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Growth:
  """Densities of one table for any number of devices, from a pool of row sets.

  Attributes:
    rows: Rows of the table.
    devices: Devices of a recorded step.
    steps: Number of recorded steps.
    held: `[N + 1]`, how many rows exactly `c` of the pool's sets hold.
    without: `held` of the pool without one step, for each of them.
    halves: `held` of the first and of the second half of the steps.
    sizes: `[N]`, rows of each set, ascending.
    step_union: Rows of a recorded step's devices together, mean.
    sets: All sets, step by step.
  """

  rows: int
  devices: int
  steps: int
  held: np.ndarray
  without: tuple[np.ndarray, ...]
  halves: tuple[np.ndarray, ...]
  sizes: np.ndarray
  step_union: float
  sets: tuple[np.ndarray, ...]

  @property
  def pooled(self) -> int:
    """Number of sets in the pool."""
    return len(self.sizes)

  def union(self, devices: int) -> float:
    """Returns the expected rows of so many devices together.

    Raises:
      ValueError: The pool has fewer sets.
    """
    return expected_union(self.held, self._checked(devices))

  def error(self, devices: int) -> float:
    """Returns the relative standard error of `union`, by the jackknife.

    It is that of the recorded steps: it cannot tell that steps of one run are
    alike and those of others are not. NaN if one step was recorded.
    """
    m = self._checked(devices)
    if self.steps == 1:
      return float("nan")
    # With a step less as large a part of the pool is drawn.
    fewer = max(1, round(m * (self.steps - 1) / self.steps))
    found = np.array([expected_union(held, fewer) for held in self.without])
    spread = np.sum((found - found.mean()) ** 2)
    variance = spread * (self.steps - 1) / self.steps
    mean = found.mean()
    return float(np.sqrt(variance) / mean) if mean else 0.0

  @property
  def drift(self) -> float:
    """Relative error of the first half of the steps on the second half."""
    if len(self.halves) < 2:
      return float("nan")
    first, second = (
      expected_union(held, len(held) - 1) for held in self.halves
    )
    return first / second - 1 if second else 0.0

  @property
  def step_ratio(self) -> float:
    """Union of a recorded step over that of as many devices of the pool.

    Below 1 devices of one step are more alike than the pool; above 1 less.
    """
    expected = self.union(self.devices)
    return self.step_union / expected if expected else 1.0

  def bounds(self, devices: int) -> tuple[float, float]:
    """Returns bounds of the union, beyond the pool as well.

    No union grows faster with another device than with the one before: beyond
    the pool it is at most a straight line from there.
    """
    beyond = devices - self.pooled
    if beyond <= 0:
      exact = self.union(devices)
      return exact, exact
    whole = self.union(self.pooled)
    # The last set of any order brings the rows that it alone holds.
    last = self.held[1] / self.pooled
    return whole, min(whole + beyond * float(last), float(self.rows))

  def fullest(self, devices: int) -> float:
    """Returns the expected rows of the fullest of the devices or the pool."""
    return expected_largest(self.sizes, min(devices, self.pooled))

  def profile(self, devices: int) -> cost.Profile:
    """Returns densities for so many devices, as the cost model takes them.

    Skew is that of expected loads: the fullest range of a step has more by
    chance.
    """
    m = self._checked(devices)
    return cost.Profile(
      rows=float(self.sizes.mean()),
      fullest=self.fullest(m),
      union=self.union(m),
      devices=m,
      skew=self._skew(m),
    )

  def _skew(self, m: int) -> tuple[float, float]:
    edges = np.arange(m + 1) * self.rows // m
    loads = [np.diff(np.searchsorted(s, edges)) for s in self.sets if len(s)]
    if not loads:
      return 1.0, 1.0
    device = np.mean([m * load.max() / load.sum() for load in loads])
    touched, counts = self._touched
    found = 1 - missed(self.pooled, m)[counts]
    union = np.bincount(
      np.searchsorted(edges, touched, side="right") - 1, found, m
    )
    return float(device), float(m * union.max() / union.sum())

  @functools.cached_property
  def _touched(self) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(np.concatenate(self.sets), return_counts=True)

  def _checked(self, devices: int) -> int:
    if not isinstance(devices, int) or devices < 1:
      raise ValueError(
        f"`devices` must be a positive integer, got {devices!r}."
      )
    if devices > self.pooled:
      needed = -(-devices // self.devices)
      raise ValueError(
        f"`devices` must not exceed the {self.pooled} row sets of"
        f" {self.steps} steps of {self.devices} devices, got {devices}: record"
        f" {needed} steps, or ask `bounds`."
      )
    return devices


def growth(recorded: Sequence[DeviceRows], rows: int) -> Growth:
  """Pools the row sets of one table.

  Args:
    recorded: For each step the rows that each device touched, ascending.
    rows: Rows of the table.

  Raises:
    ValueError: There is no step, or steps differ in their devices.

  Example:
    >>> step = [np.array([0, 1]), np.array([0, 2])]
    >>> found = growth([step, step], rows=10)
    >>> round(found.union(1), 9), round(found.union(4), 9)
    (2.0, 3.0)
  """
  devices = {len(step) for step in recorded}
  if len(devices) != 1 or 0 in devices:
    raise ValueError(
      "`recorded` must hold steps of one number of devices, at least 1, got"
      f" {sorted(devices)}."
    )
  sets = tuple(s for step in recorded for s in step)
  counts = np.zeros(rows, np.int32)
  own = [
    np.unique(np.concatenate(step), return_counts=True) for step in recorded
  ]
  for ids, number in own:
    counts[ids] += number.astype(np.int32)
  held = np.bincount(counts, minlength=len(sets) + 1)
  (n,) = devices
  half = len(recorded) // 2
  halves = (own[:half], own[half : 2 * half]) if half else ()
  return Growth(
    rows=rows,
    devices=n,
    steps=len(recorded),
    held=held,
    without=tuple(_without(held, counts, step, n) for step in own),
    halves=tuple(_held(part, rows, n) for part in halves),
    sizes=np.sort([len(s) for s in sets]),
    step_union=float(np.mean([len(ids) for ids, _ in own])),
    sets=sets,
  )


def _without(held, counts, step, n) -> np.ndarray:
  """Returns `held` of the pool less one step's sets."""
  ids, number = step
  left = held.copy()
  before = counts[ids]
  np.subtract.at(left, before, 1)
  np.add.at(left, before - number, 1)
  return left[: len(held) - n]


def _held(steps, rows, n) -> np.ndarray:
  counts = np.zeros(rows, np.int32)
  for ids, number in steps:
    counts[ids] += number.astype(np.int32)
  return np.bincount(counts, minlength=n * len(steps) + 1)
