"""Measures a machine: its links, and the work of a device in an exchange.

All devices work at the same time, as in training. Each repeat times every
program once, so that other load of the machine affects all programs alike. The
result is the median over repeats, and the maximum over processes.
"""

from collections.abc import Callable, Sequence
import itertools
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core import indexing
from zenjax._src.core.partition import Layout
from zenjax._src.machine import link_models
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work
from zenjax._src.machine.topologies import Topology
from zenjax.kernels import reference

# Runs once, and returns arrays to wait for.
Program = Callable[[], Any]

# Bytes that a device receives, approximately.
SIZES = tuple(1 << log for log in (12, 15, 18, 20, 22, 24))


# Collectives of `[n, words]` on `n` devices, as schemes use them. Each of their
# steps brings `words` to a device.
_OPS: dict[str, Callable[[jax.Array, str], jax.Array]] = {
  "all_to_all": lambda x, axis: collectives.all_to_all(x, (axis,)),
  "all_gather": lambda x, axis: collectives.all_gather(x[0], (axis,)),
  "all_reduce": lambda x, axis: collectives.psum(
    x.astype(jnp.float32), (axis,)
  ),
}


def measure_links(
  mesh: Mesh,
  axis_name: str | Sequence[str] | None = None,
  *,
  sizes: Sequence[int] = SIZES,
  repeats: int = 7,
) -> Topology:
  """Measures latency and bandwidth of the links along each mesh axis.

  Use it to plan for a machine that you have: pass the result as `topology=` to
  `planner.plan` or `planner.utility`, or save it with `to_json`. In a
  program of several processes, call it in all of them.

  It times all-to-all, all-gather and all-reduce of several sizes. A line is
  fitted to the times of each axis by least relative squares. Small sizes
  determine the latency of a message, and large ones the bandwidth.

  Args:
    mesh: The mesh to measure. All of its devices take part, and must be idle
      otherwise.
    axis_name: Axes to measure, from the slowest link to the fastest. By default
      all axes with several devices, in the order of the mesh.
    sizes: Approximate numbers of bytes that a device receives.
    repeats: How often each collective is timed.

  Returns:
    The topology, including the work that `measure_work` finds. Its `source`
    says how far the lines are from the measured times.

  Raises:
    ValueError: An axis is not in the mesh or has one device, or `sizes` or
      `repeats` is not positive.

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
  require_positive("`repeats`", repeats)
  for size in sizes:
    require_positive("Each of `sizes`", size)
  work = measure_work(mesh, repeats=repeats)
  points, programs = [], []
  for axis, op, size in itertools.product(axes, _OPS, sizes):
    steps = link_models.steps(op, mesh.shape[axis])
    words = max(round(size / 4 / steps), 1)
    points.append((steps, 4 * words * steps))
    programs.append(_collective(op, mesh, axis, words))
  all_seconds = medians(programs, repeats).reshape(len(axes), -1)
  all_points = np.array(points, float).reshape(len(axes), -1, 2)
  links, misses = [], []
  for axis, points, seconds in zip(axes, all_points, all_seconds):
    messages, received = points.T
    latency, byte_s, missed = line(messages, received, seconds)
    # If time does not grow with size, the bandwidth is at least what was
    # reached.
    bandwidth = 1 / byte_s if byte_s else float(np.max(received / seconds))
    links.append(Link(bandwidth=bandwidth, latency_s=latency, work=work))
    misses.append(f"{missed:.0%} along {axis!r}")
  stats = mesh.local_devices[0].memory_stats() or {}
  memory_bytes = stats.get("bytes_limit")
  return Topology(
    axes=axes,
    sizes=tuple(mesh.shape[axis] for axis in axes),
    links=tuple(links),
    memory_bytes=None if memory_bytes is None else float(memory_bytes),
    name=mesh.devices.flat[0].device_kind,
    source=f"measured with JAX {jax.__version__}; lines miss times by up to"
    f" {', '.join(misses)}",
  )


def _axes(mesh: Mesh, axis_name) -> tuple[str, ...]:
  axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
  if axis_name is not None:
    axes = arguments.mesh_axes(axis_name, mesh)
  if not axes or any(mesh.shape[axis] == 1 for axis in axes):
    raise ValueError(
      "`axis_name` must name axes with several devices, got"
      f" {axis_name!r} for a mesh of {dict(mesh.shape)}."
    )
  return axes


def require_positive(name: str, value: Any) -> None:
  """Raises ValueError unless `value` is a positive integer."""
  if not isinstance(value, int) or value < 1:
    raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def line(
  messages: np.ndarray, received: np.ndarray, seconds: np.ndarray
) -> tuple[float, float, float]:
  """Fits the seconds of a message and of a byte, neither of them negative.

  Args:
    messages: How many messages follow each other, for each measurement.
    received: Bytes that a device receives, for each measurement.
    seconds: The measured times.

  Returns:
    Seconds of a message, seconds of a byte, and the largest relative error.
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


