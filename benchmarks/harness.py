"""Answer first, then time: the one loop behind every benchmark.

A `Case` builds itself, which compiles it and counts its wrong elements; only
what is right is timed. The cases of a group take turns, one call each in a
round, so that whatever else the machine does falls on all of them alike.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import itertools
import os
import time
from typing import Any

import jax
import numpy as np
import tqdm

Compiled = tuple[jax.stages.Compiled, float]  # and the seconds it took


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
  """A case, compiled and checked."""

  # One call of what is measured: its arrays, not awaited. None where an answer
  # is all there is to see.
  run: Callable[[], Any] | None
  wrong: int  # elements that differ from the float64 oracle, over all devices
  compile_s: float  # to trace, lower and compile
  facts: dict[str, float]  # to report: bytes, density, imbalance
  # What must be done before each call, and awaited: not timed.
  prepare: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
  """One variant on one input."""

  group: str  # What the cases compared with each other have in common.
  name: str  # of the variant
  build: Callable[[], Built]  # Compiles and checks.


def case(
  group: str, name: str, build: Callable[..., Built], *arguments: Any
) -> Case:
  """Returns the case that `build` makes of arguments."""
  build = functools.partial(build, *arguments)
  return Case(group=group, name=name, build=build)


class Sampled:
  """Times of one thing, in seconds, in order."""

  __slots__ = ()
  times_s: Any  # Of all rounds.

  @property
  def median_s(self) -> float:
    return median(self.times_s)

  @property
  def spread_s(self) -> float:
    return spread(self.times_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result(Sampled):
  """The findings about one case."""

  group: str
  name: str
  wrong: int
  compile_s: float
  facts: dict[str, float]
  times_s: tuple[float, ...] = ()


def compile_here(lowered: jax.stages.Lowered) -> Compiled:
  start = time.perf_counter()
  return lowered.compile(), time.perf_counter() - start


def compiled(
  function: Callable[..., Any],
  *arguments: Any,
  compile: Callable[[jax.stages.Lowered], Compiled] = compile_here,
  **options: Any,
) -> Compiled:
  """Returns the program and the seconds to trace, lower and compile it.

  Arguments may be abstract shapes; `options` are those of `jax.jit`. Hosts
  `compile` together.
  """
  start = time.perf_counter()
  lowered = jax.jit(function, **options).lower(*arguments)
  seconds = time.perf_counter() - start
  program, more = compile(lowered)
  return program, seconds + more


def mesh(count: int, axis: str) -> jax.sharding.Mesh:
  """Returns `count` devices of this machine, or raises ValueError."""
  devices = jax.devices()
  if len(devices) < count:
    raise ValueError(
      "`--devices` must not exceed the devices of this machine, got"
      f" {count} of {len(devices)}: ask for fewer."
    )
  return jax.sharding.Mesh(np.array(devices[:count]), (axis,))


def named(
  flag: str, names: Sequence[str] | None, known: Iterable[str]
) -> list[str]:
  """Returns `names`, all that are `known` if None; ValueError if one is not."""
  known = list(known)
  if unknown := sorted(set(names or ()) - set(known)):
    raise ValueError(
      f"`{flag}` must be among {', '.join(known)}, got {unknown[0]!r}."
    )
  return list(names or known)


def require_memory(
  mesh: jax.sharding.Mesh | None, need: float, flag: str, remedy: str
) -> None:
  """Raises ValueError where this machine has too little memory.

  Devices other than CPUs have memory of their own, and say when it is full.
  """
  if mesh is not None and mesh.devices.flat[0].platform != "cpu":
    return
  have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  if need > have:
    raise ValueError(
      f"`{flag}` must fit in memory, got {have / 1e9:.0f} GB for about"
      f" {need / 1e9:.0f} GB. {remedy}"
    )


def median(times: Sequence[float]) -> float:
  """Returns NaN for no times."""
  return float(np.median(times)) if times else float("nan")


def spread(times: Sequence[float]) -> float:
  """Returns half the distance between the quartiles, NaN for no times."""
  if not times:
    return float("nan")
  low, high = np.percentile(times, [25, 75])
  return float(high - low) / 2


def progress(
  over: Iterable[Any] | None = None,
  total: int | None = None,
  unit: str = "cell",
) -> tqdm.tqdm:
  """Returns a bar that leaves nothing, and is none where nobody looks."""
  return tqdm.tqdm(over, total=total, unit=unit, disable=None, leave=False)


def measure(
  cases: Sequence[Case], *, repeats: int, warmup: int = 2
) -> tuple[list[Result], bool]:
  """Measures `cases`, group by group; those of one group stand together.

  Returns:
    The results, and whether all of them are there: after Ctrl-C those measured
    so far are returned, with the rounds they have.
  """
  results: list[Result] = []
  calls = len(cases) * (1 + warmup + repeats)
  with progress(total=calls, unit="call") as bar:
    try:
      for group, members in itertools.groupby(cases, lambda c: c.group):
        bar.set_description(group)
        _measure_group(list(members), repeats, warmup, bar, results)
    except KeyboardInterrupt:
      return results, False
  return results, True


def _measure_group(cases, repeats, warmup, bar, results):
  built: list[Built] = []
  first = len(results)
  for case in cases:
    bar.set_postfix_str(f"{case.name}: compile, check")
    built.append(one := case.build())
    same = {
      name: getattr(one, name) for name in ("wrong", "compile_s", "facts")
    }
    results.append(Result(group=case.group, name=case.name, **same))
    bar.update()
  bar.set_postfix_str("time")
  times = [[] for _ in built]
  try:
    for turn in range(-warmup, repeats):
      for i in shuffled(len(built), turn):
        if (run := built[i].run) and not built[i].wrong:
          if prepare := built[i].prepare:
            jax.block_until_ready(prepare())
          seconds = seconds_of(run)
          if turn >= 0:
            times[i].append(seconds)
        bar.update()
  finally:  # Also when interrupted: a sample that was taken is kept.
    for i, samples in enumerate(times, first):
      results[i] = dataclasses.replace(results[i], times_s=tuple(samples))


def shuffled(count: int, turn: int) -> np.ndarray:
  """The order in which `count` cases run in round `turn`."""
  # No case always runs after the same other one, in whose caches and clocks it
  # would stand.
  return np.random.default_rng([turn + 1000, count]).permutation(count)


@functools.cache
def _settling():
  """A program in which all devices take part."""
  spec, on = jax.sharding.PartitionSpec, mesh(jax.device_count(), "all")
  total = lambda x: jax.lax.psum(x, "all")
  mapped = jax.shard_map(total, mesh=on, in_specs=spec("all"), out_specs=spec())
  return functools.partial(jax.jit(mapped), np.zeros(on.size, np.float32))


def seconds_of(run: Callable[[], Any]) -> float:
  """Times one call until its arrays are there and its memory is given back."""
  start = time.perf_counter()
  jax.block_until_ready(run())
  # CPU devices give memory back after their answer is there, half a second for
  # a few gigabytes. The next step would wait for that: it is this one's.
  jax.block_until_ready(_settling()())
  return time.perf_counter() - start
