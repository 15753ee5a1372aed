"""Recorded runs as planning questions: leaves, and densities at any scale.

A trace has no program, so the times at which gradients are complete are
assumed. A table's is complete at the end of the backward pass, as its look-ups
come first in the forward pass; the others follow each other evenly over the
backward pass, which takes two thirds of a step.

The union of nonzero rows grows with the devices, and is predicted from few that
ran. `T` recorded steps of `n` devices are pooled: each of their `N = n T` row
sets stands for what some device touches in some step. The union of `m` devices
is then expected to be that of `m` sets drawn from the pool without replacement,
which needs no sampling: a row that `c` of `N` sets hold is missed by `m` of
them with the hypergeometric probability `C(N - c, m) / C(N, m)`.

The assumption: devices of one step are as alike as devices of two recorded
steps. It holds for shuffled data. Where every host reads a text of its own from
front to back, neighbouring steps of a host are more alike than hosts, and the
union is predicted too small: record steps that lie far apart
(`tests/planner/test_growth.py`).
"""

from collections.abc import Sequence
import dataclasses
import os
from typing import Any

import jax
import numpy as np

from zenjax import traces
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner.choosing import Question
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.rows import leaf_util
from zenjax.traces import DeviceRows

# The part of a step before any gradient: the forward pass.
_FORWARD = 1 / 3


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
    sizes: `[N]`, rows of each set, ascending.
  """

  rows: int
  devices: int
  steps: int
  held: np.ndarray
  without: tuple[np.ndarray, ...]
  sizes: np.ndarray

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
  sizes = [len(ids) for step in recorded for ids in step]
  counts = np.zeros(rows, np.int32)
  own = [
    np.unique(np.concatenate(step), return_counts=True) for step in recorded
  ]
  for ids, number in own:
    counts[ids] += number.astype(np.int32)
  held = np.bincount(counts, minlength=len(sizes) + 1)
  (n,) = devices
  return Growth(
    rows=rows,
    devices=n,
    steps=len(recorded),
    held=held,
    without=tuple(_without(held, counts, step, n) for step in own),
    sizes=np.sort(sizes),
  )


def _without(held, counts, step, n) -> np.ndarray:
  """Returns `held` of the pool less one step's sets."""
  ids, number = step
  left = held.copy()
  before = counts[ids]
  np.subtract.at(left, before, 1)
  np.add.at(left, before - number, 1)
  return left[: len(held) - n]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
  """A run as the planner sees it.

  Attributes:
    gradients: Tables last. Only tables, where the trace tells of no others.
    growths: Growth of the union of each table.
    pooled: Row sets of a table: the unions of more devices are bounds only.
    whole: True if the trace has all leaves of the model.
  """

  gradients: tuple[Gradient, ...]
  growths: dict[str, Growth]
  pooled: int
  whole: bool

  def profiles(self, devices: int, batch: int = 1) -> dict[str, Profile]:
    """Returns densities for `batch` times the recorded look-ups of a device.

    A device with twice the look-ups touches what two recorded ones did.
    """
    return {
      name: _profile(growth, devices, batch)
      for name, growth in self.growths.items()
    }

  def question(
    self, topology: Topology, batch: int = 1, **options: Any
  ) -> Question:
    """Returns the question for a machine; `options` as `Question` has them."""
    larger = tuple(
      dataclasses.replace(g, look_ups=g.look_ups and g.look_ups * batch)
      for g in self.gradients
    )
    return Question(
      gradients=larger,
      topology=topology,
      axes=axes_of(topology),
      profiles=self.profiles(topology.devices, batch),
      **options,
    )


def axes_of(topology: Topology) -> tuple[str, ...]:
  """Names the mesh axes: `"data"` for one level, the levels' for several."""
  names = tuple(level.name for level in topology.levels)
  return ("data",) if len(names) == 1 else names


def recorded(trace: traces.Trace) -> Recorded:
  """Reads a run off its trace."""
  header = trace.header
  growths = {
    table.name: growth(trace.sets[table.name], table.rows)
    for table in header.tables
  }
  leaves = header.leaves or tuple(
    traces.LeafInfo(name=t.name, shape=(t.rows, t.width), dtype=t.dtype)
    for t in header.tables
  )
  rest = [leaf for leaf in leaves if leaf.name not in growths]
  tables = [leaf for leaf in leaves if leaf.name in growths]
  backward = np.linspace(_FORWARD, 1, len(rest) + 1)[1:]
  return Recorded(
    gradients=(
      *_gradients(rest, [float(x) for x in backward]),
      *_gradients(tables, [1.0] * len(tables)),
    ),
    growths=growths,
    pooled=header.devices * header.steps,
    whole=bool(header.leaves),
  )


def profiles(
  directory: str | os.PathLike, gradients: Sequence[Gradient], devices: int
) -> dict[str, Profile]:
  """Reads the densities of a model's tables, for so many devices.

  Raises:
    ValueError: The trace is broken, or of another model.
  """
  trace = traces.read(directory)
  shapes = {
    g.name: leaf_util.table_shape(jax.ShapeDtypeStruct(g.shape, g.dtype), "row")
    for g in gradients
  }
  wrong = [
    f"{t.name!r} {t.rows} x {t.width} there, {shapes.get(t.name, 'none')} here"
    for t in trace.header.tables
    if shapes.get(t.name) != (t.rows, t.width)
  ]
  if wrong:
    raise ValueError(
      f"`trace` must be of the model that is planned, but of {wrong[0]}"
      f" ({len(wrong)} such tables); record steps of this model."
    )
  return recorded(trace).profiles(devices)


def _gradients(
  leaves: Sequence[traces.LeafInfo], ready: Sequence[float]
) -> list[Gradient]:
  return [
    Gradient(
      name=leaf.name,
      shape=leaf.shape,
      dtype=np.dtype(leaf.dtype),
      look_ups=leaf.look_ups,
      ready=at,
    )
    for leaf, at in zip(leaves, ready)
  ]


def _profile(growth: Growth, devices: int, batch: int) -> Profile:
  """Returns densities; beyond the pool the largest possible union."""
  rows = growth.bounds(batch)[1]
  # Larger batches are more alike than these: at most as uneven.
  mean = float(growth.sizes.mean())
  uneven = growth.fullest(devices) / mean if mean else 1.0
  return Profile(
    rows=rows,
    fullest=min(rows * uneven, float(growth.rows)),
    union=growth.bounds(devices * batch)[1],
    devices=devices,
  )
