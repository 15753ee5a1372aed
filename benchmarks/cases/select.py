"""`select`: what a sparsifier does on one device before anything is sent.

A gradient is added to a residual, a part of the sum is searched for elements
that are not below a threshold, and their indices are written out. The measures
are one read and one write of the vector, and `lax.top_k`.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks import library
from benchmarks import oracle
from benchmarks import table

COPY = "x + 1"
IN_PLACE = "x + 1, in place"
TOP_K = "top_k"

COLUMNS = (
  table.fact("vector\nMB", "vector_bytes", unit=1e6),
  table.fact("wanted", "wanted", ".0f"),
  table.fact("found", "found", ".0f"),
  *table.MEASURED,
  table.time_over(IN_PLACE, "over\nin place"),
  table.time_over(COPY, "over\nx + 1"),
  table.time_over(TOP_K, "over\ntop_k"),
)


@dataclasses.dataclass(frozen=True)
class Problem:
  """A device's vectors, and what it is to select of their sum."""

  residual: jax.Array  # [N]
  gradient: jax.Array  # [N]
  start: jax.Array  # [] int32, where the device's partition begins
  end: jax.Array
  k: int  # elements that all devices are to select together
  capacity: int  # room for indices

  @property
  def size(self) -> int:
    return self.residual.shape[0]

  @functools.cached_property
  def total(self) -> np.ndarray:
    """The sum that is searched, in float32 as it is kept."""
    return np.asarray(self.residual) + np.asarray(self.gradient)

  @functools.cached_property
  def threshold(self) -> float:
    """The magnitude that `k` elements of the whole vector reach."""
    magnitude = np.abs(self.total)
    return float(np.partition(magnitude, self.size - self.k)[-self.k])


@dataclasses.dataclass(frozen=True)
class Variant:
  """A way to select."""

  # `(plan, residual, gradient, start, end, threshold)` to its answer.
  run: Callable[..., Any]
  wrong: Callable[[Problem, Any], int]  # Elements that are not right.
  donates: bool = True  # Whether the answer takes the residual's memory.


def cases(options: argparse.Namespace) -> list[harness.Case]:
  """All variants for each number of devices that share the search."""
  if options.density * options.elements < 1:
    raise ValueError(
      "--density must select an element at least, got"
      f" {options.density} of {options.elements}; give one of at least"
      f" {1 / options.elements:.3g}."
    )
  size, density = options.elements, options.density
  group = f"{size:,}  {density:.2%}  1 of {{}}"
  return [
    harness.case(group.format(n), name, build, name, size, density, n)
    for n in options.parts
    for name in VARIANTS
  ]


def build(name: str, size: int, density: float, parts: int) -> harness.Built:
  """Compiles and checks one variant."""
  problem, variant = _problem(size, density, parts), VARIANTS[name]
  given, rest = [], (problem.gradient, problem.start, problem.end)
  rest = (*rest, jnp.float32(problem.threshold))
  compiled, seconds = harness.compiled(
    functools.partial(variant.run, (problem.k, problem.capacity)),
    problem.residual,
    *rest,
    donate_argnums=0 if variant.donates else (),
    keep_unused=True,
  )

  def prepare():
    given[:] = [problem.residual + 0 if variant.donates else problem.residual]
    return given[0]

  def run():
    return compiled(given.pop(), *rest)

  jax.block_until_ready(prepare())
  answer = run()
  facts = {"vector_bytes": 4.0 * size, "wanted": problem.k / parts}
  if isinstance(answer, _Found):
    facts["found"] = float(jnp.sum(answer.index < size))
  wrong = variant.wrong(problem, answer)
  return harness.Built(run, wrong, seconds, facts, prepare)


@functools.lru_cache(maxsize=1)
def _problem(size: int, density: float, parts: int) -> Problem:
  rng = np.random.default_rng(size)
  draw = lambda: jnp.asarray(rng.laplace(size=size).astype(np.float32))
  checked = library.checked_settings
  settings = checked.check(
    *("micro", "data", density),
    controller="damped",
    op="mean",
    division=library.partitions.Even,
    **dict.fromkeys(("start", "capacity", "residual_dtype", "wire_dtype")),
  )
  plan = checked.plan(np.zeros(size, np.float32), settings, parts)
  bounds = plan.division.bounds(jnp.asarray(plan.division.start()))
  middle = parts // 2
  part = bounds[middle], bounds[middle + 1]
  return Problem(draw(), draw(), *part, k=plan.k, capacity=plan.form.capacity)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Found:
  total: jax.Array  # [N]
  index: jax.Array  # [capacity] int32, N where there is none
  threshold: jax.Array  # [] float32
  square: jax.Array  # [] float32, of the residual; 0 where it is not wanted


def _exclusive(
  plan, residual, gradient, start, end, threshold, *, sampled=False, norm=False
):
  """Selects as `zenjax.sparsify.exdyna` and `zenjax.sparsify.micro` do."""
  k, capacity = plan
  if norm:
    acc, square = library.exdyna.accumulate(residual, gradient)
  else:
    acc, square = residual + gradient, jnp.float32(0)
  if sampled:
    threshold = library.thresholds.sampled(acc, start, end, k, ())
  chosen = library.element_exchange.select(acc, start, end, threshold, None)
  index = chosen.indices(jnp.int32(0), capacity, acc.shape[0])
  return _Found(acc, index, threshold, square)


def _top_k(plan, residual, gradient, *_):
  """Selects from the whole vector: it knows no partitions."""
  acc = residual + gradient
  index = lax.top_k(jnp.abs(acc), plan[0])[1]
  return _Found(acc, index, jnp.float32(0), jnp.float32(0))


def _wrong_sum(problem: Problem, answer: jax.Array) -> int:
  want = np.asarray(problem.residual) + np.float32(1)
  return oracle.count_different(np.asarray(answer), want)


def _wrong_selection(problem: Problem, answer: _Found) -> int:
  wrong = oracle.count_different(np.asarray(answer.total), problem.total)
  start, end = int(problem.start), int(problem.end)
  large = np.abs(problem.total[start:end]) >= np.float32(answer.threshold)
  # Ascending, as many as there is room for.
  want = (np.flatnonzero(large) + start)[: problem.capacity]
  index = np.asarray(answer.index)
  wrong += len(np.setxor1d(index[index < problem.size], want))
  wrong += int(np.count_nonzero(np.diff(index) < 0))
  if float(answer.square):
    square = np.sum(np.asarray(problem.residual, np.float64) ** 2)
    wrong += int(abs(float(answer.square) / square - 1) > 1e-5)
  return wrong


def _wrong_top_k(problem: Problem, answer: _Found) -> int:
  wrong = oracle.count_different(np.asarray(answer.total), problem.total)
  index = np.unique(np.asarray(answer.index))
  got = np.abs(problem.total[index])
  return wrong + problem.k - int(np.count_nonzero(got >= problem.threshold))


_SAMPLED = functools.partial(_exclusive, sampled=True)
_NORM = functools.partial(_exclusive, norm=True)
VARIANTS = {
  COPY: Variant(lambda plan, x, *_: x + 1, _wrong_sum, donates=False),
  IN_PLACE: Variant(lambda plan, x, *_: x + 1, _wrong_sum),
  "exdyna": Variant(_exclusive, _wrong_selection),
  "exdyna, norm": Variant(_NORM, _wrong_selection),
  "exdyna, sampled": Variant(_SAMPLED, _wrong_selection),
  TOP_K: Variant(_top_k, _wrong_top_k),
}
