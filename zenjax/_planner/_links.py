"""What the links at hand give: every collective timed, and a line through it.

A model of a link has two numbers; libraries differ by collective, and a line
may miss what is measured. So both are kept: the line, with its error, for
numbers of devices that were not measured, and the curve for the one that was.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import time
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import numpy as np

from zenjax._link import Curve
from zenjax._planner import _fits
from zenjax._planner import _single
from zenjax._planner import _work
from zenjax._planner._topology import Topology

# Bytes that a device receives, about.
SIZES = tuple(1 << log for log in (12, 15, 18, 20, 22, 24))
# Small buffers summed at once: what each takes beside the first is found so.
_BUFFERS = (1, 9)
# Longer than the processes take to leave a barrier one after the other.
_APART_S = 1e-3


class _Point(NamedTuple):
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
    axis_name: Which axes, from the slowest link to the fastest; by default all
      that have several devices, in the mesh's order.
    sizes: Bytes that a device receives, about.
    repeats: How often each is timed.
    progress: Whether to show a bar, which needs tqdm; by default where it is
      installed and there is a terminal.

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
    ...   found = zenjax.measure_links(mesh, sizes=(4096, 65536), repeats=2)
    >>> found.levels[0].name, sorted(fit.op for fit in found.levels[0].fits)[0]
    ('data', 'all_gather')
    >>> found.levels[0].link.seconds("all_gather", 2, 8192) > 0
    True
  """
  axes = _axes(mesh, axis_name)
  sizes = _positive_sizes(sizes)
  if not isinstance(repeats, int) or repeats < 1:
    raise ValueError(f"`repeats` must be a positive integer, got {repeats!r}.")
  pairs = [(a, op, s) for a in axes for op in _single.OPS for s in sizes]
  kinds = len(_work.TABLES) + len(_work.MOVED)
  total = (len(pairs) + len(axes) * len(_BUFFERS)) * (repeats + 2)
  with _bar(progress, total + kinds * (repeats + 1)) as advance:
    points = list(_build(mesh, pairs, advance))
    points += _build_sums(mesh, axes, advance)
    together = _starting_together(mesh)
    seconds = _slowest_process(_time(points, repeats, together, advance))
    work = _work.measured(mesh, repeats, advance)
  levels = []
  for axis in axes:
    curves = _curves(points, seconds, axis)
    level = _fits.level_of(axis, mesh.shape[axis], curves)
    # Within one process zen_sync joins no buffers: see `_totals`.
    joins = jax.process_count() > 1
    each_s = _buffer_s(points, seconds, axis) if joins else 0.0
    link = dataclasses.replace(level.link, work=work, buffer_s=each_s)
    levels.append(dataclasses.replace(level, link=link))
  return Topology(
    levels=tuple(levels),
    memory_bytes=_memory_bytes(mesh),
    name=mesh.devices.flat[0].device_kind,
    source=f"measured by zenjax.measure_links, JAX {jax.__version__}",
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


def _build(mesh, pairs, advance) -> Iterator[_Point]:
  known = set()
  for axis, op, size in pairs:
    n = mesh.shape[axis]
    words = _single.words_for(op, size, n)
    if (axis, op, words) not in known:  # Small sizes may round to one.
      known.add((axis, op, words))
      run = _single.build(op, words, mesh, axis)
      yield _Point(axis, op, _single.received(op, words, n), run)
    advance()


def _build_sums(mesh, axes, advance) -> Iterator[_Point]:
  for axis in axes:
    for buffers in _BUFFERS:
      run = _single.build_sums(buffers, mesh, axis)
      yield _Point(axis, _sum_of(buffers), 0.0, run)
      advance()


def _sum_of(buffers: int) -> str:
  return f"sum of {buffers}"


def _time(
  points: Sequence[_Point],
  repeats: int,
  together: Callable[[], float],
  advance: Callable[[], Any],
) -> np.ndarray:
  """Median seconds of each point; the first round warms up."""
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
  """What returns when all processes are there, and says when that is.

  Else the next collective would be charged with what some of them still do of
  the last one. Where hosts are joined by Gloo, as those of CPUs are, every
  second one begins late and its time counts: training reaches a collective
  apart as well, and a connection whose ends do not begin at once sends one way
  after the other, for up to twice the time.
  """
  if jax.process_count() == 1:
    return time.perf_counter
  apart = _APART_S if mesh.devices.flat[0].platform == "cpu" else 0.0

  def together() -> float:
    multihost_utils.sync_global_devices("zenjax.measure_links")
    start = time.perf_counter() + apart
    if jax.process_index() % 2:
      time.sleep(apart)
    return start

  return together


def _slowest_process(seconds: np.ndarray) -> np.ndarray:
  if jax.process_count() == 1:
    return seconds
  # In microseconds, for JAX would make them float32 either way.
  scaled = (seconds * 1e6).astype(np.float32)
  every: Any = multihost_utils.process_allgather(scaled)
  return np.max(np.asarray(every), axis=0) / 1e6


def _curves(points, seconds, axis) -> dict[str, Curve]:
  curves: dict[str, list[tuple[float, float]]] = {}
  for point, s in zip(points, seconds):
    if point.axis == axis and point.op in _single.OPS:
      curves.setdefault(point.op, []).append((point.received, float(s)))
  return {op: tuple(sorted(curve)) for op, curve in curves.items()}


def _buffer_s(points, seconds, axis) -> float:
  """Of each further one; none where noise exceeds it."""
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
  """What to call after each piece of work; only the first process shows it."""
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
