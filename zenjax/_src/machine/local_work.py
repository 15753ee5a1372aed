"""Timing of a device's own part of an exchange, by kind of work.

All devices work at once: those that share memory, as on a CPU, share its
bandwidth as in an exchange.
"""

from collections.abc import Callable, Mapping, Sequence
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

from zenjax._src.core import indexing
from zenjax._src.core.partition import Layout
from zenjax._src.machine.link_models import Work
from zenjax.kernels.reference import compact
from zenjax.kernels.reference import expand
from zenjax.kernels.reference import mask_pack
from zenjax.kernels.reference import merge

# (rows, width) of a table whose rows are found, and of rows that are moved: two
# widths each, so that what a row costs and what a byte costs come apart.
TABLES = ((50_000, 128), (200_000, 16))
MOVED = ((4_096, 128), (16_384, 16))
# Times that on accelerators, whose kernels take microseconds to start.
_LARGER = 16

# Seconds of every repetition, by what was timed.
Samples = Mapping[str, Sequence[float]]


def measure_work(mesh: Mesh | None = None, *, repeats: int = 7) -> Work:
  """Times a device's own work in an exchange: finding and moving rows.

  All devices of the mesh work at once, each on its own. Medians count; in a
  program of several processes all of them call this, and the time of the
  slowest counts. The topologies of `measure_links` have the result.

  Args:
    mesh: Its devices are timed and must be idle otherwise; by default all.
    repeats: Number of times that each kind of work is timed.

  Returns:
    The argument of `Link(work=...)`, for the operations as XLA compiles them.

  Raises:
    ValueError: `repeats` is not positive.

  Example:
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    >>> work = zenjax.planner.measure_work(mesh, repeats=1)
    >>> work.mask_byte + work.mask_row > 0, work.move_byte + work.move_row > 0
    (True, True)
  """
  if not isinstance(repeats, int) or repeats < 1:
    raise ValueError(f"`repeats` must be a positive integer, got {repeats!r}.")
  if mesh is None:
    mesh = Mesh(np.array(jax.devices()), ("device",))
  return measured(mesh, repeats, lambda: None)


def measured(mesh: Mesh, repeats: int, advance: Callable[[], Any]) -> Work:
  """Measures; calls `advance` `repeats + 1` times for each kind of work."""
  on_cpu = mesh.devices.flat[0].platform == "cpu"
  scale = 1 if on_cpu else _LARGER
  samples = {}
  for name, run in runs(mesh, mesh.size, scale).items():
    seconds = []
    for _ in range(repeats + 1):  # The first one warms up.
      start = time.perf_counter()
      run()
      seconds.append(time.perf_counter() - start)
      advance()
    samples[name] = seconds[1:]
  slowest = slowest_process(np.array(list(samples.values())))
  return Work(**fit([dict(zip(samples, slowest))], scale))


def slowest_process(seconds: np.ndarray) -> np.ndarray:
  """Returns the largest of each time over all processes."""
  if jax.process_count() == 1:
    return seconds
  # In microseconds, for JAX would make them float32 either way.
  scaled = (seconds * 1e6).astype(np.float32)
  every: Any = multihost_utils.process_allgather(scaled)
  return np.max(np.asarray(every), axis=0) / 1e6


def fit(replies: Sequence[Samples], scale: int = 1) -> dict[str, float]:
  """Returns the fields of `Work`, from the times of every host.

  Hosts may share a machine's cores: a repetition ends when the last host does.

  Args:
    replies: Seconds of each host.
    scale: The factor given to `runs`.
  """
  last = {
    name: float(np.median(np.max([reply[name] for reply in replies], axis=0)))
    for name in replies[0]
  }
  masks = [last["mask_0"] / scale, last["mask_1"] / scale]
  mask_row, mask_byte = _solve(TABLES, masks)
  # A device receives about as many rows as it packs and writes together.
  moves = [last["move_0"] / 2 / scale, last["move_1"] / 2 / scale]
  move_row, move_byte = _solve(MOVED, moves)
  return {
    "mask_byte": mask_byte,
    "mask_row": mask_row,
    "move_byte": move_byte,
    "move_row": move_row,
  }


