"""`search`: the planner's search beside all assignments and what others do."""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import statistics
import time
from typing import NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks import library
from benchmarks import record
from benchmarks import table as tables
from benchmarks.planner import baselines

ALONE, GROUPS = "tensor by tensor", "groups"
# Of each kind, tensors and options of the small instances.
SMALL = {ALONE: (8, 4), GROUPS: (7, 3)}
SEEDS = 3  # Large instances of each kind.
# The greedy search is not exact: its iterations over the best, at most.
WORST, MEAN = 1.1, 1.005


@dataclasses.dataclass(frozen=True, slots=True)
class Small:
  """One instance of which every assignment was tried."""

  kind: str  # ALONE or GROUPS.
  seed: int  # It was drawn with.
  best_s: float  # The shortest iteration.
  found_s: dict[str, float]  # By each method.


@dataclasses.dataclass(frozen=True, slots=True)
class Large:
  """One instance too large to try all."""

  kind: str  # ALONE or GROUPS.
  seed: int  # It was drawn with.
  tensors: int  # How many.
  sparse: int  # How many have rows to leave out.
  relaxed_s: float | None  # Of a linear program, which none beats.
  found_s: dict[str, float]  # By each method.
  wall_s: tuple[float, ...]  # That the search took, each time.
  cpu_s: tuple[float, ...]  # Of this process, meanwhile.
  baseline_s: float  # CPU time of the baseline, once.


# --- steps drawn at random ---------------------------------------------------

# Seconds drawn are multiples of it, so that sums in any order are equal.
_TICK = 2.0**-20


class Drawn(NamedTuple):
  """Tensors, and what they cost in groups."""

  tensors: tuple[library.Tensor, ...]
  groups: library.GroupCosts


def draw_small(seed: int, tensors: int, options: int) -> Drawn:
  """Anything goes: work, link and backward pass of one magnitude.

  The first option is all link. Not every tensor has all others.
  """
  rng = np.random.default_rng(seed)
  busy = 2.0 ** rng.uniform(-2, 2)  # The backward pass over communication.
  once = [_option(o, rng.integers(0, 400, 3)) for o in range(options)]
  drawn = []
  for j in range(tensors):
    own = []
    for o in range(options):
      if o and rng.random() < 0.15:
        continue
      most = (2000, 4000, 2000) if o == 0 else (1500, 2500, 1500)
      ticks = rng.integers(0, most, 3)
      fixed = [once[o].before_s, once[o].link_s, once[o].after_s]
      own.append(_option(o, ticks + np.array(fixed) / _TICK))
    backward = round(rng.integers(0, 3000) * busy)
    size = float(rng.integers(1, 6) * 1000)  # With ties.
    drawn.append(library.Tensor(f"t{j}", size, backward * _TICK, tuple(own)))
  groups = library.GroupCosts(drawn, {option.name: option for option in once})
  return Drawn(tuple(drawn), groups)


def _option(number: int, ticks: np.ndarray) -> library.Option:
  # The first has nothing to do on the device.
  seconds = ticks * _TICK * (number > 0, True, number > 0)
  return library.Option(f"s{number}", *seconds.tolist())


