"""`Plan`: how every gradient of a model travels, and what that should take."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
from typing import Any

import jax

from zenjax._src.core.text import columns
from zenjax._src.machine.topologies import Topology

# A plan as JSON, and back, every field checked.


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
      " it; make it anew by `zenjax.planner.plan`."
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
      f" and lacks {wrong[1]}; make it anew by `zenjax.planner.plan`."
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


# A plan as a person reads it, alone and beside what a run has shown.


_HEADINGS = (
  "leaf",
  "shape",
  "travels",
  "exchange",
  "ms",
  "pmean ms",
  "MB",
  "runner-up",
  "ms",
  "because",
)
_COMPARED = (
  "leaf",
  "travels",
  "union planned",
  "seen",
  "ratio",
  "MB planned",
  "seen",
  "ratio",
)


# Times as many bytes as rows tell of: no error of a prediction.
_PADDED = 1.5
# As fast by this, or not worth a word.
_NOTICED = 1.05


def table(plan: Any) -> str:
  """See `Plan`."""
  devices = math.prod(n for _, n in plan.mesh)
  axes = " x ".join(f"{name} {n}" for name, n in plan.mesh)
  machine = f" on {plan.machine}" if plan.machine else ""
  lines = [f"plan for {devices} devices ({axes}){machine}"]
  open_to = [leaf for leaf in plan.leaves if _has_choice(leaf)]
  if open_to:
    lines += columns(
      [_HEADINGS, *(_line(leaf) for leaf in open_to)], last_left=True
    )
  lines += _rest([leaf for leaf in plan.leaves if not _has_choice(leaf)])
  if plan.dense_seconds:
    lines.append(_times(plan))
  lines.append(verdict(plan))
  return "\n".join(lines)


def _times(plan: Any) -> str:
  """Of a whole step, or of its exchanges where no more is known."""
  told = (
    f"{_ms(plan.seconds)} ms, with pmean alone {_ms(plan.dense_seconds)} ms"
  )
  if not plan.compute_seconds:
    return f"all exchanges: {told}; compute_seconds was not given"
  kind = "beside" if plan.overlap else "after"
  return (
    f"a step: {told}, without any exchange {_ms(plan.compute_seconds)} ms;"
    f" exchanges run {kind} the backward pass"
  )


def _has_choice(leaf: Any) -> bool:
  """Whether there was one; of a plan by hand, whether one was made."""
  return bool(leaf.runner_up) or leaf.scheme != "dense"


def _rest(leaves: Sequence[Any]) -> list[str]:
  """What has no choice: most leaves of most models."""
  if not leaves:
    return []
  count = f"{len(leaves)} leaves" if len(leaves) > 1 else leaves[0].name
  size = sum(leaf.wire_bytes for leaf in leaves) / 1e6
  least = _ms(max(leaf.seconds for leaf in leaves))
  return [
    f"pmean, {size:.3g} MB a device, at least {least} ms: {count} without"
    " another way"
  ]


def verdict(plan: Any) -> str:
  """Whether anything gains, in one sentence."""
  gain = plan.dense_seconds / plan.seconds if plan.dense_seconds else 1.0
  what = "a step is" if plan.compute_seconds else "exchanges are"
  if not plan.pays and gain > _NOTICED:
    return (
      "no leaf gains by a sparse exchange. zen_sync sums small leaves in one"
      f" buffer, and {what} predicted to be {gain:.2f}x as fast for it."
    )
  if not plan.pays:
    return "plain pmean is best for every leaf: leave zen_sync out."
  if not plan.dense_seconds:
    return "no time was predicted."
  return f"{what} predicted to be {gain:.2f}x as fast as with pmean alone."


def _line(leaf: Any) -> tuple[str, ...]:
  dense = leaf.scheme == "dense"
  return (
    leaf.name,
    "x".join(map(str, leaf.shape)) or "-",
    "pmean" if dense else leaf.choice,
    "-" if dense else str(leaf.group),
    _ms(leaf.seconds),
    _ms(leaf.dense_seconds),
    f"{leaf.wire_bytes / 1e6:.3g}",
    leaf.runner_up or "-",
    _ms(leaf.runner_up_seconds),
    leaf.reason or "-",
  )


def _ms(seconds: float) -> str:
  return f"{seconds * 1e3:.3g}"


def comparison(
  plan: Any, measured: Mapping[str, Mapping[str, float]], seconds: float | None
) -> str:
  """See `Plan.compare`."""
  if seconds is not None and not 0 < seconds < math.inf:
    raise ValueError(
      f"`seconds` must be what a step took, positive, got {seconds!r}; leave it"
      " out where it was not measured."
    )
  sparse = [leaf for leaf in plan.leaves if leaf.scheme != "dense"]
  missing = sorted(leaf.name for leaf in sparse if leaf.name not in measured)
  if missing:
    raise ValueError(
      f"`measured` must tell of every leaf that the plan sends sparse, and does"
      f" not of {missing}; give `zenjax.stats(state)` after a step with"
      " `zen_sync(plan=plan)`."
    )
  found = [_Compared(leaf, measured[leaf.name]) for leaf in sparse]
  found.sort(key=lambda c: -c.error)
  lines = columns([_COMPARED, *(c.line() for c in found)], left=2)
  padded = [c.leaf.name for c in found if c.is_padded]
  if padded:
    lines.append(
      f"more bytes than their rows need: {', '.join(padded)}; first rounds are"
      " guessed until they are pinned, as by zenjax.planner.retune"
    )
  if seconds is not None and not plan.compute_seconds:
    lines.append(
      f"a step: {_ms(seconds)} ms seen; planned were exchanges alone,"
      f" {_ms(plan.seconds)} ms, for compute_seconds was not given"
    )
  elif seconds is not None:
    lines.append(
      f"a step: {_ms(plan.seconds)} ms planned, {_ms(seconds)} ms seen,"
      f" ratio {_ratio(seconds, plan.seconds)}"
    )
  return "\n".join(lines)


class _Compared:
  """One leaf as planned and as seen."""

  def __init__(self, leaf: Any, seen: Mapping[str, float]):
    self.leaf = leaf
    self.union = seen["union_density"] * seen["num_rows"]
    self.bytes = seen["wire_bytes"]
    self.went_dense = bool(seen.get("went_dense", 0))

  @property
  def error(self) -> float:
    """How far off bytes are, as a factor."""
    if not self.leaf.wire_bytes or not self.bytes:
      return math.inf
    return abs(math.log(self.bytes / self.leaf.wire_bytes))

  @property
  def is_padded(self) -> bool:
    """Whether bytes, not rows, are more than was planned."""
    leaf = self.leaf
    if leaf.capacities is not None or self.went_dense or not leaf.union:
      return False
    rows = max(self.union / leaf.union, 1.0)
    return self.bytes > _PADDED * rows * leaf.wire_bytes

  def line(self) -> tuple[str, ...]:
    leaf = self.leaf
    planned = "assumed" if leaf.union is None else f"{leaf.union:.0f}"
    return (
      leaf.name,
      leaf.choice,
      planned,
      f"{self.union:.0f}",
      _ratio(self.union, leaf.union),
      f"{leaf.wire_bytes / 1e6:.3g}",
      f"{self.bytes / 1e6:.3g}",
      _ratio(self.bytes, leaf.wire_bytes),
    )


def _ratio(seen: float, planned: float | None) -> str:
  return f"{seen / planned:.2f}" if planned else "-"


# Of `LeafPlan.scheme`: what zen_sync calls a leaf that takes pmean.
DENSE = "dense"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlan:
  """How the gradient of one parameter travels.

  Attributes:
    name: As `zenjax.report` has it.
    shape: Of the parameter.
    dtype: Its name.
    look_ups: Rows that a device brings, of SparseRows; None of an array.
    ready: The part of a step's work until the gradient is complete.
    scheme: `"dense"` for pmean, or a sparse scheme of `zen_sync`.
    group: Sparse leaves of one scheme and one number share an exchange.
    column_groups: Of `"zen"`: 1 for hashed rows, the devices for columns.
    wire_dtype: Name of the dtype in which rows travel; None for their own.
    capacities: Rows of the first round, `(push, pull)`: as given, or enough
      for the rows that were counted; None as zen_sync guesses them.
    seconds: What its part of the exchange should take, local work included.
    dense_seconds: What pmean should take.
    wire_bytes: That a device should receive.
    rows: Nonzero rows of a device that this was chosen for, mean; None if none
      were counted, and a vocabulary's were assumed.
    fullest: Those of the device that has most.
    union: Those of all devices together.
    runner_up: What was second best, in words.
    runner_up_seconds: What that should take.
    reason: Why it was chosen, in words.

  Example:
    >>> import zenjax
    >>> zenjax.planner.LeafPlan(
    ...   name="table", shape=(4096, 8), dtype="float32", scheme="zen",
    ...   column_groups=2, wire_dtype="bfloat16",
    ... ).choice
    'zen/2 bfloat16'
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  scheme: str
  group: int = 0
  column_groups: int = 1
  wire_dtype: str | None = None
  look_ups: int | None = None
  ready: float = 1.0
  capacities: tuple[int, int] | None = None
  seconds: float = 0.0
  dense_seconds: float = 0.0
  wire_bytes: float = 0.0
  rows: float | None = None
  fullest: float | None = None
  union: float | None = None
  runner_up: str = ""
  runner_up_seconds: float = 0.0
  reason: str = ""

  @property
  def choice(self) -> str:
    """How it travels, as a table has it."""
    parts = [self.scheme]
    if self.scheme == "zen":
      parts.append(f"/{self.column_groups}")
    if self.wire_dtype:
      parts.append(f" {self.wire_dtype}")
    return "".join(parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
  """How every gradient of a model travels, for `zen_sync(plan=...)`.

  Made by `zenjax.planner.plan`. It holds for one tree of parameters on one
  mesh: with others, and with another release of JAX, `zen_sync` refuses it.

  Attributes:
    leaves: One for every parameter.
    mesh: `(axis, devices)` of what gradients are averaged over, the slowest
      link first.
    machine: Name of the topology that it was made for.
    topology: All of it, for `retune`.
    compute_seconds: Of a step on one device, without any exchange.
    seconds: Of a whole step, as planned.
    dense_seconds: Of a whole step where all leaves take pmean.
    overlap: Whether exchanges were taken to run beside the backward pass.
    wire_dtypes: To which rows might be rounded on the wire.
    memory_bytes: That the buffers of a leaf's exchange might take; None for
      any.
    jax_version: Of the JAX that made it.

  Example:
    >>> import zenjax
    >>> leaf = zenjax.planner.LeafPlan(
    ...   name="table", shape=(4096, 8), dtype="float32", scheme="zen"
    ... )
    >>> plan = zenjax.planner.Plan(leaves=(leaf,), mesh=(("data", 8),))
    >>> zenjax.planner.Plan.from_json(plan.to_json()) == plan
    True
    >>> tx = zenjax.zen_sync("data", plan=plan)
  """

  leaves: tuple[LeafPlan, ...]
  mesh: tuple[tuple[str, int], ...]
  machine: str = ""
  topology: Topology | None = None
  compute_seconds: float = 0.0
  seconds: float = 0.0
  dense_seconds: float = 0.0
  overlap: bool = False
  wire_dtypes: tuple[str, ...] = ()
  memory_bytes: float | None = None
  jax_version: str = jax.__version__

  def __post_init__(self):
    names = [leaf.name for leaf in self.leaves]
    if len(set(names)) != len(names):
      raise ValueError(
        f"`leaves` of a Plan must be named once each, got {sorted(names)}."
      )

  def __str__(self) -> str:
    return table(self)

  @property
  def by_name(self) -> dict[str, LeafPlan]:
    return {leaf.name: leaf for leaf in self.leaves}

  @property
  def devices(self) -> int:
    """All of the mesh."""
    return math.prod(n for _, n in self.mesh)

  @property
  def pays(self) -> bool:
    """Whether any leaf travels otherwise than by pmean."""
    return any(leaf.scheme != DENSE for leaf in self.leaves)

  def sparse(self, name: str, leaf: Any) -> bool:
    """For `zen_sync(sparse=...)`: whether a leaf travels sparse."""
    del leaf
    known = self.by_name.get(name)
    return known is not None and known.scheme != DENSE

  def to_json(self) -> str:
    """All of it as text, for `from_json`."""
    return dumps(self)

  @classmethod
  def from_json(cls, text: str) -> "Plan":
    """A plan that `to_json` wrote.

    Raises:
      ValueError: The text is no plan, is cut short, or of another release.
    """
    return loads(text, cls, LeafPlan)

  def compare(
    self,
    measured: Mapping[str, Mapping[str, float]],
    seconds: float | None = None,
  ) -> str:
    """A table of what was predicted beside what a run has shown.

    Args:
      measured: By leaf name, as `zenjax.stats(state)` returns it after some
        steps with this plan.
      seconds: What a whole step was measured to take.

    Returns:
      Lines of text: for each leaf that travels sparse rows and bytes predicted
      and seen with their ratio, the largest error first; the whole step's last.

    Raises:
      ValueError: `measured` lacks a leaf that travels sparse, or `seconds` is
        not positive.
    """
    return comparison(self, measured, seconds)


def require_tree(
  plan: Plan, shapes: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
  """Raises `ValueError` where a plan was made for other parameters.

  Args:
    plan: The plan.
    shapes: Of what is synchronized: `(shape, dtype)` by name.
  """
  known = {x.name: (x.shape, x.dtype) for x in plan.leaves}
  missing = sorted(set(shapes) - set(known))
  gone = sorted(set(known) - set(shapes))
  other = sorted(k for k in set(known) & set(shapes) if known[k] != shapes[k])
  told = []
  if missing:
    told.append(f"it says nothing of {missing}")
  if gone:
    told.append(f"it has {gone}, which these have not")
  if other:
    name = other[0]
    more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    told.append(
      f"{name!r}{more} is {_shape(known[name])} there and"
      f" {_shape(shapes[name])} here"
    )
  if told:
    raise ValueError(
      f"`plan` must be made for these gradients, but {'; '.join(told)}; call"
      " `zenjax.planner.plan` for the parameters of this model."
    )


def require_mesh(plan: Plan, mesh: tuple[tuple[str, int], ...]) -> None:
  """Raises `ValueError` where it was made for other devices."""
  if plan.mesh != mesh:
    raise ValueError(
      f"`plan` must be made for the devices at hand: it is for"
      f" {dict(plan.mesh)}, got {dict(mesh)}; call `zenjax.planner.plan` with a"
      " topology of these."
    )


def require_version(plan: Plan) -> None:
  """Raises `ValueError` where another JAX made it."""
  if plan.jax_version != jax.__version__:
    raise ValueError(
      f"`plan` must be made by the JAX that runs it, {jax.__version__}, whose"
      f" programs it predicts; it was made by {plan.jax_version}. Call"
      " `zenjax.planner.plan` again."
    )


def _shape(known: tuple[tuple[int, ...], str]) -> str:
  shape, dtype = known
  return f"{dtype}[{','.join(map(str, shape))}]"
