"""A study's cells as tables, in Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from examples.studies.sparsifiers.cells import Cell
from examples.studies.sparsifiers.cells import DENSE
from examples.studies.sparsifiers.cells import StudyFile

_Gap = Callable[[float, float], str]


def seeds(cells: Sequence[Cell], file: StudyFile, measure: str, gap: _Gap):
  """Dense beside the sparsifiers that were trained from several seeds."""
  done: dict[tuple[str, float, int], dict[int, float]] = {}
  for cell in cells:
    if record := file.find(cell):
      key = (cell.kind, cell.density, cell.devices)
      done.setdefault(key, {})[cell.seed] = _last(record)
  lines = [
    f"| | devices | {measure}, by seed | mean | against dense |",
    "|---|---|---|---|---|",
  ]
  for (kind, density, devices), values in done.items():
    if len(values) < 2:
      continue
    dense = done.get((DENSE, 1.0, devices), {})
    mean, beside = np.mean(list(values.values())), ""
    if kind != DENSE and values.keys() <= dense.keys():
      beside = gap(float(mean), float(np.mean([dense[s] for s in values])))
    each = ", ".join(f"{x:.4g}" for x in values.values())
    name = _name(kind, density)
    lines.append(f"| {name} | {devices} | {each} | {mean:.4g} | {beside} |")
  return "\n".join(lines) if len(lines) > 2 else ""


def table(cells: Sequence[Cell], file: StudyFile, measure: str, gap: _Gap):
  """All cells of the first seed."""
  lines = [
    f"| devices | | got/wanted | build-up | imbalance | rounds | MB a step |"
    f" fewer | {measure} | against dense |",
    "|---" * 10 + "|",
  ]
  dense: dict[int, dict[str, Any]] = {}
  for cell in sorted(cells, key=_order):
    record = file.find(cell)
    if record is None or cell.seed != cells[0].seed:
      continue
    if cell.kind == DENSE:
      dense[cell.devices] = record
    lines.append(_line(cell, record, dense.get(cell.devices), gap))
  return "\n".join(lines)


def _line(
  cell: Cell,
  record: dict[str, Any],
  dense: dict[str, Any] | None,
  gap: _Gap,
) -> str:
  received = _received(record)
  columns = [str(cell.devices), _name(cell.kind, cell.density)]
  if s := record["settled"]:
    columns.append(f"{s['density'] / s['density_wanted']:.3f}")
    columns += [
      f"{s[name]:.2f}" if name in s else ""  # Not all sparsifiers count it.
      for name in ("build_up", "imbalance", "rounds")
    ]
  else:
    columns += [""] * 4
  columns.append(f"{received:.3g}")
  columns.append(f"{_received(dense) / received:.1f}x" if dense else "")
  columns.append(f"{_last(record):.4g}")
  columns.append(gap(_last(record), _last(dense)) if s and dense else "")
  return f"| {' | '.join(columns)} |"


def _order(cell: Cell):
  return cell.devices, cell.kind != DENSE, cell.density, cell.kind


def _name(kind: str, density: float) -> str:
  return kind if kind == DENSE else f"{kind} {100 * density:g} %"


def _last(record: dict[str, Any]) -> float:
  return record["measured"]["value"][-1]


def _received(record: dict[str, Any]) -> float:
  measured = record["measured"]
  return measured["megabytes"][-1] / measured["step"][-1]
