"""The table of a run of `planned`, a row for each way, and what follows."""

from collections.abc import Iterator, Sequence
import itertools

import numpy as np

from benchmarks import table
from benchmarks.campaigns.planned import cells as cells_lib

_HEADERS = (
  *("predicted\nms", "measured\nms", "error\n%", "over\npmean"),
  *("receives\nMB", "compile\ns", "wrong\nelements"),
)


def show(title: str, found: cells_lib.Found) -> None:
  """Prints all sections, and what follows from them."""
  shown = table.made(title, "cell\n  way", *_HEADERS)
  for section in found.sections.values():
    shown.add_row(
      f"[bold]{section.model}, {section.hosts} hosts, {section.rate}[/bold]:"
      f" {section.compute_s * 1e3:.1f} ms to compute"
    )
    for row in _rows(section):
      shown.add_row(*row)
    shown.add_section()
  console = table.console()
  console.print(shown)
  for line in lines(list(found.sections.values())):
    console.print(line, markup=False, highlight=False)


def _rows(section: cells_lib.Section) -> Iterator[list[str]]:
  timed = {cell.way: cell for cell in cells_lib.cells(section)}
  for name, way in section.ways.items():
    numbers = ["-"] * 4
    if cell := timed.get(name):
      over = "-"
      if cells_lib.BASELINE in timed:
        over = f"{cell.measured_s / timed[cells_lib.BASELINE].measured_s:.2f}"
      numbers = [
        f"{cell.predicted_s * 1e3:.1f}",
        f"{cell.measured_s * 1e3:.1f}",
        f"{cell.error:+.0%}" + ("" if cell.by_link else " *"),
        over,
      ]
    numbers += [f"{way.received_bytes / 1e6:.2f}", f"{way.compile_s:.1f}"]
    yield [
      f"  {name}",
      *numbers,
      f"[bold red]{way.wrong}[/]" if way.wrong else "0",
    ]


def lines(sections: Sequence[cells_lib.Section]) -> Iterator[str]:
  """Yields in words how near predictions came, and what plans cost."""
  found = list(itertools.chain.from_iterable(map(cells_lib.cells, sections)))
  for by_link, of in ((True, "the links limit"), (False, "the cores limit")):
    errors = [abs(c.error) for c in found if c.by_link == by_link]
    if errors:
      median, most = np.percentile(errors, [50, 90])
      yield (
        f"{len(errors)} steps that {of}: predicted with a median error of"
        f" {median:.0%}, 90 % of them within {most:.0%}"
      )
  picks = [p for section in sections if (p := cells_lib.pick(section))]
  if picks:
    yield (
      f"the plan is within {cells_lib.NEAR - 1:.0%} of the best way measured in"
      f" {sum(p.good for p in picks)} of {len(picks)} cells, surely not in"
      f" {sum(p.far for p in picks)}, slower than pmean by more than"
      f" {cells_lib.NO_SLOWER - 1:.0%} in {sum(p.harmful for p in picks)}"
    )
  for p in picks:
    if not p.good or p.harmful:
      yield (
        f"  {p.section.model}, {p.section.hosts} hosts, {p.section.rate}:"
        f" {p.over_best} of {p.best}, {p.over_pmean} of pmean"
      )