def draw_model(seed: int, tensors: int, sparse: int) -> Drawn:
  """A model's tensors, of which so many have rows to leave out.

  Half of them are tiny, 256 bytes to 64 KB, the others up to 100 MB, all
  log-uniform. Each goes as it is or in 16 bits, and the sparse ones by two more
  schemes, at 1 to 60 % of the bytes. Link and memory are drawn too: 200 MB/s to
  30 GB/s, 3 to 300 GB/s, 10 us to 1 ms.
  """
  rng = np.random.default_rng(seed)
  bandwidth, memory = 10 ** rng.uniform((8.3, 9.5), (10.5, 11.5))
  latency, launch = 10 ** rng.uniform(-5, -3), 1e-5
  once = [
    _rounded("pmean", 0.0, latency, 0.0),
    *(_rounded(x, launch, latency, launch) for x in ("pmean16", "all_gather")),
    _rounded("zen", 2 * launch, 2 * latency, launch),
  ]
  sizes = np.exp(rng.uniform(np.log(64e3), np.log(1e8), tensors))
  tiny = rng.permutation(tensors)[: tensors // 2]  # Biases and norms.
  sizes[tiny] = np.exp(rng.uniform(np.log(256), np.log(64e3), len(tiny)))
  with_rows = set(rng.choice(tensors, sparse, replace=False).tolist())
  busy = 2 * rng.uniform(0.1, 1) / bandwidth
  drawn = []
  for j, size in enumerate(sizes.tolist()):
    work = size / memory
    parts = [(0.0, 2 * size / bandwidth, 0.0)]
    parts.append((1.5 * work, size / bandwidth, 1.5 * work))
    if j in with_rows:
      some = size * rng.uniform((0.01, 0.01), (0.9, 0.6))  # Gathered, sent.
      after = np.array([3, 5]) * some / memory
      parts += [(work, *x) for x in zip(2 * some / bandwidth, after)]
    own = tuple(
      _rounded(o.name, o.before_s + before, o.link_s + link, o.after_s + after)
      for o, (before, link, after) in zip(once, parts)
    )
    backward = _rounded("", busy * size + rng.exponential(1e-4), 0.0, 0.0)
    drawn.append(library.Tensor(f"t{j}", size, backward.before_s, own))
  groups = library.GroupCosts(drawn, {option.name: option for option in once})
  return Drawn(tuple(drawn), groups)


def _rounded(
  name: str, before: float, link: float, after: float
) -> library.Option:
  tick = _TICK / 1024
  seconds = (round(x / tick) * tick for x in (before, link, after))
  return library.Option(name, *seconds)


# --- the command -------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
  """Searches, prints and saves; returns 1 if the search is far from best."""
  sizes = [min(26, options.tensors), options.tensors]
  total = len(SMALL) * (options.instances + len(sizes) * SEEDS)
  every = itertools.chain(
    _small(options.instances), _large(options.tensors, sizes, options.repeats)
  )
  found = list(harness.progress(every, total, "step"))
  small = [one for one in found if isinstance(one, Small)]
  large = [one for one in found if isinstance(one, Large)]
  show(small, large)
  told = [list(map(dataclasses.asdict, ones)) for ones in (small, large)]
  record.save(options, dict(zip(("small", "large"), told)))
  over = [one.found_s["search"] / one.best_s for one in small]
  over += [one.found_s["search"] / min(one.found_s.values()) for one in large]
  return int(max(over) > WORST or statistics.mean(over) > MEAN)


def _small(instances: int) -> Iterator[Small]:
  for kind, (tensors, count) in SMALL.items():
    for seed in range(instances):
      drawn = draw_small(seed, tensors, count)
      groups = _groups(kind, drawn)
      found = {"search": library.search(groups)} | _others(kind, drawn)
      if kind == ALONE:
        thrice = baselines.espresso(drawn.tensors, passes=3)
        found["Espresso, 3 passes"] = thrice
      else:
        cuts = (baselines.cut_at(groups, k) for k in range(1, tensors + 1))
        best = min(filter(None, cuts), key=lambda cut: _seconds(drawn, cut))
        found["best of all cuts in two"] = best
      _, best_s = baselines.exhaustive(groups)
      seconds = {name: _seconds(drawn, a) for name, a in found.items()}
      yield Small(kind=kind, seed=seed, best_s=best_s, found_s=seconds)


def _groups(kind: str, drawn: Drawn) -> library.GroupCosts:
  return drawn.groups if kind == GROUPS else library.GroupCosts(drawn.tensors)


def _others(kind: str, drawn: Drawn) -> dict[str, library.Assignment]:
  if kind == ALONE:
    return {"Espresso": baselines.espresso(drawn.tensors)}
  found = baselines.mergecomp(drawn.groups)
  return {"MergeComp": found} if found else {}


def _seconds(drawn: Drawn, assignment: library.Assignment) -> float:
  return library.iteration_seconds(drawn.tensors, assignment)


def _large(tensors: int, sizes: list[int], repeats: int) -> Iterator[Large]:
  for kind, sparse, seed in itertools.product(SMALL, sizes, range(SEEDS)):
    drawn = draw_model(seed, tensors, sparse)
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
    pmean = baselines.uncompressed(drawn.tensors)
    found = {"search": library.search(groups), **others, "pmean": pmean}
    yield Large(
      kind=kind,
      seed=seed,
      tensors=len(drawn.tensors),
      sparse=sparse,
      relaxed_s=None if kind == GROUPS else baselines.relaxed_s(drawn.tensors),
      found_s={name: _seconds(drawn, a) for name, a in found.items()},
      wall_s=tuple(wall),
      cpu_s=tuple(cpu),
      baseline_s=baseline,
    )


def show(small: Sequence[Small], large: Sequence[Large]) -> None:
  """Prints what was found of small steps, and of large ones."""
  for kind in dict.fromkeys(one.kind for one in small):
    _show_methods(kind, [one for one in small if one.kind == kind])
  tables.show_rows("large steps", _SIZES, map(_size, large))
  print(
    "The baseline is Espresso's greedy tensor by tensor, MergeComp's cut of"
    " groups. A better plan of tensors by themselves gains no more than is"
    " over the relaxed one, in which tensors may be split between options."
  )
  for kind in dict.fromkeys(one.kind for one in large):
    ones = [one for one in large if one.kind == kind]
    cpu = statistics.median(s for one in ones for s in one.cpu_s) * 1e3
    print(f"Searching {kind} took {cpu:.0f} ms of CPU at the median.")


def _show_methods(kind: str, small: Sequence[Small]) -> None:
  rows = []
  for name in dict.fromkeys(name for one in small for name in one.found_s):
    over = [o.found_s[name] / o.best_s for o in small if name in o.found_s]
    within = sum(x <= 1.01 for x in over) / len(over)
    numbers = f"{within:.0%}", f"{statistics.median(over):.3f}"
    counts = str(len(over)), str(over.count(1.0))
    rows.append([name, *counts, *numbers, f"{max(over):.3f}"])
  tables.show_rows(
    f"{len(small)} small steps, {kind}: iteration over the best of all",
    ("method", "possible", "equal", "within 1 %", "median", "worst"),
    rows,
  )


_SIZES = (
  *("kind, tensors, sparse", "iteration\nms", "over\nrelaxed %"),
  *("time\nms", "CPU\nms", "pmean\nover it", "baseline\nover it"),
  "its CPU\nms",
)


def _size(one: Large) -> list[str]:
  found = one.found_s["search"]
  names = [n for n in one.found_s if n not in ("search", "pmean")]
  over = one.relaxed_s and 100 * (found / one.relaxed_s - 1)
  return [
    f"{one.kind}, {one.tensors}, {one.sparse}",
    f"{found * 1e3:.1f}",
    tables.number(over, ".2f"),
    f"{statistics.median(one.wall_s) * 1e3:.0f}",
    f"{statistics.median(one.cpu_s) * 1e3:.0f}",
    f"{one.found_s['pmean'] / found:.3f}",
    f"{one.found_s[names[0]] / found:.3f}" if names else "-",
    f"{one.baseline_s * 1e3:.0f}",
  ]
