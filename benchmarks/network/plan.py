"""What a run is asked for, and what of it is still to be measured."""

import dataclasses

from benchmarks.network import calibration
from benchmarks.network.cells import Findings
from benchmarks.network.cells import Key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
  """What is to be measured.

  Attributes:
    hosts: Numbers of hosts, each a testbed of its own.
    rates: Names in `netns.RATES`.
    workloads: Names in `workloads.ALL_NAMES`.
    variants: Names in `VARIANTS`.
    repeats: Timed rounds; one more goes before them.
    batches: Different batches that rounds go through in turn.
    calibrate: Whether single collectives are timed too.
    loopback: Whether hosts are mere processes on 127.0.0.1.
    keep_memory: Whether their freed memory stays theirs.
  """

  hosts: tuple[int, ...]
  rates: tuple[str, ...]
  workloads: tuple[str, ...]
  variants: tuple[str, ...]
  repeats: int
  batches: int
  calibrate: bool
  loopback: bool
  keep_memory: bool = False

  def keys(self) -> list[Key]:
    """Of all cells."""
    return [
      Key(hosts, rate, workload, variant)
      for hosts in self.hosts
      for workload in self.workloads
      for rate in self.rates
      for variant in self.variants
    ]


class Plan:
  """What of a grid is not among the findings, at the time of making this."""

  def __init__(self, grid: Grid, found: Findings):
    self.cells = [key for key in grid.keys() if not _is_done(grid, found, key)]
    self.points = [
      point
      for hosts in grid.hosts
      for rate in grid.rates
      for point in calibration.points(hosts, rate)
      if grid.calibrate and dataclasses.astuple(point) not in found.calibration
    ]

  def calls(self, repeats: int) -> int:
    """How often hosts are asked, as the progress bar counts."""
    built = {(k.hosts, k.workload, k.variant) for k in self.cells}
    drawn = {(k.hosts, k.workload) for k in self.cells}
    # Each is built and its bytes counted; each cell has an untimed round.
    rounds = len(self.cells) * (1 + repeats)
    return len(self.points) + len(drawn) + 2 * len(built) + rounds


def _is_done(grid, found, key):
  cell = found.cells.get(key)
  return cell is not None and cell.is_done(grid.repeats, grid.batches)
