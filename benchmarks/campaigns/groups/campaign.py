"""`groups`: one exchange, one a leaf, or a few, between hosts and simulated."""

import argparse

from benchmarks import campaign
from benchmarks import harness
from benchmarks import record
from benchmarks.campaigns.groups import cells as cells_lib
from benchmarks.campaigns.groups import ways as ways_lib
from benchmarks.campaigns.groups.cells import NONE

# Rounds of which the step without exchanges is told; and of each collective.
_COMPUTE_ROUNDS, _LINK_ROUNDS = 5, 5
# Bytes of a collective: from what a small leaf brings to several times all.
_SIZES = tuple(1 << log for log in (8, 11, 14, 17, 20))


def run(options: argparse.Namespace) -> int:
  """Measures, prints, saves; returns the exit code."""
  if options.show:
    cells_lib.show(cells_lib.Found.read(options.show))
    return 0
  return _Groups(options).run()


class _Groups(campaign.Campaign):
  resumes = False

  def __init__(self, options: argparse.Namespace):
    if options.width % 8:
      raise ValueError(
        f"`--width` must be a multiple of 8, got {options.width}."
      )
    shape = options.width, options.batch, options.image_size
    network = ways_lib.cnn(options.hosts, *shape, batches=1)
    ways_lib.require_several(network, options.least)
    asked = campaign.asked(options, {"rates": ("200mbit", "1gbit")})
    self._rates = asked["rates"]
    campaign.require(options, [options.hosts], self._rates)
    self.options, self._done = options, False
    self.found = cells_lib.Found(record.software(), record.settings(options))

  def complete(self) -> bool:
    return self._done

  def show(self) -> None:
    cells_lib.show(self.found)

  def failed(self) -> bool:
    return self.found.wrong > 0

  def measure(self) -> None:
    options, found = self.options, self.found
    with (
      campaign.hosts(
        options.hosts, "campaigns.groups.host", loopback=options.loopback
      ) as self._served,
      harness.progress(unit="round") as self._bar,
    ):
      self._bar.set_postfix_str("compile, rehearse")
      names = ("width", "batch", "image_size", "batches", "density", "least")
      ask = self._served.ask
      told = ask("model", **{x: getattr(options, x) for x in names})
      found.leaves = told[0]["leaves"]
      found.lost = sum(x["lost"] for x in told)
      found.simulated = [ways_lib.Simulated(**x) for x in ask("simulate")[0]]
      programs: dict[str, tuple[int, float]] = {}
      for rate in self._rates:
        self._rate(rate, programs)
        self.save()
    self._done = True

  def _rate(self, rate: str, built: dict[str, tuple[int, float]]) -> None:
    """Measures a section; `built` has wrong elements and seconds to compile."""
    bed = self._served.bed
    self._bar.set_postfix_str(f"{rate}: measure the links")
    bed.set_rate(rate)
    topology = self._served.ask("links", repeats=_LINK_ROUNDS, sizes=_SIZES)[0]
    bed.set_rate("unlimited")
    # Seconds of a step without exchanges.
    compute_s = campaign.compute_s(self._served, [NONE], _COMPUTE_ROUNDS)
    told = self._served.ask("ways", topology=topology, compute_s=compute_s)[0]
    section = cells_lib.Section(rate=rate, topology=topology)
    self.found.sections.append(section)
    for name, facts in told.items():
      way = cells_lib.Way(**facts)
      self._bar.set_postfix_str(f"{rate}: compile {name}")
      if way.program not in built:
        replies = self._served.ask(
          "build", program=way.program, stops=way.stops
        )
        wrong = sum(reply["wrong"] for reply in replies)
        wrong += len({reply["digest"] for reply in replies}) - 1
        built[way.program] = wrong, replies[0]["compile_s"]
      way.wrong, way.compile_s = built[way.program]
      section.ways[name] = way
    bed.set_rate(rate)
    names, repeats = [NONE, *section.right()], self.options.repeats
    self._bar.reset(len(names) * (1 + repeats))
    self._bar.set_postfix_str(rate)
    for _ in campaign.time_programs(self._served, section, names, repeats):
      self._bar.update()
    for way in section.ways.values():
      way.told = self._served.ask("told", program=way.program)[0]
