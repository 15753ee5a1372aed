"""`kernels`: every operation against the bytes that it must move.

XLA and Pallas side by side where the platform runs both compiled. Elsewhere the
kernels are interpreted on a small table: that shows their answers, no times.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp

from benchmarks import kernel_work
from benchmarks import table
from benchmarks.harness import Built
from benchmarks.harness import Case
from benchmarks.harness import Result
from benchmarks.kernel_work import Work
from benchmarks.table import Peers
from zenjax.kernels._dispatch import Operation
from zenjax.kernels.operations import OPERATIONS

_COPY = "copy"
# JAX's names of the platforms that kernels are for.
_PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}
# What an interpreter can do while one waits.
_INTERPRETED = 4000, 128


def _bytes_a_second(peers: Peers) -> float:
  copy = peers[_COPY]
  return copy.facts["bytes"] / copy.median_s


def _over_floor(result: Result, peers: Peers) -> float:
  if _COPY not in peers or result.name == _COPY:
    return float("nan")
  return result.median_s * _bytes_a_second(peers) / result.facts["bytes"]


def _over_read(result: Result, peers: Peers) -> float:
  """Time over that of a read of the table, at half the time of its copy."""
  if _COPY not in peers:
    return float("nan")
  return 2 * result.median_s / peers[_COPY].median_s


OVER_FLOOR = table.Column("over\nfloor", _over_floor, ".2f")
COLUMNS = (
  table.fact("must move\nMB", "bytes", unit=1e6),
  table.WRONG,
  table.COMPILE,
  table.TIME,
  table.SPREAD,
  OVER_FLOOR,
  table.Column("over one\nread", _over_read, ".2f"),
)


def cases(options: argparse.Namespace) -> list[Case]:
  """A copy of the table, and every operation by all that can compute it."""
  shape = options.rows, options.width
  platform = _PLATFORMS.get(jax.default_backend())
  group = f"{shape[0]:,} x {shape[1]}  {options.density:.1%}"
  found = [_case(group, _COPY, _build_copy, *shape, options.density)]
  found += [
    _case(group, f"{name} {way}", _build, *shape, options.density, name, way)
    for name in OPERATIONS
    for way in ("xla", "pallas")
    if way == "xla" or platform in OPERATIONS[name].kernels
  ]
  if platform is not None:
    return found
  group = "{:,} x {}  interpreted: answers, no times".format(*_INTERPRETED)
  return found + [
    _case(group, f"{name} {on}", _build_interpreted, name, on)
    for name, operation in OPERATIONS.items()
    for on in operation.kernels
  ]


def _case(group, name, build, *args):
  return Case(group=group, name=name, build=functools.partial(build, *args))


def _build_copy(rows, width, density):
  """What memory can do: a read and a write of the table."""
  gradient = kernel_work.gradient(rows, width, density).table
  # With a number that is not known: XLA may not see that nothing changes.
  copy, seconds = _compile(lambda g, x: g * x, (gradient, jnp.float32(1)))
  run = functools.partial(copy, gradient, jnp.float32(1))
  wrong = int(jnp.sum(run() != gradient))
  facts = {"bytes": 2.0 * gradient.nbytes}
  return Built(run=run, wrong=wrong, compile_s=seconds, facts=facts)


def _build(rows, width, density, name, way):
  work = kernel_work.WORK[name](kernel_work.gradient(rows, width, density))
  run = functools.partial(OPERATIONS[name], implementation=way)
  compiled, seconds = _compile(
    lambda *arrays: run(*arrays, *work.static), work.arrays, work.in_place
  )
  call = _Call(compiled, work)
  wrong = work.wrong(call())
  facts = {"bytes": float(work.bytes)}
  return Built(run=call, wrong=wrong, compile_s=seconds, facts=facts)


class _Call:
  """Calls on the same arrays; one that is changed in place goes round."""

  def __init__(self, compiled, work: Work):
    self._compiled = compiled
    self._arrays = list(work.arrays)
    self._in_place = work.in_place

  def __call__(self):
    result = self._compiled(*self._arrays)
    if self._in_place:
      self._arrays[0] = result
    return result


def _build_interpreted(name, platform):
  operation: Operation = OPERATIONS[name]
  work = kernel_work.WORK[name](kernel_work.gradient(*_INTERPRETED, 0.02))
  kernel = functools.partial(operation.kernel(platform), interpret=True)
  run = lambda *arrays: kernel(*arrays, *work.static)
  compiled, seconds = _compile(run, work.arrays)
  wrong = work.wrong(compiled(*work.arrays))
  facts = {"bytes": float(work.bytes), "interpreted": 1.0}
  return Built(run=None, wrong=wrong, compile_s=seconds, facts=facts)


def _compile(function, arrays, in_place=False):
  start = time.perf_counter()
  donated = (0,) if in_place else ()
  lowered = jax.jit(function, donate_argnums=donated).lower(*arrays)
  return lowered.compile(), time.perf_counter() - start
