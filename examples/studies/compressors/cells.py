"""The runs of the study, and what each leaves."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from examples.studies.common.loop import Run
from examples.studies.compressors.ways import DENSE
from examples.studies.compressors.ways import TERNARY
from examples.studies.compressors.ways import VOTE
from examples.studies.sparsifiers.cells import curve
from examples.studies.sparsifiers.cells import short
from examples.studies.sparsifiers.cells import StudyFile

# Learning rates that are tried with the first seed. The best is taken for all
# seeds, and dense training's for all ways that are not here: votes have the
# size one, and TernGrad's noise is too large for the rate of SGD, which is that
# of the study of sparsifiers.
TRIED = {
  (DENSE, "sgd"): (1.0,),
  (TERNARY, "sgd"): (0.1, 0.3, 1.0),
  (DENSE, "adam"): (0.003, 0.01, 0.03),
  (VOTE, "sgd"): (0.001, 0.003, 0.01),
  (VOTE, "adam"): (0.001, 0.003, 0.01),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
  """Names one run: a way to average, an optimizer, its rate, and a seed."""

  way: str
  optimizer: str
  lr: float
  seed: int

  @property
  def label(self) -> str:
    """The cell as text."""
    return f"{self.way}, {self.optimizer} {self.lr:g}, seed {self.seed}"


def searches(
  ways: Sequence[str],
  optimizers: Sequence[str],
  seed: int,
  rates: int | None = None,
) -> list[Cell]:
  """Returns the cells that choose learning rates, from so many each."""
  return [
    Cell(way, optimizer, rate, seed)
    for (way, optimizer), tried in TRIED.items()
    if optimizer in optimizers and way in (DENSE, *ways)
    for rate in tried[:rates]
  ]


def grid(
  ways: Sequence[str],
  optimizers: Sequence[str],
  seeds: Sequence[int],
  file: StudyFile,
) -> list[Cell]:
  """Returns all cells, with the best rates that `searches` found."""
  return [
    Cell(way, name, best_rate(way, name, seeds[0], file), seed)
    for name in optimizers
    for seed in seeds
    for way in ways
  ]


def best_rate(way: str, optimizer: str, seed: int, file: StudyFile) -> float:
  """Returns the rate with the lowest perplexity of those that were tried."""
  way = way if (way, optimizer) in TRIED else DENSE
  found = {
    rate: last(file.find(Cell(way, optimizer, rate, seed)))
    for rate in TRIED[way, optimizer]
  }
  return min(found, key=lambda rate: found[rate])


def record(cell: Cell, run: Run, elements: int, received: float) -> dict:
  """Returns what is kept of a cell.

  Args:
    cell: The cell.
    run: Its run, from step 0.
    elements: The parameters of the model.
    received: The bytes that a device receives in a step.
  """
  found = {
    **dataclasses.asdict(cell),
    "elements": elements,
    "seconds": run.step_time,
    "bytes": received,
    "measured": {
      "step": list(run.measured),
      "value": list(run.measured.values()),
    },
    "curves": {"loss": curve(run.losses)},
  }
  return short(found)


def last(record: dict[str, Any] | None) -> float:
  """Returns the perplexity at the end; infinity if the run diverged."""
  value = record["measured"]["value"][-1] if record else None
  return float("inf") if value is None else value
