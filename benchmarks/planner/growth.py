"""`growth`: unions of many devices, predicted from steps of few.

Real ids come as training reads them: in different orders of one text, each of
which yields steps without end, of each device the ascending rows of its ids.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import itertools
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks import library
from benchmarks import record
from benchmarks import table as tables
from benchmarks import workloads
from examples.studies.lm import corpus
from zenjax.traces import DeviceRows

Ids = np.ndarray
Step = list[Ids]
_WINDOW = 64
# Steps of the larger number of devices, whose mean is what is predicted.
_REAL_STEPS = 16
# Of the Zen paper (section 2.1 and figure 8): BERT's union of 128 devices as a
# share of the rows. Those of the workloads were fitted to the same point.
_PAPER = {"squad-bert": 0.408}
_DRAWN = ("lm1b-lstm", "criteo-deepfm", "iwslt-nmt", "squad-bert")


def starts(ids: Ids, n: int, tokens: int, *, seed: int) -> Iterator[Step]:
  """Contiguous text from a random place, of every device and step its own."""
  rng = np.random.default_rng([seed, n])
  while True:
    at = rng.integers(0, len(ids) - tokens + 1, n)
    yield [np.unique(ids[a : a + tokens]) for a in at]


def windows(ids: Ids, n: int, tokens: int, *, seed: int) -> Iterator[Step]:
  """Windows of 64 tokens, shuffled: as `examples.studies.lm` reads them."""
  rng = np.random.default_rng([seed, n])
  count = len(ids) // _WINDOW
  cut = ids[: count * _WINDOW].reshape(count, _WINDOW)
  size = max(tokens // _WINDOW, 1)
  while True:
    order = rng.permutation(count)[: count // (n * size) * n * size]
    for step in order.reshape(-1, n, size):
      yield [np.unique(cut[mine]) for mine in step]


def streams(ids: Ids, n: int, tokens: int, *, seed: int) -> Iterator[Step]:
  """Every device reads a part of its own from front to back."""
  rng = np.random.default_rng([seed, n])
  part = len(ids) // n
  at = rng.integers(0, part)
  while True:
    places = at + np.arange(tokens)
    yield [np.unique(ids[d * part + places % part]) for d in range(n)]
    at += tokens


def apart(ids: Ids, n: int, tokens: int, *, seed: int) -> Iterator[Step]:
  """Takes one step in 13 of `streams`: so steps may be recorded, too."""
  yield from itertools.islice(streams(ids, n, tokens, seed=seed), 0, None, 13)


ORDERS: dict[str, Callable[..., Iterator[Step]]] = {
  "starts": starts,
  "windows": windows,
  "streams": streams,
  "streams, 1 in 13": apart,
}


def run(options: argparse.Namespace) -> int:
  """Predicts, counts, prints and saves; returns the exit code."""
  if options.steps < 16:
    raise ValueError(
      "`--steps` must be at least 16, for as many sets as the devices that are"
      f" predicted, got {options.steps}."
    )
  rows = list(harness.progress(_rows(options), unit="case"))
  _show(rows)
  record.save(options, {"rows": rows})
  return 0


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
  text, n = corpus.load_tokens(), options.devices
  for order, draw in ORDERS.items():
    few = draw(text.ids, n, options.tokens, seed=0)
    many = draw(text.ids, 16 * n, options.tokens, seed=1)
    yield _row(
      ("stdlib", order, len(text.vocab)),
      list(itertools.islice(few, options.steps)),
      list(itertools.islice(many, _REAL_STEPS)),
    )
  for workload in map(workloads.get, _DRAWN):
    yield _row(
      (workload.name, "drawn", workload.rows),
      [workloads.sets(workload, n, seed) for seed in range(options.steps)],
      [workloads.sets(workload, 16 * n, seed) for seed in range(900, 904)],
    )


def _row(
  source: tuple[str, str, int], recorded: list[Step], larger: list[Step]
) -> dict[str, Any]:
  """Predicts steps of more devices from recorded ones, and counts real ones."""
  ids, order, rows = source
  n, more = len(recorded[0]), len(larger[0])
  found = library.union_growth.growth(recorded, rows)
  real, union = map(_union, (larger, recorded))
  # What `Profile.union_of` fits: a power law through one step's union.
  local = np.mean([len(s) for step in recorded for s in step])
  power = np.log(union / local) / np.log(n)
  predicted = found.union(more)
  return {
    "ids": ids,  # Where they are from.
    "order": order,  # In which they are read.
    "devices": n,  # Of the recorded steps.
    "steps": len(recorded),
    "larger": more,  # Devices predicted.
    "density": found.union(1) / rows,  # Of one device.
    "predicted": predicted / rows,  # The union.
    "real": real / rows,  # That of real steps of so many devices, mean.
    # As the pool says of itself, over the prediction.
    "standard_error": found.error(more),
    "drift": drift(recorded, rows),  # Of the first half against the second.
    "step_ratio": step_ratio(recorded, found),
    # A power law through one device and a step, over real.
    "power_law": float(found.union(1) * more**power / real - 1),
    "error": predicted / real - 1,
  }


def _union(steps: Sequence[DeviceRows]) -> float:
  """Returns the mean over steps."""
  return float(np.mean([len(workloads.union(step)) for step in steps]))


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
  return _union(recorded) / found.union(found.devices)


_COLUMNS = {
  "ids": "{ids}",
  "order": "{order}",
  "d": "{density:.3%}",
  "predicted": "{predicted:.3%}",
  "real": "{real:.3%}",
  "off by": "{error:+.1%}",
  "its own\nerror": "{standard_error:.1%}",
  "drift": "{drift:+.1%}",
  "step\nratio": "{step_ratio:.3f}",
  "power law\noff by": "{power_law:+.1%}",
}


def _show(rows: list[dict[str, Any]]) -> None:
  title = "Union of {larger} devices from {steps} steps of {devices}"
  words = [[x.format(**r) for x in _COLUMNS.values()] for r in rows]
  tables.show_rows(title.format(**rows[0]), list(_COLUMNS), words, left=2)
  for r in rows:
    if r["larger"] == 128 and r["ids"] in _PAPER:
      print(f"{r['ids']}: {100 * _PAPER[r['ids']]:.1f} % in the Zen paper.")
