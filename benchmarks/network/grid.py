"""Measures workloads x variants x rates x hosts on a testbed, cell by cell.

Every host runs `benchmarks.network.host`; this side says what comes next, and
stops where a time is shorter than its bytes need on the link.
"""

from collections.abc import Callable
import dataclasses
import tempfile
from typing import Any

import tqdm

from benchmarks import harness
from benchmarks import testbed_cli
from benchmarks.network import calibration
from benchmarks.network.calibration import Point
from benchmarks.network.cells import Cell
from benchmarks.network.cells import Findings
from benchmarks.network.cells import least_s
from benchmarks.network.cells import require_limit
from benchmarks.network.plan import Grid
from benchmarks.network.plan import Plan
from benchmarks.served import Served
from benchmarks.testbed import Testbed
from zenjax._src.machine import local_work

# Exchanges between two looks at the counters, or as many as there are batches.
_COUNTED = 3
# Eight hosts may share two cores while they compile.
_SLOW_S = 900.0
_CALL_S = 120.0


class Measurement:
  """One run over a grid: adds to `found`, and has `save` called as it goes."""

  def __init__(self, grid: Grid, found: Findings, save: Callable[[], None]):
    self._grid, self._found, self._save = grid, found, save
    self._plan = Plan(grid, found)

  def run(self) -> None:
    """Measures what is missing.

    Raises:
      RuntimeError: A host died or did not answer, or a link was too fast.
    """
    calls = self._plan.calls(self._grid.repeats)
    with tqdm.tqdm(total=calls, unit="call", disable=None, leave=False) as bar:
      self._bar = bar
      for hosts in self._grid.hosts:
        cells = [key for key in self._plan.cells if key.hosts == hosts]
        points = [point for point in self._plan.points if point.hosts == hosts]
        if cells or points:
          bar.set_description(f"{hosts} hosts")
          bar.set_postfix_str("start")
          with (
            tempfile.TemporaryDirectory(prefix="zenjax-network-") as cache,
            Testbed(hosts, "unlimited", self._grid.loopback) as bed,
          ):
            hosts = Served(
              bed,
              "benchmarks.network.host",
              cache,
              keep_memory=self._grid.keep_memory,
            )
            self._measure(hosts, cells, points)

  def _measure(self, hosts, cells, points):
    for rate in self._grid.rates:
      at_rate = [point for point in points if point.rate == rate]
      if at_rate or any(key.rate == rate for key in cells):
        self._probe(hosts.bed, rate)
        self._calibrate(hosts, at_rate)
    if points and hosts.bed.hosts not in self._found.work:
      self._bar.set_postfix_str("local work")
      replies = hosts.ask("work", timeout=_SLOW_S)
      self._found.work[hosts.bed.hosts] = local_work.fit(replies)
    for workload in self._grid.workloads:
      keys = [key for key in cells if key.workload == workload]
      if keys:
        self._workload(hosts, workload, keys)

  def _probe(self, bed, rate):
    self._bar.set_postfix_str(f"{rate}: measure the links")
    bed.set_rate(rate)
    links = bed.probe()
    with tqdm.tqdm.external_write_mode():
      testbed_cli.show(bed, links)
    said = {"hosts": bed.hosts, "rate": rate, **dataclasses.asdict(links)}
    self._found.links[bed.hosts, rate] = said

  def _calibrate(self, hosts, points: list[Point]):
    for point in points:
      hosts.bed.set_rate(point.rate)
      self._bar.set_postfix_str(f"{point.rate}: {point.op} x {point.words}")
      times = hosts.ask(
        "collective",
        timeout=_CALL_S + 30 * calibration.least_s(point),
        op=point.op,
        words=point.words,
        repeats=calibration.REPEATS,
      )
      key = (point.hosts, point.rate, point.op, point.words)
      self._found.calibration[key] = calibration.record(point, times)
      self._bar.update()
    if points:
      self._save()

  def _workload(self, hosts, workload, keys):
    self._bar.set_description(f"{hosts.bed.hosts} hosts, {workload}")
    hosts.bed.set_rate("unlimited")
    self._bar.set_postfix_str("draw")
    facts = hosts.ask(
      "workload", timeout=_SLOW_S, name=workload, batches=self._grid.batches
    )[0]
    self._bar.update()
    built = {}
    for variant in self._grid.variants:
      if any(key.variant == variant for key in keys):
        built[variant] = self._build(hosts, variant)
    for rate in self._grid.rates:
      variants = [key.variant for key in keys if key.rate == rate]
      cells = [
        Cell(
          hosts=hosts.bed.hosts,
          rate=rate,
          workload=workload,
          variant=variant,
          repeats=self._grid.repeats,
          batches=self._grid.batches,
          facts=facts,
          **built[variant],
        )
        for variant in variants
      ]
      for cell in cells:
        self._found.add(cell)
      self._time(hosts, rate, cells)
      self._save()

  def _build(self, hosts, variant) -> dict[str, Any]:
    """Compiles and checks; counts the bytes of what is right."""
    self._bar.set_postfix_str(f"{variant}: compile, check")
    replies = hosts.ask("build", timeout=_SLOW_S, variant=variant)
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

  def _count(self, hosts, variant):
    # Whole turns of the batches: their mean is what is declared.
    batches = self._grid.batches
    times = -(-_COUNTED // batches) * batches
    before = hosts.bed.counters()
    hosts.ask("repeat", timeout=_SLOW_S, variant=variant, times=times)
    after = hosts.bed.counters()
    if before is None or after is None:
      return float("nan")
    received = [
      b.received_bytes - a.received_bytes for a, b in zip(before, after)
    ]
    return max(received) / times

  def _time(self, hosts, rate, cells: list[Cell]):
    hosts.bed.set_rate(rate)
    for turn in range(-1, self._grid.repeats):
      for i in harness.shuffled(len(cells), turn):
        cell = cells[i]
        round_ = f"round {turn + 1} of {self._grid.repeats}"
        self._bar.set_postfix_str(f"{rate}, {round_}: {cell.variant}")
        if not cell.wrong:
          wait = _CALL_S + 30 * least_s(cell)
          seconds = hosts.ask("time", timeout=wait, variant=cell.variant)
          require_limit(cell, max(seconds))
          if turn >= 0:
            cell.host_times_s.append(seconds)
        self._bar.update()
