"""Sets of the rows that steps touch: their sources, and what is counted.

They come from a recorded trace, of which several steps are pooled for more
devices, or from a workload, drawn anew for every `n`. `benchmarks/README.md`
defines every figure; layouts and bytes are those of the library's own code.

A set is the ascending ids of the rows that are not zero on one device in one
step. Letters: `n` devices, `R` rows, `P` parts, `I_i` the set of device `i`,
`U` the union.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import library
from benchmarks import workloads
from zenjax.planner import traces

# Devices and steps of a workload's statistics, as `workloads` states them.
_WORKLOAD_DEVICES = 8
_WORKLOAD_STEPS = 8

Sets = Sequence[np.ndarray]
Tables = Sequence[library.Table]


class Observed(NamedTuple):
  """One table, and what is known of its gradients."""

  tables: Tables  # All that travel together.
  place: int  # Which of them this is.
  devices: int  # of a step as it was recorded
  # From `n` to the sets of `n` devices, step by step. Empty where a trace has
  # too few sets.
  draw: Callable[[int], Sequence[Sets]]
  pools: bool  # Whether more devices than `devices` are several steps' pooled.

  @property
  def table(self) -> library.Table:
    return self.tables[self.place]


def load(
  source: str, *, steps: int | None, seed: int, full_size: bool
) -> list[Observed]:
  """The tables of a trace, or the one of a workload, whose name goes first.

  `steps` are by default all of a trace, 8 of a workload; `seed` is of its ids.

  Raises:
    ValueError: `source` is neither, or the trace is broken or too short.
  """
  if source in workloads.ALL_NAMES:
    workload = workloads.get(source, full_size=full_size)
    seeds = range(seed, seed + (steps or _WORKLOAD_STEPS))
    draw = lambda n: [workloads.sets(workload, n, s) for s in seeds]
    table = library.table(workload.name, workload.rows, workload.width)
    return [Observed([table], 0, _WORKLOAD_DEVICES, draw, pools=False)]
  if not pathlib.Path(source).exists():
    raise ValueError(
      "`source` must be a directory that `examples.studies.lm --trace` wrote,"
      f" or one of {', '.join(workloads.ALL_NAMES)}, got {source!r}."
    )
  if full_size:
    raise ValueError(
      "`--full-size` goes with a workload, got a trace: leave it out."
    )
  trace = traces.read(source)
  header = trace.header
  if steps is not None and steps > trace.steps:
    raise ValueError(
      f"`--steps` must not exceed the {trace.steps} steps of the trace, got"
      f" {steps}: ask for fewer or record more."
    )
  tables = [
    library.table(t.name, t.rows, t.width, t.dtype) for t in header.tables
  ]
  draws = (functools.partial(cut, trace.sets[t.name][:steps]) for t in tables)
  return [
    Observed(tables, place, header.devices, draw, pools=True)
    for place, draw in enumerate(draws)
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
NAMES = (CONTIGUOUS, INDEPENDENT, ROTATION, COLUMNS)
# Apart from the seeds of the rotation, which uses the same mixing.
_INDEPENDENT = np.uint32(0x9E3779B9)


def plan_of(
  tables: Tables, index: int, n: int, name: str, seed: int
) -> library.buffer_sizes.TablePlan:
  """Returns the layout by `zen_sync`, `ROTATION` or `COLUMNS`, of one table.

  Those that travel together share one space of hashed ids.
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
  tables: Tables, index: int, n: int, name: str, seed: int
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


# Row counts are summed by a matrix product of zeros and ones in float32, which
# is exact up to 2**24; so many elements at a time also fit in memory.
_ELEMENTS = 1 << 24


