"""How the union of nonzero rows grows with the devices, from few that ran.

`T` recorded steps of `n` devices are pooled: each of their `N = n T` row sets
stands for what some device touches in some step. The union of `m` devices is
then expected to be that of `m` sets drawn from the pool without replacement,
which needs no sampling: a row that `c` of `N` sets hold is missed by `m` of
them with the hypergeometric probability `C(N - c, m) / C(N, m)`.

What it rests on: devices of one step are as alike as devices of two recorded
steps. So it is for shuffled data: from 32 steps of 4 devices, the union of 64
is predicted within 0.2 per cent on shuffled windows of real text, and within
4.4 on contiguous text from random places. Where every host reads a text of its
own from front to back, neighbouring steps of a host are more alike than hosts:
consecutive ones predict 11 per cent too little for 64 devices, 19 for 128 (from
16 steps of 8), steps 13 apart 0.3 and 0.8. Record steps that lie far apart.
(`python -m benchmarks.run growth`, where a power law through one step is 17 to
26 per cent too high.)

Beside the Zen paper's points: BERT's 1.06 per cent are predicted to be 41 of
128 devices, the paper has 40.8. The ids are drawn from a law that was fitted to
that point, so this checks the pooling and not the paper.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools

import numpy as np

from zenjax import traces
from zenjax._src.machine import cost
from zenjax._src.schemes import buffer_sizes

# What is expected of `m` of `N` row sets drawn without replacement: exact.


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


# Row ids of one table in one step, one ascending array a device.
Sets = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Growth:
  """What a pool of row sets of one table says of any number of devices.

  Attributes:
    rows: Of the table.
    devices: Of a recorded step.
    steps: Recorded.
    held: `[N + 1]`, how many rows exactly `c` of the pool's sets hold.
    without: The same of the pool without one step, for each of them.
    halves: The same of the first and of the second half of the steps.
    sizes: `[N]`, rows of each set, ascending.
    step_union: Rows of a recorded step's devices together, mean.
    sets: All of them, step by step.
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
    """Sets in the pool."""
    return len(self.sizes)

  def union(self, devices: int) -> float:
    """Expected rows of so many devices together.

    Raises:
      ValueError: The pool has fewer sets.
    """
    return expected(self.held, self._checked(devices))

  def error(self, devices: int) -> float:
    """Standard error of `union`, over it: each step is left out in turn.

    Of the recorded steps alone: that steps of one run may be alike, and others
    not, it cannot know. NaN where one step was recorded.
    """
    m = self._checked(devices)
    if self.steps == 1:
      return float("nan")
    # With a step less as large a part of the pool is drawn.
    fewer = max(1, round(m * (self.steps - 1) / self.steps))
    found = np.array([expected(held, fewer) for held in self.without])
    spread = np.sum((found - found.mean()) ** 2)
    variance = spread * (self.steps - 1) / self.steps
    mean = found.mean()
    return float(np.sqrt(variance) / mean) if mean else 0.0

  @property
  def drift(self) -> float:
    """What the first half of the steps says of the second half, less one."""
    if len(self.halves) < 2:
      return float("nan")
    first, second = (expected(held, len(held) - 1) for held in self.halves)
    return first / second - 1 if second else 0.0

  @property
  def step_ratio(self) -> float:
    """A recorded step's union over what the pool says of as many devices.

    Below 1 devices of one step are more alike than the pool; above 1 less.
    """
    expected = self.union(self.devices)
    return self.step_union / expected if expected else 1.0

  def bounds(self, devices: int) -> tuple[float, float]:
    """What the union is at least and at most, beyond the pool as well.

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
    """Expected rows of the device that has most; of the pool's, beyond it."""
    return fullest(self.sizes, min(devices, self.pooled))

  def profile(self, devices: int) -> cost.Profile:
    """What the cost model asks of a table, for so many devices.

    Skew is of expected loads: that of the fullest range in a step is larger by
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


def growth(recorded: Sequence[Sets], rows: int) -> Growth:
  """Pools the row sets of one table.

  Args:
    recorded: Of each step the rows that each device touched, ascending.
    rows: Of the table.

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


def growth_of(
  trace: traces.Trace, expected: Sequence[buffer_sizes.Table] | None = None
) -> Mapping[str, Growth]:
  """The growth of each table of a trace.

  Args:
    trace: That `zenjax.traces.read` gave.
    expected: The tables of the model that is planned, if they are known.

  Raises:
    ValueError: The trace is of another model; the message says what differs.
  """
  if expected is not None:
    wanted = {t.name: (t.num_rows, t.width) for t in expected}
    found = {t.name: (t.rows, t.width) for t in trace.header.tables}
    wrong = {k: found.get(k) for k, v in wanted.items() if found.get(k) != v}
    if wrong:
      raise ValueError(
        "`trace` must be of the model that is planned: of"
        f" {', '.join(f'{k!r} {wanted[k]}' for k in wrong)} it holds"
        f" {', '.join(str(v or 'nothing') for v in wrong.values())}; record the"
        " steps of this model."
      )
  return {
    t.name: growth(trace.sets[t.name], t.rows) for t in trace.header.tables
  }


def _without(held, counts, step, n) -> np.ndarray:
  """`held` of the pool less one step's sets."""
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
