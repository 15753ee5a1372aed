"""Answer first, then time: the one loop behind every benchmark.

A `Case` builds itself, which compiles it and counts its wrong elements; only
what is right is timed. The cases of a group take turns, one call each in a
round, so that whatever else the machine does falls on all of them alike.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
import os
import time
from typing import Any

import jax
import numpy as np
import tqdm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
  """A case, compiled and checked.

  Attributes:
    run: One call of what is measured. Returns its arrays, not awaited. None
      where an answer is all there is to see.
    wrong: Elements that differ from the float64 oracle, over all devices.
    compile_s: Seconds to trace, lower and compile.
    facts: Numbers to report beside the time: bytes, density, imbalance.
    prepare: What must be done before each call, and awaited: not timed.
  """

  run: Callable[[], Any] | None
  wrong: int
  compile_s: float
  facts: dict[str, float]
  prepare: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
  """One variant on one input.

  Attributes:
    group: What the cases compared with each other have in common.
    name: The variant.
    build: Compiles and checks.
  """

  group: str
  name: str
  build: Callable[[], Built]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
  """The findings about one case; times in seconds, in order."""

  group: str
  name: str
  wrong: int
  compile_s: float
  facts: dict[str, float]
  times_s: tuple[float, ...] = ()

  @property
  def median_s(self) -> float:
    return median(self.times_s)

  @property
  def spread_s(self) -> float:
    return spread(self.times_s)


def compiled(
  function: Callable[..., Any], *arguments: Any, **options: Any
) -> tuple[jax.stages.Compiled, float]:
  """Returns the program and the seconds to trace, lower and compile it.

  Args:
    function: What to compile.
    *arguments: Its arrays, or their abstract shapes.
    **options: Of `jax.jit`.
  """
  start = time.perf_counter()
  program = jax.jit(function, **options).lower(*arguments).compile()
  return program, time.perf_counter() - start


def mesh(count: int, axis: str) -> jax.sharding.Mesh:
  """Returns `count` devices of this machine along one axis.

  Raises:
    ValueError: There are too few.
  """
  devices = jax.devices()
  if len(devices) < count:
    raise ValueError(
      "`--devices` must not exceed the devices of this machine, got"
      f" {count} of {len(devices)}: ask for fewer."
    )
  return jax.sharding.Mesh(np.array(devices[:count]), (axis,))


def require_memory(need: float, flag: str, remedy: str) -> None:
  """Raises ValueError where this machine has too little memory."""
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


def measure(
  cases: Sequence[Case], *, repeats: int, warmup: int = 2
) -> tuple[list[Result], bool]:
  """Measures `cases`, group by group.

  Args:
    cases: Those of one group stand together.
    repeats: Timed rounds.
    warmup: Rounds before them.

  Returns:
    The results, and whether all of them are there: after Ctrl-C those measured
    so far are returned, with the rounds they have.
  """
  results: list[Result] = []
  calls = len(cases) * (1 + warmup + repeats)
  with tqdm.tqdm(total=calls, unit="call", disable=None, leave=False) as bar:
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
    built.append(case.build())
    results.append(_result(case, built[-1]))
    bar.update()
  bar.set_postfix_str("time")
  times = [[] for _ in built]
  # Also when interrupted: a sample that was taken is kept.
  with _writing_back(results, first, times):
    for turn in range(-warmup, repeats):
      for i in shuffled(len(built), turn):
        run, prepare = built[i].run, built[i].prepare
        if run is not None and not built[i].wrong:
          if prepare is not None:
            jax.block_until_ready(prepare())
          seconds = seconds_of(run)
          if turn >= 0:
            times[i].append(seconds)
        bar.update()


def _result(case, built):
  return Result(
    group=case.group,
    name=case.name,
    wrong=built.wrong,
    compile_s=built.compile_s,
    facts=built.facts,
  )


@contextlib.contextmanager
def _writing_back(results, first, times) -> Iterator[None]:
  try:
    yield
  finally:
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
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
  spec = jax.sharding.PartitionSpec
  total = jax.shard_map(
    lambda x: jax.lax.psum(x, "all"),
    mesh=mesh,
    in_specs=spec("all"),
    out_specs=spec(),
  )
  return functools.partial(jax.jit(total), np.zeros(mesh.size, np.float32))


def seconds_of(run: Callable[[], Any]) -> float:
  """Times one call until its arrays are there and its memory is given back."""
  start = time.perf_counter()
  jax.block_until_ready(run())
  # CPU devices give memory back after their answer is there, half a second for
  # a few gigabytes. The next step would wait for that: it is this one's.
  jax.block_until_ready(_settling()())
  return time.perf_counter() - start
