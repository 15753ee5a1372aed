"""Measurement of links: every collective is timed, and a line fitted to it.

Both are kept: the curve for the number of devices that was measured, and the
line, with its error, for other numbers.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.machine import link_models
from zenjax._src.machine import local_work
from zenjax._src.machine.link_models import Curve
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.topologies import Fit
from zenjax._src.machine.topologies import Level
from zenjax._src.machine.topologies import Topology
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes

# Bytes that a device receives, approximately.
SIZES = tuple(1 << log for log in (12, 15, 18, 20, 22, 24))
# Small buffers summed at once: what each takes beside the first is found so.
_BUFFERS = (1, 9)
# Longer than the processes take to leave a barrier one after the other.
_APART_S = 1e-3


class _Timed(NamedTuple):
  axis: str
  op: str
  received: float
  run: Callable[[], None]


def measure_links(
  mesh: Mesh,
  axis_name: str | Sequence[str] | None = None,
  *,
  sizes: Sequence[int] = SIZES,
  repeats: int = 7,
  progress: bool | None = None,
) -> Topology:
  """Times each collective that the schemes use, along each axis of a mesh.

  All groups of an axis run at once, as they do in training. Every size of every
  collective is timed once in each repeat, so that what else the machine does
  falls on all of them alike; medians count. A line is fitted by least squares
  of the relative errors: small sizes decide the latency, large ones the
  bandwidth. In a program of several processes all of them call this, and the
  slowest one's time counts.

  Args:
    mesh: All of its devices take part; they must be idle otherwise.
    axis_name: Axes to measure, from the slowest link to the fastest; by default
      all that have several devices, in the mesh's order.
    sizes: Bytes that a device receives, approximately.
    repeats: Number of times that each is timed.
    progress: Shows a bar, which needs tqdm; by default where it is installed
      and there is a terminal.

  Returns:
    A topology with a curve and a fit of each collective on each level. Its
    links' bandwidth and latency are the median collective's, their work is what
    `measure_work` says of all devices at once, and `buffer_s` what each of nine
    small buffers took in one sum beside the first, between processes.

  Raises:
    ValueError: No such axis, or nothing to measure.
    ImportError: `progress=True` without tqdm.

  Warns:
    RuntimeWarning: A line misses a measured time by more than 30 %; it names
      the collective.

  Example:
    >>> import warnings
    >>> import zenjax
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> with warnings.catch_warnings():
    ...   warnings.simplefilter("ignore")  # Fake devices make a poor link.
    ...   found = zenjax.planner.measure_links(
    ...     mesh, sizes=(4096, 65536), repeats=2
    ...   )
    >>> found.levels[0].name, sorted(fit.op for fit in found.levels[0].fits)[0]
    ('data', 'all_gather')
    >>> found.levels[0].link.seconds("all_gather", 2, 8192) > 0
    True
  """
  axes = _axes(mesh, axis_name)
  sizes = _positive_sizes(sizes)
  if not isinstance(repeats, int) or repeats < 1:
    raise ValueError(f"`repeats` must be a positive integer, got {repeats!r}.")
  kinds = len(local_work.TABLES) + len(local_work.MOVED)
  total = len(axes) * (len(OPS) * len(sizes) + len(_BUFFERS)) * (repeats + 2)
  with _bar(progress, total + kinds * (repeats + 1)) as advance:
    points = _compiled(mesh, axes, sizes, advance)
    together = _starting_together(mesh)
    seconds = _time(points, repeats, together, advance)
    seconds = local_work.slowest_process(seconds)
    work = local_work.measured(mesh, repeats, advance)
  levels = []
  for axis in axes:
    curves = _curves(points, seconds, axis)
    level = level_of(axis, mesh.shape[axis], curves)
    # Within one process zen_sync joins no buffers.
    joins = jax.process_count() > 1
    each_s = _buffer_s(points, seconds, axis) if joins else 0.0
    link = dataclasses.replace(level.link, work=work, buffer_s=each_s)
    levels.append(dataclasses.replace(level, link=link))
  return Topology(
    levels=tuple(levels),
    memory_bytes=_memory_bytes(mesh),
    name=mesh.devices.flat[0].device_kind,
    source=f"measured by zenjax.planner.measure_links, JAX {jax.__version__}",
  )


def _axes(mesh: Mesh, axis_name) -> tuple[str, ...]:
  several = tuple(a for a in mesh.axis_names if mesh.shape[a] > 1)
  if axis_name is None:
    axes = several
  else:
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
  if not axes or len(set(axes)) != len(axes) or not set(axes) <= set(several):
    raise ValueError(
      "`axis_name` must name axes of the mesh that have several devices, each"
      f" once, got {axis_name!r} and a mesh of {dict(mesh.shape)}; one device"
      " has no link."
    )
  return axes


def _positive_sizes(sizes: Sequence[int]) -> list[int]:
  if not sizes or any(not s > 0 for s in sizes):
    raise ValueError(
      f"`sizes` must be positive numbers of bytes, got {tuple(sizes)}."
    )
  return sorted(set(sizes))


def _compiled(
  mesh: Mesh,
  axes: Sequence[str],
  sizes: Sequence[int],
  advance: Callable[[], Any],
) -> list[_Timed]:
  found = {}
  for axis in axes:
    n = mesh.shape[axis]
    for op, size in itertools.product(OPS, sizes):
      words = words_for(op, size, n)
      if (axis, op, words) not in found:  # Small sizes may round to one.
        run = build(op, words, mesh, axis)
        of = _Timed(axis, op, received(op, words, n), run)
        found[axis, op, words] = of
      advance()
    for k in _BUFFERS:
      run = build(sum_of(k), _SMALL * k, mesh, axis)
      found[axis, k] = _Timed(axis, _sum_of(k), 0.0, run)
      advance()
  return list(found.values())


def _sum_of(buffers: int) -> str:
  return f"sum of {buffers}"


def _time(
  points: Sequence[_Timed],
  repeats: int,
  together: Callable[[], float],
  advance: Callable[[], Any],
) -> np.ndarray:
  """Returns the median time of each point; the first round warms up."""
  rounds = []
  for _ in range(repeats + 1):
    times = []
    for point in points:
      start = together()
      point.run()
      times.append(time.perf_counter() - start)
      advance()
    rounds.append(times)
  return np.median(np.array(rounds[1:]), axis=0)


def _starting_together(mesh: Mesh) -> Callable[[], float]:
  """Returns a barrier of all processes, which returns the starting time.

  Without it a collective would be charged with the rest of the one before. On
  CPU, where Gloo joins hosts, every second process starts late, and its delay
  counts: processes reach a collective at different times in training too, and
  a connection whose ends do not start together sends one way after the other,
  for up to twice the time.
  """
  if jax.process_count() == 1:
    return time.perf_counter
  apart = _APART_S if mesh.devices.flat[0].platform == "cpu" else 0.0

  def together() -> float:
    multihost_utils.sync_global_devices("zenjax.planner.measure_links")
    start = time.perf_counter() + apart
    if jax.process_index() % 2:
      time.sleep(apart)
    return start

  return together


def _curves(points, seconds, axis) -> dict[str, Curve]:
  curves: dict[str, list[tuple[float, float]]] = {}
  for point, s in zip(points, seconds):
    if point.axis == axis and point.op in OPS:
      curves.setdefault(point.op, []).append((point.received, float(s)))
  return {op: tuple(sorted(curve)) for op, curve in curves.items()}


def _buffer_s(points, seconds, axis) -> float:
  """Returns the time of each further buffer; 0 where noise exceeds it."""
  of = {point.op: s for point, s in zip(points, seconds) if point.axis == axis}
  few, many = _BUFFERS
  more_s = float(of[_sum_of(many)] - of[_sum_of(few)])
  return max(more_s / (many - few), 0.0)


def _memory_bytes(mesh: Mesh) -> float | None:
  local = [
    d for d in mesh.devices.flat if d.process_index == jax.process_index()
  ]
  stats = local[0].memory_stats() or {}
  limit = stats.get("bytes_limit")
  return float(limit) if limit else None


@contextlib.contextmanager
def _bar(wanted: bool | None, total: int) -> Iterator[Callable[[], Any]]:
  """Yields a function that advances the bar, which one process shows."""
  if wanted is False or jax.process_index() > 0:
    yield lambda: None
    return
  try:
    import tqdm
  except ImportError as error:
    if wanted:
      raise ImportError(
        "`progress=True` needs tqdm, which is not installed: pip install"
        ' "zenjax[plan]", or leave `progress` out.'
      ) from error
    yield lambda: None
    return
  hidden = None if wanted is None else False  # None: where it is no terminal.
  with tqdm.tqdm(
    total=total, desc="links", unit="run", leave=False, disable=hidden
  ) as bar:
    yield bar.update


# --- single collectives -------------------------------------------------------


def _all_to_all(x: jax.Array, axis: str, n: int) -> jax.Array:
  return collectives.all_to_all(x.reshape(n, -1), (axis,))


def _all_gather(x: jax.Array, axis: str, n: int) -> jax.Array:
  del n
  return collectives.all_gather(x, (axis,))


def _all_reduce(x: jax.Array, axis: str, n: int) -> jax.Array:
  del n
  return collectives.psum(x, (axis,))


def _reduce_scatter(x: jax.Array, axis: str, n: int) -> jax.Array:
  del n
  return collectives.sum_in_shards(x, (axis,))


def _collective_permute(x: jax.Array, axis: str, n: int) -> jax.Array:
  # In pairs, as recursive doubling does: over Gloo that takes twice the time
  # of a ring's shift.
  pairs = [(i, i ^ 1) for i in range(n) if i ^ 1 < n]
  return collectives.permute(x, axis, pairs)


# Elements of a buffer that takes its latencies and no more.
_SMALL = 64


class Collective(NamedTuple):
  """A collective as the schemes use it, and the dtype of its operand."""

  apply: Callable[[jax.Array, str, int], jax.Array]
  dtype: DTypeLike


OPS: dict[str, Collective] = {
  "all_to_all": Collective(_all_to_all, jnp.uint32),
  "all_gather": Collective(_all_gather, jnp.uint32),
  "all_reduce": Collective(_all_reduce, jnp.float32),
  "reduce_scatter": Collective(_reduce_scatter, jnp.float32),
  "collective_permute": Collective(_collective_permute, jnp.uint32),
}


def sum_of(buffers: int) -> Collective:
  """Returns one sum of so many buffers, as of a tree's leaves."""

  def apply(x: jax.Array, axis: str, n: int) -> jax.Array:
    parts = jnp.split(x, buffers)
    return jnp.concatenate([_all_reduce(part, axis, n) for part in parts])

  return Collective(apply, jnp.float32)


