"""The tables that `search` prints on the terminal."""

from collections.abc import Iterator, Sequence
import statistics
from typing import TYPE_CHECKING

import rich.box
import rich.table

from benchmarks import table as tables

if TYPE_CHECKING:
  from benchmarks.search import Large
  from benchmarks.search import Small


def show(small: "Sequence[Small]", large: "Sequence[Large]") -> None:
  """Prints what was found of small steps, and of large ones."""
  console = tables.console()
  for kind in dict.fromkeys(one.kind for one in small):
    console.print(_methods(kind, [one for one in small if one.kind == kind]))
  console.print(_sizes(large))
  for line in _notes(large):
    print(line)


def _table(title: str, *headers: str) -> rich.table.Table:
  made = rich.table.Table(
    title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", padding=(0, 1)
  )
  for number, header in enumerate(headers):
    made.add_column(header, justify="right" if number else "left", no_wrap=True)
  return made


def _methods(kind: str, small: "Sequence[Small]") -> rich.table.Table:
  made = _table(
    f"{len(small)} small steps, {kind}: iteration over the best of all",
    *("method", "possible", "equal", "within 1 %", "median", "worst"),
  )
  for name in dict.fromkeys(name for one in small for name in one.found_s):
    pairs = [(o.found_s[name], o.best_s) for o in small if name in o.found_s]
    ratios = [found / best for found, best in pairs]
    made.add_row(
      name,
      str(len(pairs)),
      str(sum(found == best for found, best in pairs)),
      f"{100 * sum(r <= 1.01 for r in ratios) / len(ratios):.0f} %",
      f"{statistics.median(ratios):.3f}",
      f"{max(ratios):.3f}",
    )
  return made


def _sizes(large: "Sequence[Large]") -> rich.table.Table:
  made = _table(
    "large steps",
    *("kind, tensors, sparse", "iteration\nms", "over\nrelaxed %"),
    *("time\nms", "CPU\nms", "pmean\nover it", "baseline\nover it"),
    "its CPU\nms",
  )
  for one in large:
    found = one.found_s["search"]
    names = [n for n in one.found_s if n not in ("search", "pmean")]
    made.add_row(
      f"{one.kind}, {one.tensors}, {one.sparse}",
      f"{found * 1e3:.1f}",
      _percent_over(found, one.relaxed_s),
      f"{statistics.median(one.wall_s) * 1e3:.0f}",
      f"{statistics.median(one.cpu_s) * 1e3:.0f}",
      f"{one.found_s['pmean'] / found:.3f}",
      f"{one.found_s[names[0]] / found:.3f}" if names else "-",
      f"{one.baseline_s * 1e3:.0f}",
    )
  return made


def _percent_over(found_s: float, bound_s: float | None) -> str:
  return "-" if bound_s is None else f"{100 * (found_s / bound_s - 1):.2f}"


def _notes(large: "Sequence[Large]") -> Iterator[str]:
  yield (
    "The baseline is Espresso's greedy tensor by tensor, MergeComp's cut of"
    " groups. A better plan of tensors by themselves gains no more than is"
    " over the relaxed one, in which tensors may be split between options."
  )
  for kind in dict.fromkeys(one.kind for one in large):
    ones = [one for one in large if one.kind == kind]
    cpu = statistics.median(s for one in ones for s in one.cpu_s) * 1e3
    yield f"Searching {kind} took {cpu:.0f} ms of CPU at the median."
