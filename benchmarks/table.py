"""The table that a run prints on the terminal."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math

import rich.box
import rich.console
import rich.table

from benchmarks.harness import Result

# The results of one group, by the name of the variant.
Peers = dict[str, Result]


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
  """A column; the README defines each.

  Attributes:
    header: At most two short lines.
    value: From a result and its peers; NaN prints as a dash.
    format: For `format()`.
  """

  header: str
  value: Callable[[Result, Peers], float]
  format: str = ".1f"


def fact(
  header: str, key: str, format: str = ".1f", *, unit: float = 1
) -> Column:
  """A number that the case itself reported, in multiples of `unit`."""
  return Column(header, lambda r, _: r.facts.get(key, math.nan) / unit, format)


TIME = Column("time\nms", lambda r, _: r.median_s * 1e3)
SPREAD = Column("±\nms", lambda r, _: r.spread_s * 1e3)
WRONG = Column("wrong\nelements", lambda r, _: r.wrong, ".0f")
COMPILE = Column("compile\ns", lambda r, _: r.compile_s, ".2f")


def time_over(name: str, header: str) -> Column:
  """Time over that of the variant called `name`."""
  return Column(header, lambda r, p: r.median_s / median_s(p, name), ".2f")


def added_over(name: str, nothing: str, header: str) -> Column:
  """What a variant adds to `nothing`, over what `name` adds to it."""

  def value(result, peers):
    base = median_s(peers, nothing)
    if result.name == nothing:
      return math.nan
    return (result.median_s - base) / (median_s(peers, name) - base)

  return Column(header, value, ".2f")


def median_s(peers: Peers, name: str) -> float:
  """Seconds of the variant called `name`, NaN if it was not measured."""
  return peers[name].median_s if name in peers else math.nan


def show(
  title: str, results: Sequence[Result], columns: Sequence[Column]
) -> None:
  """Prints one line a result, one section a group."""
  table = rich.table.Table(
    title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", padding=(0, 1)
  )
  table.add_column("workload\n  variant", no_wrap=True)
  for column in columns:
    table.add_column(column.header, justify="right", no_wrap=True)
  for group, members in itertools.groupby(results, lambda r: r.group):
    peers = {result.name: result for result in members}
    table.add_row(f"[bold]{group}[/bold]")
    for result in peers.values():
      cells = [_cell(column, result, peers) for column in columns]
      style = "bold red" if result.wrong else None
      table.add_row(f"  {result.name}", *cells, style=style)
    table.add_section()
  console().print(table)


def _cell(column, result, peers):
  value = column.value(result, peers)
  return format(value, column.format) if math.isfinite(value) else "-"


def console() -> rich.console.Console:
  """Where tables are printed."""
  console = rich.console.Console(highlight=False)
  # Into a pipe or a file a table is written as wide as it is.
  return console if console.is_terminal else rich.console.Console(width=180)
