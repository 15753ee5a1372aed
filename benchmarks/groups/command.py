"""`groups`: one exchange, one a leaf, or a few, between hosts and simulated."""

import argparse
import sys
import tempfile
from typing import Any

import numpy as np
import tqdm

from benchmarks import harness
from benchmarks import netns
from benchmarks import record
from benchmarks.commands import arguments
from benchmarks.groups import found as findings
from benchmarks.groups import model as models
from benchmarks.groups import show
from benchmarks.groups.found import Found
from benchmarks.groups.found import Section
from benchmarks.groups.found import Way
from benchmarks.served import Served
from benchmarks.testbed import Testbed

# Four hosts may share two cores while they compile.
_SLOW_S, _CALL_S = 1200.0, 300.0
# Rounds of which the step without exchanges is told; and of each collective.
_COMPUTE_ROUNDS, _LINK_ROUNDS = 5, 5
_NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what this command has beside the timed rounds and the file."""
  parser.add_argument(
    "--hosts", type=int, choices=range(2, 9), default=4, help="by default 4"
  )
  parser.add_argument(
    "--rates",
    nargs="+",
    choices=tuple(netns.RATES),
    metavar="NAME",
    help=f"of {', '.join(netns.RATES)}; by default 200mbit 1gbit",
  )
  arguments.add_place(parser)


def run(options: argparse.Namespace) -> int:
  """Measures, prints, saves; returns the exit code.

  Raises:
    ValueError: An argument cannot be meant, or a file is none of this
      command's.
    RuntimeError: This machine or user cannot have namespaces.
  """
  if options.show:
    show.show(findings.read(options.show))
    return 0
  return _Job(options).run()


class _Job:
  def __init__(self, options: argparse.Namespace):
    if options.width % 8:
      raise ValueError(
        f"`--width` must be a multiple of 8, got {options.width}."
      )
    network = models.cnn(
      options.hosts, options.width, options.batch, options.image_size, 1
    )
    models.require_several(network, options.least)
    self._options = options
    given = options.rates or (
      ["unlimited"] if options.loopback else ["200mbit", "1gbit"]
    )
    self._rates = list(dict.fromkeys(given))
    for rate in self._rates:
      Testbed(options.hosts, rate, options.loopback)  # Only checked.
    settings = record.settings(options)
    self._found = Found(environment=record.software(), options=settings)
    self._programs: dict[str, tuple[int, float]] = {}

  def run(self) -> int:
    status, last_words = 0, ""
    try:
      self._save()  # A file that cannot be written ends the run here.
      self._measure()
      self._found.complete = True
    except KeyboardInterrupt:
      status, last_words = 130, "Interrupted: this is what was measured."
    except RuntimeError as error:
      status, last_words = 1, str(error)
    finally:
      self._save()
    show.show(self._found)
    if self._options.json:
      print(f"Saved {self._options.json}")
    if last_words:
      print(last_words, file=sys.stderr)
    return status or int(self._found.wrong > 0)

  def _save(self) -> None:
    if self._options.json:
      self._found.save(self._options.json)

  def _measure(self) -> None:
    options = self._options
    with (
      tempfile.TemporaryDirectory(prefix="zenjax-groups-") as cache,
      Testbed(options.hosts, "unlimited", options.loopback) as bed,
      tqdm.tqdm(unit="round", disable=None, leave=False) as bar,
    ):
      self._bar = bar
      self._served = Served(
        bed, "benchmarks.groups.host", cache, keep_memory=True
      )
      bar.set_postfix_str("compile, rehearse")
      told = self._ask(
        "model",
        width=options.width,
        batch=options.batch,
        size=options.image_size,
        batches=options.batches,
        density=options.density,
        least=options.least,
      )
      self._found.leaves = told[0]["leaves"]
      self._found.lost = sum(x["lost"] for x in told)
      told = self._ask("simulate")[0]
      self._found.simulated = findings.simulated_of(told)
      for rate in self._rates:
        self._rate(rate)
        self._save()

  def _ask(self, do: str, **arguments) -> list[Any]:
    return self._served.ask(do, timeout=_SLOW_S, **arguments)

  def _rate(self, rate: str) -> None:
    bed = self._served.bed
    self._bar.set_postfix_str(f"{rate}: measure the links")
    bed.set_rate(rate)
    topology = self._ask("links", repeats=_LINK_ROUNDS)[0]
    bed.set_rate("unlimited")
    compute_s = self._compute_s()
    told = self._ask("ways", topology=topology, compute_s=compute_s)[0]
    section = Section(rate=rate, topology=topology, ways={}, host_times_s={})
    self._found.sections.append(section)
    for name, facts in told.items():
      way = Way(stops=tuple(facts["stops"]), exchanges_s=facts["exchanges_s"])
      self._bar.set_postfix_str(f"{rate}: compile {name}")
      way.wrong, way.compile_s = self._built(way)
      section.ways[name] = way
    bed.set_rate(rate)
    self._time(section)
    for way in section.ways.values():
      way.told = self._ask("told", program=way.program)[0]

  def _compute_s(self) -> float:
    """Of a step without exchanges."""
    rounds = []
    for _ in range(1 + _COMPUTE_ROUNDS):
      rounds.append(max(self._ask("time", program=_NONE)))
    return float(np.median(rounds[1:]))

  def _built(self, way: Way) -> tuple[int, float]:
    """Wrong elements and seconds to compile; each program once."""
    if way.program not in self._programs:
      replies = self._ask("build", program=way.program, stops=way.stops)
      wrong = sum(reply["wrong"] for reply in replies)
      wrong += len({reply["digest"] for reply in replies}) - 1
      self._programs[way.program] = wrong, replies[0]["compile_s"]
    return self._programs[way.program]

  def _time(self, section: Section) -> None:
    right = [way.program for way in section.ways.values() if not way.wrong]
    programs = [_NONE, *dict.fromkeys(right)]
    times: dict[str, list[list[float]]] = {x: [] for x in programs}
    section.host_times_s = times
    repeats = self._options.repeats
    self._bar.reset(repeats)
    self._bar.set_postfix_str(section.rate)
    for turn in range(-1, repeats):
      for i in harness.shuffled(len(programs), turn):
        seconds = self._served.ask("time", timeout=_CALL_S, program=programs[i])
        if turn >= 0:
          times[programs[i]].append(seconds)
      self._bar.update(turn >= 0)
