"""Measurement of a machine: its links, and a device's own work.

All devices work at once, as in training. Every program is timed once in each
repeat, so that what else the machine does falls on all of them alike; medians
count, and in a program of several processes the slowest one's time.
"""

from collections.abc import Callable, Sequence
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import indexing
from zenjax._src.core.partition import Layout
from zenjax._src.machine import link_models
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work
from zenjax._src.machine.topologies import Topology
from zenjax.kernels.reference import compact
from zenjax.kernels.reference import expand
from zenjax.kernels.reference import mask_pack
from zenjax.kernels.reference import merge

# Bytes that a device receives, approximately.
SIZES = tuple(1 << log for log in (12, 15, 18, 20, 22, 24))


# Collectives of `[n, words]` on `n` devices as the schemes use them, and the
# words that a device receives of as many as `n * words`.
_OPS: dict[str, tuple[Callable[[jax.Array, str], jax.Array], Callable]] = {
  "all_to_all": (
    lambda x, axis: collectives.all_to_all(x, (axis,)),
    lambda n, words: (n - 1) * words,
  ),
  "all_gather": (
    lambda x, axis: collectives.all_gather(x[0], (axis,)),
    lambda n, words: (n - 1) * words,
  ),
  "all_reduce": (
    lambda x, axis: collectives.psum(x.astype(jnp.float32), (axis,)),
    lambda n, words: 2 * (n - 1) * words,
  ),
}


def measure_links(
  mesh: Mesh,
  axis_name: str | Sequence[str] | None = None,
  *,
  sizes: Sequence[int] = SIZES,
  repeats: int = 7,
) -> Topology:
  """Measures latency and bandwidth of the links along each axis of a mesh.

  All-to-all, all-gather and all-reduce of several sizes are timed. One line,
  of the least relative squares, goes through all times of an axis: small sizes
  decide the latency of a message, large ones the bandwidth. In a program of
  several processes all of them must call this.

  Args:
    mesh: All of its devices take part; they must be idle otherwise.
    axis_name: Axes to measure, from the slowest link to the fastest; by default
      all that have several devices, in the mesh's order.
    sizes: Bytes that a device receives, approximately.
    repeats: Number of times that each is timed.

  Returns:
    The topology, with the work that `measure_work` finds. `source` says by how
    much the lines miss the times.

  Raises:
    ValueError: No such axis, or nothing to measure.

  Example:
    >>> import zenjax
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> found = zenjax.planner.measure_links(
    ...   mesh, sizes=(4096, 65536), repeats=2
    ... )
    >>> found.axes, found.sizes, found.links[0].bandwidth > 0
    (('data',), (2,), True)
  """
  axes = _axes(mesh, axis_name)
  _require_positive("repeats", repeats)
  for size in sizes:
    _require_positive("sizes", size)
  work = measure_work(mesh, repeats=repeats)
  points, programs = [], []
  for axis in axes:
    n = mesh.shape[axis]
    for op, (_, received) in _OPS.items():
      for size in sizes:
        words = max(round(size / 4 / received(n, 1)), 1)
        points.append((axis, link_models.steps(op, n), 4 * received(n, words)))
        programs.append(_collective(op, mesh, axis, words))
  seconds = _medians(programs, repeats)
  links, misses = [], []
  for axis in axes:
    of_axis = [(*p[1:], s) for p, s in zip(points, seconds) if p[0] == axis]
    messages, received, times = np.array(of_axis, float).T
    latency, byte_s, missed = line(messages, received, times)
    # Where time does not grow with size, what was reached is all that is known.
    bandwidth = 1 / byte_s if byte_s else float(np.max(received / times))
    links.append(Link(bandwidth=bandwidth, latency_s=latency, work=work))
    misses.append(f"{missed:.0%} along {axis!r}")
  stats = mesh.local_devices[0].memory_stats() or {}
  return Topology(
    axes=axes,
    sizes=tuple(mesh.shape[axis] for axis in axes),
    links=tuple(links),
    memory_bytes=float(stats["bytes_limit"])
    if "bytes_limit" in stats
    else None,
    name=mesh.devices.flat[0].device_kind,
    source=f"measured with JAX {jax.__version__}; lines miss times by up to"
    f" {', '.join(misses)}",
  )


def _axes(mesh: Mesh, axis_name) -> tuple[str, ...]:
  several = tuple(a for a in mesh.axis_names if mesh.shape[a] > 1)
  axes = (axis_name,) if isinstance(axis_name, str) else axis_name
  axes = several if axes is None else tuple(axes)
  if not axes or len(set(axes)) != len(axes) or not set(axes) <= set(several):
    raise ValueError(
      "`axis_name` must name axes of the mesh that have several devices, each"
      f" once, got {axis_name!r} and a mesh of {dict(mesh.shape)}."
    )
  return axes


def _require_positive(name: str, value: Any) -> None:
  if not isinstance(value, int) or value < 1:
    raise ValueError(f"`{name}` must be positive integers, got {value!r}.")


