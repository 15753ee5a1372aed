"""The tables that commands print on the terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import itertools
import math
from typing import Any, NamedTuple

import rich.box
import rich.console
import rich.table

# The results of one group, by the name of the variant.
Peers = Mapping[str, Any]


class Column(NamedTuple):
  """A column; the README defines each."""

  header: str  # at most two short lines
  value: Callable[[Any, Any], float]  # of a result and its peers
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
MEASURED = (WRONG, COMPILE, TIME, SPREAD)  # Of every case.


def time_over(name: str, header: str) -> Column:
  """Time over that of the variant called `name`."""
  return Column(header, lambda r, p: r.median_s / median_s(p, name), ".2f")


def faster_than(name: str, header: str) -> Column:
  """Compares the speed with that of the variant called `name`."""
  return Column(header, lambda r, p: median_s(p, name) / r.median_s, ".2f")


def added_over(name: str, nothing: str, header: str) -> Column:
  """Compares what a variant adds to `nothing` with what `name` adds."""

  def value(result, peers):
    base = median_s(peers, nothing)
    if result.name == nothing:
      return math.nan
    return (result.median_s - base) / (median_s(peers, name) - base)

  return Column(header, value, ".2f")


def median_s(peers: Peers, name: str) -> float:
  """Seconds of the variant called `name`, NaN if it was not measured."""
  return peers[name].median_s if name in peers else math.nan


def show(title: str, results: Sequence[Any], columns: Sequence[Column]) -> None:
  """Prints one line a result, one section a group."""
  grouped = itertools.groupby(results, lambda r: r.group)
  groups = ((group, {r.name: r for r in members}) for group, members in grouped)
  show_groups(title, "workload\n  variant", columns, groups)


def show_groups(
  title: str,
  first: str,
  columns: Sequence[Column],
  groups: Iterable[tuple[str, Peers]],
  note: Callable[[Peers], str] = lambda peers: "",
) -> None:
  """Prints one line for each member of each group, in red what is `wrong`.

  `first` is the header of their names; `note` may be a group's last line.
  """
  shown = made(title, first, *(column.header for column in columns))
  for group, peers in groups:
    shown.add_row(f"[bold]{group}[/bold]")
    for name, member in peers.items():
      numbers = (number(c.value(member, peers), c.format) for c in columns)
      style = "bold red" if getattr(member, "wrong", 0) else None
      shown.add_row(f"  {name}", *numbers, style=style)
    if said := note(peers):
      shown.add_row(f"  [italic]{said}[/italic]")
    shown.add_section()
  console().print(shown)


def show_rows(
  title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
  """Prints rows of words; columns after the first hold numbers."""
  shown = made(title, *headers)
  for row in rows:
    shown.add_row(*row)
  console().print(shown)


def made(title: str, *headers: str) -> rich.table.Table:
  """Returns an empty table, whose first column holds words."""
  table = rich.table.Table(
    title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", padding=(0, 1)
  )
  for index, header in enumerate(headers):
    justify = "right" if index else "left"
    table.add_column(header, justify=justify, no_wrap=True)
  return table


def wrong(count: int) -> str:
  """Returns the number of wrong elements, in red where there are any."""
  return f"[bold red]{count}[/]" if count else "0"


def number(value: float | None, format_: str, unit: float = 1) -> str:
  """Returns `value * unit` in words, a dash where there is none."""
  if value is None or not math.isfinite(value):
    return "-"
  return format(value * unit, format_)


def console() -> rich.console.Console:
  """Returns where tables are printed."""
  console = rich.console.Console(highlight=False)
  # Into a pipe or a file a table is written as wide as it is.
  return console if console.is_terminal else rich.console.Console(width=180)