def received(op: str, words: int, n: int) -> float:
  """Returns the bytes that a device of `n` receives, nothing twice."""
  context = Context(axes=("data",), sizes=(n,), mean=False)
  return float(received_bytes([Message(op, ("data",), words)], context))


def words_for(op: str, wanted: float, n: int) -> int:
  """Returns the operand size with which a device receives about `wanted`."""
  return max(round(wanted / received(op, n, n)), 1) * n


def build(
  op: str | Collective, words: int, mesh: Mesh, axis: str
) -> Callable[[], None]:
  """Compiles one collective along one axis, in all its groups at once.

  Args:
    op: A collective, or its name in `OPS`.
    words: Words of 32 bits in the operand of each device; a multiple of the
      devices along `axis`.
    mesh: All of its devices take part.
    axis: Axis of the collective.

  Returns:
    A function that runs it once and waits for it.
  """
  program, x = lowered(op, words, mesh, axis)
  compiled = program.compile()

  def run():
    jax.block_until_ready(compiled(x))

  return run


def lowered(
  op: str | Collective, words: int, mesh: Mesh, axis: str
) -> tuple[jax.stages.Lowered, jax.Array]:
  """Returns the program of `build`, and its operand."""
  collective = OPS[op] if isinstance(op, str) else op
  n, names = mesh.shape[axis], mesh.axis_names
  split, dtype = NamedSharding(mesh, P(*names)), collective.dtype
  shape = (*mesh.devices.shape, words)
  x = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=split)()

  def local(x: jax.Array) -> jax.Array:
    out = collective.apply(x.reshape(-1), axis, n)
    return out.reshape(*(1 for _ in names), -1)

  mapped = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=P(*names),
    out_specs=P(*names),
    check_vma=False,
  )
  return jax.jit(mapped).lower(x), x


