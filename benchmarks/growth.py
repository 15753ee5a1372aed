"""`growth`: unions of many devices, predicted from steps of few."""

import argparse
from collections.abc import Iterator
import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import rich.box
import rich.table
import tqdm

from benchmarks import growth_ids
from benchmarks import record
from benchmarks import table as tables
from benchmarks import workloads
from examples import corpus
from zenjax._src.planner import union_growth

# Steps of the larger number of devices, whose mean is what is predicted.
_REAL_STEPS = 16
# Of the Zen paper (section 2.1 and figure 8): BERT's union of 128 devices as a
# share of the rows. Those of the workloads were fitted to the same point.
_PAPER = {"squad-bert": 0.408}


class _Case(NamedTuple):
  ids: str
  order: str
  rows: int
  recorded: list[growth_ids.Step]
  real: list[growth_ids.Step]
  power: float  # of a line through what one step shows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
  """One prediction beside what it predicts.

  Attributes:
    ids: Where they are from.
    order: In which they are read.
    devices: Of the recorded steps.
    steps: How many.
    larger: Devices predicted.
    density: Of one device.
    predicted: Union, as a share of the rows.
    real: That of real steps of so many devices, mean.
    standard_error: As the pool says of itself, over the prediction.
    drift: Second half of the steps against the first.
    step_ratio: A recorded step's union over what the pool says of as many.
    power_law: What a power law through one device and a step says, over real.
  """

  ids: str
  order: str
  devices: int
  steps: int
  larger: int
  density: float
  predicted: float
  real: float
  standard_error: float
  drift: float
  step_ratio: float
  power_law: float

  @property
  def error(self) -> float:
    return self.predicted / self.real - 1


def run(options: argparse.Namespace) -> int:
  """Predicts, counts, prints and saves; returns the exit code."""
  rows = []
  with tqdm.tqdm(unit="case", disable=None, leave=False) as bar:
    for found in rows_of(options):
      rows.append(found)
      bar.update()
  _show(rows)
  if options.json:
    record.write_json(
      options.json,
      {
        "environment": record.software(),
        "rows": [{**dataclasses.asdict(r), "error": r.error} for r in rows],
      },
    )
    print(f"Saved {options.json}")
  return 0


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
  """One a source and order."""
  n, larger, steps = options.devices, options.devices * 16, options.steps
  if steps < 16:
    raise ValueError(
      "`--steps` must be at least 16, for as many sets as the devices that are"
      f" predicted, got {steps}."
    )
  for case in _cases(options, n, larger, steps):
    found = union_growth.growth(case.recorded, case.rows)
    real = [len(np.unique(np.concatenate(step))) for step in case.real]
    mean = float(np.mean(real))
    line = found.union(1) * larger**case.power
    yield Row(
      ids=case.ids,
      order=case.order,
      devices=n,
      steps=steps,
      larger=larger,
      density=found.union(1) / case.rows,
      predicted=found.union(larger) / case.rows,
      real=mean / case.rows,
      standard_error=found.error(larger),
      drift=found.drift,
      step_ratio=found.step_ratio,
      power_law=line / mean - 1,
    )


def _cases(options, n, larger, steps) -> Iterator[_Case]:
  text = corpus.load_tokens()
  take = lambda draw, *a, count, seed: list(
    itertools.islice(draw(text.ids, *a, seed=seed), count)
  )
  for order, draw in growth_ids.ORDERS.items():
    few = take(draw, n, options.tokens, count=steps, seed=0)
    many = take(draw, larger, options.tokens, count=_REAL_STEPS, seed=1)
    yield _Case("stdlib", order, len(text.vocab), few, many, _power(few))
  for name in ("lm1b-lstm", "criteo-deepfm", "iwslt-nmt", "squad-bert"):
    workload = workloads.get(name)
    few, many = (
      [
        [np.unique(ids) for ids in workloads.ids(workload, m, seed)]
        for seed in seeds
      ]
      for m, seeds in ((n, range(steps)), (larger, range(900, 904)))
    )
    yield _Case(name, "drawn", workload.rows, few, many, _power(few))


def _power(recorded) -> float:
  """What `Profile.union_of` fits: a power law through one step's union."""
  local = np.mean([len(s) for step in recorded for s in step])
  union = np.mean([len(np.unique(np.concatenate(s))) for s in recorded])
  return float(np.log(union / local) / np.log(len(recorded[0])))


def _show(rows):
  n, steps, larger = rows[0].devices, rows[0].steps, rows[0].larger
  made = rich.table.Table(
    title=f"Union of {larger} devices from {steps} steps of {n}",
    box=rich.box.SIMPLE_HEAD,
    title_justify="left",
  )
  headers = (
    "ids",
    "order",
    "d\n%",
    "predicted\n%",
    "real\n%",
    "off by\n%",
    "its own\nerror %",
    "drift\n%",
    "step\nratio",
    "power law\noff by %",
  )
  for i, header in enumerate(headers):
    made.add_column(header, justify="right" if i > 1 else "left", no_wrap=True)
  for r in rows:
    shares = r.density, r.predicted, r.real
    made.add_row(
      r.ids,
      r.order,
      *(f"{100 * x:.3f}" for x in shares),
      f"{100 * r.error:+.1f}",
      f"{100 * r.standard_error:.1f}",
      f"{100 * r.drift:+.1f}",
      f"{r.step_ratio:.3f}",
      f"{100 * r.power_law:+.1f}",
    )
  tables.console().print(made)
  for r in rows:
    if r.larger == 128 and r.ids in _PAPER:
      print(f"{r.ids}: {100 * _PAPER[r.ids]:.1f} % in the Zen paper.")
