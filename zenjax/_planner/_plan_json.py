"""A plan as JSON, and back, every field checked."""

import dataclasses
import json
import math
from typing import Any

from zenjax._planner._topology import Topology

_VERSION = 1
_KEY = "zenjax_plan"


def dumps(plan: Any) -> str:
  """A plan as JSON, its topology in the form that it has by itself."""
  # A topology's own form: `asdict` leaves keys that JSON has not.
  topology = plan.topology and json.loads(plan.topology.to_json())
  fields = dataclasses.asdict(dataclasses.replace(plan, topology=None))
  document = {_KEY: _VERSION, **fields, "topology": topology}
  return json.dumps(document, indent=2)


def loads(text: str, plan: Any, leaf: Any) -> Any:
  """A `plan` of `leaf`s; see `Plan.from_json`."""
  try:
    found = json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(
      f"`text` must be a plan as `Plan.to_json` writes it, and is no JSON at"
      f" line {error.lineno}: was it cut short?"
    ) from error
  if not isinstance(found, dict) or found.pop(_KEY, None) != _VERSION:
    raise ValueError(
      f"`text` must be a plan of version {_VERSION}, as `Plan.to_json` writes"
      " it; make it anew by `zenjax.plan`."
    )
  leaves = tuple(
    _of(leaf, _with_tuples(x, f"leaves[{i}]"), f"leaves[{i}]")
    for i, x in enumerate(_records(found.get("leaves")))
  )
  pairs = found.get("mesh")
  if not isinstance(pairs, list) or not all(_is_axis(x) for x in pairs):
    raise ValueError(
      f"`mesh` of a plan must be a list of [axis, devices], got {pairs!r}."
    )
  read = {
    "leaves": leaves,
    "mesh": tuple((name, devices) for name, devices in pairs),
    "topology": _topology(found.get("topology")),
    "wire_dtypes": _names(found.get("wire_dtypes", [])),
  }
  return _of(plan, {**found, **read}, "the plan")


def _topology(found: Any) -> Topology | None:
  return None if found is None else Topology.from_json(json.dumps(found))


def _names(found: Any) -> tuple[str, ...]:
  if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
    raise ValueError(
      f"`wire_dtypes` of a plan must be a list of names, got {found!r:.60}."
    )
  return tuple(found)


def _records(found: Any) -> list[dict[str, Any]]:
  if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
    raise ValueError(
      f"`leaves` of a plan must be a list of records, got {found!r:.60}."
    )
  return found


def _with_tuples(fields: dict[str, Any], where: str) -> dict[str, Any]:
  """The same, lists of whole numbers as tuples."""
  found = dict(fields)
  for name in ("shape", "capacities"):
    value = fields.get(name)
    if value is None:
      continue
    if not isinstance(value, list) or not all(map(_is_count, value)):
      raise ValueError(
        f"`{name}` of {where} must be a list of whole numbers, got {value!r}."
      )
    found[name] = tuple(value)
  return found


def _is_count(x: Any) -> bool:
  return type(x) is int and x >= 0


def _is_of(value: Any, kinds: Any) -> bool:
  if isinstance(value, bool):  # Which is an int as well.
    return kinds is bool
  if isinstance(value, float) and not math.isfinite(value):
    return False
  return isinstance(value, kinds)


def _is_axis(pair: Any) -> bool:
  if not isinstance(pair, list) or len(pair) != 2:
    return False
  name, devices = pair
  return isinstance(name, str) and _is_count(devices) and devices > 0


def _of(kind: Any, values: dict[str, Any], where: str) -> Any:
  fields = {field.name: field for field in dataclasses.fields(kind)}
  needed = {
    name
    for name, field in fields.items()
    if field.default is dataclasses.MISSING
  }
  wrong = sorted(set(values) - set(fields)), sorted(needed - set(values))
  if any(wrong):
    raise ValueError(
      f"`text` must hold the fields of a plan: {where} has unknown {wrong[0]}"
      f" and lacks {wrong[1]}; make it anew by `zenjax.plan`."
    )
  for name, value in values.items():
    if not _is_of(value, _KINDS[name]):
      raise ValueError(
        f"`{name}` of {where} must be {_named(_KINDS[name])}, got {value!r}."
      )
  return kind(**values)


_NUMBER = (int, float)
_OPTIONAL = type(None)
_KINDS: dict[str, Any] = dict(
  capacities=(tuple, _OPTIONAL),
  column_groups=int,
  compute_seconds=_NUMBER,
  dense_seconds=_NUMBER,
  dtype=str,
  fullest=(*_NUMBER, _OPTIONAL),
  group=int,
  jax_version=str,
  leaves=tuple,
  look_ups=(int, _OPTIONAL),
  machine=str,
  memory_bytes=(*_NUMBER, _OPTIONAL),
  mesh=tuple,
  name=str,
  overlap=bool,
  ready=_NUMBER,
  reason=str,
  rows=(*_NUMBER, _OPTIONAL),
  runner_up=str,
  runner_up_seconds=_NUMBER,
  scheme=str,
  seconds=_NUMBER,
  shape=tuple,
  topology=(Topology, _OPTIONAL),
  union=(*_NUMBER, _OPTIONAL),
  wire_bytes=_NUMBER,
  wire_dtype=(str, _OPTIONAL),
  wire_dtypes=tuple,
)


def _named(kinds: Any) -> str:
  kinds = kinds if isinstance(kinds, tuple) else (kinds,)
  return " or ".join(kind.__name__ for kind in kinds)