def _collective(op: str, mesh: Mesh, axis: str, words: int) -> Program:
  """Compiles a collective along an axis, for all groups of devices along it."""
  shape = mesh.shape[axis], words
  x = on_each(lambda: jnp.zeros(shape, jnp.uint32), mesh)()
  compiled = on_each(lambda x: _OPS[op](x, axis), mesh).lower(x).compile()
  return lambda: compiled(x)


def medians(programs: Sequence[Program], repeats: int) -> np.ndarray:
  """Returns the median time of each program, after one round to warm up."""
  rounds = np.zeros((repeats + 1, len(programs)))
  for times in rounds:
    for i, run in enumerate(programs):
      multihost_utils.sync_global_devices("zenjax.planner.measure")
      start = time.perf_counter()
      jax.block_until_ready(run())
      times[i] = time.perf_counter() - start
  seconds = np.median(rounds[1:], axis=0).astype(np.float32)
  every: Any = multihost_utils.process_allgather(seconds[None], tiled=True)
  return np.max(every, axis=0).astype(float)


def on_each(local: Callable, mesh: Mesh, donate: Any = ()) -> Any:
  """Maps `local` over devices, along the first dimension of its arguments."""
  split = P(mesh.axis_names)

  def one(*args):
    mine = jax.tree.map(lambda x: x[0], args)
    return jax.tree.map(lambda x: x[None], local(*mine))

  mapped = jax.shard_map(
    one, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
  )
  return jax.jit(mapped, donate_argnums=donate)


# (rows, width) of tables whose nonzero rows are found, and of rows that are
# moved. Two widths each separate the cost of a row from the cost of a byte.
_TABLES = (50_000, 128), (200_000, 16)
_MOVED = (4_096, 128), (16_384, 16)
# Accelerators get larger tables by this factor, because their kernels take
# microseconds to start.
_LARGER = 16


def measure_work(mesh: Mesh | None = None, *, repeats: int = 7) -> Work:
  """Measures the work of a device in an exchange.

  The work is to find nonzero rows and to move rows, as XLA compiles it. You
  need this function only to make a `Link` by hand, because `measure_links`
  measures the same. In a program of several processes, call it in all of them.

  Args:
    mesh: The devices to time, which must be idle otherwise; by default all.
    repeats: How often each kind of work is timed.

  Returns:
    The work, for `Link(work=...)`.

  Raises:
    ValueError: `repeats` is not a positive integer.

  Example:
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    >>> work = zenjax.planner.measure_work(mesh, repeats=1)
    >>> work.mask_byte + work.mask_row > 0, work.move_byte + work.move_row > 0
    (True, True)
  """
  require_positive("`repeats`", repeats)
  mesh = mesh or Mesh(np.array(jax.devices()), ("device",))
  scale = 1 if mesh.devices.flat[0].platform == "cpu" else _LARGER
  programs = [_mask(mesh, rows * scale, width) for rows, width in _TABLES]
  programs += [_move(mesh, rows * scale, width) for rows, width in _MOVED]
  seconds = medians(programs, repeats) / scale
  shapes = np.array([*_TABLES, *_MOVED], float)
  rows, sizes = shapes[:, 0], shapes[:, 0] * shapes[:, 1] * 4
  mask_row, mask_byte, _ = line(rows[:2], sizes[:2], seconds[:2])
  # In an exchange, a device receives about as many rows as it packs and writes
  # together. Here it packs and writes `rows` each, which is twice `rows`.
  move_row, move_byte, _ = line(rows[2:], sizes[2:], seconds[2:] / 2)
  return Work(
    mask_byte=mask_byte,
    mask_row=mask_row,
    move_byte=move_byte,
    move_row=move_row,
  )


def _mask(mesh: Mesh, rows: int, width: int) -> Program:
  """Returns a program that finds the nonzero rows of a table."""
  layout = Layout(num_rows=rows, groups=mesh.size)
  find = on_each(lambda t: (reference.mask_pack(t, layout).words,), mesh)
  table = on_each(lambda: jnp.zeros((rows, width)), mesh)()
  return lambda: find(table)


def _move(mesh: Mesh, rows: int, width: int) -> Program:
  """Returns a program that packs rows, merges as many, and writes them."""
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
    start, limit = jnp.zeros(n, jnp.int32), jnp.int32(slots)
    _, packed = reference.compact(table, bitmap, layout, start, each)
    union = reference.merge(ids, packed, limit, slots, n * each, table.dtype)
    row = layout.row(jnp.zeros_like(union.slots), union.slots)
    return reference.expand(table, row, union.rows), union.total

  move_all = on_each(move, mesh, donate=0)
  table = on_each(lambda: jnp.zeros((rows * 8, width)), mesh)()
  sources = on_each(lambda: (words, ids), mesh)()

  def run():
    nonlocal table
    table, total = move_all(table, *sources)
    return table, total

  return run