# --- lines through measured times ---------------------------------------------


# A line that misses a measured time by more than this is worth a warning.
POOR = 0.3


def level_of(name: str, devices: int, curves: dict[str, Curve]) -> Level:
  """Makes a level from measured collectives; warns of fits that are poor.

  Args:
    name: Name of the axis.
    devices: Devices along it.
    curves: `(bytes received, seconds)` by collective, ascending.
  """
  fits = tuple(fit_line(op, curve) for op, curve in curves.items())
  poor = [f"{f.op} by {f.error:.0%}" for f in fits if f.error > POOR]
  if poor:
    warnings.warn(
      f"Links along {name!r}: a straight line misses what was measured of"
      f" {', '.join(poor)}. For {devices} devices predictions follow the"
      " measured curve, for other numbers the line. Measure on an idle machine,"
      " with more `repeats`, or with the `sizes` that matter.",
      RuntimeWarning,
      stacklevel=3,
    )
  finite = [f.bandwidth for f in fits if math.isfinite(f.bandwidth)]
  # Where time does not grow with size, what was reached is all that is known.
  reached = max(x / y for curve in curves.values() for x, y in curve)
  steps = [link_models.steps(f.op, devices) for f in fits]
  link = Link(
    bandwidth=statistics.median(finite) if finite else reached,
    latency_s=statistics.median(f.latency_s / s for f, s in zip(fits, steps)),
    curves={(op, devices): curve for op, curve in curves.items()},
  )
  return Level(name=name, devices=devices, link=link, fits=fits)


