"""Lines through what collectives were measured to take, and their errors."""

import dataclasses
import math
import statistics
import warnings

import numpy as np

from zenjax import _link
from zenjax._link import Curve
from zenjax._link import Link
from zenjax._planner._levels import Fit
from zenjax._planner._levels import Level

# A line that misses a measured time by more than this is worth a warning.
POOR = 0.3


def level_of(name: str, devices: int, curves: dict[str, Curve]) -> Level:
  """A level from measured collectives; warns of fits that are poor.

  Args:
    name: Of the axis.
    devices: Along it.
    curves: `(bytes received, seconds)` by collective, ascending.
  """
  fits = tuple(fit(op, curve) for op, curve in curves.items())
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
  steps = [_link.steps(f.op, devices) for f in fits]
  link = Link(
    bandwidth=statistics.median(finite) if finite else reached,
    latency_s=statistics.median(f.latency_s / s for f, s in zip(fits, steps)),
    curves={(op, devices): curve for op, curve in curves.items()},
  )
  return Level(name=name, devices=devices, link=link, fits=fits)


def fit(op: str, curve: Curve) -> Fit:
  """The line of least relative squares, neither number negative.

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
  """The link as it is to leaves that share an exchange with many others.

  What a link sends faster at first, as after a pause from a token bucket, it
  does once: all later bytes go at the rate of the largest that were timed.
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
