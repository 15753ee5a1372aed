"""`kernels`: every operation against the bytes that it must move.

XLA and Pallas side by side where the platform runs both compiled. Elsewhere the
kernels are interpreted on a small table: that shows their answers, no times.
Inputs are rows at random in a table, as one device of 8 has them: every row's
owner, and so the answers, come from `Layout.place`, which no kernel uses.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks import library
from benchmarks import oracle
from benchmarks import table
from benchmarks.harness import Built
from zenjax.kernels.operations import OPERATIONS

DEVICES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
  """An operation on arrays."""

  arrays: tuple[Any, ...]  # On the device, the first arguments.
  static: tuple[Any, ...]  # What follows them, known when it is traced.
  wrong: Callable[[Any], int]  # Elements of a result that are not the answer.
  bytes: float  # That any implementation reads and writes.
  in_place: bool = False  # Whether the first array becomes the result.


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
  """`[R, D]` whose rows `found` are `values`, and where those belong."""

  table: jax.Array
  layout: library.partition.Layout
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
  layout = library.partition.Layout(num_rows=rows, groups=DEVICES)
  group, slot = (np.asarray(x) for x in layout.place(jnp.asarray(found)))
  table = jax.block_until_ready(table)
  return Gradient(table, layout, found, values, group, slot)


def mask_pack(g: Gradient) -> Work:
  """The whole gradient, read once, and its words."""

  def wrong(packed):
    different = np.asarray(packed.words) ^ g.words
    return int(np.bitwise_count(different).sum()) + int(packed.negative)

  return Work(
    arrays=(g.table,),
    static=(g.layout,),
    wrong=wrong,
    bytes=g.table.nbytes + g.words.nbytes,
  )


def _owned(g, group):
  """Places in `found` of the rows of one owner, by slot."""
  mine = np.flatnonzero(g.group == group)
  return mine[np.argsort(g.slot[mine])]


def _buffers(g, sent, capacity):
  """Slots and rows of `found`, as 8 buffers of one size hold them."""
  slots = np.full((DEVICES, capacity), g.layout.slots, np.int32)
  rows = np.zeros((DEVICES, capacity, g.values.shape[1]), np.float32)
  for i, mine in enumerate(sent):
    slots[i, : mine.size] = g.slot[mine]
    rows[i, : mine.size] = g.values[mine]
  return slots, rows


def compact(g: Gradient) -> Work:
  """The rows that are there, read; the buffers, written whole."""
  owned = [_owned(g, group) for group in range(DEVICES)]
  capacity = max(map(len, owned))
  slots, rows = _buffers(g, owned, capacity)

  def wrong(result):
    different = int(np.count_nonzero(np.asarray(result[0]) != slots))
    return different + oracle.count_different(np.asarray(result[1]), rows)

  bitmap = library.indexing.index(jnp.asarray(g.words))
  return Work(
    arrays=(g.table, bitmap),
    static=(g.layout, jnp.zeros(DEVICES, jnp.int32), capacity),
    wrong=wrong,
    bytes=g.values.nbytes + rows.nbytes + slots.nbytes,
  )


def merge(g: Gradient) -> Work:
  """8 devices send one owner the slots of its rows, of each a random half."""
  mine = _owned(g, 0)
  capacity, width = mine.size, g.values.shape[1]
  rng = np.random.default_rng(0)
  half = rng.random((DEVICES, capacity)) < 0.5
  slots, rows = _buffers(g, [mine[some] for some in half], capacity)
  sent, times = mine[half.any(axis=0)], half.sum(axis=0)
  count, want = len(sent), g.values[sent].astype(np.float64)
  want *= times[times > 0, None]

  def wrong(union):
    if int(union.total) != count:
      return capacity * width
    got = np.asarray(union.rows)
    different = np.asarray(union.slots)[:count] != g.slot[sent]
    unused = int(np.count_nonzero(got[count:]))
    return int(different.sum()) + unused + oracle.count_wrong(got[:count], want)

  received, last = int(times.sum()) * width * 4 + slots.nbytes, g.layout.slots
  return Work(
    arrays=(jnp.asarray(slots), jnp.asarray(rows)),
    static=(jnp.int32(last), last, capacity, jnp.float32),
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
  work.__name__: work for work in (mask_pack, compact, merge, expand)
}
_COPY = "copy"
# JAX's names of the platforms that kernels are for.
_PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}
# What an interpreter can do while one waits.
INTERPRETED = 4000, 128, 0.02


def _over_floor(result: harness.Result, peers: table.Peers) -> float:
  if _COPY not in peers or result.name == _COPY:
    return math.nan
  copy = peers[_COPY]
  floor = result.facts["bytes"] / copy.facts["bytes"] * copy.median_s
  return result.median_s / floor


def over_read(result: harness.Result, peers: table.Peers) -> float:
  """Time over one read of the table, or of the 8, as fast as its copy."""
  if result.name == _COPY:
    return math.nan
  reads = DEVICES if result.name.startswith("zen") else 1
  return 2 * result.median_s / table.median_s(peers, _COPY) / reads


COLUMNS = (
  table.fact("must move\nMB", "bytes", unit=1e6),
  *table.MEASURED,
  table.Column("over\nfloor", _over_floor, ".2f"),
  table.Column("over one\nread", over_read, ".2f"),
)


def cases(options: argparse.Namespace) -> list[harness.Case]:
  """A copy of the table, and every operation by all that can compute it."""
  shape = options.rows, options.width, options.density
  platform = _PLATFORMS.get(jax.default_backend())
  group = "{:,} x {}  {:.1%}".format(*shape)
  found = [harness.case(group, _COPY, _build_copy, *shape)]
  for name, operation in OPERATIONS.items():
    for way in ("xla", "pallas"):
      if way == "xla" or platform is not None:
        run = functools.partial(operation, kernels=way)
        of = f"{name} {way}"
        found.append(harness.case(group, of, _build, shape, name, run))
  if platform is not None:
    return found
  group = "{:,} x {}  interpreted: answers, no times".format(*INTERPRETED)
  for name, operation in OPERATIONS.items():
    for on in _PLATFORMS.values():
      run = functools.partial(operation.kernel(on), interpret=True)
      of = f"{name} {on}", _build, INTERPRETED, name, run, False
      found.append(harness.case(group, *of))
  return found


def _build_copy(*shape):
  """Times memory itself: a read and a write of the table."""
  gradient = draw(*shape).table
  # With a number that is not known: XLA may not see that nothing changes.
  return _checked(
    lambda g, x: g * x,
    (gradient, jnp.float32(1)),
    lambda copied: int(jnp.sum(copied != gradient)),
    {"bytes": 2.0 * gradient.nbytes},
  )


def _build(shape, name, run, timed=True):
  work = WORK[name](draw(*shape))
  facts = {"bytes": float(work.bytes)} | ({} if timed else {"interpreted": 1.0})
  call = lambda *arrays: run(*arrays, *work.static)
  # What is interpreted runs once: nothing goes round.
  in_place = work.in_place and timed
  built = _checked(call, work.arrays, work.wrong, facts, in_place=in_place)
  return built if timed else dataclasses.replace(built, run=None)


def _checked(
  function: Callable[..., Any],
  arguments: Sequence[Any],
  wrong: Callable[[Any], int],
  facts: dict[str, float],
  *,
  in_place: bool = False,
) -> Built:
  """Compiles and checks; calls are on the same arrays.

  The first goes round where it is changed `in_place`.
  """
  compiled, seconds = harness.compiled(
    function, *arguments, donate_argnums=(0,) if in_place else ()
  )
  arrays = list(arguments)

  def run():
    result = compiled(*arrays)
    if in_place:
      arrays[0] = result
    return result

  return Built(run=run, wrong=wrong(run()), compile_s=seconds, facts=facts)
