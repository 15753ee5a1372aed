"""How near predictions came, and what the planner's choice cost or gained."""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from benchmarks import netns
from benchmarks.network.paired import Interval
from benchmarks.planned.found import Section
from benchmarks.planned.grid import BASELINE
from benchmarks.planned.ways import PLANNED

# How near to the best measured way is good enough, and to `pmean`.
NEAR, NO_SLOWER = 1.05, 1.03


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
  """A way that was predicted and measured.

  Attributes:
    section: Where.
    way: Its name.
    predicted_s: Of a step.
    measured_s: Median.
    by_link: Whether the link needs more than half of the time predicted for the
      bytes alone: the rest are the hosts' shared cores.
  """

  section: Section
  way: str
  predicted_s: float
  measured_s: float
  by_link: bool

  @property
  def error(self) -> float:
    return self.predicted_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Pick:
  """What the planner took in a section, by what was measured.

  Attributes:
    section: Where.
    best: The way with the least median; luck decides which of equals, so that
      `over_best` errs to the side of a miss.
    over_best: Its time over that one's, and where the ratio lies at 95 %.
    over_pmean: The same over `pmean`.
  """

  section: Section
  best: str
  over_best: tuple[float, Interval | None]
  over_pmean: tuple[float, Interval | None]

  @property
  def good(self) -> bool:
    return self.over_best[0] <= NEAR

  @property
  def far(self) -> bool:
    """Farther from the best than that, and not by chance."""
    ratio, interval = self.over_best
    return ratio > NEAR and interval is not None and interval.low > NEAR

  @property
  def harmful(self) -> bool:
    """Slower than `pmean`, and not by chance."""
    ratio, interval = self.over_pmean
    return ratio > NO_SLOWER and interval is not None and interval.low > 1


def cells(section: Section) -> Iterator[Cell]:
  """Every way of a section that was timed."""
  limit = netns.RATES[section.rate]
  for name, way in section.ways.items():
    if way.predicted_s is None or not section.host_times_s.get(way.program):
      continue
    line_s = way.received_bytes / limit.bytes_per_s if limit else 0.0
    by_link = line_s > way.predicted_s / 2
    measured_s = section.median_s(name)
    yield Cell(section, name, way.predicted_s, measured_s, by_link)


def pick(section: Section) -> Pick | None:
  """None where the planner's choice or `pmean` was not timed."""
  timed = [cell.way for cell in cells(section)]
  if PLANNED not in timed or BASELINE not in timed:
    return None
  others = [way for way in timed if way != PLANNED]
  best = min(others, key=section.median_s)
  return Pick(
    section,
    best,
    section.ratio(PLANNED, best),
    section.ratio(PLANNED, BASELINE),
  )


def lines(sections: Sequence[Section]) -> list[str]:
  """In words."""
  return [*_errors(sections), *_picks(sections)]


def _errors(sections: Sequence[Section]) -> Iterator[str]:
  found = [cell for section in sections for cell in cells(section)]
  for by_link, of in ((True, "the links limit"), (False, "the cores limit")):
    errors = [abs(c.error) for c in found if c.by_link == by_link]
    if errors:
      median, most = np.percentile(errors, [50, 90])
      yield (
        f"{len(errors)} steps that {of}: predicted with a median error of"
        f" {median:.0%}, 90 % of them within {most:.0%}"
      )


def _picks(sections: Sequence[Section]) -> Iterator[str]:
  found = [p for section in sections if (p := pick(section))]
  if not found:
    return
  good, harmful = [p for p in found if p.good], [p for p in found if p.harmful]
  yield (
    f"the plan is within {NEAR - 1:.0%} of the best way measured in"
    f" {len(good)} of {len(found)} cells, surely not in"
    f" {sum(p.far for p in found)}, slower than pmean by more than"
    f" {NO_SLOWER - 1:.0%} in {len(harmful)}"
  )
  for p in found:
    if not p.good or p.harmful:
      yield (
        f"  {p.section.model}, {p.section.hosts} hosts, {p.section.rate}:"
        f" {told(p.over_best)} of {p.best}, {told(p.over_pmean)} of pmean"
      )


def told(ratio: tuple[float, Interval | None]) -> str:
  """A ratio and its interval."""
  value, interval = ratio
  if interval is None:
    return f"{value:.2f}x"
  return f"{value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"
