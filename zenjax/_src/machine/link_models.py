"""Links between devices: latency and bandwidth, or measured collectives.

A link has two numbers, as in the Zen paper, or measured times of each
collective: libraries differ by collective as much as links do.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import numbers
from typing import Any

from zenjax._src.schemes.base import Context

# Messages that follow each other in a collective of `n` devices.
_STEPS = {
  "all_gather": lambda n: n - 1,
  "all_reduce": lambda n: 2 * (n - 1),
  "all_to_all": lambda n: n - 1,
  "collective_permute": lambda n: 1,
  "reduce_scatter": lambda n: n - 1,
}

COLLECTIVES = tuple(_STEPS)

# Points `(bytes received, seconds)` of a collective, ascending.
Curve = tuple[tuple[float, float], ...]


def _check_number(what: str, value: Any) -> None:
  if not isinstance(value, numbers.Real):
    raise TypeError(f"{what} must be a number, got {value!r}.")
  if not float(value) >= 0:
    raise ValueError(
      f"{what} must be 0 or more, got {value!r}; bytes are by the second, times"
      " in seconds."
    )


def _check_curve(key: tuple[str, int], curve: Curve) -> None:
  if key[0] not in COLLECTIVES:
    raise ValueError(
      f"`curves` of a Link must be of {', '.join(COLLECTIVES)}, got {key!r}."
    )
  sizes = [received for received, _ in curve]
  if any(a >= b for a, b in zip(sizes, sizes[1:])):
    raise ValueError(
      f"`curves[{key!r}]` of a Link must be points (bytes, seconds) of"
      f" ascending bytes, got {curve!r}."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
  """Seconds of a device's own work in an exchange.

  Attributes:
    mask_byte: Finding the nonzero rows, per byte of the table.
    mask_row: Finding the nonzero rows, per row of the table.
    move_byte: Packing, merging or writing rows, per byte received.
    move_row: Packing, merging or writing rows, per row received.

  Example:
    >>> import zenjax
    >>> work = zenjax.planner.Work(mask_byte=3e-13)
    >>> link = zenjax.planner.Link(
    ...   bandwidth=12.5e9, latency_s=5e-6, work=work
    ... )
    >>> link.work.mask_byte
    3e-13
  """

  mask_byte: float = 0.0
  mask_row: float = 0.0
  move_byte: float = 0.0
  move_row: float = 0.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      _check_number(f"`{field.name}` of Work", getattr(self, field.name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
  """The connection of a device to the others.

  Attributes:
    bandwidth: Bytes a second that a device receives while it sends as many.
    latency_s: Latency of one message between two devices.
    curves: Measured times of collectives by `(name, devices)`, with all
      overheads. Bandwidth and latency stand for a collective that is missing.
    work: Time of the device's own work; by default none.
    buffer_s: Time of every buffer but the first in a collective of several, as
      `lax.pmean` of a tree: Gloo sums them one after the other.

  Example:
    >>> import zenjax
    >>> zenjax.planner.Link(bandwidth=12.5e9, latency_s=5e-6).bandwidth
    12500000000.0
  """

  bandwidth: float
  latency_s: float
  curves: Mapping[tuple[str, int], Curve] = dataclasses.field(
    default_factory=dict
  )
  work: Work = Work()
  buffer_s: float = 0.0

  def __post_init__(self):
    for name in ("bandwidth", "latency_s", "buffer_s"):
      _check_number(f"`{name}` of a Link", getattr(self, name))
    if not self.bandwidth > 0:
      raise ValueError(
        f"`bandwidth` of a Link must be positive, got {self.bandwidth!r}; it is"
        " in bytes a second."
      )
    for key, curve in self.curves.items():
      _check_curve(key, curve)

  def __hash__(self):
    curves = frozenset(self.curves.items())
    numbers = self.bandwidth, self.latency_s, self.buffer_s
    return hash((numbers, curves, self.work))

  def seconds(self, op: str, devices: int, received: float) -> float:
    """Returns the time of a collective by the bytes that a device receives."""
    curve = self.curves.get((op, devices))
    if curve:
      return _interpolate(curve, received)
    return steps(op, devices) * self.latency_s + received / self.bandwidth


def steps(op: str, devices: int) -> int:
  """Returns the number of messages that follow each other in a collective."""
  return _STEPS[op](devices)


def _interpolate(curve: Curve, received: float) -> float:
  """Interpolates; constant before the points, at the last rate beyond them."""
  if len(curve) == 1 or received <= curve[0][0]:
    return curve[0][1]
  for (x0, y0), (x1, y1) in zip(curve, curve[1:]):
    if received <= x1:
      return y0 + (y1 - y0) * (received - x0) / (x1 - x0)
  (x0, y0), (x1, y1) = curve[-2:]
  rate = max((y1 - y0) / (x1 - x0), 0.0)
  return y1 + (received - x1) * rate


# An axis, a collective along it, its devices, bytes that each receives.
Phase = tuple[str, str, int, float]

# One link for all axes, or one for each.
Links = Link | Mapping[str, Link]


def buffer_s(context: Context, link: Links) -> float:
  """Returns the time of one more buffer in a sum over all axes."""
  return sum(
    of_axis(axis, link).buffer_s
    for axis, size in zip(context.axes, context.sizes)
    if size > 1
  )


def wire_s(phases: Iterable[Phase], link: Links) -> float:
  """Returns the time of collectives, one after the other."""
  return sum(
    of_axis(axis, link).seconds(op, n, received)
    for axis, op, n, received in phases
  )


def of_axis(axis: str, link: Links) -> Link:
  """Returns the link along an axis."""
  return link if isinstance(link, Link) else link[axis]