def overlaps(first: Sets, second: Sets | None = None) -> np.ndarray:
  """`|I n J| / min(|I|, |J|)` of pairs of sets that hold a row (definition 3).

  Of every pair of one of each step, or of the pairs within `first`.
  """
  other = first if second is None else second
  common = np.zeros((len(first), len(other)))
  end = max((int(s[-1]) + 1 for s in (*first, *other) if len(s)), default=0)
  step = max(1, _ELEMENTS // max(len(first), len(other), 1))
  for low in range(0, end, step):
    a = _members(first, low, min(low + step, end))
    b = a if second is None else _members(second, low, min(low + step, end))
    common += a @ b.T
  smaller = np.minimum.outer([len(s) for s in first], [len(s) for s in other])
  wanted = smaller > 0
  if second is None:
    wanted &= np.triu(np.ones_like(wanted), 1)
  return common[wanted] / smaller[wanted]


def _members(sets, low, high):
  members = np.zeros((len(sets), high - low), np.float32)
  for row, ids in zip(members, sets):
    start, stop = np.searchsorted(ids, [low, high])
    row[ids[start:stop].astype(np.int64) - low] = 1
  return members


def boundaries(rows: int, parts: int) -> np.ndarray:
  """`[P + 1]`: where `P` parts of `R` rows begin and end, evenly cut."""
  return np.arange(parts + 1) * rows // parts


def skew(ids: np.ndarray, rows: int, parts: int) -> tuple[float, float]:
  """The densest part's density over that of the table (definition 5).

  Returns:
    That ratio of a set that is not empty, and its share in the first part.
  """
  edges = boundaries(rows, parts)
  counts = np.diff(np.searchsorted(ids, edges))
  densest = np.max(counts / np.diff(edges))
  return float(densest / (len(ids) / rows)), float(counts[0] / len(ids))


def loads(sets: Sets, owner: np.ndarray, owners: int) -> np.ndarray:
  """`[len(sets), owners]`: rows of each set by `owner: [R]`."""
  return np.array([np.bincount(owner[i], minlength=owners) for i in sets])


def push_imbalance(pushed: np.ndarray) -> float:
  """`max_ij n |I_i^j| / |I_i|` (definition 8); 1 where nothing is sent.

  `pushed: [n, n]` are the rows that device `i` sends owner `j`.
  """
  sent = pushed.sum(axis=1)
  some = sent > 0
  if not some.any():
    return 1.0
  return float(np.max(pushed.shape[1] * pushed[some].max(axis=1) / sent[some]))


def pull_imbalance(pulled: np.ndarray) -> float:
  """`max_j n |U_j| / |U|` (definition 8); 1 where nothing is sent."""
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
  """Many values of a share."""

  count: int
  mean: float
  percentiles: dict[int, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
  """The skew over a number of parts, means over devices and steps."""

  parts: int
  ratio: float
  first: float  # share of the nonzero rows that the first part holds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
  """One partition, means over steps; None where `zen_sync` has none such."""

  push: float  # imbalance, as the pull
  pull: float
  paid: float  # what buffers of one size cost the push
  capacity: tuple[int, int] | None = None  # as `zenjax.advise` would say
  bytes: float | None = None  # received, buffers as large as the step needs
  over_ideal: float | None = None  # that over `(n-1)/n (d + dn)` of the table


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
  """One table."""

  name: str
  rows: int
  width: int
  dtype: str
  devices: int  # that density, overlap and skew were taken over
  steps: int  # the same
  density: Distribution  # of a device in a step
  overlap_devices: Distribution | None  # pairs of devices in one step
  overlap_steps: Distribution | None  # any device in a step, any in the next
  skew: list[Skew]  # by number of parts
  scales: list[Scale]  # by number of devices
  too_few: list[int]  # numbers of devices that the trace has too few sets for


def analyze(
  observed: Observed, devices: Sequence[int], *, seed: int
) -> Iterator[Sparsity | None]:
  """Yields None after each part of the work, `len(devices) + 1`, then all.

  `devices` are each at least 2; `seed` is of both hashes.

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
  shares = [len(ids) / table.num_rows for step in recorded for ids in step]
  density = _distribution([np.array(shares)])
  assert density is not None  # A step has at least one device.
  pairs = itertools.pairwise(recorded)
  overlap_devices = _distribution([overlaps(step) for step in recorded])
  overlap_steps = _distribution([overlaps(a, b) for a, b in pairs])
  skews = []
  for parts in [parts for parts in PARTS if parts <= table.num_rows]:
    found = [skew(ids, table.num_rows, parts) for ids in sets]
    ratio, first = np.mean(found, axis=0).tolist()
    skews.append(Skew(parts=parts, ratio=ratio, first=first))
  yield None
  scales = []
  for n in devices:
    if steps := observed.draw(n):
      scales.append(_scale(observed, steps, n, seed))
    yield None
  yield Sparsity(
    name=table.name,
    rows=table.num_rows,
    width=table.width,
    dtype=str(table.dtype),
    devices=observed.devices,
    steps=len(recorded),
    density=density,
    overlap_devices=overlap_devices,
    overlap_steps=overlap_steps,
    skew=skews,
    scales=scales,
    too_few=[n for n in devices if n not in {s.devices for s in scales}],
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
  )


def _scale(
  observed: Observed, steps: Sequence[Sets], n: int, seed: int
) -> Scale:
  rows = observed.table.num_rows
  unions = [workloads.union(step) for step in steps]
  local = float(np.mean([len(ids) for step in steps for ids in step]))
  total = float(np.mean([len(u) for u in unions]))
  row_bytes = observed.table.width * observed.table.dtype.itemsize
  ideal = (n - 1) / n * (local + total) * row_bytes
  given = observed, steps, unions, n, seed, ideal
  return Scale(
    devices=n,
    steps=len(steps),
    pooled=observed.pools and n > observed.devices,
    density=local / rows,
    union_density=total / rows,
    densification=total / local if local else 1.0,
    balance={name: _balance(name, *given) for name in NAMES},
  )


def _balance(name, observed, steps, unions, n, seed, ideal) -> Balance:
  which = observed.tables, observed.place, n, name, seed
  if name == COLUMNS:
    # Every owner has an equal part of every row.
    pushed = [np.array([[len(ids) / n] * n for ids in step]) for step in steps]
    pulled = [np.full(n, len(u) / n) for u in unions]
  else:
    owner = owner_of(*which)
    pushed = [loads(step, owner, n) for step in steps]
    pulled = list(loads(unions, owner, n))
  shown = Balance(
    push=float(np.mean([push_imbalance(p) for p in pushed])),
    pull=float(np.mean([pull_imbalance(p) for p in pulled])),
    paid=float(np.mean([push_paid(p) for p in pushed])),
  )
  if name not in (ROTATION, COLUMNS):
    return shown
  blocks = n if name == COLUMNS else 1
  pushes = np.array([round(p.max() * blocks) for p in pushed])
  pulls = np.array([round(u.max() * blocks) for u in pulled])
  plan = plan_of(*which)
  context, zen = library.context(n), library.SPARSE["zen"]
  sizes = []
  for push, pull in zip(pushes.tolist(), pulls.tolist()):
    # One push and one pull of just these rows: of the fullest pair of source
    # and owner, and of the fullest union.
    sent = zen.push_messages([library.Room(plan, push)], context)
    sent = [*sent, *zen.pull_messages([library.Room(plan, pull)], context)]
    sizes.append(round(float(library.received_bytes(sent, context))))
  received = float(np.mean(sizes))
  return dataclasses.replace(
    shown,
    capacity=library.stats.capacity(pushes, pulls, observed.table.num_rows),
    bytes=received,
    over_ideal=received / ideal if ideal else None,
  )
