"""`predict`: the formulas' record on what `network --json` has left."""

import argparse
from collections.abc import Iterator, Sequence
import json

import numpy as np
import rich.box
import rich.table

from benchmarks import table as tables
from benchmarks.network import picks as picks_lib
from benchmarks.network import predict


def run(options: argparse.Namespace) -> int:
  """Prints all tables.

  Args:
    options: With `file`, a path.

  Raises:
    ValueError: The file is not what `network --json` writes.
  """
  try:
    document = json.loads(options.file.read_text(encoding="utf-8"))
    cells = predict.cells(document)
    picks = picks_lib.picks(document)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"FILE must be what `network --json` wrote, with its calibration, got"
      f" {options.file} ({type(error).__name__}: {error}). Run `network` again."
    ) from error
  _show_cells(cells)
  _show_picks(picks)
  for name in dict.fromkeys(cell.workload for cell in cells):
    _show_beyond(name, document)
  return 0


def _table(title: str, *columns: str) -> rich.table.Table:
  table = rich.table.Table(
    title=title, box=rich.box.SIMPLE_HEAD, title_justify="left"
  )
  for i, column in enumerate(columns):
    table.add_column(column, justify="left" if i == 0 else "right")
  return table


def _show_cells(cells: Sequence[predict.Cell]) -> None:
  table = _table(
    "Predicted beside measured",
    *("workload, hosts, rate", "variant", "predicted ms", "measured ms"),
    *("error %", "limited by"),
  )
  for cell in cells:
    table.add_row(
      f"{cell.workload}, {cell.hosts}, {cell.rate}",
      cell.variant,
      f"{cell.predicted.seconds * 1e3:.1f}",
      f"{cell.measured_s * 1e3:.1f}",
      f"{cell.error * 100:+.0f}",
      "cores" if cell.by_cores else "link",
    )
  tables.console().print(table)
  linked = [abs(cell.error) for cell in cells if not cell.by_cores]
  if linked:
    middle, most = np.percentile(linked, [50, 90]) * 100
    print(
      f"{len(linked)} of {len(cells)} cells are limited by the link: error"
      f" {middle:.0f} % at the median, {most:.0f} % at the 90th percentile."
    )


def _show_picks(picks: Sequence[picks_lib.Pick]) -> None:
  table = _table(
    'What scheme="auto" takes; in brackets 95 % intervals over paired rounds',
    *("workload, hosts, rate", "taken", "best measured", "over best"),
    "over psum",
  )
  for pick in picks:
    style = "red" if pick.harmful else None if pick.good else "yellow"
    table.add_row(
      "{}, {}, {}".format(*pick.section),
      pick.chosen,
      pick.best,
      _ratio(pick.over_best, 2),
      _ratio(pick.over_psum, 3),
      style=style,
    )
  tables.console().print(table)
  for line in _record(picks):
    print(line)


def _ratio(ratio: picks_lib.Ratio, digits: int) -> str:
  text = f"{ratio.median:.{digits}f}"
  if ratio.interval is None or ratio.interval.low == ratio.interval.high:
    return text  # Too few rounds, or a variant over itself.
  low, high = (f"{x:.{digits}f}" for x in ratio.interval)
  return f"{text} ({low}-{high})"


def _record(picks: Sequence[picks_lib.Pick]) -> Iterator[str]:
  """How often it was right: by medians, and as far as these are sure."""
  if not picks:
    return
  near, slower = picks_lib.NEAR, picks_lib.NO_SLOWER
  best, psum = [p.over_best for p in picks], [p.over_psum for p in picks]
  yield (
    f"By medians the best or within 10 % of it in {sum(p.good for p in picks)}"
    f" of {len(picks)} sections; slower than psum by more than 5 % in"
    f" {sum(p.harmful for p in picks)}."
  )
  yield (
    "By intervals the best measured or surely within 10 % of it in"
    f" {sum(r.surely_within(near) for r in best)}, surely not in"
    f" {sum(r.surely_above(near) for r in best)}; surely no slower than psum"
    f" by more than 5 % in {sum(r.surely_within(slower) for r in psum)},"
    f" surely slower in {sum(r.surely_above(slower) for r in psum)}."
  )


def _show_beyond(name: str, document: dict) -> None:
  rate = document["cells"][0]["rate"]
  batches = document["options"]["batches"]
  found = predict.beyond(name, rate, batches, latency_s=20e-6)
  table = _table(
    f"{name} at {rate}: by formula alone, line rate, no local work",
    *("hosts", "fastest", "ms", "next", "ms", "times faster than psum"),
  )
  for hosts, predictions in found.items():
    schemes = {}
    for p in predictions:
      schemes.setdefault(p.scheme, p)
    dense = schemes.pop("dense")
    best, second = list(schemes.values())[:2]
    table.add_row(
      str(hosts),
      f"{best.scheme}/{best.column_groups}",
      f"{best.seconds * 1e3:.1f}",
      second.scheme,
      f"{second.seconds * 1e3:.1f}",
      f"{dense.seconds / best.seconds:.1f}",
    )
  tables.console().print(table)
