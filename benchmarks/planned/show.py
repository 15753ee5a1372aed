"""The table of a run, a row for each way."""

import rich.box
import rich.table

from benchmarks import table as tables
from benchmarks.planned import verdict
from benchmarks.planned.found import Found
from benchmarks.planned.found import Section
from benchmarks.planned.grid import BASELINE

_HEADERS = (
  "predicted\nms",
  "measured\nms",
  "error\n%",
  "over\npmean",
  "receives\nMB",
  "compile\ns",
  "wrong\nelements",
)


def show(title: str, found: Found) -> None:
  """Prints all sections, and what follows from them."""
  shown = rich.table.Table(
    title=title,
    box=rich.box.SIMPLE_HEAD,
    title_justify="left",
    padding=(0, 1),
  )
  shown.add_column("cell\n  way", no_wrap=True)
  for header in _HEADERS:
    shown.add_column(header, justify="right", no_wrap=True)
  for section in found.sections.values():
    _add(shown, section)
  console = tables.console()
  console.print(shown)
  for line in verdict.lines(list(found.sections.values())):
    console.print(line, markup=False, highlight=False)


def _add(shown: rich.table.Table, section: Section) -> None:
  shown.add_row(
    f"[bold]{section.model}, {section.hosts} hosts, {section.rate}[/bold]:"
    f" {section.compute_s * 1e3:.1f} ms to compute"
  )
  timed = {cell.way: cell for cell in verdict.cells(section)}
  for name, way in section.ways.items():
    cell = timed.get(name)
    numbers = ["-"] * 4
    if cell is not None:
      over = "-"
      if BASELINE in timed:
        over = f"{cell.measured_s / timed[BASELINE].measured_s:.2f}"
      numbers = [
        f"{cell.predicted_s * 1e3:.1f}",
        f"{cell.measured_s * 1e3:.1f}",
        f"{cell.error:+.0%}" + ("" if cell.by_link else " *"),
        over,
      ]
    wrong = f"[bold red]{way.wrong}[/]" if way.wrong else "0"
    shown.add_row(
      f"  {name}",
      *numbers,
      f"{way.received_bytes / 1e6:.2f}",
      f"{way.compile_s:.1f}",
      wrong,
    )
  shown.add_section()
