"""What a table's row sets amount to, from the sets to plain numbers.

`benchmarks/README.md` defines every figure; `measures` computes one of one
step, here they are gathered over steps, partitions and numbers of devices.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools

import numpy as np

from benchmarks import measures
from benchmarks import owners
from benchmarks.row_sets import Observed
from benchmarks.row_sets import Sets
from zenjax._src.report import stats

PARTS = (2, 4, 8, 16, 32, 64, 128)
PERCENTILES = (5, 25, 50, 75, 95)
BINS = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
  """Many values of a share: percentiles, and counts in `BINS` equal bins."""

  count: int
  mean: float
  percentiles: dict[int, float]
  histogram: list[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
  """Of one number of parts, means over devices and steps."""

  parts: int
  ratio: float
  first: float  # share of the nonzero rows that the first part holds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
  """One partition, means over steps.

  Attributes:
    push: Imbalance of the push.
    pull: Imbalance of the pull.
    paid: What buffers of one size cost the push.
    capacity: `(push, pull)` that `zenjax.advise` would say; None where
      `zen_sync` has no such partition, as what follows.
    bytes: Received by a device, buffers as large as the step needs.
    over_ideal: That over `(n-1)/n (d + dn)` of the table.
  """

  push: float
  pull: float
  paid: float
  capacity: tuple[int, int] | None = None
  bytes: float | None = None
  over_ideal: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
  """All that depends on the number of devices; means over steps."""

  devices: int
  steps: int
  pooled: bool
  density: float
  union_density: float
  densification: float
  balance: dict[str, Balance]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
  """One table.

  Attributes:
    name: Of the table.
    rows: Of the table.
    width: Of the table.
    dtype: Of the table.
    devices: That density, overlap and skew were taken over.
    steps: The same.
    density: Of a device in a step.
    overlap_devices: Of pairs of devices in one step.
    overlap_steps: Of any device in a step and any in the next.
    skew: By number of parts.
    scales: By number of devices.
    too_few: Numbers of devices that the trace has too few sets for.
  """

  name: str
  rows: int
  width: int
  dtype: str
  devices: int
  steps: int
  density: Distribution
  overlap_devices: Distribution | None
  overlap_steps: Distribution | None
  skew: list[Skew]
  scales: list[Scale]
  too_few: list[int]


def analyze(
  observed: Observed, devices: Sequence[int], *, seed: int
) -> Iterator[Sparsity | None]:
  """Yields None after each part of the work, `len(devices) + 1`, then all.

  Args:
    observed: The table.
    devices: Numbers of devices, each at least 2.
    seed: Of both hashes.

  Raises:
    ValueError: No row was ever touched.
  """
  table = observed.table
  recorded = observed.draw(observed.devices)
  sets = [ids for step in recorded for ids in step if len(ids)]
  if not sets:
    raise ValueError(
      f"Table {table.name!r} must have a nonzero row in some step, got none in"
      f" {len(recorded)} steps; record steps in which it is trained."
    )
  density = [len(ids) / table.num_rows for step in recorded for ids in step]
  following = itertools.pairwise(recorded)
  overlap_devices = [measures.overlaps(step) for step in recorded]
  overlap_steps = [measures.overlaps(a, b) for a, b in following]
  skews = [_skew(sets, table.num_rows, p) for p in PARTS if p <= table.num_rows]
  yield None
  scales, too_few = [], []
  for n in devices:
    if steps := observed.draw(n):
      scales.append(_scale(observed, steps, n, seed))
    else:
      too_few.append(n)
    yield None
  yield Sparsity(
    name=table.name,
    rows=table.num_rows,
    width=table.width,
    dtype=str(table.dtype),
    devices=observed.devices,
    steps=len(recorded),
    density=_required(_distribution([np.array(density)])),
    overlap_devices=_distribution(overlap_devices),
    overlap_steps=_distribution(overlap_steps),
    skew=skews,
    scales=scales,
    too_few=too_few,
  )


def _distribution(parts: Sequence[np.ndarray]) -> Distribution | None:
  values = np.concatenate([np.zeros(0), *parts])
  if not len(values):
    return None  # One device, one step, or no two sets that are not empty.
  found = np.percentile(values, PERCENTILES)
  return Distribution(
    count=len(values),
    mean=float(values.mean()),
    percentiles={p: float(x) for p, x in zip(PERCENTILES, found)},
    histogram=np.histogram(values, BINS, (0, 1))[0].tolist(),
  )


def _required(distribution: Distribution | None) -> Distribution:
  assert distribution is not None  # A step has at least one device.
  return distribution


def _skew(sets: Sets, rows: int, parts: int) -> Skew:
  found = [measures.skew(ids, rows, parts) for ids in sets]
  ratio, first = np.mean(found, axis=0)
  return Skew(parts=parts, ratio=float(ratio), first=float(first))


def _scale(observed: Observed, steps: list[Sets], n: int, seed: int) -> Scale:
  rows = observed.table.num_rows
  unions = [measures.union(step, rows) for step in steps]
  local = float(np.mean([len(ids) for step in steps for ids in step]))
  total = float(np.mean([len(u) for u in unions]))
  row_bytes = observed.table.width * observed.table.dtype.itemsize
  ideal = (n - 1) / n * (local + total) * row_bytes
  balance = {
    name: _balance(observed, steps, unions, n, name, seed, ideal)
    for name in owners.NAMES
  }
  return Scale(
    devices=n,
    steps=len(steps),
    pooled=observed.pools and n > observed.devices,
    density=local / rows,
    union_density=total / rows,
    densification=total / local if local else 1.0,
    balance=balance,
  )


def _balance(observed, steps, unions, n, name, seed, ideal) -> Balance:
  tables, index = observed.tables, observed.index
  if name == owners.COLUMNS:
    # Every owner has an equal part of every row.
    pushed = [np.array([[len(ids) / n] * n for ids in step]) for step in steps]
    pulled = [np.full(n, len(u) / n) for u in unions]
  else:
    owner = owners.owner(tables, index, n, name, seed)
    pushed = [measures.loads(step, owner, n) for step in steps]
    pulled = list(measures.loads(unions, owner, n))
  shown = Balance(
    push=_mean(measures.push_imbalance, pushed),
    pull=_mean(measures.pull_imbalance, pulled),
    paid=_mean(measures.push_paid, pushed),
  )
  if name not in (owners.ROTATION, owners.COLUMNS):
    return shown
  blocks = n if name == owners.COLUMNS else 1
  pushes = np.array([round(p.max() * blocks) for p in pushed])
  pulls = np.array([round(u.max() * blocks) for u in pulled])
  plan = owners.plan(tables, index, n, name, seed)
  sizes = [
    owners.fitted_bytes(plan, int(push), int(pull))
    for push, pull in zip(pushes, pulls)
  ]
  return dataclasses.replace(
    shown,
    capacity=stats.capacity(pushes, pulls, observed.table.num_rows),
    bytes=float(np.mean(sizes)),
    over_ideal=float(np.mean(sizes)) / ideal if ideal else None,
  )


def _mean(measure, steps) -> float:
  return float(np.mean([measure(step) for step in steps]))
