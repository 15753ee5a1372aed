"""The study's runs as tables in Markdown."""

from collections.abc import Sequence
import math

import numpy as np

from examples.studies.local_steps.cells import Cell
from examples.studies.local_steps.cells import DENSE
from examples.studies.local_steps.cells import last
from examples.studies.sparsifiers.cells import StudyFile


def results(cells: Sequence[Cell], file: StudyFile) -> str:
  """Returns perplexities, losses against dense training, and bytes."""
  lines = [
    "| exchange | rates | perplexity, by seed | loss | against dense"
    " | by seed | bytes a sample | times fewer |",
    "|---" * 8 + "|",
  ]
  groups: dict[tuple[int, bool], list[Cell]] = {}
  for cell in cells:
    groups.setdefault((cell.every, cell.int4), []).append(cell)
  losses = {
    key: np.log([last(cell, file) for cell in group])
    for key, group in groups.items()
  }
  dense = losses[DENSE, False]
  whole = _bytes(groups[DENSE, False][0], file)
  for (every, int4), group in groups.items():
    first, own = group[0], losses[every, int4]
    bits = " in int4" if int4 else ""
    name = f"every {every} steps{bits}" if every > 1 else "every step (dense)"
    rates = f"{first.lr:g}"
    if every > 1:
      rates += f"; {first.outer_lr:g}, {first.momentum:g}"
    each = ", ".join(_text(last(cell, file)) for cell in group)
    columns = [name, rates, each, f"{own.mean():.3f}"]
    gaps = own / dense - 1
    shown = every > 1
    columns.append(f"{own.mean() / dense.mean() - 1:+.2%}" if shown else "")
    columns.append(", ".join(f"{x:+.1%}" for x in gaps) if shown else "")
    size = _bytes(first, file)
    columns += [f"{size:,.0f}", f"{whole / size:,.0f}"]
    lines.append(f"| {' | '.join(columns)} |")
  return "\n".join(lines)


def rates(cells: Sequence[Cell], file: StudyFile) -> str:
  """Returns the perplexities of all rates that were tried."""
  lines = [
    "| exchange | AdamW | outer rate | momentum | perplexity |",
    "|---" * 5 + "|",
  ]
  for cell in cells:
    outer = f"{cell.outer_lr:g} | {cell.momentum:g}"
    name = f"every {cell.every} steps"
    if cell.every == DENSE:
      name, outer = "every step", " | "
    lines.append(
      f"| {name} | {cell.lr:g} | {outer} | {_text(last(cell, file))} |"
    )
  return "\n".join(lines)


def _bytes(cell: Cell, file: StudyFile) -> float:
  found = file.find(cell)
  return found["bytes"] / found["samples"] if found else math.nan


def _text(perplexity: float) -> str:
  if math.isnan(perplexity):
    return "not run"
  return f"{perplexity:.2f}" if math.isfinite(perplexity) else "diverged"
