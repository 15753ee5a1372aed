"""`predict`: the formulas' record on what `network --json` has left."""

from collections.abc import Sequence
import json
import pathlib

import numpy as np
import rich.box
import rich.table

from benchmarks import table as tables
from benchmarks.network import predict


def run(path: pathlib.Path) -> int:
  """Prints all tables.

  Raises:
    ValueError: `path` is not what `network --json` writes.
  """
  try:
    document = json.loads(path.read_text(encoding="utf-8"))
    cells = predict.cells(document)
    picks = predict.picks(document)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"FILE must be what `network --json` wrote, with its calibration, got"
      f" {path} ({type(error).__name__}: {error}). Run `network` again."
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


def _show_picks(picks: Sequence[predict.Pick]) -> None:
  table = _table(
    'What scheme="auto" takes',
    *("workload, hosts, rate", "taken", "best measured", "over best"),
    "over psum",
  )
  for pick in picks:
    style = "red" if pick.harmful else None if pick.good else "yellow"
    table.add_row(
      "{}, {}, {}".format(*pick.section),
      pick.chosen,
      pick.best,
      f"{pick.over_best:.2f}",
      f"{pick.over_psum:.3f}",
      style=style,
    )
  tables.console().print(table)
  if picks:
    good = sum(pick.good for pick in picks)
    harm = sum(pick.harmful for pick in picks)
    print(
      f"The best or within 10 % of it in {good} of {len(picks)} sections;"
      f" slower than psum by more than 5 % in {harm}."
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
