"""`groups`: one exchange, one a leaf, or a few, between hosts and simulated."""

import argparse
import pathlib
from typing import Any

import tqdm

from benchmarks import campaign
from benchmarks import harness
from benchmarks import record
from benchmarks.campaigns.groups import cells
from benchmarks.campaigns.groups import show
from benchmarks.campaigns.groups import ways as ways_lib
from benchmarks.campaigns.groups.cells import Found
from benchmarks.campaigns.groups.cells import Section
from benchmarks.campaigns.groups.cells import Way

# Rounds of which the step without exchanges is told; and of each collective.
_COMPUTE_ROUNDS, _LINK_ROUNDS = 5, 5
# Bytes of a collective: from what a small leaf brings to several times all.
_SIZES = tuple(1 << log for log in (8, 11, 14, 17, 20))
_NONE = "none"


def run(options: argparse.Namespace) -> int:
  """Measures, prints, saves; returns the exit code.

  Raises:
    ValueError: An argument cannot be meant, or a file is none of this
      command's.
    RuntimeError: This machine or user cannot have namespaces.
  """
  if options.show:
    show.show(cells.read(options.show))
    return 0
  return _Groups(options).run()


class _Groups(campaign.Campaign):
  resumes = False

  def __init__(self, options: argparse.Namespace):
    if options.width % 8:
      raise ValueError(
        f"`--width` must be a multiple of 8, got {options.width}."
      )
    network = ways_lib.cnn(
      options.hosts, options.width, options.batch, options.image_size, 1
    )
    ways_lib.require_several(network, options.least)
    asked = campaign.asked(options, {"rates": ("200mbit", "1gbit")})
    self._rates = asked["rates"]
    super().__init__(options, [options.hosts], self._rates)
    settings = record.settings(options)
    self._found = Found(environment=record.software(), options=settings)
    self._programs: dict[str, tuple[int, float]] = {}

  def write(self, path: pathlib.Path) -> None:
    self._found.save(path)

  def show(self) -> None:
    show.show(self._found)

  def failed(self) -> bool:
    return self._found.wrong > 0

  def measure(self) -> None:
    options, found = self.options, self._found
    with (
      campaign.hosts(
        options.hosts, "groups.host", loopback=options.loopback
      ) as self._served,
      tqdm.tqdm(unit="round", disable=None, leave=False) as self._bar,
    ):
      self._bar.set_postfix_str("compile, rehearse")
      told = self._ask(
        "model",
        width=options.width,
        batch=options.batch,
        size=options.image_size,
        batches=options.batches,
        density=options.density,
        least=options.least,
      )
      found.leaves = told[0]["leaves"]
      found.lost = sum(x["lost"] for x in told)
      found.simulated = cells.simulated_of(self._ask("simulate")[0])
      for rate in self._rates:
        self._rate(rate)
        self.save()
    found.complete = True

  def _ask(self, do: str, **arguments) -> list[Any]:
    return self._served.ask(do, timeout=campaign.SLOW_S, **arguments)

  def _rate(self, rate: str) -> None:
    bed = self._served.bed
    self._bar.set_postfix_str(f"{rate}: measure the links")
    bed.set_rate(rate)
    topology = self._ask("links", repeats=_LINK_ROUNDS, sizes=_SIZES)[0]
    bed.set_rate("unlimited")
    # Seconds of a step without exchanges.
    rounds = [
      max(self._ask("time", program=_NONE)) for _ in range(1 + _COMPUTE_ROUNDS)
    ]
    compute_s = harness.median(rounds[1:])
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

  def _built(self, way: Way) -> tuple[int, float]:
    """Returns wrong elements and seconds to compile; each program once."""
    if way.program not in self._programs:
      replies = self._ask("build", program=way.program, stops=way.stops)
      wrong = sum(reply["wrong"] for reply in replies)
      wrong += len({reply["digest"] for reply in replies}) - 1
      self._programs[way.program] = wrong, replies[0]["compile_s"]
    return self._programs[way.program]

  def _time(self, section: Section) -> None:
    right = [way.program for way in section.ways.values() if not way.wrong]
    programs = [_NONE, *dict.fromkeys(right)]
    repeats = self.options.repeats
    self._bar.reset(len(programs) * (1 + repeats))
    self._bar.set_postfix_str(section.rate)
    for _ in campaign.time_programs(self._served, section, programs, repeats):
      self._bar.update()
