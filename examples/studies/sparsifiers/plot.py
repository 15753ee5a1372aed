"""Pictures of a study: what was learned for how much, and what was selected."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.studies.sparsifiers.cells import Cell
from examples.studies.sparsifiers.cells import DENSE
from examples.studies.sparsifiers.cells import StudyFile

_COLORS = {DENSE: "black", "exdyna": "C0", "micro": "C1", "top_k": "C2"}
_STYLES = ("-", "--", ":", "-.")

# Of the selection: curve, what it says, and what is best.
_SELECTION = (
  ("density", "density got over wanted", 1.0),
  ("build_up", "build-up: union over wanted", 1.0),
  ("imbalance", "imbalance: largest over mean", 1.0),
  ("threshold", "threshold", None),
)

_Shown = list[tuple[Cell, dict[str, Any]]]


def save(
  cells: Sequence[Cell], file: StudyFile, measure: str, path: Path
) -> list[Path]:
  """Saves `<path>-loss`, `-<measure>` and `-selection`, of the first seed.

  Args:
    cells: Which to show, as far as they are done.
    file: Where they are.
    measure: What was measured on held-out data.
    path: Where to; its ending picks the format.

  Returns:
    The files.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  shown = [
    (cell, record)
    for cell in cells
    if cell.seed == cells[0].seed and (record := file.find(cell))
  ]
  devices = sorted({cell.devices for cell, _ in shown})
  styles = _styles(shown)
  saved = []
  for name in ("loss", measure, "selection"):
    rows = len(_SELECTION) if name == "selection" else 2
    figure, axes = plt.subplots(
      rows,
      len(devices),
      figsize=(5 * len(devices), 3 * rows),
      layout="constrained",
      squeeze=False,
    )
    for column, n in zip(axes.T, devices):
      mine = [x for x in shown if x[0].devices == n]
      if name == "selection":
        _draw_selection(column, mine, styles)
      else:
        _draw_learned(column, mine, styles, name)
      column[0].set_title(f"{n} devices")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    saved.append(path.with_name(f"{path.stem}-{name}{path.suffix}"))
    figure.savefig(saved[-1], dpi=80)
    plt.close(figure)
  return saved


def _styles(shown: _Shown) -> dict[float, str]:
  """By density, the largest first."""
  densities = sorted({c.density for c, _ in shown if c.sparsifier})[::-1]
  return {d: _STYLES[i % len(_STYLES)] for i, d in enumerate(densities)}


def _line(cell: Cell, styles: dict[float, str]) -> dict[str, Any]:
  label = cell.label.split(",")[0]
  style = styles.get(cell.density, "-") if cell.sparsifier else "-"
  color = _COLORS.get(cell.kind, "C3")
  return {"label": label, "linestyle": style, "color": color, "linewidth": 1.2}


def _draw_learned(axes, shown: _Shown, styles, name: str) -> None:
  for cell, record in shown:
    if name == "loss":
      curves = record["curves"]
      y, x = np.array(curves["loss"]), np.array(curves["megabytes"])
      steps = record["every"] * np.arange(1, len(y) + 1)
    else:
      measured = {k: np.array(v[1:]) for k, v in record["measured"].items()}
      y, x, steps = measured["value"], measured["megabytes"], measured["step"]
    axes[0].plot(steps, y, **_line(cell, styles))
    axes[1].plot(x, y, **_line(cell, styles))
  axes[0].set(xlabel="step", ylabel=name)
  axes[1].set(xlabel="MB that a device received", ylabel=name, xscale="log")
  for one in axes:
    if name == "loss":
      one.set_yscale("log")
    elif name != "accuracy":
      _set_short_log(one)


def _draw_selection(axes, shown: _Shown, styles) -> None:
  for one, (key, what, best) in zip(axes, _SELECTION):
    for cell, record in shown:
      if key not in record["curves"]:
        continue  # Dense, or a sparsifier that does not count it.
      y = np.array(record["curves"][key], float)  # NaN stands for null.
      if key == "density":
        y = y / cell.density
      steps = record["every"] * np.arange(1, len(y) + 1)
      one.plot(steps, y, **_line(cell, styles))
    if best is None:
      _set_short_log(one)
    else:
      one.axhline(best, color="gray", linewidth=0.5)
    one.set(xlabel="step", ylabel=what)


def _set_short_log(axes) -> None:
  """Sets a log scale of a decade or two, with numbers as people write them."""
  axes.set_yscale("log")
  axes.yaxis.set_major_formatter("{x:g}")
  axes.yaxis.set_minor_formatter(_short_number)


def _short_number(x: float, _: int) -> str:
  return f"{x:g}" if f"{x:e}"[0] in "235" else ""
