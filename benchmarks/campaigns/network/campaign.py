"""`network`: measures workloads x variants x rates x hosts on a testbed.

Every host runs `benchmarks.campaigns.network.host`; this side says what comes
next, and stops where a time is shorter than its bytes need on the link.
"""

import argparse
import dataclasses
import os
import pathlib
from typing import Any

import tqdm

from benchmarks import campaign
from benchmarks import library
from benchmarks import record
from benchmarks import workloads
from benchmarks.campaigns.network import cells as cells_lib
from benchmarks.campaigns.network import show
from benchmarks.campaigns.network.cells import Cell
from benchmarks.campaigns.network.cells import Findings
from benchmarks.campaigns.network.cells import Key
from benchmarks.campaigns.network.cells import Point
from benchmarks.campaigns.network.variants import VARIANTS
from benchmarks.testbed import testbed
from benchmarks.testbed.served import Served

# Exchanges between two looks at the counters, or as many as there are batches.
_COUNTED = 3
_CALL_S = 120.0
# Those with something to save; dense tables and the sweep go by name.
_WORKLOADS = tuple(n for n, w in workloads.SCALED.items() if w.density < 1)
_DEFAULTS: dict[str, tuple] = {
  "hosts": (2, 4, 8),
  "rates": ("200mbit", "1gbit"),
  "workloads": (*_WORKLOADS, "stdlib-lm"),
  "variants": tuple(VARIANTS),
}
# On two cores compiling is most of it.
_SMALL: dict[str, tuple] = {
  "hosts": (4,),
  "rates": ("200mbit", "1gbit"),
  "workloads": ("lm1b-lstm", "squad-bert"),
  "variants": (
    *("psum", "all_gather", "split_all_gather", "split_dense_gather"),
    *("zen", "zen-pinned"),
  ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
  """The cells to be measured.

  Attributes:
    hosts: Numbers of hosts, each a testbed of its own.
    rates: Names in `netns.RATES`.
    workloads: Names in `workloads.ALL_NAMES`.
    variants: Names in `VARIANTS`.
    repeats: Timed rounds; one more goes before them.
    batches: Different batches that rounds go through in turn.
    calibrate: Whether single collectives are timed too.
  """

  hosts: tuple[int, ...]
  rates: tuple[str, ...]
  workloads: tuple[str, ...]
  variants: tuple[str, ...]
  repeats: int
  batches: int
  calibrate: bool

  def keys(self) -> list[Key]:
    """Returns those of all cells."""
    return [
      Key(hosts, rate, workload, variant)
      for hosts in self.hosts
      for workload in self.workloads
      for rate in self.rates
      for variant in self.variants
    ]


class Left:
  """The part of a grid that the findings lack, when this is made."""

  def __init__(self, grid: Grid, found: Findings):
    done = found.cells
    self.cells = [
      key
      for key in grid.keys()
      if key not in done or not done[key].is_done(grid.repeats, grid.batches)
    ]
    self.points = [
      point
      for hosts in grid.hosts
      for rate in grid.rates
      for point in cells_lib.points(hosts, rate)
      if grid.calibrate and point not in found.calibration
    ]

  def calls(self, repeats: int) -> int:
    """Returns how often hosts are asked, as the progress bar counts."""
    built = {(k.hosts, k.workload, k.variant) for k in self.cells}
    drawn = {(k.hosts, k.workload) for k in self.cells}
    # Each is built and its bytes counted; each cell has an untimed round.
    rounds = len(self.cells) * (1 + repeats)
    return len(self.points) + len(drawn) + 2 * len(built) + rounds


def run(options: argparse.Namespace) -> int:
  """Measures, prints, saves; returns the exit code.

  Raises:
    ValueError: A file is none of this command's, or a name is none.
    RuntimeError: This machine or user cannot have namespaces.
  """
  return _Network(options).run()


class _Network(campaign.Campaign):
  def __init__(self, options: argparse.Namespace):
    asked = campaign.asked(options, _SMALL if options.small else _DEFAULTS)
    self._grid = Grid(
      **asked,
      repeats=options.repeats,
      batches=options.batches,
      calibrate=not options.no_calibration,
    )
    super().__init__(options, self._grid.hosts, self._grid.rates)
    if options.plot:
      from benchmarks.campaigns.network import plots  # Imports matplotlib.

      plots.require_suffix(options.plot)
    now = cells_lib.software(
      loopback=options.loopback, keep_memory=options.keep_memory
    )
    self._found = Findings(now)
    if options.json:
      self._found = cells_lib.load(options.json, now)

  def write(self, path: pathlib.Path) -> None:
    left = Left(self._grid, self._found)
    settings = record.settings(self.options)
    complete = not left.cells and not left.points
    self._found.save(path, settings, complete=complete)

  def show(self) -> None:
    place = "processes" if self.options.loopback else "network namespaces"
    jax = self._found.software["jax"]
    title = f"network: {place} on {os.cpu_count()} cores, JAX {jax}"
    show.show(title, self._found)
    for lines in (show.paper_lines, show.crossing_lines):
      for line in lines(self._found):
        print(line)
    if self.options.plot:
      from benchmarks.campaigns.network import plots

      for line in plots.save_plots(self.options.plot, self._found):
        print(line)

  def failed(self) -> bool:
    asked = (self._found.cells.get(key) for key in self._grid.keys())
    return any(cell is not None and cell.wrong for cell in asked)

  def measure(self) -> None:
    grid, left = self._grid, Left(self._grid, self._found)
    calls = left.calls(grid.repeats)
    with tqdm.tqdm(total=calls, unit="call", disable=None, leave=False) as bar:
      self._bar = bar
      for count in grid.hosts:
        cells = [key for key in left.cells if key.hosts == count]
        points = [point for point in left.points if point.hosts == count]
        if cells or points:
          bar.set_description(f"{count} hosts")
          bar.set_postfix_str("start")
          with campaign.hosts(
            count,
            "network.host",
            loopback=self.options.loopback,
            keep_memory=self.options.keep_memory,
          ) as hosts:
            self._on_hosts(hosts, cells, points)

  def _on_hosts(
    self, hosts: Served, cells: list[Key], points: list[Point]
  ) -> None:
    for rate in self._grid.rates:
      at_rate = [point for point in points if point.rate == rate]
      if at_rate or any(key.rate == rate for key in cells):
        self._probe(hosts.bed, rate)
        self._calibrate(hosts, at_rate)
    if points and hosts.bed.hosts not in self._found.work:
      self._bar.set_postfix_str("local work")
      replies = hosts.ask("work", timeout=campaign.SLOW_S)
      self._found.work[hosts.bed.hosts] = library.local_work.fit(replies)
    for workload in self._grid.workloads:
      keys = [key for key in cells if key.workload == workload]
      if keys:
        self._workload(hosts, workload, keys)

  def _probe(self, bed: testbed.Testbed, rate: str) -> None:
    self._bar.set_postfix_str(f"{rate}: measure the links")
    bed.set_rate(rate)
    links = bed.probe()
    with tqdm.tqdm.external_write_mode():
      testbed.show(bed, links)
    said = {"hosts": bed.hosts, "rate": rate, **dataclasses.asdict(links)}
    self._found.links[bed.hosts, rate] = said

  def _calibrate(self, hosts: Served, points: list[Point]) -> None:
    for point in points:
      hosts.bed.set_rate(point.rate)
      self._bar.set_postfix_str(f"{point.rate}: {point.op} x {point.words}")
      times = hosts.ask(
        "collective",
        timeout=_CALL_S + 30 * point.least_s,
        op=point.op,
        words=point.words,
        repeats=cells_lib.REPEATS,
      )
      self._found.calibration[point] = point.record(times)
      self._bar.update()
    if points:
      self.save()

  def _workload(self, hosts: Served, workload: str, keys: list[Key]) -> None:
    grid = self._grid
    self._bar.set_description(f"{hosts.bed.hosts} hosts, {workload}")
    hosts.bed.set_rate("unlimited")
    self._bar.set_postfix_str("draw")
    facts = hosts.ask(
      "workload", timeout=campaign.SLOW_S, name=workload, batches=grid.batches
    )[0]
    self._bar.update()
    built = {
      variant: self._build(hosts, variant)
      for variant in grid.variants
      if any(key.variant == variant for key in keys)
    }
    for rate in grid.rates:
      cells = [
        Cell(
          **key._asdict(),
          repeats=grid.repeats,
          batches=grid.batches,
          facts=facts,
          **built[key.variant],
        )
        for key in keys
        if key.rate == rate
      ]
      for cell in cells:
        self._found.add(cell)
      self._time(hosts, rate, cells)
      self.save()

  def _build(self, hosts: Served, variant: str) -> dict[str, Any]:
    """Compiles and checks; counts the bytes of what is right."""
    self._bar.set_postfix_str(f"{variant}: compile, check")
    replies = hosts.ask("build", timeout=campaign.SLOW_S, variant=variant)
    self._bar.update()
    built = {
      key: max(reply[key] for reply in replies)
      for key in ("compile_s", "wire_bytes", "least_wire_bytes")
    }
    built["wrong"] = sum(reply["wrong"] for reply in replies)
    built["received_bytes"] = float("nan")
    if not built["wrong"]:
      self._bar.set_postfix_str(f"{variant}: count bytes")
      built["received_bytes"] = self._count(hosts, variant)
    self._bar.update()
    return built

  def _count(self, hosts: Served, variant: str) -> float:
    # Whole turns of the batches: their mean is what is declared.
    batches = self._grid.batches
    times = -(-_COUNTED // batches) * batches
    before = hosts.bed.counters()
    hosts.ask("repeat", timeout=campaign.SLOW_S, variant=variant, times=times)
    after = hosts.bed.counters()
    if before is None or after is None:
      return float("nan")
    received = [
      b.received_bytes - a.received_bytes for a, b in zip(before, after)
    ]
    return max(received) / times

  def _time(self, hosts: Served, rate: str, cells: list[Cell]) -> None:
    hosts.bed.set_rate(rate)
    for turn, cell in campaign.turns(cells, self._grid.repeats):
      round_ = f"round {turn + 1} of {self._grid.repeats}"
      self._bar.set_postfix_str(f"{rate}, {round_}: {cell.variant}")
      if not cell.wrong:
        wait = _CALL_S + 30 * cell.least_s
        seconds = hosts.ask("time", timeout=wait, variant=cell.variant)
        cell.require_limit(max(seconds))
        if turn >= 0:
          cell.host_times_s.append(seconds)
      self._bar.update()
