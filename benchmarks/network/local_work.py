"""A host's own part of an exchange, timed once for each kind of work.

On all hosts at once: they share the machine's cores, as in an exchange.
"""

from collections.abc import Callable
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from benchmarks.network import work
from zenjax import _bitmap
from zenjax._partition import Layout
from zenjax.kernels.compact.reference import compact
from zenjax.kernels.expand.reference import expand
from zenjax.kernels.mask_pack.reference import mask_pack
from zenjax.kernels.merge.reference import merge

_REPEATS = 9


def measure(
  mesh: Mesh, common_start: Callable[[], float]
) -> dict[str, list[float]]:
  """Seconds of every repetition on this host.

  Args:
    mesh: Of all hosts, one device each.
    common_start: Returns on all hosts at one instant, and says which.
  """
  n = mesh.size
  found: dict[str, Callable[[], object]] = {}
  for i, (rows, width) in enumerate(work.TABLES):
    found[f"mask_{i}"] = _mask(rows, width, n)
  for i, (rows, width) in enumerate(work.MOVED):
    found[f"move_{i}"] = _move(rows, width, n)
  return {name: _samples(run, common_start) for name, run in found.items()}


def _samples(run, common_start) -> list[float]:
  jax.block_until_ready(run())
  seconds = []
  for _ in range(_REPEATS):
    start = common_start()
    jax.block_until_ready(run())
    seconds.append(time.monotonic() - start)
  return seconds


def _mask(rows, width, n):
  layout = Layout(num_rows=rows, groups=n)
  find = jax.jit(lambda t: mask_pack(t, layout).words)
  table = jnp.zeros((rows, width))
  return lambda: find(table)


def _move(rows, width, n):
  """Rows packed, as many from `n` sources merged, and written to a table."""
  each = max(1, rows // n)
  layout = Layout(num_rows=rows * 8, groups=n)
  slots = layout.slots
  rng = np.random.default_rng(0)
  ids = np.sort(
    [rng.permutation(slots)[:each] for _ in range(n)], axis=1
  ).astype(np.int32)
  words = jnp.stack([_bitmap.from_slots(jnp.array(i), slots) for i in ids])
  sources = jnp.array(ids)

  def move(table, words, ids):
    bitmap = _bitmap.index(words)
    first = jnp.zeros(n, jnp.int32)
    _, packed = compact(table, bitmap, layout, first, each)
    union = merge(ids, packed, jnp.int32(slots), slots, n * each, table.dtype)
    row = layout.row(jnp.zeros_like(union.slots), union.slots)
    return expand(table, row, union.rows), union.total

  run = jax.jit(move, donate_argnums=0)
  table = jnp.zeros((rows * 8, width))

  def again():
    nonlocal table
    table, total = run(table, words, sources)
    return total

  return again
