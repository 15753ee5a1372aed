"""A host's own part of an exchange, measured once for each kind of work.

Two widths each, so that what a row costs and what a byte costs come apart. Run
on all hosts at once: they share the machine's cores, as in an exchange.
"""

from collections.abc import Callable
import time

import jax
import jax.numpy as jnp
import numpy as np

from zenjax import _bitmap
from zenjax._partition import Layout
from zenjax.kernels.compact.reference import compact
from zenjax.kernels.expand.reference import expand
from zenjax.kernels.mask_pack.reference import mask_pack
from zenjax.kernels.merge.reference import merge

# (rows, width) of a table whose rows are found, and of rows that are moved.
_TABLES = ((50_000, 128), (200_000, 16))
_MOVED = ((4_096, 128), (16_384, 16))
_REPEATS = 7


def measure(n: int, together: Callable[[], None]) -> dict[str, float]:
  """Seconds for the fields of `zenjax.Work`.

  Args:
    n: Hosts, which are as many groups of rows.
    together: Returns at about the same time on all hosts.
  """
  masks = [_mask_s(rows, width, n, together) for rows, width in _TABLES]
  moves = [_move_s(rows, width, n, together) for rows, width in _MOVED]
  mask_row, mask_byte = _solve(_TABLES, masks)
  move_row, move_byte = _solve(_MOVED, moves)
  return {
    "mask_byte": mask_byte,
    "mask_row": mask_row,
    "move_byte": move_byte,
    "move_row": move_row,
    "fixed": _move_s(n, 8, n, together),
  }


def _solve(shapes, seconds) -> tuple[float, float]:
  """Seconds of a row and of a byte, neither negative."""
  rows = np.array([[r, r * d * 4] for r, d in shapes], float)
  by_row, by_byte = np.linalg.solve(rows, np.array(seconds))
  if by_row < 0 or by_byte < 0:  # Noise: one kind explains both.
    by_byte = seconds[0] / rows[0, 1] if by_row < 0 else 0.0
    by_row = 0.0 if by_row < 0 else seconds[1] / rows[1, 0]
  return float(by_row), float(by_byte)


def _mask_s(rows, width, n, together):
  layout = Layout(num_rows=rows, groups=n)
  find = jax.jit(lambda t: mask_pack(t, layout).words)
  return _median_s(find, (jnp.zeros((rows, width)),), together)


def _move_s(rows, width, n, together):
  """Rows packed, as many from `n` sources merged, and written to a table."""
  each = max(1, rows // n)
  layout = Layout(num_rows=rows * 8, groups=n)
  slots = layout.slots
  rng = np.random.default_rng(0)
  ids = np.sort(
    [rng.permutation(slots)[:each] for _ in range(n)], axis=1
  ).astype(np.int32)
  words = jnp.stack([_bitmap.from_slots(jnp.array(i), slots) for i in ids])

  def move(table, words, ids):
    bitmap = _bitmap.index(words)
    first = jnp.zeros(n, jnp.int32)
    _, packed = compact(table, bitmap, layout, first, each)
    union = merge(ids, packed, jnp.int32(slots), slots, n * each, table.dtype)
    row = layout.row(jnp.zeros_like(union.slots), union.slots)
    return expand(table, row, union.rows), union.total

  run = jax.jit(move, donate_argnums=0)

  def again(words, ids):
    nonlocal table
    table, total = run(table, words, ids)
    return total

  table = jnp.zeros((rows * 8, width))
  # What is received is about what is packed and again what is written.
  return _median_s(again, (words, jnp.array(ids)), together) / 2


def _median_s(f, arguments, together):
  jax.block_until_ready(f(*arguments))
  seconds = []
  for _ in range(_REPEATS):
    together()
    start = time.perf_counter()
    jax.block_until_ready(f(*arguments))
    seconds.append(time.perf_counter() - start)
  return float(np.median(seconds))
