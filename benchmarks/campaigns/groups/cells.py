"""The findings of a run of `groups`, the file that holds them, their tables."""

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import Any, Self

from benchmarks import campaign
from benchmarks import table as tables
from benchmarks.campaigns.groups import ways

NONE = "none"  # A step without the exchanges.


@dataclasses.dataclass(slots=True, kw_only=True)
class Way:
  """One way to group."""

  stops: Sequence[int]  # After which leaves an exchange leaves.
  exchanges_s: float  # What its exchanges should take.
  wrong: int = 0  # Parameters not of one exchange, or not of all hosts.
  compile_s: float = 0.0  # Of the host that compiles for all.
  # What zen_sync counts of the last step.
  told: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def program(self) -> str:
    """Ways with the same program were measured as one."""
    return ways.program(self.stops)


@dataclasses.dataclass(slots=True, kw_only=True)
class Section(campaign.Timed):
  """All that was found out about links of one rate."""

  rate: str  # Its name.
  topology: str  # The links, measured, as JSON.
  ways: dict[str, Way] = dataclasses.field(default_factory=dict)
  # [round][host] by program, `NONE` among them.
  host_times_s: dict[str, list[list[float]]] = dataclasses.field(
    default_factory=dict
  )

  def best(self) -> str | None:
    """Returns the program with the least median; None where there is none."""
    programs = {way.program for way in self.ways.values()}
    timed = [x for x in programs if self.times_s(x)]
    return min(timed, key=self.median_s, default=None)


@dataclasses.dataclass(slots=True)
class Found(campaign.Findings):
  """All that is in a file."""

  # Elements that are in no update and no residual after a first step.
  lost: int = 0
  # Those that are compressed, as the backward pass completes them.
  leaves: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  sections: list[Section] = dataclasses.field(default_factory=list)
  # On machines that are not there.
  simulated: list[ways.Simulated] = dataclasses.field(default_factory=list)

  @property
  def wrong(self) -> int:
    """Elements of all answers together."""
    every = [way for x in self.sections for way in x.ways.values()]
    return self.lost + sum(way.wrong for way in every)

  def contents(self) -> dict[str, Any]:
    names = ("lost", "leaves", "sections", "simulated")
    return {name: dataclasses.asdict(self)[name] for name in names}

  @classmethod
  def parsed(cls, document: dict[str, Any]) -> Self:
    sections, simulated = map(document.pop, ("sections", "simulated"))
    for x in sections:
      x["ways"] = {name: Way(**way) for name, way in x["ways"].items()}
    return cls(
      **document,
      sections=[Section(**x) for x in sections],
      simulated=[ways.Simulated(**x) for x in simulated],
    )


_MEASURED = (
  *("exchanges", "predicted\nms", "measured\nms", "over the best\n(95 %)"),
  *("receives\nkB", "rounds", "wrong"),
)
_SIMULATED = (
  *("compute\nms", "one\nms", "each leaf\nms", "best cut\nms"),
  *("MergeComp\nms", "exact\nms", "unimodal\nin the cut"),
)


def show(found: Found) -> None:
  """Prints all of it."""
  hosts, loopback = (found.options[k] for k in ("hosts", "loopback"))
  place = "processes" if loopback else "network namespaces"
  leaves = found.leaves
  elements = sum(leaf["elements"] for leaf in leaves)
  print(
    f"groups: {hosts} {place} on {found.environment['cores']} cores, JAX"
    f" {found.environment['jax']}; {len(leaves)} compressed leaves of"
    f" {elements:,} elements, {found.lost} of them lost"
  )
  for section in found.sections:
    _show_measured(section)
  if found.simulated:
    _show_simulated(found.simulated)
  for line in lines(found):
    print(line)


def _show_measured(section: Section) -> None:
  none_s, best, rows = section.median_s(NONE), section.best(), []
  for name, way in section.ways.items():
    over = "-"
    if best is not None and section.times_s(way.program):
      over = str(section.over(way.program, best))
    row = (
      name,
      str(len(way.stops)),
      _ms(none_s + way.exchanges_s),
      _ms(section.median_s(way.program)),
      over,
      f"{way.told.get('wire_bytes', math.nan) / 1e3:.1f}",
      f"{way.told.get('rounds', math.nan):.0f}",
      tables.wrong(way.wrong),
    )
    rows.append(row)
  title = f"{section.rate}: {none_s * 1e3:.1f} ms without these exchanges"
  tables.show_rows(title, ("way", *_MEASURED), rows)


def _show_simulated(rows: list[ways.Simulated]) -> None:
  shown = tables.made(
    "SIMULATED, nothing measured: exchanges beside the backward pass",
    "machine\n  images of a device",
    *_SIMULATED,
  )
  machine = ""
  for x in rows:
    if x.machine != machine:
      machine = x.machine
      shown.add_row(f"[bold]{machine}[/bold]")
    cut = min(x.cuts_s)
    shown.add_row(
      f"  {x.images:,}",
      *(_ms(s, 3) for s in (x.compute_s, x.one_s, x.each_s)),
      f"{_ms(cut, 3)} ({x.cuts_s.index(cut) + 1})",
      f"{_ms(x.mergecomp_s, 3)} ({_stops(x.mergecomp)})",
      f"{_ms(x.search_s, 3)} ({_stops(x.search)})",
      "yes" if x.unimodal else "no",
    )
  tables.console().print(shown)


def _ms(seconds: float, digits: int = 1) -> str:
  return f"{seconds * 1e3:.{digits}f}"


def _stops(stops: Sequence[int]) -> str:
  """The cuts, without the end that all ways have."""
  return " ".join(map(str, stops[:-1])) or "none"


def lines(found: Found) -> Iterator[str]:
  """Yields the conclusions, in words."""
  for section in found.sections:
    known = section.ways.get(ways.MERGECOMP)
    if known is None or not section.times_s(known.program):
      continue
    n = len(known.stops)
    exchanges = "one exchange" if n == 1 else f"{n} exchanges"
    for name in (ways.ONE, ways.EACH):
      other = section.ways[name].program
      if section.times_s(other):
        yield (
          f"{section.rate}: MergeComp's choice, {exchanges}, takes"
          f" {section.over(known.program, other)} of {name}"
        )
  rows = found.simulated
  for x in rows:
    curve = " ".join(_ms(s, 3) for s in x.cuts_s)
    yield f"simulated, {x.machine}, {x.images:,} images, cut after 1..: {curve}"
  if rows:
    yield (
      "simulated: time is unimodal in the cut in"
      f" {sum(x.unimodal for x in rows)} of {len(rows)} cases; MergeComp's"
      " halving comes within 1 % of the exact search in"
      f" {sum(x.mergecomp_s <= 1.01 * x.search_s for x in rows)} of {len(rows)}"
    )
