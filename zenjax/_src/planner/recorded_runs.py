"""Predicts densities of tables for any number of devices, from a trace.

The union of nonzero rows grows with the number of devices. It is predicted from
a run on few devices: `T` recorded steps of `n` devices give a pool of `N = n T`
row sets, each of which is what one device touched in one step. The union of `m`
devices is modelled as the union of `m` sets drawn from the pool without
replacement. Its expectation needs no sampling: a row that is in `c` of `N` sets
is in none of `m` drawn sets with the hypergeometric probability
`C(N - c, m) / C(N, m)`.

The model assumes that two devices of a step are as similar as two recorded
steps. This holds for shuffled data. If every host reads its own text from front
to back, neighboring steps of a host are more similar than two hosts, and the
predicted union is too small. Record steps that are far apart in this case.
"""

from collections.abc import Sequence
import os
from typing import NamedTuple

import numpy as np

from zenjax._src.machine.cost import Profile
from zenjax._src.planner import traces
from zenjax._src.planner.traces import DeviceRows


class Growth(NamedTuple):
  """Densities of one table for any number of devices, from a pool of row sets.

  Attributes:
    rows: Rows of the table.
    held: `[N + 1]`: entry `c` is how many rows are in exactly `c` sets.
    sizes: `[N]`: the number of rows of each set, ascending.
  """

  rows: int
  held: np.ndarray
  sizes: np.ndarray

  def union(self, devices: int) -> float:
    """Returns the expected number of rows of so many devices together.

    For more devices than the pool has sets, this is an upper bound: each
    further device adds at most as many new rows as the one before it.
    """
    pooled = len(self.sizes)
    union = self.held @ (1 - _missed(pooled, min(devices, pooled)))
    # In any order, the last set of the pool adds the rows that only it has.
    beyond = max(devices - pooled, 0) * self.held[1] / pooled
    return min(float(union + beyond), float(self.rows))

  def fullest(self, devices: int) -> float:
    """Returns the expected rows of the device with most rows.

    For more devices than the pool has sets, it is the largest set.
    """
    pooled = len(self.sizes)
    # Set k is the largest of those drawn if no drawn set is above it.
    none_above = _missed(pooled, min(devices, pooled))[::-1]
    return float(self.sizes @ np.diff(none_above))

  def profile(self, devices: int, batch: int = 1) -> Profile:
    """Returns densities for `batch` times the recorded lookups of a device.

    A device with twice the lookups is modelled as two recorded devices.
    """
    rows, mean = self.union(batch), float(self.sizes.mean())
    # Larger batches are more alike, so this imbalance is an upper bound.
    uneven = self.fullest(devices) / mean if mean else 1.0
    return Profile(
      rows=rows,
      fullest=min(rows * uneven, float(self.rows)),
      union=self.union(devices * batch),
      devices=devices,
    )


def _missed(pooled: int, m: int) -> np.ndarray:
  """Returns `[N + 1]`: the probability that `m` drawn sets miss a row.

  Entry `c` is for a row that is in `c` of the `N` pooled sets.
  """
  log_factorial = np.concatenate(
    [[0], np.cumsum(np.log(np.arange(1, pooled + 1)))]
  )
  c = np.arange(pooled - m + 1)
  log = log_factorial[pooled - c] - log_factorial[pooled - c - m]
  log += log_factorial[pooled - m] - log_factorial[pooled]
  return np.concatenate([np.exp(log), np.zeros(m)])


def growth(recorded: Sequence[DeviceRows], rows: int) -> Growth:
  """Pools the row sets of one table.

  Args:
    recorded: For each step, the rows that each device touched, ascending.
    rows: Rows of the table.

  Example:
    >>> step = [np.array([0, 1]), np.array([0, 2])]
    >>> pool = growth([step, step], rows=10)
    >>> round(pool.union(1), 9), round(pool.union(4), 9)
    (2.0, 3.0)
  """
  sets = [ids for step in recorded for ids in step]
  counts = np.zeros(rows, np.int64)
  for ids in sets:
    counts[ids] += 1
  held = np.bincount(counts, minlength=len(sets) + 1)
  return Growth(rows, held, np.sort([len(ids) for ids in sets]))


def growths(trace: traces.Trace) -> dict[str, Growth]:
  """Returns the growth of every table of a trace."""
  tables = trace.header.tables
  return {t.name: growth(trace.sets[t.name], t.rows) for t in tables}


def profiles(
  directory: str | os.PathLike, rows: dict[str, int], devices: int
) -> dict[str, Profile]:
  """Reads a trace, and returns the densities of its tables.

  Args:
    directory: The directory of the trace.
    rows: Rows of every leaf of the model.
    devices: The number of devices to predict for.

  Raises:
    ValueError: The trace is broken, or belongs to another model.
  """
  recorded = growths(traces.read(directory))
  for name, table in recorded.items():
    if rows.get(name) != table.rows:
      raise ValueError(
        f"`trace` was recorded with another model: table {name!r} has"
        f" {table.rows} rows in the trace and {rows.get(name, 'none')} in the"
        " model. Record steps of this model."
      )
  return {name: table.profile(devices) for name, table in recorded.items()}
