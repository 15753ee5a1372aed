"""`planned`: what it is asked for, checked before anything starts."""

import argparse
import os
import sys
from typing import Any

from benchmarks import netns
from benchmarks import record
from benchmarks.commands import arguments
from benchmarks.planned import found as findings
from benchmarks.planned import show
from benchmarks.planned import verdict
from benchmarks.planned.grid import Grid
from benchmarks.planned.grid import Measurement
from benchmarks.testbed import Testbed

# `-rows`: row gradients, whose step does not grow with the tables.
MODELS = ("lm", "dlrm", "lm-rows", "dlrm-rows", "small", "small-rows")
_DEFAULTS: dict[str, tuple] = {
  "hosts": (2, 4, 8),
  "rates": tuple(netns.RATES),
  "models": ("lm", "dlrm"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what this command has beside the timed rounds and the file."""
  parser.add_argument(
    "--hosts",
    nargs="+",
    type=int,
    choices=range(2, 9),
    metavar="N",
    help="how many, each a testbed of its own; by default 2 4 8",
  )
  known = {"rates": tuple(netns.RATES), "models": MODELS}
  for name, names in known.items():
    parser.add_argument(
      f"--{name}",
      nargs="+",
      choices=names,
      metavar="NAME",
      help=f"of {', '.join(names)}; by default {' '.join(_DEFAULTS[name])}",
    )
  parser.add_argument(
    "--ways",
    nargs="+",
    metavar="NAME",
    help="what to measure beside the plan and pmean, say all_gather zen/1"
    " zen/4 'zen/1 alone'; by default all",
  )
  arguments.add_place(parser)


def run(options: argparse.Namespace) -> int:
  """Measures, prints, saves; returns the exit code.

  Raises:
    ValueError: A file is none of this command's.
    RuntimeError: This machine or user cannot have namespaces.
  """
  if options.show:
    show.show(str(options.show), findings.read(options.show))
    return 0
  return _Job(options).run()


class _Job:
  def __init__(self, options: argparse.Namespace):
    self._options = options
    self._grid = _grid(options)
    for hosts in self._grid.hosts:
      for rate in self._grid.rates:
        Testbed(hosts, rate, options.loopback)  # Not entered: only checked.
    now = findings.software(loopback=options.loopback)
    self._found = findings.Found(now)
    if options.json:
      self._found = findings.load(options.json, now)

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
    if self._options.json:
      print(f"Saved {self._options.json}")
    if last_words:
      print(last_words, file=sys.stderr)
    return status or int(self._failed())

  def _failed(self) -> bool:
    """Whether an answer was wrong, or a plan harmful."""
    sections = self._found.sections.values()
    wrong = any(way.wrong for s in sections for way in s.ways.values())
    picks = [p for s in sections if (p := verdict.pick(s))]
    return wrong or any(p.harmful for p in picks)

  def _save(self) -> None:
    if self._options.json:
      complete = not self._grid.left(self._found)
      settings = record.settings(self._options)
      self._found.save(self._options.json, settings, complete=complete)

  def _title(self) -> str:
    place = "processes" if self._options.loopback else "network namespaces"
    jax = self._found.software["jax"]
    return f"planned: {place} on {os.cpu_count()} cores, JAX {jax}"


def _grid(options: argparse.Namespace) -> Grid:
  asked: dict[str, Any] = dict(_DEFAULTS)
  if options.loopback:
    asked["rates"] = ("unlimited",)
  for name in asked:
    # Once each, in the order given.
    asked[name] = tuple(dict.fromkeys(getattr(options, name) or asked[name]))
  return Grid(
    **asked,
    repeats=options.repeats,
    batches=options.batches,
    loopback=options.loopback,
    ways=options.ways and tuple(options.ways),
  )
