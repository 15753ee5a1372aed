"""`network`: measures workloads x variants x rates x hosts on a testbed.

Every host runs `benchmarks.campaigns.network.host`; this side says what comes
next, and stops where a time is shorter than its bytes need on the link.
"""

import argparse
import dataclasses
import itertools
from typing import Any

import tqdm

from benchmarks import campaign
from benchmarks import harness
from benchmarks import workloads
from benchmarks.campaigns.network import cells as cells_lib
from benchmarks.campaigns.network import show
from benchmarks.campaigns.network.cells import Cell
from benchmarks.campaigns.network.cells import Findings
from benchmarks.campaigns.network.cells import Key
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
    *("zen", "zen-tuned"),
  ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
  """The cells to be measured."""

  hosts: tuple[int, ...]  # Numbers of hosts, each a testbed of its own.
  rates: tuple[str, ...]  # Names in `netns.RATES`.
  workloads: tuple[str, ...]  # Names in `workloads.ALL_NAMES`.
  variants: tuple[str, ...]  # Names in `VARIANTS`.
  repeats: int  # Timed rounds; one more goes before them.
  batches: int  # Different batches that rounds go through in turn.

  def keys(self) -> list[Key]:
    """Returns those of all cells."""
    grid = self.hosts, self.workloads, self.rates, self.variants
    every = itertools.product(*grid)
    return [Key(n, rate, workload, v) for n, workload, rate, v in every]

  def left(self, found: Findings) -> list[Key]:
    """Returns the cells that the findings lack."""
    asked, done = (self.repeats, self.batches), found.cells
    is_done = lambda key: key in done and done[key].is_done(*asked)
    return [key for key in self.keys() if not is_done(key)]


def run(options: argparse.Namespace) -> int:
  """Measures, prints, saves; returns the exit code."""
  return _Network(options).run()


class _Network(campaign.Campaign):
  def __init__(self, options: argparse.Namespace):
    asked = campaign.asked(options, _SMALL if options.small else _DEFAULTS)
    campaign.require(options, asked["hosts"], asked["rates"])
    self._grid = Grid(
      **asked,
      repeats=options.repeats,
      batches=options.batches,
    )
    names = ("loopback", "keep_memory")
    self._kind = {name: getattr(options, name) for name in names}
    now = campaign.software(cells_lib.CODE, **self._kind)
    self.options, self.found = options, Findings.load(options.json, now)

  def complete(self) -> bool:
    return not self._grid.left(self.found)

  def show(self) -> None:
    show.show(self.title(), self.found)

  def failed(self) -> bool:
    asked = (self.found.cells.get(key) for key in self._grid.keys())
    return any(cell is not None and cell.wrong for cell in asked)

  def measure(self) -> None:
    left = self._grid.left(self.found)
    with harness.progress(total=len(left)) as self._bar:
      for n in self._grid.hosts:
        cells = [key for key in left if key.hosts == n]
        if cells:
          self._bar.set_description(f"{n} hosts")
          self._bar.set_postfix_str("start")
          module = "campaigns.network.host"
          with campaign.hosts(n, module, **self._kind) as hosts:
            self._on_hosts(hosts, cells)

  def _on_hosts(self, hosts: Served, cells: list[Key]) -> None:
    for rate in self._grid.rates:
      if any(key.rate == rate for key in cells):
        self._probe(hosts.bed, rate)
    for workload in self._grid.workloads:
      if keys := [key for key in cells if key.workload == workload]:
        self._workload(hosts, workload, keys)

  def _probe(self, bed: testbed.Testbed, rate: str) -> None:
    self._bar.set_postfix_str(f"{rate}: measure the links")
    bed.set_rate(rate)
    links = bed.probe()
    with tqdm.tqdm.external_write_mode():
      testbed.show(bed, links)
    at = {"hosts": bed.hosts, "rate": rate}
    self.found.links[bed.hosts, rate] = at | dataclasses.asdict(links)

  def _workload(self, hosts: Served, workload: str, keys: list[Key]) -> None:
    grid = self._grid
    self._bar.set_description(f"{hosts.bed.hosts} hosts, {workload}")
    hosts.bed.set_rate("unlimited")
    self._bar.set_postfix_str("draw")
    facts = hosts.ask("workload", name=workload, batches=grid.batches)[0]
    left = {key.variant for key in keys}
    built = {v: self._build(hosts, v) for v in grid.variants if v in left}
    same = {"repeats": grid.repeats, "batches": grid.batches, "facts": facts}
    for rate in grid.rates:
      cells = [
        Cell(**key._asdict(), **same, **built[key.variant])
        for key in keys
        if key.rate == rate
      ]
      for cell in cells:
        self.found.add(cell)
      self._time(hosts, rate, cells)
      self.save()

  def _build(self, hosts: Served, variant: str) -> dict[str, Any]:
    """Compiles and checks; counts the bytes of what is right."""
    self._bar.set_postfix_str(f"{variant}: compile, check")
    replies = hosts.ask("build", variant=variant)
    names = ("compile_s", "wire_bytes", "least_wire_bytes")
    built = {name: max(reply[name] for reply in replies) for name in names}
    built["wrong"] = sum(reply["wrong"] for reply in replies)
    built["received_bytes"] = float("nan")
    if not built["wrong"]:
      self._bar.set_postfix_str(f"{variant}: count bytes")
      # Whole turns of the batches: their mean is what is declared.
      batches = self._grid.batches
      times = -(-_COUNTED // batches) * batches
      before = hosts.bed.counters()
      hosts.ask("repeat", variant=variant, times=times)
      after = hosts.bed.counters()
      if before and after:
        both = zip(before, after)
        received = max(b.received_bytes - a.received_bytes for a, b in both)
        built["received_bytes"] = received / times
    return built

  def _time(self, hosts: Served, rate: str, cells: list[Cell]) -> None:
    hosts.bed.set_rate(rate)
    for turn, cell in campaign.turns(cells, self._grid.repeats):
      round_ = f"round {turn + 1} of {self._grid.repeats}"
      self._bar.set_postfix_str(f"{rate}, {round_}: {cell.variant}")
      if not cell.wrong:
        wait = _CALL_S + 30 * cell.least_s
        seconds = hosts.ask("time", timeout=wait, program=cell.variant)
        cell.require_limit(max(seconds))
        if turn >= 0:
          cell.host_times_s.append(seconds)
    self._bar.update(len(cells))