def line(
  messages: np.ndarray, received: np.ndarray, seconds: np.ndarray
) -> tuple[float, float, float]:
  """Fits seconds of a message and of a byte, neither negative.

  Returns:
    Both, and the largest distance of a time from the line, over that time.
  """
  columns = np.stack([messages, received], axis=1) / seconds[:, None]
  fits = []
  for used in ([0, 1], [0], [1]):
    line = np.zeros(2)
    line[used] = np.linalg.lstsq(columns[:, used], np.ones(len(seconds)))[0]
    error = columns @ line - 1
    if np.all(line >= 0):
      fits.append((float(np.sum(error**2)), *line, np.abs(error).max()))
  _, message, byte, error = min(fits)
  return float(message), float(byte), float(error)


def _collective(
  op: str, mesh: Mesh, axis: str, words: int
) -> Callable[[], Any]:
  """Compiles a collective along an axis, in all its groups at once."""
  n, apply = mesh.shape[axis], _OPS[op][0]
  x = _on_each(lambda: jnp.zeros((n, words), jnp.uint32), mesh)()
  compiled = _on_each(lambda x: apply(x, axis), mesh).lower(x).compile()
  return lambda: compiled(x)


def _medians(programs: Sequence[Callable[[], Any]], repeats: int) -> np.ndarray:
  """Returns the median time of each program; the first round warms up."""
  rounds = np.zeros((repeats + 1, len(programs)))
  for times in rounds:
    for i, run in enumerate(programs):
      if jax.process_count() > 1:
        multihost_utils.sync_global_devices("zenjax.planner.measure")
      start = time.perf_counter()
      jax.block_until_ready(run())
      times[i] = time.perf_counter() - start
  seconds = np.median(rounds[1:], axis=0)
  if jax.process_count() == 1:
    return seconds
  # In microseconds, for JAX would make them float32 either way.
  scaled = (seconds * 1e6).astype(np.float32)
  every: Any = multihost_utils.process_allgather(scaled)
  return np.max(np.asarray(every), axis=0) / 1e6


def _on_each(local: Callable, mesh: Mesh, donate: Any = ()) -> Any:
  """Maps `local` over devices along the first dimension of its arguments."""
  split = P(mesh.axis_names)

  def one(*args):
    return jax.tree.map(lambda x: x[None], local(*(x[0] for x in args)))

  mapped = jax.shard_map(
    one, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
  )
  return jax.jit(mapped, donate_argnums=donate)


# (rows, width) of a table whose rows are found, and of rows that are moved: two
# widths each, so that what a row costs and what a byte costs come apart.
_TABLES = (50_000, 128), (200_000, 16)
_MOVED = (4_096, 128), (16_384, 16)
# Times that on accelerators, whose kernels take microseconds to start.
_LARGER = 16


def measure_work(mesh: Mesh | None = None, *, repeats: int = 7) -> Work:
  """Measures a device's own work in an exchange: finding and moving rows.

  In a program of several processes all of them must call this. The topologies
  of `measure_links` have the result.

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
  _require_positive("repeats", repeats)
  if mesh is None:
    mesh = Mesh(np.array(jax.devices()), ("device",))
  scale = 1 if mesh.devices.flat[0].platform == "cpu" else _LARGER
  programs = [_mask(mesh, rows * scale, width) for rows, width in _TABLES]
  programs += [_move(mesh, rows * scale, width) for rows, width in _MOVED]
  seconds = _medians(programs, repeats) / scale
  shapes = np.array([*_TABLES, *_MOVED], float)
  rows, sizes = shapes[:, 0], shapes[:, 0] * shapes[:, 1] * 4
  mask_row, mask_byte, _ = line(rows[:2], sizes[:2], seconds[:2])
  # A device receives about as many rows as it packs and writes together.
  move_row, move_byte, _ = line(rows[2:], sizes[2:], seconds[2:] / 2)
  return Work(
    mask_byte=mask_byte,
    mask_row=mask_row,
    move_byte=move_byte,
    move_row=move_row,
  )


def _mask(mesh: Mesh, rows: int, width: int) -> Callable[[], Any]:
  """Finds the nonzero rows of a table."""
  layout = Layout(num_rows=rows, groups=mesh.size)
  find = _on_each(lambda t: (mask_pack(t, layout).words,), mesh)
  table = _on_each(lambda: jnp.zeros((rows, width)), mesh)()
  return lambda: find(table)


def _move(mesh: Mesh, rows: int, width: int) -> Callable[[], Any]:
  """Packs rows, merges as many of all devices, and writes them to a table."""
  n = mesh.size
  each = max(1, rows // n)
  layout = Layout(num_rows=rows * 8, groups=n)
  slots = layout.slots
  rng = np.random.default_rng(0)
  drawn = [np.sort(rng.permutation(slots)[:each]) for _ in range(n)]
  ids = jnp.array(np.array(drawn, np.int32))
  words = jnp.stack([indexing.from_slots(i, slots) for i in ids])

  def move(table, words, ids):
    bitmap = indexing.index(words)
    _, packed = compact(table, bitmap, layout, jnp.zeros(n, jnp.int32), each)
    union = merge(ids, packed, jnp.int32(slots), slots, n * each, table.dtype)
    row = layout.row(jnp.zeros_like(union.slots), union.slots)
    return expand(table, row, union.rows), union.total

  move_all = _on_each(move, mesh, donate=0)
  table = _on_each(lambda: jnp.zeros((rows * 8, width)), mesh)()
  sources = _on_each(lambda: (words, ids), mesh)()

  def run():
    nonlocal table
    table, total = move_all(table, *sources)
    return table, total

  return run
