"""One input of every kernel, its answer in NumPy, and the bytes that must move.

Rows at random in a table, as one device of 8 has them: every row's owner, and
so the answers, come from `Layout.place`, which the kernels do not use.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle
from zenjax._src.core import bitmaps
from zenjax._src.core.partition import Layout

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
  layout: Layout
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
def gradient(rows: int, width: int, density: float) -> Gradient:
  """Drawn from the number of rows, always the same."""
  rng = np.random.default_rng(rows)
  count = max(1, round(rows * density))
  found = np.sort(rng.choice(rows, count, replace=False)).astype(np.int32)
  values = oracle.values(rng, (count, width))
  table = jnp.zeros((rows, width), jnp.float32).at[found].set(values)
  layout = Layout(num_rows=rows, groups=DEVICES)
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

  bitmap = bitmaps.index(jnp.asarray(g.words))
  return Work(
    arrays=(g.table, bitmap),
    static=(g.layout, jnp.zeros(DEVICES, jnp.int32), capacity),
    wrong=wrong,
    bytes=g.values.nbytes + rows.nbytes + slots.nbytes,
  )


def merge(g: Gradient) -> Work:
  """What 8 devices send one owner: its rows' slots, of each a random half."""
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
