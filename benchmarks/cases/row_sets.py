"""Sets of the rows that steps touch: their sources, and what is counted.

Sets come from a recorded trace or from a workload that is drawn. Both answer
one question: which rows would `n` devices touch in a step? A trace of fewer
devices pools several steps into one of `n`; a workload is drawn anew for every
`n`. `benchmarks/README.md` defines every figure. The rotation hash, its layout
and the bytes of a push and a pull are the library's own code.

A set is the ascending ids of the rows that are not zero on one device in one
step. Letters: `n` devices, `R` rows, `P` parts, `I_i` the set of device `i`,
`U` the union.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import library
from benchmarks import workloads
from zenjax import traces

# The devices of a workload's statistics, as those in `workloads` are stated.
_WORKLOAD_DEVICES = 8
_WORKLOAD_STEPS = 8

Sets = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
  """One table, and what is known of its gradients.

  Attributes:
    tables: All tables that travel together.
    index: Which of them this is.
    devices: Devices of a step as it was recorded.
    steps: Steps there are.
    draw: From `n` to the sets of `n` devices, step by step. Empty where a trace
      has too few sets.
  """

  tables: tuple[library.Table, ...]
  index: int
  devices: int
  steps: int
  draw: Callable[[int], list[Sets]]
  pools: bool  # Whether more devices than `devices` are several steps' pooled.

  @property
  def table(self) -> library.Table:
    return self.tables[self.index]


def load(
  source: str, *, steps: int | None, seed: int, full_size: bool
) -> list[Observed]:
  """The tables of a trace, or the one of a workload.

  Args:
    source: A directory, or the name of a workload, which goes first.
    steps: So many only; by default all of a trace, 8 of a workload.
    seed: Of a workload's ids.
    full_size: A workload as published.

  Raises:
    ValueError: `source` is neither, or the trace is broken or too short.
  """
  if source in workloads.ALL_NAMES:
    workload = workloads.get(source, full_size=full_size)
    return [_of_workload(workload, steps or _WORKLOAD_STEPS, seed)]
  if not pathlib.Path(source).exists():
    raise ValueError(
      "`source` must be a directory that `examples.studies.lm --trace` wrote,"
      f" or one of {', '.join(workloads.ALL_NAMES)}, got {source!r}."
    )
  if full_size:
    raise ValueError(
      "`--full-size` goes with a workload, got a trace: leave it out."
    )
  return _of_trace(traces.read(source), steps)


def _of_workload(workload, steps, seed):
  def draw(n: int) -> list[Sets]:
    seeds = range(seed, seed + steps)
    return [workloads.sets(workload, n, s) for s in seeds]

  table = library.table(workload.name, workload.rows, workload.width)
  return Observed(
    tables=(table,),
    index=0,
    devices=_WORKLOAD_DEVICES,
    steps=steps,
    draw=draw,
    pools=False,
  )


def _of_trace(trace, steps):
  header = trace.header
  if steps is not None and steps > header.steps:
    raise ValueError(
      f"`--steps` must not exceed the {header.steps} steps of the trace, got"
      f" {steps}: ask for fewer or record more."
    )
  tables = tuple(
    library.table(t.name, t.rows, t.width, t.dtype) for t in header.tables
  )
  return [
    Observed(
      tables=tables,
      index=index,
      devices=header.devices,
      steps=steps or header.steps,
      draw=functools.partial(cut, trace.sets[table.name][:steps]),
      pools=True,
    )
    for index, table in enumerate(tables)
  ]


def cut(recorded: Sequence[Sets], n: int) -> list[Sets]:
  """Steps of `n` devices from recorded ones; what does not fill one is left.

  A step of more devices is cut into several; steps of fewer are pooled.
  """
  if n > len(recorded[0]):
    recorded = [[ids for step in recorded for ids in step]]
  return [
    step[low : low + n]
    for step in recorded
    for low in range(0, len(step) - n + 1, n)
  ]


CONTIGUOUS = "contiguous"
INDEPENDENT = "independent hash"
ROTATION = "rotation hash"
COLUMNS = "columns"
# Apart from the seeds of the rotation, which uses the same mixing.
_INDEPENDENT = np.uint32(0x9E3779B9)
NAMES = (CONTIGUOUS, INDEPENDENT, ROTATION, COLUMNS)


def plan_of(
  tables: Sequence[library.Table],
  index: int,
  n: int,
  name: str,
  seed: int,
) -> library.buffer_sizes.TablePlan:
  """Returns the layout by `zen_sync` of table `index` of those that travel.

  Args:
    tables: All of them, in order: they share one space of hashed ids.
    index: Which one is meant.
    n: Devices.
    name: `ROTATION` or `COLUMNS`.
    seed: `hash_seed`.
  """
  groups = (1, n) if name == COLUMNS else (n, 1)
  plans = library.buffer_sizes.plan_group(
    tables,
    row_groups=[groups[0]] * len(tables),
    column_groups=[groups[1]] * len(tables),
    devices=n,
    pinned=[None] * len(tables),
    seed=seed,
  )
  return plans[index]


def owner_of(
  tables: Sequence[library.Table],
  index: int,
  n: int,
  name: str,
  seed: int,
) -> np.ndarray:
  """`[R] int32`: the owner of each row of table `index`; not for `COLUMNS`."""
  rows = tables[index].num_rows
  if name == CONTIGUOUS:
    sizes = np.diff(boundaries(rows, n))
    return np.repeat(np.arange(n, dtype=np.int32), sizes)
  if name == INDEPENDENT:
    # Mixed first: a small number would only permute neighbours.
    key = library.partition.fmix32(jnp.full(1, seed, jnp.uint32) ^ _INDEPENDENT)
    mixed = library.partition.fmix32(jnp.arange(rows, dtype=jnp.uint32) ^ key)
    return (np.asarray(mixed) % np.uint32(n)).astype(np.int32)
  layout = plan_of(tables, index, n, name, seed).layout
  ids = jnp.arange(rows, dtype=jnp.int32)
  return np.asarray(jax.jit(lambda r: layout.place(r)[0])(ids))


def fitted_bytes(
  table_plan: library.buffer_sizes.TablePlan, push: int, pull: int
) -> int:
  """Bytes a device receives in one push and one pull of just these sizes.

  Args:
    table_plan: Of `n` devices in a row.
    push: Rows of the fullest pair of source and owner.
    pull: Rows of the fullest owner's union.
  """
  n = table_plan.layout.groups * table_plan.column_groups
  context = library.context(n)
  zen = library.SPARSE["zen"]
  messages = [
    *zen.push_messages([library.Room(table_plan, push)], context),
    *zen.pull_messages([library.Room(table_plan, pull)], context),
  ]
  return round(float(library.received_bytes(messages, context)))


# Row counts are summed by a matrix product of zeros and ones in float32, which
# is exact up to 2**24; so many elements at a time also fit in memory.
_ELEMENTS = 1 << 24


def overlaps(first: Sets, second: Sets | None = None) -> np.ndarray:
  """`|I n J| / min(|I|, |J|)` of pairs of sets that hold a row (definition 3).

  Args:
    first: Sets of one step.
    second: Those of another: every pair of one of each. By default the pairs
      within `first`.
  """
  common = _common(first, first if second is None else second)
  sizes = [len(s) for s in first], [len(s) for s in second or first]
  smaller = np.minimum.outer(*sizes)
  wanted = smaller > 0
  if second is None:
    wanted &= np.triu(np.ones_like(wanted), 1)
  return common[wanted] / smaller[wanted]


def _common(first: Sets, second: Sets) -> np.ndarray:
  """`[len(first), len(second)]` numbers of common rows."""
  total = np.zeros((len(first), len(second)))
  ends = [int(s[-1]) + 1 for s in (*first, *second) if len(s)]
  step = max(1, _ELEMENTS // max(len(first), len(second), 1))
  for low in range(0, max(ends, default=0), step):
    high = min(low + step, max(ends))
    a = _members(first, low, high)
    b = a if second is first else _members(second, low, high)
    total += a @ b.T
  return total


def _members(sets, low, high):
  members = np.zeros((len(sets), high - low), np.float32)
  for row, ids in zip(members, sets):
    start, stop = np.searchsorted(ids, [low, high])
    row[ids[start:stop].astype(np.int64) - low] = 1
  return members


def union(sets: Sets, rows: int) -> np.ndarray:
  """`U`, ascending."""
  touched = np.zeros(rows, bool)
  for ids in sets:
    touched[ids] = True
  return np.flatnonzero(touched)


def boundaries(rows: int, parts: int) -> np.ndarray:
  """`[P + 1]`: where `P` parts of `R` rows begin and end, evenly cut."""
  return np.arange(parts + 1) * rows // parts


def skew(ids: np.ndarray, rows: int, parts: int) -> tuple[float, float]:
  """The densest part's density over that of the table (definition 5).

  Args:
    ids: One set, not empty.
    rows: `R`.
    parts: `P`, at most `R`.

  Returns:
    That ratio, and the share of the set that lies in the first part.
  """
  edges = boundaries(rows, parts)
  counts = np.diff(np.searchsorted(ids, edges))
  densest = np.max(counts / np.diff(edges))
  return float(densest / (len(ids) / rows)), float(counts[0] / len(ids))


def loads(sets: Sets, owner: np.ndarray, owners: int) -> np.ndarray:
  """`[len(sets), owners]`: how many rows of each set each owner has.

  Args:
    sets: The sets.
    owner: `[R]`, who owns a row.
    owners: How many there are.
  """
  return np.array([np.bincount(owner[i], minlength=owners) for i in sets])


def push_imbalance(pushed: np.ndarray) -> float:
  """`max_ij n |I_i^j| / |I_i|` (definition 8); 1 where nothing is sent.

  Args:
    pushed: `[n, n]`, rows that device `i` sends owner `j`.
  """
  sent = pushed.sum(axis=1)
  some = sent > 0
  if not some.any():
    return 1.0
  return float(np.max(pushed.shape[1] * pushed[some].max(axis=1) / sent[some]))


def pull_imbalance(pulled: np.ndarray) -> float:
  """`max_j n |U_j| / |U|` (definition 8); 1 where nothing is sent.

  Args:
    pulled: `[n]`, rows of the union that owner `j` has.
  """
  total = pulled.sum()
  return float(len(pulled) * pulled.max() / total) if total else 1.0


def push_paid(pushed: np.ndarray) -> float:
  """`n max_ij |I_i^j| / mean_i |I_i|`: buffers of one size for all pairs.

  More than `push_imbalance` where the device with most rows decides.
  """
  mean = pushed.sum() / len(pushed)
  return float(pushed.shape[1] * pushed.max() / mean) if mean else 1.0


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
  """The skew over a number of parts, means over devices and steps."""

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
    devices: That density, overlap and skew were taken over.
    steps: As `devices`.
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
  overlap_devices = [overlaps(step) for step in recorded]
  overlap_steps = [overlaps(a, b) for a, b in following]
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
  found = [skew(ids, rows, parts) for ids in sets]
  ratio, first = np.mean(found, axis=0)
  return Skew(parts=parts, ratio=float(ratio), first=float(first))


def _scale(observed: Observed, steps: list[Sets], n: int, seed: int) -> Scale:
  rows = observed.table.num_rows
  unions = [union(step, rows) for step in steps]
  local = float(np.mean([len(ids) for step in steps for ids in step]))
  total = float(np.mean([len(u) for u in unions]))
  row_bytes = observed.table.width * observed.table.dtype.itemsize
  ideal = (n - 1) / n * (local + total) * row_bytes
  balance = {
    name: _balance(observed, steps, unions, n, name, seed, ideal)
    for name in NAMES
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
  if name == COLUMNS:
    # Every owner has an equal part of every row.
    pushed = [np.array([[len(ids) / n] * n for ids in step]) for step in steps]
    pulled = [np.full(n, len(u) / n) for u in unions]
  else:
    owner = owner_of(tables, index, n, name, seed)
    pushed = [loads(step, owner, n) for step in steps]
    pulled = list(loads(unions, owner, n))
  shown = Balance(
    push=_mean(push_imbalance, pushed),
    pull=_mean(pull_imbalance, pulled),
    paid=_mean(push_paid, pushed),
  )
  if name not in (ROTATION, COLUMNS):
    return shown
  blocks = n if name == COLUMNS else 1
  pushes = np.array([round(p.max() * blocks) for p in pushed])
  pulls = np.array([round(u.max() * blocks) for u in pulled])
  plan = plan_of(tables, index, n, name, seed)
  sizes = [
    fitted_bytes(plan, int(push), int(pull))
    for push, pull in zip(pushes, pulls)
  ]
  return dataclasses.replace(
    shown,
    capacity=library.stats.capacity(pushes, pulls, observed.table.num_rows),
    bytes=float(np.mean(sizes)),
    over_ideal=float(np.mean(sizes)) / ideal if ideal else None,
  )


def _mean(measure, steps) -> float:
  return float(np.mean([measure(step) for step in steps]))
