"""The cells of a study of sparsifiers, and the numbers that each leaves."""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

from measured_run import Run
import numpy as np
from sparsified import settled
from sparsified import Sparsifier
from step_log import finite

DENSE = "dense"

# Of a curve, at most about; each is the mean of some steps.
_POINTS = 100

# Of each step of a sparsifier.
CURVES = ("density", "build_up", "imbalance", "threshold", "residual_norm")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
  """One run of the study.

  Attributes:
    kind: `DENSE`, or of `sparsified.KINDS`.
    density: What is asked for; 1 of `DENSE`.
    devices: How many.
    seed: Of parameters and batches.
  """

  kind: str
  density: float
  devices: int
  seed: int

  @property
  def sparsifier(self) -> Sparsifier | None:
    """What is trained with."""
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
  """All cells in the order that they are run in.

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
  """What is kept of a cell, of five digits.

  Args:
    cell: The cell.
    run: What it gave; it began at step 0.
    elements: Of the model.

  Returns:
    The cell's own fields; `elements`; `seconds`, the median step; `settled`,
    means of a sparsifier's numbers; `measured`, what was measured, after which
    steps and how many megabytes that a device had received; and `curves`, with
    a point for `every` so many steps: `loss`, `megabytes`, and a sparsifier's.
  """
  history = run.history
  received = np.cumsum([0.0, *_received(cell, run, elements)]) / 1e6
  steps = list(run.measured)
  every = max(len(history.losses) // _POINTS, 1)
  curves = {
    "loss": _points(history.losses, every),
    "megabytes": received[every::every].tolist(),
  }
  if cell.sparsifier:
    stats = [last["sparsifier"] for last in history.stats]
    curves |= {key: _points([s[key] for s in stats], every) for key in CURVES}
  found = {
    **dataclasses.asdict(cell),
    "elements": elements,
    "seconds": history.step_time,
    "settled": settled(history) if cell.sparsifier else {},
    "measured": {
      "step": steps,
      "megabytes": received[steps].tolist(),
      "value": list(run.measured.values()),
    },
    "every": every,
    "curves": curves,
  }
  return _short(finite(found))


def _received(cell: Cell, run: Run, elements: int) -> list[float]:
  """Bytes that a device received in every step."""
  if cell.sparsifier:
    stats = [last["sparsifier"] for last in run.history.stats]
    return [s["wire_bytes"] for s in stats]
  # A ring's, as `zenjax.stats` has it; float32.
  bytes_a_step = 2 * (cell.devices - 1) / cell.devices * 4 * elements
  return [bytes_a_step] * len(run.history.losses)


def _points(values: Sequence[float], every: int) -> list[float]:
  whole = len(values) // every * every
  return np.reshape(values[:whole], (-1, every)).mean(axis=1).tolist()


def _short(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _short(x) for key, x in value.items()}
  if isinstance(value, list):
    return [_short(x) for x in value]
  return float(f"{value:.5g}") if isinstance(value, float) else value
