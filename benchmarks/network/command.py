"""`network`: what it is asked for, checked before anything starts."""

import argparse
import os
import sys
from typing import Any

from benchmarks import netns
from benchmarks import record
from benchmarks import workloads
from benchmarks.commands import arguments
from benchmarks.network import cells
from benchmarks.network import crossing
from benchmarks.network import papers
from benchmarks.network import show
from benchmarks.network.cells import Findings
from benchmarks.network.grid import Measurement
from benchmarks.network.plan import Grid
from benchmarks.network.plan import Plan
from benchmarks.network.variants import VARIANTS
from benchmarks.testbed import Testbed

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what this command has beside the timed rounds and the files."""
  for name, known in (("workloads", workloads.ALL_NAMES), ("variants", None)):
    known = known or tuple(VARIANTS)
    parser.add_argument(
      f"--{name}",
      nargs="+",
      choices=known,
      metavar="NAME",
      help=f"of {', '.join(known)}; by default"
      f" {'all' if known == _DEFAULTS[name] else ', '.join(_DEFAULTS[name])}",
    )
  parser.add_argument(
    "--hosts",
    nargs="+",
    type=int,
    choices=range(2, 9),
    metavar="N",
    help="how many, each a testbed of its own; by default 2 4 8",
  )
  parser.add_argument(
    "--rates",
    nargs="+",
    choices=tuple(netns.RATES),
    metavar="RATE",
    help=f"of {', '.join(netns.RATES)}; by default 200mbit 1gbit",
  )
  parser.add_argument(
    "--small",
    action="store_true",
    help="for what is not said otherwise take what two cores do in 10 minutes:"
    f" 4 hosts, lm1b-lstm and squad-bert, {', '.join(_SMALL['variants'])}",
  )
  arguments.add_loopback(parser)
  parser.add_argument(
    "--keep-memory",
    action="store_true",
    help="hosts never return freed memory: no page faults in the times",
  )
  parser.add_argument(
    "--no-calibration",
    action="store_true",
    help="without times of single collectives",
  )


def run(options: argparse.Namespace) -> int:
  """Measures, prints, saves; returns the exit code.

  Args:
    options: What `add_arguments` has parsed, with `repeats`, `batches`, `json`
      and `plot`.

  Raises:
    ValueError: A file is none of this command's, or a name is none.
    RuntimeError: This machine or user cannot have namespaces.
  """
  return _Job(options).run()


class _Job:
  def __init__(self, options: argparse.Namespace):
    self._options = options
    self._grid = _grid(options)
    for hosts in self._grid.hosts:
      for rate in self._grid.rates:
        Testbed(hosts, rate, options.loopback)  # Not entered: only checked.
    if options.plot:
      from benchmarks.network import plots  # matplotlib: a second to import.

      plots.require_suffix(options.plot)
    now = cells.software(
      loopback=options.loopback, keep_memory=options.keep_memory
    )
    self._found = Findings(now)
    if options.json:
      self._found = cells.load(options.json, now)

  def run(self) -> int:
    status, last_words = 0, ""
    try:
      self._save()  # A file that cannot be written ends the run here.
      Measurement(self._grid, self._found, self._save).run()
    except KeyboardInterrupt:
      status, last_words = 130, "Interrupted: this is what was measured."
      if self._options.json:
        last_words += " The same command goes on from there."
    except RuntimeError as error:
      status, last_words = 1, str(error)
    finally:
      self._save()
    show.show(self._title(), self._found)
    for line in (*papers.lines(self._found), *crossing.lines(self._found)):
      print(line)
    self._draw()
    if self._options.json:
      print(f"Saved {self._options.json}")
    if last_words:
      print(last_words, file=sys.stderr)
    return status or int(self._wrong())

  def _wrong(self):
    asked = (self._found.cells.get(key) for key in self._grid.keys())
    return any(cell is not None and cell.wrong for cell in asked)

  def _save(self):
    if self._options.json:
      left = Plan(self._grid, self._found)
      settings = record.settings(self._options)
      complete = not left.cells and not left.points
      self._found.save(self._options.json, settings, complete=complete)

  def _draw(self):
    if self._options.plot:
      from benchmarks.network import plots

      for line in plots.save_plots(self._options.plot, self._found):
        print(line)

  def _title(self):
    place = "processes" if self._options.loopback else "network namespaces"
    jax = self._found.software["jax"]
    return f"network: {place} on {os.cpu_count()} cores, JAX {jax}"


def _grid(options):
  asked: dict[str, Any] = dict(_SMALL if options.small else _DEFAULTS)
  if options.loopback:
    asked["rates"] = ("unlimited",)
  for name in asked:
    # Once each, in the order given.
    given = getattr(options, name)
    asked[name] = tuple(dict.fromkeys(given or asked[name]))
  return Grid(
    **asked,
    repeats=options.repeats,
    batches=options.batches,
    calibrate=not options.no_calibration,
    loopback=options.loopback,
    keep_memory=options.keep_memory,
  )