def fit_line(op: str, curve: Curve) -> Fit:
  """Fits the line of least relative squares, neither number negative.

  Raises:
    ValueError: A time that is not positive.
  """
  x, y = np.array(curve, np.float64).T
  if not np.all(y > 0):
    raise ValueError(
      f"`curve` of {op} must hold positive seconds, got {y.tolist()}."
    )
  columns = np.stack([1 / y, x / y], axis=1)
  found = []
  for used in ([0, 1], [0], [1]):
    part, *_ = np.linalg.lstsq(columns[:, used], np.ones_like(y), rcond=None)
    line = np.zeros(2)
    line[used] = part
    if np.all(line >= 0):
      found.append((np.sum((columns @ line - 1) ** 2), *line))
  _, latency, per_byte = min(found)
  error = np.max(np.abs((latency + per_byte * x) / y - 1))
  return Fit(
    op=op,
    latency_s=float(latency),
    bandwidth=1 / float(per_byte) if per_byte > 0 else math.inf,
    error=float(error),
  )


def lasting(link: Link) -> Link:
  """Returns a link as leaves meet it that share an exchange with many others.

  A burst, as of a token bucket after a pause, helps the first bytes only: all
  later ones go at the rate of the largest sizes that were timed.
  """
  curves = {key: _lasting(curve) for key, curve in link.curves.items()}
  return dataclasses.replace(link, curves=curves)


def _lasting(curve: Curve) -> Curve:
  if len(curve) == 1:
    return curve
  (x1, y1), (x2, y2) = curve[-2:]
  byte_s = max((y2 - y1) / (x2 - x1), 0.0)
  first, least = curve[0][0], min(y for _, y in curve)
  return tuple((x, max(y, least + (x - first) * byte_s)) for x, y in curve)
