"""The study's runs as tables in Markdown, and as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from examples.studies.compressors.cells import Cell
from examples.studies.compressors.cells import last
from examples.studies.compressors.ways import DENSE
from examples.studies.sparsifiers.cells import StudyFile

_Values = dict[tuple[str, str], dict[int, float]]


def perplexities(cells: Sequence[Cell], file: StudyFile) -> str:
  """Returns perplexities by seed, and how much larger than dense they are."""
  lines = [
    "| optimizer | | rate | perplexity, by seed | mean | against dense"
    " | by seed |",
    "|---" * 7 + "|",
  ]
  values = _values(cells, file)
  for (optimizer, way), found in values.items():
    dense = values.get((optimizer, DENSE), {})
    rate = next(c.lr for c in cells if (c.optimizer, c.way) == (optimizer, way))
    gaps = [found[s] / dense[s] - 1 for s in found if s in dense]
    each = ", ".join(map(_text, found.values()))
    columns = [optimizer, way, f"{rate:g}", each]
    columns.append(_text(float(np.mean(list(found.values())))))
    shown = way != DENSE and len(gaps) == len(found)
    columns.append(f"{_gap(found, dense):+.2%}" if shown else "")
    columns.append(", ".join(f"{x:+.1%}" for x in gaps) if shown else "")
    lines.append(f"| {' | '.join(columns)} |")
  return "\n".join(lines)


def sizes(cells: Sequence[Cell], file: StudyFile) -> str:
  """Returns the bytes that a device receives in a step."""
  lines = [
    "| | kB a step | fewer than float32 | fewer than bfloat16 |",
    "|---" * 4 + "|",
  ]
  received = _bytes(cells, file)
  whole = received[DENSE]
  for way, size in received.items():
    lines.append(
      f"| {way} | {size / 1e3:.1f} | {whole / size:.2f}x |"
      f" {whole / 2 / size:.2f}x |"
    )
  return "\n".join(lines)


def rates(cells: Sequence[Cell], file: StudyFile) -> str:
  """Returns the perplexities of all learning rates that were tried."""
  lines = ["| optimizer | | rate | perplexity |", "|---" * 4 + "|"]
  for cell in cells:
    value = last(file.find(cell))
    lines.append(
      f"| {cell.optimizer} | {cell.way} | {cell.lr:g} | {_text(value)} |"
    )
  return "\n".join(lines)


def plot(cells: Sequence[Cell], file: StudyFile, path: Path) -> None:
  """Draws perplexities against bytes, compared with dense training."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  values, received = _values(cells, file), _bytes(cells, file)
  optimizers = list(dict.fromkeys(cell.optimizer for cell in cells))
  figure, row = plt.subplots(
    1,
    len(optimizers),
    figsize=(6.5 * len(optimizers), 4),
    layout="constrained",
    sharey=True,
    squeeze=False,
  )
  for axes, optimizer in zip(row[0], optimizers):
    dense = values[optimizer, DENSE]
    axes.axhline(0, color="gray", linewidth=0.5)
    for number, (way, size) in enumerate(received.items()):
      found = values.get((optimizer, way))
      if found is None or way == DENSE:
        continue
      gaps = [100 * (found[s] / dense[s] - 1) for s in found]
      x = [size / received[DENSE]] * len(gaps)
      axes.plot(x, gaps, "o", ms=4, label=way, color=f"C{number % 10}",
                fillstyle="full" if number < 10 else "none")  # fmt: skip
    axes.set(
      title=optimizer,
      xlabel="bytes, relative to float32",
      ylabel="perplexity above dense, %",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks((-5, -1, 0, 1, 5, 20), ("-5", "-1", "0", "1", "5", "20"))
    axes.xaxis.set_major_formatter(
      lambda x, _: "1" if x == 1 else f"1/{1 / x:g}"
    )
  handles, labels = row[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside right center")
  figure.savefig(path, dpi=80)
  plt.close(figure)


def _values(cells: Sequence[Cell], file: StudyFile) -> _Values:
  """Returns the perplexities of optimizers and ways, by seed."""
  values: _Values = {}
  for cell in cells:
    if record := file.find(cell):
      of = values.setdefault((cell.optimizer, cell.way), {})
      of[cell.seed] = last(record)
  return values


def _bytes(cells: Sequence[Cell], file: StudyFile) -> dict[str, float]:
  found = {cell.way: file.find(cell) for cell in cells}
  return {way: record["bytes"] for way, record in found.items() if record}


def _text(perplexity: float) -> str:
  return f"{perplexity:.2f}" if np.isfinite(perplexity) else "diverged"


def _gap(found: dict[int, float], dense: dict[int, float]) -> float:
  means = [np.mean(list(of.values())) for of in (found, dense)]
  return float(means[0] / means[1] - 1)
