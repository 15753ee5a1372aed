"""`search`: the planner's search beside all assignments and what others do."""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import statistics
import time
from typing import Any

import rich.box
import rich.table
import tqdm

from benchmarks import library
from benchmarks import record
from benchmarks import table as tables
from benchmarks.planner import baselines
from benchmarks.planner import oracles
from benchmarks.planner import steps_drawn
from benchmarks.planner.steps_drawn import Drawn

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
  sizes = [min(26, options.tensors), options.tensors]
  total = len(SMALL) * (options.instances + len(sizes) * SEEDS)
  with tqdm.tqdm(total=total, unit="step", disable=None, leave=False) as bar:
    small = list(_watched(_small(options.instances), bar))
    found = _large(options.tensors, sizes, options.repeats)
    large = list(_watched(found, bar))
  show(small, large)
  found = {"small": small, "large": large}
  record.save(
    options,
    {
      kind: [dataclasses.asdict(o) for o in ones]
      for kind, ones in found.items()
    },
  )
  return int(not is_near(small, large))


def is_near(small: Sequence[Small], large: Sequence[Large]) -> bool:
  """Returns False where the search is far from the best that is known."""
  over = [one.found_s["search"] / one.best_s for one in small]
  over += [one.found_s["search"] / min(one.found_s.values()) for one in large]
  return max(over) <= WORST and statistics.mean(over) <= MEAN


def _watched(found: Iterator[Any], bar: tqdm.tqdm) -> Iterator[Any]:
  for one in found:
    bar.update()
    yield one


def _small(instances: int) -> Iterator[Small]:
  for kind, (tensors, count) in SMALL.items():
    for seed in range(instances):
      drawn = steps_drawn.small(seed, tensors, count)
      groups = _groups(kind, drawn)
      found = {"search": library.search(groups)}
      found |= _others(kind, drawn)
      if kind == ALONE:
        thrice = baselines.espresso(drawn.tensors, passes=3)
        found["Espresso, 3 passes"] = thrice
      else:
        found["best of all cuts in two"] = _best_cut(drawn)
      _, best_s = oracles.exhaustive(groups)
      seconds = {name: _seconds(drawn, a) for name, a in found.items()}
      yield Small(kind=kind, seed=seed, best_s=best_s, found_s=seconds)


def _groups(kind: str, drawn: Drawn) -> library.GroupCosts:
  return drawn.groups if kind == GROUPS else library.GroupCosts(drawn.tensors)


def _others(kind: str, drawn: Drawn) -> dict[str, library.Assignment]:
  if kind == ALONE:
    return {"Espresso": baselines.espresso(drawn.tensors)}
  found = baselines.mergecomp(drawn.groups)
  return {"MergeComp": found} if found else {}


def _best_cut(drawn: Drawn) -> library.Assignment:
  n = len(drawn.tensors)
  cuts = [baselines.cut_at(drawn.groups, cut) for cut in range(1, n + 1)]
  possible = [cut for cut in cuts if cut is not None]
  return min(possible, key=lambda cut: _seconds(drawn, cut))


def _seconds(drawn: Drawn, assignment: library.Assignment) -> float:
  return library.iteration_seconds(drawn.tensors, assignment)


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
    library.search(groups)
    wall.append(time.perf_counter() - started[0])
    cpu.append(time.process_time() - started[1])
  started = time.process_time()
  others = _others(kind, drawn)
  baseline = time.process_time() - started
  others = {"search": library.search(groups)} | others
  others["pmean"] = baselines.uncompressed(drawn.tensors)
  return Large(
    kind=kind,
    seed=seed,
    tensors=len(drawn.tensors),
    sparse=sparse,
    relaxed_s=None if kind == GROUPS else oracles.relaxed_s(drawn.tensors),
    found_s={name: _seconds(drawn, a) for name, a in others.items()},
    wall_s=tuple(wall),
    cpu_s=tuple(cpu),
    baseline_s=baseline,
  )


def show(small: Sequence[Small], large: Sequence[Large]) -> None:
  """Prints what was found of small steps, and of large ones."""
  console = tables.console()
  for kind in dict.fromkeys(one.kind for one in small):
    console.print(_methods(kind, [one for one in small if one.kind == kind]))
  console.print(_sizes(large))
  for line in _notes(large):
    print(line)


def _methods(kind: str, small: Sequence[Small]) -> rich.table.Table:
  made = tables.made(
    f"{len(small)} small steps, {kind}: iteration over the best of all",
    *("method", "possible", "equal", "within 1 %", "median", "worst"),
  )
  for name in dict.fromkeys(name for one in small for name in one.found_s):
    pairs = [(o.found_s[name], o.best_s) for o in small if name in o.found_s]
    ratios = [found / best for found, best in pairs]
    made.add_row(
      name,
      str(len(pairs)),
      str(sum(found == best for found, best in pairs)),
      f"{100 * sum(r <= 1.01 for r in ratios) / len(ratios):.0f} %",
      f"{statistics.median(ratios):.3f}",
      f"{max(ratios):.3f}",
    )
  return made


def _sizes(large: Sequence[Large]) -> rich.table.Table:
  made = tables.made(
    "large steps",
    *("kind, tensors, sparse", "iteration\nms", "over\nrelaxed %"),
    *("time\nms", "CPU\nms", "pmean\nover it", "baseline\nover it"),
    "its CPU\nms",
  )
  for one in large:
    found = one.found_s["search"]
    names = [n for n in one.found_s if n not in ("search", "pmean")]
    made.add_row(
      f"{one.kind}, {one.tensors}, {one.sparse}",
      f"{found * 1e3:.1f}",
      _percent_over(found, one.relaxed_s),
      f"{statistics.median(one.wall_s) * 1e3:.0f}",
      f"{statistics.median(one.cpu_s) * 1e3:.0f}",
      f"{one.found_s['pmean'] / found:.3f}",
      f"{one.found_s[names[0]] / found:.3f}" if names else "-",
      f"{one.baseline_s * 1e3:.0f}",
    )
  return made


def _percent_over(found_s: float, bound_s: float | None) -> str:
  return "-" if bound_s is None else f"{100 * (found_s / bound_s - 1):.2f}"


def _notes(large: Sequence[Large]) -> Iterator[str]:
  yield (
    "The baseline is Espresso's greedy tensor by tensor, MergeComp's cut of"
    " groups. A better plan of tensors by themselves gains no more than is"
    " over the relaxed one, in which tensors may be split between options."
  )
  for kind in dict.fromkeys(one.kind for one in large):
    ones = [one for one in large if one.kind == kind]
    cpu = statistics.median(s for one in ones for s in one.cpu_s) * 1e3
    yield f"Searching {kind} took {cpu:.0f} ms of CPU at the median."
