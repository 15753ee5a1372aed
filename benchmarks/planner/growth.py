"""`growth`: unions of many devices, predicted from steps of few.

Real ids come as training reads them: in different orders of one text, each of
which yields steps without end, of each device the ascending rows of its ids.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools

import numpy as np
import tqdm

from benchmarks import library
from benchmarks import record
from benchmarks import table as tables
from benchmarks import workloads
from examples.studies.lm import corpus
from zenjax.traces import DeviceRows

Step = list[np.ndarray]
_WINDOW = 64
# Steps of the larger number of devices, whose mean is what is predicted.
_REAL_STEPS = 16
# Of the Zen paper (section 2.1 and figure 8): BERT's union of 128 devices as a
# share of the rows. Those of the workloads were fitted to the same point.
_PAPER = {"squad-bert": 0.408}
_DRAWN = ("lm1b-lstm", "criteo-deepfm", "iwslt-nmt", "squad-bert")


def starts(
  ids: np.ndarray, n: int, tokens: int, *, seed: int
) -> Iterator[Step]:
  """Contiguous text from a random place, of every device and step its own."""
  rng = np.random.default_rng([seed, n])
  while True:
    at = rng.integers(0, len(ids) - tokens + 1, n)
    yield [np.unique(ids[a : a + tokens]) for a in at]


def windows(
  ids: np.ndarray, n: int, tokens: int, *, seed: int
) -> Iterator[Step]:
  """Windows of 64 tokens, shuffled: as `examples.studies.lm` reads them."""
  rng = np.random.default_rng([seed, n])
  count = len(ids) // _WINDOW
  cut = ids[: count * _WINDOW].reshape(count, _WINDOW)
  size = max(tokens // _WINDOW, 1)
  while True:
    order = rng.permutation(count)[: count // (n * size) * n * size]
    for step in order.reshape(-1, n, size):
      yield [np.unique(cut[mine]) for mine in step]


def streams(
  ids: np.ndarray, n: int, tokens: int, *, seed: int
) -> Iterator[Step]:
  """Every device reads a part of its own from front to back."""
  rng = np.random.default_rng([seed, n])
  part = len(ids) // n
  at = rng.integers(0, part)
  while True:
    places = at + np.arange(tokens)
    yield [np.unique(ids[d * part + places % part]) for d in range(n)]
    at += tokens


def apart(ids: np.ndarray, n: int, tokens: int, *, seed: int) -> Iterator[Step]:
  """Takes one step in 13 of `streams`: so steps may be recorded, too."""
  yield from itertools.islice(streams(ids, n, tokens, seed=seed), 0, None, 13)


ORDERS: dict[str, Callable[..., Iterator[Step]]] = {
  "starts": starts,
  "windows": windows,
  "streams": streams,
  "streams, 1 in 13": apart,
}


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
    error: Of the prediction.
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
  error: float


def run(options: argparse.Namespace) -> int:
  """Predicts, counts, prints and saves; returns the exit code."""
  if options.steps < 16:
    raise ValueError(
      "`--steps` must be at least 16, for as many sets as the devices that are"
      f" predicted, got {options.steps}."
    )
  every = itertools.chain(_of_text(options), _of_workloads(options))
  rows = list(tqdm.tqdm(every, unit="case", disable=None, leave=False))
  _show(rows)
  record.save(options, {"rows": [dataclasses.asdict(row) for row in rows]})
  return 0


def _of_text(options: argparse.Namespace) -> Iterator[Row]:
  text, n = corpus.load_tokens(), options.devices
  for order, draw in ORDERS.items():
    few = draw(text.ids, n, options.tokens, seed=0)
    many = draw(text.ids, 16 * n, options.tokens, seed=1)
    yield _row(
      ("stdlib", order, len(text.vocab)),
      list(itertools.islice(few, options.steps)),
      list(itertools.islice(many, _REAL_STEPS)),
    )


def _of_workloads(options: argparse.Namespace) -> Iterator[Row]:
  n = options.devices
  for workload in map(workloads.get, _DRAWN):
    yield _row(
      (workload.name, "drawn", workload.rows),
      [workloads.sets(workload, n, seed) for seed in range(options.steps)],
      [workloads.sets(workload, 16 * n, seed) for seed in range(900, 904)],
    )


def _row(
  source: tuple[str, str, int], recorded: list[Step], larger: list[Step]
) -> Row:
  """Predicts steps of more devices from recorded ones, and counts real ones."""
  ids, order, rows = source
  n, more = len(recorded[0]), len(larger[0])
  found = library.union_growth.growth(recorded, rows)
  real, union = (
    float(np.mean([len(np.unique(np.concatenate(step))) for step in steps]))
    for steps in (larger, recorded)
  )
  # What `Profile.union_of` fits: a power law through one step's union.
  local = np.mean([len(s) for step in recorded for s in step])
  power = np.log(union / local) / np.log(n)
  predicted = found.union(more)
  return Row(
    ids=ids,
    order=order,
    devices=n,
    steps=len(recorded),
    larger=more,
    density=found.union(1) / rows,
    predicted=predicted / rows,
    real=real / rows,
    standard_error=found.error(more),
    drift=drift(recorded, rows),
    step_ratio=step_ratio(recorded, found),
    power_law=float(found.union(1) * more**power / real - 1),
    error=predicted / real - 1,
  )


def drift(recorded: Sequence[DeviceRows], rows: int) -> float:
  """Returns the relative error of the first half of the steps on the second."""
  half = len(recorded) // 2
  parts = recorded[:half], recorded[half : 2 * half]
  first, second = (library.union_growth.growth(part, rows) for part in parts)
  return first.union(first.pooled) / second.union(second.pooled) - 1


def step_ratio(
  recorded: Sequence[DeviceRows], found: library.union_growth.Growth
) -> float:
  """Returns the union of a recorded step over that of the pool's devices.

  Below 1 devices of one step are more alike than the pool; above 1 less.
  """
  unions = [len(np.unique(np.concatenate(step))) for step in recorded]
  return float(np.mean(unions)) / found.union(found.devices)


def _show(rows: list[Row]) -> None:
  first = rows[0]
  made = tables.made(
    f"Union of {first.larger} devices from {first.steps} steps of"
    f" {first.devices}",
    *("ids", "order", "d\n%", "predicted\n%", "real\n%", "off by\n%"),
    *("its own\nerror %", "drift\n%", "step\nratio", "power law\noff by %"),
    left=2,
  )
  for r in rows:
    made.add_row(
      r.ids,
      r.order,
      *(f"{100 * x:.3f}" for x in (r.density, r.predicted, r.real)),
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
