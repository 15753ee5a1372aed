"""`search`: the planner's search beside all assignments and what others do."""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import statistics
import time

import tqdm

from benchmarks import record
from benchmarks import relaxed
from benchmarks import search_table
from benchmarks import steps_drawn
from benchmarks.planner import baselines
from benchmarks.planner import exhaustive
from benchmarks.steps_drawn import Drawn
from zenjax._src.planner.plan_search import search
from zenjax._src.planner.timeline import Assignment
from zenjax._src.planner.timeline import GroupCosts
from zenjax._src.planner.timeline import iteration_seconds

ALONE, GROUPS = "tensor by tensor", "groups"
# Of each kind, tensors and options of the small instances.
SMALL = {ALONE: (8, 4), GROUPS: (7, 3)}
SEEDS = 3  # Large instances of each kind.
# The greedy search is not exact: its iterations over the best, at most.
WORST, MEAN = 1.1, 1.005


@dataclasses.dataclass(frozen=True, slots=True)
class Small:
  """One instance of which every assignment was tried.

  Attributes:
    kind: ALONE or GROUPS.
    seed: It was drawn with.
    best_s: The shortest iteration.
    found_s: By each method.
  """

  kind: str
  seed: int
  best_s: float
  found_s: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Large:
  """One instance too large to try all.

  Attributes:
    kind: ALONE or GROUPS.
    seed: It was drawn with.
    tensors: How many.
    sparse: How many have rows to leave out.
    relaxed_s: No iteration is shorter, by a linear program, tensor by tensor.
    found_s: By each method.
    wall_s: That the search took, each time.
    cpu_s: Of this process, meanwhile.
    baseline_s: CPU time of the baseline, once.
  """

  kind: str
  seed: int
  tensors: int
  sparse: int
  relaxed_s: float | None
  found_s: dict[str, float]
  wall_s: tuple[float, ...]
  cpu_s: tuple[float, ...]
  baseline_s: float


def run(options: argparse.Namespace) -> int:
  """Searches, prints and saves; returns 1 if the search is far from best."""
  count = len(SMALL) * options.instances
  sizes = [min(26, options.tensors), options.tensors]
  total = count + len(SMALL) * len(sizes) * SEEDS
  with tqdm.tqdm(total=total, unit="step", disable=None, leave=False) as bar:
    small = []
    for one in _small(options.instances):
      small.append(one)
      bar.update()
    large = []
    for one in _large(options.tensors, sizes, options.repeats):
      large.append(one)
      bar.update()
  search_table.show(small, large)
  if options.json:
    settings = record.settings(options)
    document = {
      "environment": record.software(),
      "options": settings,
      "small": [dataclasses.asdict(one) for one in small],
      "large": [dataclasses.asdict(one) for one in large],
    }
    record.write_json(options.json, document)
    print(f"Saved {options.json}")
  return int(not is_near(small, large))


def is_near(small: Sequence[Small], large: Sequence[Large]) -> bool:
  """Returns False where the search is far from the best that is known."""
  over = [one.found_s["search"] / one.best_s for one in small]
  over += [one.found_s["search"] / min(one.found_s.values()) for one in large]
  return max(over) <= WORST and statistics.mean(over) <= MEAN


def _small(instances: int) -> Iterator[Small]:
  for kind, (tensors, count) in SMALL.items():
    for seed in range(instances):
      drawn = steps_drawn.small(seed, tensors, count)
      groups = _groups(kind, drawn)
      found = {"search": search(groups)}
      found |= _others(kind, drawn)
      if kind == ALONE:
        thrice = baselines.espresso(drawn.tensors, passes=3)
        found["Espresso, 3 passes"] = thrice
      else:
        found["best of all cuts in two"] = _best_cut(drawn)
      _, best_s = exhaustive.exhaustive(groups)
      seconds = {name: _seconds(drawn, a) for name, a in found.items()}
      yield Small(kind=kind, seed=seed, best_s=best_s, found_s=seconds)


def _groups(kind: str, drawn: Drawn) -> GroupCosts:
  return drawn.groups if kind == GROUPS else GroupCosts(drawn.tensors)


def _others(kind: str, drawn: Drawn) -> dict[str, Assignment]:
  if kind == ALONE:
    return {"Espresso": baselines.espresso(drawn.tensors)}
  found = baselines.mergecomp(drawn.groups)
  return {"MergeComp": found} if found else {}


def _best_cut(drawn: Drawn) -> Assignment:
  n = len(drawn.tensors)
  cuts = [baselines.cut_at(drawn.groups, cut) for cut in range(1, n + 1)]
  possible = [cut for cut in cuts if cut is not None]
  return min(possible, key=lambda cut: _seconds(drawn, cut))


def _seconds(drawn: Drawn, assignment: Assignment) -> float:
  return iteration_seconds(drawn.tensors, assignment)


def _large(tensors: int, sizes: list[int], repeats: int) -> Iterator[Large]:
  for kind in SMALL:
    for sparse in sizes:
      for seed in range(SEEDS):
        drawn = steps_drawn.model(seed, tensors, sparse)
        yield _measured(kind, seed, sparse, drawn, repeats)


def _measured(kind, seed, sparse, drawn, repeats) -> Large:
  groups = _groups(kind, drawn)
  wall, cpu = [], []
  for _ in range(repeats):
    started = time.perf_counter(), time.process_time()
    search(groups)
    wall.append(time.perf_counter() - started[0])
    cpu.append(time.process_time() - started[1])
  started = time.process_time()
  others = _others(kind, drawn)
  baseline = time.process_time() - started
  others = {"search": search(groups)} | others
  others["pmean"] = baselines.uncompressed(drawn.tensors)
  return Large(
    kind=kind,
    seed=seed,
    tensors=len(drawn.tensors),
    sparse=sparse,
    relaxed_s=None if kind == GROUPS else relaxed.relaxed_s(drawn.tensors),
    found_s={name: _seconds(drawn, a) for name, a in others.items()},
    wall_s=tuple(wall),
    cpu_s=tuple(cpu),
    baseline_s=baseline,
  )
