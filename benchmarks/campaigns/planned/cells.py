"""The sections of `planned` as its file holds them, their table and lines."""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple, Self

import numpy as np

from benchmarks import campaign
from benchmarks import table
from benchmarks.testbed import netns

BASELINE = "pmean"
PLANNED, DENSE = "planned", "dense"
# How near to the best measured way is good enough, and to `pmean`.
NEAR, NO_SLOWER = 1.05, 1.03
# What numbers depend on, beside what is installed.
CODE = (
  "zenjax/**/*.py",
  "benchmarks/campaigns/planned/*.py",
  "benchmarks/testbed/netns.py",
  "benchmarks/testbed/served.py",
)


class Key(NamedTuple):
  """One model between some hosts on links of one rate."""

  hosts: int
  rate: str
  model: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Way:
  """One way to synchronize, as predicted and as measured."""

  program: str  # Ways with the same program were measured as one.
  predicted_s: float | None = None  # Of a step; None of what no plan predicts.
  received_bytes: float = 0.0  # By a host in a step, as predicted.
  wrong: int = 0  # Elements that are not those of `pmean`, over hosts.
  compile_s: float = 0.0  # Of the host that compiles for all.
  plan: str | None = None  # The planner's, without the machine.


@dataclasses.dataclass(slots=True, kw_only=True)
class Section(campaign.Timed):
  """All that was found out about a key."""

  hosts: int  # How many.
  rate: str  # Of their links.
  model: str  # Its name.
  repeats: int  # Timed rounds that were asked for.
  compute_s: float  # Of a step without any exchange.
  ways: dict[str, Way]  # By name.
  host_times_s: dict[str, list[list[float]]]  # [round][host].

  @property
  def key(self) -> Key:
    return Key(self.hosts, self.rate, self.model)

  def is_done(self, repeats: int) -> bool:
    """Returns False if more is to be measured; wrong ways are tried anew."""
    rounds = {len(x) for x in self.host_times_s.values()}
    wrong = any(way.wrong for way in self.ways.values())
    return self.repeats == repeats and rounds == {repeats} and not wrong


@dataclasses.dataclass(slots=True)
class Found(campaign.Findings):
  """All that is in a file."""

  # Measured links, as JSON, by hosts and rate.
  topologies: dict[tuple[int, str], str] = dataclasses.field(
    default_factory=dict
  )
  # By key, in the order of measuring.
  sections: dict[Key, Section] = dataclasses.field(default_factory=dict)

  def contents(self) -> dict[str, Any]:
    return {
      "topologies": [
        {"hosts": hosts, "rate": rate, "topology": text}
        for (hosts, rate), text in self.topologies.items()
      ],
      "sections": [dataclasses.asdict(s) for s in self.sections.values()],
    }

  @classmethod
  def parsed(cls, document: dict[str, Any]) -> Self:
    found = cls(document["environment"])
    for x in document["topologies"]:
      found.topologies[x["hosts"], x["rate"]] = x["topology"]
    for x in document["sections"]:
      ways = {name: Way(**way) for name, way in x.pop("ways").items()}
      section = Section(ways=ways, **x)
      found.sections[section.key] = section
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
  """A way that was predicted and measured."""

  section: Section  # Where.
  way: str  # Its name.
  predicted_s: float  # Of a step.
  measured_s: float  # Median.
  by_link: bool  # Whether it needs more than half of what is predicted.

  @property
  def error(self) -> float:
    return self.predicted_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Pick:
  """The planner's choice in a section, judged by measured times."""

  section: Section  # Where.
  best: str  # Luck decides which of equals: `over_best` errs to a miss.
  over_best: campaign.Ratio  # Its time over that one's.
  over_pmean: campaign.Ratio  # The same over `pmean`.

  @property
  def good(self) -> bool:
    return self.over_best.median <= NEAR

  @property
  def far(self) -> bool:
    """True if it is farther from the best than that, and not by chance."""
    return self.over_best.median > NEAR and self.over_best.surely_above(NEAR)

  @property
  def harmful(self) -> bool:
    """True if it is slower than `pmean`, and not by chance."""
    over = self.over_pmean
    return over.median > NO_SLOWER and over.surely_above(1)


