"""Sweeps: a step's time against hosts, link rates and batch size.

At each point the run is planned anew. Between consecutive points with another
better choice, the turns are bisected.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib.util
import io
from typing import Any

from zenjax._src.machine import topologies
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner.choosing import answer
from zenjax._src.planner.recorded_runs import Recorded
from zenjax._src.sync.plans import Better

# Rates in Mbit/s at which a link is searched: none beyond is sold.
RATES_MBIT = tuple(10.0 * 10 ** (k / 2) for k in range(13))
_RATIO = 1.02  # The turn of a rate is found within 2 %.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
  """A step at one point of a sweep.

  Attributes:
    at: Hosts, Mbit/s, or multiple of the recorded batch.
    devices: Number of all devices.
    compute_seconds: Time of a step without any exchange.
    seconds: Time of a step as planned.
    dense_seconds: Time of a step with plain pmean.
    better: The better choice, as `Plan.better` has it.
    bounded: True beyond the trace, where unions are the largest possible.
  """

  at: float
  devices: int
  compute_seconds: float
  seconds: float
  dense_seconds: float
  better: Better
  bounded: bool

  @property
  def scaling(self) -> float:
    """Scaling factor: 1 if devices train as fast together as alone."""
    return self.compute_seconds / self.seconds

  @property
  def dense_scaling(self) -> float:
    """Scaling factor with plain pmean."""
    return self.compute_seconds / self.dense_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
  """A value from which on another choice is the better one.

  Attributes:
    at: The value.
    better: That choice.
  """

  at: float
  better: Better


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
  """One quantity varied.

  Attributes:
    points: The points asked for.
    turns: Turns in the range that was searched.
    searched: Ends of that range.
  """

  points: tuple[Point, ...]
  turns: tuple[Turn, ...]
  searched: tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Base:
  """The run and the machine that sweeps vary.

  Attributes:
    recorded: The run.
    topology: The machine.
    batch: Multiple of the recorded look-ups.
    compute_seconds: Time of a step of the recorded batch; it grows with the
      batch.
    settings: Further fields of `Question`.
  """

  recorded: Recorded
  topology: Topology
  batch: int
  compute_seconds: float
  settings: dict[str, Any]

  def point(self, at: float, topology: Topology, batch: int) -> Point:
    """Plans for one machine and batch."""
    compute_s = self.compute_seconds * batch
    asked = self.recorded.question(
      topology, batch, compute_seconds=compute_s, **self.settings
    )
    plan = answer(asked)
    return Point(
      at=at,
      devices=topology.devices,
      compute_seconds=compute_s,
      seconds=plan.seconds,
      dense_seconds=plan.dense_seconds,
      better=plan.better,
      bounded=topology.devices * batch > self.recorded.pooled,
    )

  def hosts(self, at: float) -> Point:
    """Plans for another number of hosts, on the slowest level."""
    slowest = self.topology.levels[0].name
    return self.point(
      at, self.topology.resized(**{slowest: int(at)}), self.batch
    )

  def link(self, at: float) -> Point:
    """Plans for another rate of the slowest level."""
    faster = topologies.with_rate(self.topology, at * 1e6)
    return self.point(at, faster, self.batch)

  def larger_batch(self, at: float) -> Point:
    """Plans for another multiple of the recorded batch."""
    return self.point(at, self.topology, int(at))


def over_hosts(base: Base, hosts: Sequence[int]) -> Sweep:
  """Varies the hosts, that is the devices of the outermost level."""
  return _sweep(base.hosts, hosts, _doubled(max(hosts)), _middle)


def over_links(base: Base, mbit: Sequence[float]) -> Sweep:
  """Varies the line rate of the outermost level."""
  return _sweep(base.link, mbit, RATES_MBIT, _geometric)


def over_batch(base: Base, batches: Sequence[int]) -> Sweep:
  """Varies the multiple of the recorded batch."""
  return _sweep(base.larger_batch, batches, _doubled(max(batches)), _middle)


def _doubled(most: int) -> list[int]:
  return sorted({most, *(1 << k for k in range(1, most.bit_length()))})


def _sweep(
  point: Callable[[float], Point],
  asked: Sequence[float],
  scanned: Sequence[float],
  middle: Callable[[float, float], float | None],
) -> Sweep:
  known: dict[float, Point] = {}

  def at(x: float) -> Point:
    if x not in known:
      known[x] = point(x)
    return known[x]

  along = sorted({*asked, *scanned})
  turns = []
  for low, high in zip(along, along[1:]):
    while at(low).better != at(high).better:
      turns.append(_turn(at, low, high, middle))
      low = turns[-1].at
  return Sweep(
    points=tuple(at(x) for x in sorted(set(asked))),
    turns=tuple(turns),
    searched=(along[0], along[-1]),
  )


def _turn(
  at: Callable[[float], Point],
  low: float,
  high: float,
  middle: Callable[[float, float], float | None],
) -> Turn:
  """Bisects between two that differ, for one that is unlike `low` just so."""
  while (x := middle(low, high)) is not None:
    if at(x).better == at(low).better:
      low = x
    else:
      high = x
  return Turn(at=high, better=at(high).better)


def _middle(low: float, high: float) -> float | None:
  return (low + high) // 2 if high - low > 1 else None


def _geometric(low: float, high: float) -> float | None:
  return (low * high) ** 0.5 if high / low > _RATIO else None


_PLAN, _PMEAN = "#0060a0", "#c04000"
_TURN: dict[str, Any] = dict(color="#808080", linestyle="--", linewidth=1)


def require() -> None:
  """Raises `ImportError` if matplotlib is not installed."""
  if importlib.util.find_spec("matplotlib") is None:
    raise ImportError(
      '--plot needs matplotlib, which is not installed: pip install "zenjax'
      '[plan]", or leave it out; the table says the same.'
    )


def drawn(kind: str, sweeps: Mapping[Any, Sweep], title: str) -> bytes:
  """Draws times above and scaling factors below, a column for each sweep.

  Args:
    kind: Format of the picture, say "png".
    sweeps: By `cli.Axis`.
    title: Title of the picture.
  """
  from matplotlib.figure import Figure
  from matplotlib.lines import Line2D

  figure = Figure(figsize=(11, 6.5), layout="constrained")
  grid = figure.subplots(2, len(sweeps), sharex="col", squeeze=False)
  for column, (axis, sweep) in enumerate(sweeps.items()):
    times, factors = grid[0][column], grid[1][column]
    _draw(times, sweep, lambda p: (p.seconds * 1e3, p.dense_seconds * 1e3))
    _draw(factors, sweep, lambda p: (p.scaling, p.dense_scaling))
    compute = [p.compute_seconds * 1e3 for p in sweep.points]
    at = [p.at for p in sweep.points]
    times.plot(at, compute, ":", color="black", label="without any exchange")
    times.set_ylim(0, None)
    factors.set_ylim(0, 1.05)
    factors.set_xscale("log")
    factors.set_xticks(at, [axis.tick(x) for x in at])
    factors.minorticks_off()
    factors.set_xlabel(axis.drawn)
  grid[0][0].set_ylabel("ms a step")
  grid[1][0].set_ylabel("scaling factor")
  figure.suptitle(f"Predicted, varied from {title}")
  handles, _ = grid[0][0].get_legend_handles_labels()
  if any(map(_turns, sweeps.values())):
    label = "the better choice changes"
    handles.append(Line2D([], [], label=label, **_TURN))
  figure.legend(
    handles=handles,
    loc="outside lower center",
    ncols=4,
    frameon=False,
  )
  content = io.BytesIO()
  figure.savefig(content, format=kind, dpi=120)
  return content.getvalue()


def _turns(sweep: Sweep) -> list[float]:
  """Returns the turns between its points."""
  first, last = sweep.points[0].at, sweep.points[-1].at
  return [turn.at for turn in sweep.turns if first <= turn.at <= last]


def _draw(axes: Any, sweep: Sweep, values: Any) -> None:
  at = [p.at for p in sweep.points]
  planned, dense = zip(*map(values, sweep.points))
  axes.plot(at, planned, "o-", color=_PLAN, label="planned")
  axes.plot(at, dense, "s-", color=_PMEAN, label="plain pmean")
  for x in _turns(sweep):
    axes.axvline(x, **_TURN)
  axes.spines[["top", "right"]].set_visible(False)
