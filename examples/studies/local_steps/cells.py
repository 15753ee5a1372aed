"""The runs of the study, and what each leaves."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from examples.studies.common.loop import Run
from examples.studies.sparsifiers.cells import short
from examples.studies.sparsifiers.cells import StudyFile

# Rates of AdamW that are tried with the first seed, and without compression.
# For local steps, rate and Nesterov momentum of the outer SGD come with each.
DENSE_RATES = (0.01, 0.02, 0.04)
LOCAL_RATES = (
  (0.02, 1.0, 0.0),
  (0.02, 0.7, 0.5),
  (0.02, 0.7, 0.9),
  (0.04, 1.0, 0.0),
  (0.04, 0.7, 0.5),
)
DENSE = 1  # The value of `every` for training that exchanges in each step.


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
  """Names one run.

  Attributes:
    every: Steps between two exchanges; `DENSE` for plain data parallelism.
    int4: Whether pseudo-gradients are compressed.
    lr: The rate of AdamW at the first step.
    outer_lr: The rate of the outer optimizer; 0 for none.
    momentum: The momentum of the outer optimizer.
    seed: Draws parameters and batches.
  """

  every: int
  int4: bool
  lr: float
  outer_lr: float
  momentum: float
  seed: int

  @property
  def label(self) -> str:
    """The cell as text."""
    if self.every == DENSE:
      return f"dense, {self.lr:g}, seed {self.seed}"
    bits = ", int4" if self.int4 else ""
    outer = f"{self.lr:g}, outer {self.outer_lr:g} and {self.momentum:g}"
    return f"every {self.every}{bits}, {outer}, seed {self.seed}"


def searches(
  every: Sequence[int], seed: int, rates: int | None = None
) -> list[Cell]:
  """Returns the cells that choose rates, from so many each."""
  dense, local = DENSE_RATES[:rates], LOCAL_RATES[:rates]
  cells = [Cell(DENSE, False, lr, 0.0, 0.0, seed) for lr in dense]
  return cells + [Cell(e, False, *x, seed) for e in every for x in local]


def grid(
  found: Sequence[Cell],
  every: Sequence[int],
  seeds: Sequence[int],
  file: StudyFile,
) -> list[Cell]:
  """Returns all cells, with the best rates of `found`, those of `searches`."""
  cells = []
  for seed in seeds:
    for e in (DENSE, *every):
      tried = [x for x in found if x.every == e]
      best = min(tried, key=lambda x: last(x, file))
      for int4 in (False, True)[: 1 if e == DENSE else 2]:
        cells.append(dataclasses.replace(best, int4=int4, seed=seed))
  return cells


def record(cell: Cell, run: Run, received: float, samples: int) -> dict:
  """Returns what is kept of a cell.

  Args:
    cell: The cell.
    run: Its run; a step of it is a round.
    received: The bytes that a device receives in a round.
    samples: The samples that a device trains on in a round.
  """
  return short(
    {
      **dataclasses.asdict(cell),
      "bytes": received,
      "samples": samples,
      "seconds": sum(run.seconds),
      "perplexity": run.last,
    }
  )


def last(cell: Cell, file: StudyFile) -> float:
  """Returns the perplexity at the end: infinity if it diverged, NaN if none."""
  found: dict[str, Any] | None = file.find(cell)
  if found is None:
    return math.nan
  return math.inf if found["perplexity"] is None else found["perplexity"]
