"""Recorded runs: densities of tables for any number of devices.

The union of nonzero rows grows with the devices, and is predicted from few that
ran. `T` recorded steps of `n` devices are pooled: each of their `N = n T` row
sets stands for what some device touches in some step. The union of `m` devices
is then expected to be that of `m` sets drawn from the pool without replacement,
which needs no sampling: a row that `c` of `N` sets hold is missed by `m` of
them with the hypergeometric probability `C(N - c, m) / C(N, m)`.

The assumption: devices of one step are as alike as devices of two recorded
steps. It holds for shuffled data. Where every host reads a text of its own from
front to back, neighboring steps of a host are more alike than hosts, and the
union is predicted too small: record steps that are far apart.
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
    held: `[N + 1]`, how many rows exactly `c` of the pool's sets hold.
    sizes: `[N]`, rows of each set, ascending.
  """

  rows: int
  held: np.ndarray
  sizes: np.ndarray

  def union(self, devices: int) -> float:
    """Returns the expected rows of so many devices together.

    Beyond the pool it is the largest that can be: no union grows faster with
    another device than with the one before.
    """
    pooled = len(self.sizes)
    union = self.held @ (1 - _missed(pooled, min(devices, pooled)))
    # The last set of any order brings the rows that it alone holds.
    beyond = max(devices - pooled, 0) * self.held[1] / pooled
    return min(float(union + beyond), float(self.rows))

  def fullest(self, devices: int) -> float:
    """Returns the expected rows of the fullest of the devices or the pool."""
    pooled = len(self.sizes)
    # The largest is number k where the k smaller ones hold all the others.
    none_above = _missed(pooled, min(devices, pooled))[::-1]
    return float(self.sizes @ np.diff(none_above))

  def profile(self, devices: int, batch: int = 1) -> Profile:
    """Returns densities for `batch` times the recorded look-ups of a device.

    A device with twice the look-ups touches what two recorded ones did.
    """
    rows, mean = self.union(batch), float(self.sizes.mean())
    # Larger batches are more alike than these: at most as uneven.
    uneven = self.fullest(devices) / mean if mean else 1.0
    return Profile(
      rows=rows,
      fullest=min(rows * uneven, float(self.rows)),
      union=self.union(devices * batch),
      devices=devices,
    )


def _missed(pooled: int, m: int) -> np.ndarray:
  """Returns `[N + 1]`: that `m` of `N` sets miss a row which `c` hold."""
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
    recorded: For each step the rows that each device touched, ascending.
    rows: Rows of the table.

  Example:
    >>> step = [np.array([0, 1]), np.array([0, 2])]
    >>> found = growth([step, step], rows=10)
    >>> round(found.union(1), 9), round(found.union(4), 9)
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
  """Reads the densities of a model's tables, for so many devices.

  Args:
    directory: Of the trace.
    rows: Rows of every leaf of the model.
    devices: Number of devices.

  Raises:
    ValueError: The trace is broken, or of another model.
  """
  known = growths(traces.read(directory))
  for name, found in known.items():
    if rows.get(name) != found.rows:
      raise ValueError(
        f"`trace` must be of the model that is planned, but table {name!r} has"
        f" {found.rows} rows there and {rows.get(name, 'none')} here. Record"
        " steps of this model."
      )
  return {name: found.profile(devices) for name, found in known.items()}
