"""Levels as JSON: written, and read with every entry checked."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from zenjax import _link
from zenjax._link import Link
from zenjax._planner._levels import Fit
from zenjax._planner._levels import Level

REMEDY = "write it with `Topology.to_json`, or measure with `measure_links`"


def document(level: Level) -> dict[str, Any]:
  """A level as JSON holds it."""
  link = level.link
  finite = lambda x: x if math.isfinite(x) else None
  return {
    "name": level.name,
    "devices": level.devices,
    "bandwidth": link.bandwidth,
    "latency_s": link.latency_s,
    "buffer_s": link.buffer_s,
    "work": dataclasses.asdict(link.work),
    "curves": [
      {"op": op, "devices": n, "points": [list(p) for p in points]}
      for (op, n), points in sorted(link.curves.items())
    ],
    "fits": [
      {**dataclasses.asdict(fit), "bandwidth": finite(fit.bandwidth)}
      for fit in level.fits
    ],
  }


def parse(entry: Any, index: int) -> Level:
  """A level from its document; raises `ValueError` by what is wrong in it."""
  where = f"level {index}"
  fields = object(entry, where)
  work = object(fields.get("work", {}), f"work of {where}")
  known = {f.name for f in dataclasses.fields(_link.Work)}
  if unknown := set(work) - known:
    raise broken(f"work of {where}", f"hold only {sorted(known)}", unknown)
  curves = dict(
    _parse_curve(curve, f"curve {i} of {where}")
    for i, curve in enumerate(get(fields, "curves", list, where))
  )
  fits = get(fields, "fits", list, where)
  numbers = {k: number(work, k, f"work of {where}") for k in work}
  return Level(
    name=get(fields, "name", str, where),
    devices=get(fields, "devices", int, where),
    link=Link(
      bandwidth=number(fields, "bandwidth", where, positive=True),
      latency_s=number(fields, "latency_s", where),
      # Files of before it was known have none.
      buffer_s=number({"buffer_s": 0.0, **fields}, "buffer_s", where),
      curves=curves,
      work=_link.Work(**numbers),
    ),
    fits=tuple(
      _parse_fit(fit, f"fit {i} of {where}") for i, fit in enumerate(fits)
    ),
  )


def _parse_curve(entry: Any, where: str):
  fields = object(entry, where)
  points = []
  for point in get(fields, "points", list, where):
    pair = dict(enumerate(point)) if isinstance(point, list) else {}
    if len(pair) != 2:
      raise broken(where, "hold pairs of bytes and seconds", point)
    points.append(tuple(number(pair, i, where) for i in (0, 1)))
  sizes = [x for x, _ in points]
  if not points or sizes != sorted(set(sizes)):
    raise broken(where, "hold points of ascending bytes", points)
  op = get(fields, "op", str, where)
  if op not in _link.COLLECTIVES:
    raise broken(where, f"be of one of {list(_link.COLLECTIVES)}", op)
  return (op, get(fields, "devices", int, where)), tuple(points)


def _parse_fit(entry: Any, where: str) -> Fit:
  fields = object(entry, where)
  infinite = fields.get("bandwidth", 0) is None
  return Fit(
    op=get(fields, "op", str, where),
    latency_s=number(fields, "latency_s", where),
    bandwidth=math.inf
    if infinite
    else number(fields, "bandwidth", where, positive=True),
    error=number(fields, "error", where),
  )


def object(value: Any, where: str) -> dict[str, Any]:
  """The value; raises `ValueError` where it is no object."""
  if not isinstance(value, dict):
    raise broken(where, "be an object", value)
  return value


def get(fields: dict[str, Any], name: str, kind: Callable, where: str) -> Any:
  """A field of exactly that kind; raises `ValueError` where it is another."""
  value = fields.get(name)
  if type(value) is not kind:  # True is no number here.
    raise broken(f"{name!r} of {where}", f"be a {kind.__name__}", value)
  return value


def number(
  fields: dict[Any, Any], name: Any, where: str, positive: bool = False
) -> float:
  """A finite field, not negative; raises `ValueError` where it is none."""
  value = fields.get(name)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise broken(f"{name!r} of {where}", "be a number, not negative", value)
  if not math.isfinite(value) or value < 0:
    raise broken(f"{name!r} of {where}", "be a number, not negative", value)
  if positive and not value:
    raise broken(f"{name!r} of {where}", "be positive", value)
  return float(value)


def broken(what: str, must: str, value: Any) -> ValueError:
  """The error that names the field, its rule, its value and the remedy."""
  return ValueError(f"{what} must {must}, got {value!r}; {REMEDY}.")
