"""The cells of a study of sparsifiers, what each leaves, and their file."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.studies.common.files import environment
from examples.studies.common.files import finite
from examples.studies.common.files import written_whole
from examples.studies.common.loop import Run
from examples.studies.common.sparsifier import settled
from examples.studies.common.sparsifier import Sparsifier
from examples.studies.common.sparsifier import STATS

DENSE = "dense"

# A curve has about so many at most; each is the mean of some steps.
_POINTS = 100

# What a sparsifier's cell keeps of every step, if the sparsifier counts it.
CURVES = ("density", "build_up", "imbalance", "threshold", "residual_norm")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
  """Names one run of the study.

  Attributes:
    kind: `DENSE`, or one of `sparsifier.KINDS`.
    density: What is asked for; 1 where `DENSE`.
    devices: How many.
    seed: Draws parameters and batches.
  """

  kind: str
  density: float
  devices: int
  seed: int

  @property
  def sparsifier(self) -> Sparsifier | None:
    """The sparsifier to train with; None where `DENSE`."""
    if self.kind == DENSE:
      return None
    return Sparsifier(self.kind, self.density)

  @property
  def label(self) -> str:
    """For a person."""
    part = "" if self.kind == DENSE else f" {100 * self.density:g} %"
    return f"{self.kind}{part}, {self.devices} devices, seed {self.seed}"


def grid(
  kinds: Sequence[str],
  densities: Sequence[float],
  devices: Sequence[int],
  seeds: Sequence[int],
  main: float,
) -> list[Cell]:
  """Returns all cells in the order that they are run in.

  First dense and the first kind at density `main` on the most devices, from
  every seed: what the study is for. Then the rest, from the first seed.
  """
  most, seed = max(devices), seeds[0]
  line = [
    Cell(kind, density, most, seed)
    for seed in seeds
    for kind, density in ((DENSE, 1.0), (kinds[0], main))
  ]
  rest = []
  for n in sorted(devices, reverse=True):
    rest.append(Cell(DENSE, 1.0, n, seed))
    for density, kind in itertools.product(densities, kinds):
      rest.append(Cell(kind, density, n, seed))
  return list(dict.fromkeys([*line, *rest]))


def record(cell: Cell, run: Run, elements: int) -> dict[str, Any]:
  """Returns what is kept of a cell, of five digits.

  Args:
    cell: The cell.
    run: Its run, from step 0.
    elements: The parameters of the model.

  Returns:
    The cell's own fields; `elements`; `seconds`, the median step; `settled`,
    means of a sparsifier's numbers; `measured`, what was measured, after which
    steps and how many megabytes that a device had received; and `curves`, with
    a point for `every` so many steps: `loss`, `megabytes`, and a sparsifier's.
  """
  received = np.cumsum([0.0, *_received(cell, run, elements)]) / 1e6
  steps = list(run.measured)
  every = _every(run.losses)
  curves = {
    "loss": curve(run.losses),
    "megabytes": received[every::every].tolist(),
  }
  if cell.sparsifier:
    stats = [last[STATS] for last in run.stats]
    curves |= {
      key: curve([s[key] for s in stats]) for key in CURVES if key in stats[0]
    }
  found = {
    **dataclasses.asdict(cell),
    "elements": elements,
    "seconds": run.step_time,
    "settled": settled(run) if cell.sparsifier else {},
    "measured": {
      "step": steps,
      "megabytes": received[steps].tolist(),
      "value": list(run.measured.values()),
    },
    "every": every,
    "curves": curves,
  }
  return short(found)


def _received(cell: Cell, run: Run, elements: int) -> list[float]:
  """Returns the bytes that a device received in every step."""
  if cell.sparsifier:
    return [last[STATS]["wire_bytes"] for last in run.stats]
  # A ring's, as `zenjax.stats` has it; float32.
  bytes_a_step = 2 * (cell.devices - 1) / cell.devices * 4 * elements
  return [bytes_a_step] * len(run.losses)


def curve(values: Sequence[float]) -> list[float]:
  """Returns means of so many values each that few enough are left."""
  every = _every(values)
  whole = len(values) // every * every
  return np.reshape(values[:whole], (-1, every)).mean(axis=1).tolist()


def _every(values: Sequence[float]) -> int:
  return max(len(values) // _POINTS, 1)


def short(value: Any) -> Any:
  """Returns what JSON can hold, of five digits."""
  value = finite(value)
  if isinstance(value, dict):
    return {key: short(x) for key, x in value.items()}
  if isinstance(value, list):
    return [short(x) for x in value]
  return float(f"{value:.5g}") if isinstance(value, float) else value


class StudyFile:
  """Keeps the cells of one task, in memory, and in a file if there is one.

  Cells that are done are not run again.

  Args:
    path: Is gone on from, if it exists; None for memory alone.
    task: What is compared: "lm", "cnn" or "compressors".
    options: What all cells must share.

  Raises:
    ValueError: The file is none of a study, or was made with other options.
  """

  def __init__(self, path: Path | None, task: str, options: Mapping[str, Any]):
    self._path = path
    self._document = {
      "task": task,
      "jax": jax.__version__,
      "cores": os.cpu_count(),
      "complete": False,
      "environment": environment(),
      "options": dict(options),
      "cells": [],
    }
    if path and path.exists():
      self._read(path)

  @property
  def cells(self) -> list[dict[str, Any]]:
    """Every record."""
    return self._document["cells"]

  def find(self, cell: Any) -> dict[str, Any] | None:
    """Returns the record of a cell, a dataclass, if it is done."""
    fields = dataclasses.asdict(cell).items()
    for found in self.cells:
      if all(found[name] == value for name, value in fields):
        return found
    return None

  def add(self, record: dict[str, Any]) -> None:
    """Keeps a record; the file is whole at any time."""
    self.cells.append(record)
    made, now = self._document["environment"], environment()["git"]
    if made and now not in (made["git"], *made.get("continued", [])):
      made["continued"] = [*made.get("continued", []), now]
    self._save()

  def finish(self) -> None:
    """Says in the file that no cell is missing."""
    if not self._document["complete"]:
      self._document["complete"] = True
      self._save()

  def _save(self) -> None:
    if self._path is None:
      return
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(self._path) as partial:
      partial.write_text(self._text(), encoding="utf-8")

  def _text(self) -> str:
    """Gives each cell a line, so that files can be compared."""
    head = {k: v for k, v in self._document.items() if k != "cells"}
    cells = ",\n".join(json.dumps(cell) for cell in self.cells)
    return f'{json.dumps(head)[:-1]}, "cells": [\n{cells}\n]}}\n'

  def _read(self, path: Path) -> None:
    try:
      found = json.loads(path.read_text(encoding="utf-8"))
      made_with = {"task": found["task"], "jax": found["jax"]}
      made_with |= found["options"]
      self._document["cores"] = found["cores"]
      # Older files say nothing of their commit.
      self._document["complete"] = found.get("complete", False)
      self._document["environment"] = found.get("environment")
      cells = found["cells"]
    except (ValueError, TypeError, KeyError) as error:
      raise ValueError(
        f"must name a study's file or a new one, but {path} is none: {error!r}"
      ) from error
    now = {"task": self._document["task"], "jax": self._document["jax"]}
    now |= self._document["options"]
    for name, value in now.items():
      if made_with.get(name) != value:
        raise ValueError(
          f"must name a new file, or one of the same study: {path} was made"
          f" with {name} {made_with.get(name)!r}, got {value!r}"
        )
    self._document["cells"] = cells