def cells(section: Section) -> Iterator[Cell]:
  """Yields every way of a section that was timed."""
  for name, way in section.ways.items():
    predicted_s, measured_s = way.predicted_s, section.median_s(way.program)
    if predicted_s is not None and not math.isnan(measured_s):
      line_s = netns.least_s(way.received_bytes, section.rate)
      by_link = line_s > predicted_s / 2
      yield Cell(section, name, predicted_s, measured_s, by_link)


def pick(section: Section) -> Pick | None:
  """Returns None where the planner's choice or `pmean` was not timed."""
  measured = {cell.way: cell.measured_s for cell in cells(section)}
  if not {PLANNED, BASELINE} <= set(measured):
    return None
  best = min((x for x in measured if x != PLANNED), key=measured.__getitem__)
  program = {name: way.program for name, way in section.ways.items()}
  return Pick(
    section,
    best,
    section.over(program[PLANNED], program[best]),
    section.over(program[PLANNED], program[BASELINE]),
  )


_HEADERS = (
  *("predicted\nms", "measured\nms", "error\n%", "over\npmean"),
  *("receives\nMB", "compile\ns", "wrong\nelements"),
)


def show(title: str, found: Found) -> None:
  """Prints all sections, and what follows from them."""
  shown = table.made(title, "cell\n  way", *_HEADERS)
  for section in found.sections.values():
    shown.add_row(
      f"[bold]{section.model}, {section.hosts} hosts, {section.rate}[/bold]:"
      f" {section.compute_s * 1e3:.1f} ms to compute"
    )
    timed = {cell.way: cell for cell in cells(section)}
    for name, way in section.ways.items():
      numbers = ["-"] * 4
      if cell := timed.get(name):
        seconds = cell.predicted_s, cell.measured_s
        error = f"{cell.error:+.0%}" + ("" if cell.by_link else " *")
        over = cell.measured_s / section.median_s(BASELINE)
        numbers = [f"{s * 1e3:.1f}" for s in seconds]
        numbers += [error, table.number(over, ".2f")]
      numbers += [f"{way.received_bytes / 1e6:.2f}", f"{way.compile_s:.1f}"]
      shown.add_row(f"  {name}", *numbers, table.wrong(way.wrong))
    shown.add_section()
  table.console().print(shown)
  for line in lines(list(found.sections.values())):
    print(line)


def lines(sections: Sequence[Section]) -> Iterator[str]:
  """Yields in words how near predictions came, and what plans cost."""
  found = list(itertools.chain.from_iterable(map(cells, sections)))
  for by_link, of in ((True, "the links limit"), (False, "the cores limit")):
    errors = [abs(c.error) for c in found if c.by_link == by_link]
    if errors:
      median, most = np.percentile(errors, [50, 90])
      yield (
        f"{len(errors)} steps that {of}: predicted with a median error of"
        f" {median:.0%}, 90 % of them within {most:.0%}"
      )
  picks = [p for section in sections if (p := pick(section))]
  if picks:
    yield (
      f"the plan is within {NEAR - 1:.0%} of the best way measured in"
      f" {sum(p.good for p in picks)} of {len(picks)} cells, surely not in"
      f" {sum(p.far for p in picks)}, slower than pmean by more than"
      f" {NO_SLOWER - 1:.0%} in {sum(p.harmful for p in picks)}"
    )
  for p in picks:
    if not p.good or p.harmful:
      yield (
        f"  {p.section.model}, {p.section.hosts} hosts, {p.section.rate}:"
        f" {p.over_best} of {p.best}, {p.over_pmean} of pmean"
      )