def _solve(shapes, seconds) -> tuple[float, float]:
  """Solves for the seconds of a row and of a byte, neither negative."""
  rows = np.array([[r, r * d * 4] for r, d in shapes], float)
  by_row, by_byte = np.linalg.solve(rows, np.array(seconds))
  if by_row < 0 or by_byte < 0:  # Noise: one kind explains both.
    by_byte = seconds[0] / rows[0, 1] if by_row < 0 else 0.0
    by_row = 0.0 if by_row < 0 else seconds[1] / rows[1, 0]
  return float(by_row), float(by_byte)


def runs(
  mesh: Mesh, sources: int, scale: int = 1
) -> dict[str, Callable[[], None]]:
  """Returns functions that do each kind of work once, and wait for it.

  Args:
    mesh: All of its devices work; nothing crosses its axes.
    sources: Number of devices whose rows are merged.
    scale: Factor on the number of rows.
  """
  found: dict[str, Callable[[], None]] = {}
  for i, (rows, width) in enumerate(TABLES):
    found[f"mask_{i}"] = _mask(mesh, rows * scale, width, sources)
  for i, (rows, width) in enumerate(MOVED):
    found[f"move_{i}"] = _move(mesh, rows * scale, width, sources)
  return found


def _mask(mesh, rows, width, n) -> Callable[[], None]:
  layout = Layout(num_rows=rows, groups=n)
  find = _on_each(lambda t: (mask_pack(t, layout).words,), mesh)
  table = _copies(mesh, lambda: jnp.zeros((rows, width)))

  def run():
    jax.block_until_ready(find(table))

  return run


def _move(mesh, rows, width, n) -> Callable[[], None]:
  """Packs rows, merges as many from `n` sources, and writes them to a table."""
  each = max(1, rows // n)
  layout = Layout(num_rows=rows * 8, groups=n)
  slots = layout.slots
  rng = np.random.default_rng(0)
  drawn = [np.sort(rng.permutation(slots)[:each]) for _ in range(n)]
  ids = np.array(drawn, np.int32)

  def move(table, words, ids):
    bitmap = indexing.index(words)
    first = jnp.zeros(n, jnp.int32)
    _, packed = compact(table, bitmap, layout, first, each)
    union = merge(ids, packed, jnp.int32(slots), slots, n * each, table.dtype)
    row = layout.row(jnp.zeros_like(union.slots), union.slots)
    return expand(table, row, union.rows), union.total

  move_all = _on_each(move, mesh, donate=0)
  words = lambda: jnp.stack(
    [indexing.from_slots(jnp.array(i), slots) for i in ids]
  )
  sources = _copies(mesh, words), _copies(mesh, lambda: jnp.array(ids))
  table = _copies(mesh, lambda: jnp.zeros((rows * 8, width)))

  def run():
    nonlocal table
    table, total = jax.block_until_ready(move_all(table, *sources))

  return run


def _on_each(local: Callable, mesh: Mesh, donate=()) -> Callable:
  """Maps `local` over devices along the first dimension of its arguments."""
  split = P(mesh.axis_names)

  def one(*args):
    return jax.tree.map(lambda x: x[None], local(*(x[0] for x in args)))

  mapped = jax.shard_map(
    one, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
  )
  return jax.jit(mapped, donate_argnums=donate)


def _copies(mesh: Mesh, make: Callable[[], jax.Array]) -> jax.Array:
  """Makes the same array on every device."""
  mapped = jax.shard_map(
    lambda: make()[None],
    mesh=mesh,
    in_specs=(),
    out_specs=P(mesh.axis_names),
    check_vma=False,
  )
  return jax.jit(mapped)()
