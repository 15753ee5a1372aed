"""`kernels`: every operation against the bytes that it must move.

XLA and Pallas side by side where the platform runs both compiled. Elsewhere the
kernels are interpreted on a small table: that shows their answers, no times.
Inputs are rows at random in a table, as one device of 8 has them: every row's
owner, and so the answers, come from `Layout.place`, which no kernel uses.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks import library
from benchmarks import oracle
from benchmarks import table
from benchmarks.harness import Built
from benchmarks.harness import Case
from benchmarks.harness import Result
from benchmarks.table import Peers
from zenjax.kernels._dispatch import Operation
from zenjax.kernels.operations import OPERATIONS

DEVICES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
  """An operation on arrays.

  Attributes:
    arrays: On the device, the first arguments.
    static: What follows them, known when it is traced.
    wrong: Elements of a result that are not the answer.
    bytes: That any implementation reads and writes.
    in_place: Whether the first array becomes the result.
  """

  arrays: tuple[Any, ...]
  static: tuple[Any, ...]
  wrong: Callable[[Any], int]
  bytes: float
  in_place: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
  """`[R, D]` whose rows `found` are `values`, and where those belong."""

  table: jax.Array
  layout: library.Layout
  found: np.ndarray
  values: np.ndarray
  group: np.ndarray
  slot: np.ndarray

  @property
  def words(self) -> np.ndarray:
    words = np.zeros((DEVICES, self.layout.words), np.uint32)
    bit = np.uint32(1) << (self.slot % 32).astype(np.uint32)
    np.bitwise_or.at(words, (self.group, self.slot // 32), bit)
    return words


@functools.lru_cache(maxsize=1)
def draw(rows: int, width: int, density: float) -> Gradient:
  """Drawn from the number of rows, always the same."""
  rng = np.random.default_rng(rows)
  count = max(1, round(rows * density))
  found = np.sort(rng.choice(rows, count, replace=False)).astype(np.int32)
  values = oracle.values(rng, (count, width))
  table = jnp.zeros((rows, width), jnp.float32).at[found].set(values)
  layout = library.Layout(num_rows=rows, groups=DEVICES)
  group, slot = (np.asarray(x) for x in layout.place(jnp.asarray(found)))
  table = jax.block_until_ready(table)
  return Gradient(table, layout, found, values, group, slot)


def mask_pack(g: Gradient) -> Work:
  """The whole gradient, read once, and its words."""

  def wrong(packed):
    different = np.asarray(packed.words) ^ g.words
    return int(np.bitwise_count(different).sum()) + int(packed.negative)

  moved = g.table.nbytes + g.words.nbytes
  return Work(arrays=(g.table,), static=(g.layout,), wrong=wrong, bytes=moved)


def compact(g: Gradient) -> Work:
  """The rows that are there, read; the buffers, written whole."""
  capacity = int(np.bincount(g.group, minlength=DEVICES).max())
  slots = np.full((DEVICES, capacity), g.layout.slots, np.int32)
  rows = np.zeros((DEVICES, capacity, g.values.shape[1]), np.float32)
  for group in range(DEVICES):
    mine = np.flatnonzero(g.group == group)
    mine = mine[np.argsort(g.slot[mine])]
    slots[group, : mine.size] = g.slot[mine]
    rows[group, : mine.size] = g.values[mine]

  def wrong(result):
    different = int(np.count_nonzero(np.asarray(result[0]) != slots))
    return different + oracle.count_different(np.asarray(result[1]), rows)

  bitmap = library.bitmaps.index(jnp.asarray(g.words))
  return Work(
    arrays=(g.table, bitmap),
    static=(g.layout, jnp.zeros(DEVICES, jnp.int32), capacity),
    wrong=wrong,
    bytes=g.values.nbytes + rows.nbytes + slots.nbytes,
  )


def merge(g: Gradient) -> Work:
  """8 devices send one owner the slots of its rows, of each a random half."""
  mine = np.flatnonzero(g.group == 0)
  mine = mine[np.argsort(g.slot[mine])]
  capacity, width = mine.size, g.values.shape[1]
  slots = np.full((DEVICES, capacity), g.layout.slots, np.int32)
  rows = np.zeros((DEVICES, capacity, width), np.float32)
  total = np.zeros((capacity, width))
  sent = np.zeros(capacity, bool)
  rng = np.random.default_rng(0)
  for source in range(DEVICES):
    some = np.flatnonzero(rng.random(capacity) < 0.5)
    slots[source, : some.size] = g.slot[mine[some]]
    rows[source, : some.size] = g.values[mine[some]]
    total[some] += g.values[mine[some]]
    sent[some] = True

  def wrong(union):
    count = int(sent.sum())
    if int(union.total) != count:
      return total.size
    got = np.asarray(union.rows)
    different = np.asarray(union.slots)[:count] != g.slot[mine[sent]]
    unused = int(np.count_nonzero(got[count:]))
    return (
      int(different.sum())
      + unused
      + oracle.count_wrong(got[:count], total[sent])
    )

  received = int((slots < g.layout.slots).sum()) * width * 4 + slots.nbytes
  return Work(
    arrays=(jnp.asarray(slots), jnp.asarray(rows)),
    static=(
      jnp.int32(g.layout.slots),
      g.layout.slots,
      capacity,
      jnp.float32,
    ),  # fmt: skip
    wrong=wrong,
    bytes=received + capacity * (width * 4 + 4),
  )


def expand(g: Gradient) -> Work:
  """The rows written, read and written over the table in place."""
  sums = g.values * 2

  def wrong(table):
    want = np.zeros(table.shape, np.float32)
    want[g.found] = sums
    return oracle.count_different(np.asarray(table), want)

  # A table of its own: the first call gives it away.
  return Work(
    arrays=(g.table + 0, jnp.asarray(g.found), jnp.asarray(sums)),
    static=(),
    wrong=wrong,
    bytes=2 * sums.nbytes + g.found.nbytes,
    in_place=True,
  )


WORK: dict[str, Callable[[Gradient], Work]] = {
  "mask_pack": mask_pack,
  "compact": compact,
  "merge": merge,
  "expand": expand,
}


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
  """Times memory itself: a read and a write of the table."""
  gradient = draw(rows, width, density).table
  # With a number that is not known: XLA may not see that nothing changes.
  copy, seconds = harness.compiled(lambda g, x: g * x, gradient, jnp.float32(1))
  run = functools.partial(copy, gradient, jnp.float32(1))
  wrong = int(jnp.sum(run() != gradient))
  facts = {"bytes": 2.0 * gradient.nbytes}
  return Built(run=run, wrong=wrong, compile_s=seconds, facts=facts)


def _build(rows, width, density, name, way):
  work = WORK[name](draw(rows, width, density))
  run = functools.partial(OPERATIONS[name], implementation=way)
  compiled, seconds = harness.compiled(
    lambda *arrays: run(*arrays, *work.static),
    *work.arrays,
    donate_argnums=(0,) if work.in_place else (),
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
  work = WORK[name](draw(*_INTERPRETED, 0.02))
  kernel = functools.partial(operation.kernel(platform), interpret=True)
  run = lambda *arrays: kernel(*arrays, *work.static)
  compiled, seconds = harness.compiled(run, *work.arrays)
  wrong = work.wrong(compiled(*work.arrays))
  facts = {"bytes": float(work.bytes), "interpreted": 1.0}
  return Built(run=None, wrong=wrong, compile_s=seconds, facts=facts)
