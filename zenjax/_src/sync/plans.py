"""`Plan`: the way of every gradient of a model, and its predicted time."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
from typing import Annotated, Any, Literal

import jax

from zenjax._src.core import checked_json
from zenjax._src.core.checked_json import NOT_NEGATIVE
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Source
from zenjax._src.core.text import columns
from zenjax._src.machine.topologies import Topology

# The `scheme` of leaves that take pmean.
DENSE = "dense"
# The better choice of a plan and pmean by predicted times, "neither" where they
# differ by less than predictions err.
Better = Literal["plan", "pmean", "neither"]
# Nine of ten measured steps differed from their prediction by no more than this
# part (benchmarks/results/planned.json).
ERROR = 0.2

_VERSION = "zenjax_plan", 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlan:
  """How the gradient of one parameter travels.

  Attributes:
    name: Name of the leaf, as `zenjax.report` shows it.
    shape: Shape of the parameter.
    dtype: Name of its dtype.
    look_ups: Rows that a device brings as SparseRows; None for an array.
    ready: The part of a step's work until the gradient is complete.
    scheme: `"dense"` for pmean, or a sparse scheme of `zen_sync`.
    group: Sparse leaves of one scheme and one number share an exchange.
    column_groups: Column groups of `"zen"`: 1 for hashed rows, as many as
      devices for columns.
    wire_dtype: Name of the dtype in which rows travel; None for their own.
    capacities: Rows of the first round, `(push, pull)`: as given, or enough
      for the rows that were counted; None if zen_sync is to guess them.
    seconds: Predicted time of its part of the exchange, local work included.
    dense_seconds: Predicted time of pmean.
    wire_bytes: Predicted bytes that a device receives.
    rows: Mean nonzero rows of a device that this was chosen for; None if they
      were not counted but assumed as for a vocabulary.
    fullest: Nonzero rows of the device that has most.
    union: Nonzero rows of all devices together.
    runner_up: The second best way, in words.
    runner_up_seconds: Predicted time of the second best.
    sharded_bytes: Bytes that a device would receive in plain `jit` if it held
      an equal part of the table's rows, `P(axes, None)`, and the loss only
      looked rows up. It is another program, for `plan_tables`. Where look-ups
      were not counted, each nonzero row is taken to be looked up once: they are
      at least so many. None for leaves without a choice.
    sharded_seconds: Predicted time of that on the links.
    owned_bytes: Bytes that a device would receive in a step if the table were
      split by `zenjax.tables.shard`, one exchange of one round. Shown likewise;
      None also where devices lie along more than one axis.
    owned_seconds: Predicted time of that on the links.
    reason: Reason of the choice, in words.

  Example:
    >>> import zenjax
    >>> zenjax.planner.LeafPlan(
    ...   name="table", shape=(4096, 8), dtype="float32", scheme="zen",
    ...   column_groups=2, wire_dtype="bfloat16",
    ... ).choice
    'zen/2 bfloat16'
  """

  name: str
  shape: tuple[Annotated[int, NOT_NEGATIVE], ...]
  dtype: str
  scheme: str
  group: int = 0
  column_groups: int = 1
  wire_dtype: str | None = None
  look_ups: int | None = None
  ready: float = 1.0
  capacities: (
    tuple[Annotated[int, NOT_NEGATIVE], Annotated[int, NOT_NEGATIVE]] | None
  ) = None
  seconds: float = 0.0
  dense_seconds: float = 0.0
  wire_bytes: float = 0.0
  rows: float | None = None
  fullest: float | None = None
  union: float | None = None
  runner_up: str = ""
  runner_up_seconds: float = 0.0
  sharded_bytes: float | None = None
  sharded_seconds: float | None = None
  owned_bytes: float | None = None
  owned_seconds: float | None = None
  reason: str = ""

  @property
  def choice(self) -> str:
    """Scheme, column groups and wire dtype in words, say `zen/2 bfloat16`."""
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
    topology: That topology, for `retune`.
    compute_seconds: Time of a step on one device, without any exchange.
    seconds: Predicted time of a whole step.
    dense_seconds: Predicted time of a whole step where all leaves take pmean.
    overlap: True if exchanges were taken to overlap the backward pass.
    wire_dtypes: Dtypes to which rows could be rounded on the wire.
    memory_bytes: Limit on the buffers of a leaf's exchange; None for no limit.
    jax_version: Release of JAX that made it.

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
  mesh: tuple[tuple[str, Annotated[int, POSITIVE]], ...]
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
    return _table(self)

  @property
  def by_name(self) -> dict[str, LeafPlan]:
    """The leaves by their names."""
    return {leaf.name: leaf for leaf in self.leaves}

  @property
  def devices(self) -> int:
    """Number of devices of the mesh."""
    return math.prod(n for _, n in self.mesh)

  @property
  def pays(self) -> bool:
    """True if any leaf travels otherwise than by pmean."""
    return any(leaf.scheme != DENSE for leaf in self.leaves)

  @property
  def better(self) -> Better:
    """The better choice by predicted times.

    It is "neither" where the predicted gain lies within the error of
    predictions: nine of ten measured steps came within 20 %.
    """
    if not self.pays:
      return "pmean"
    return "plan" if self._gain > 1 + ERROR else "neither"

  @property
  def _gain(self) -> float:
    """Time of a step with pmean alone over that of the plan."""
    return self.dense_seconds / self.seconds if self.seconds else 1.0

  def sparse(self, name: str, leaf: Any) -> bool:
    """Returns True for leaves that travel sparse, for `zen_sync(sparse=)`."""
    del leaf
    known = self.by_name.get(name)
    return known is not None and known.scheme != DENSE

  def to_json(self) -> str:
    """Returns all of it as text, for `from_json`."""
    # Topologies have a form of their own: `asdict` leaves keys JSON lacks.
    topology = self.topology and json.loads(self.topology.to_json())
    fields = dataclasses.asdict(dataclasses.replace(self, topology=None))
    document = {**dict([_VERSION]), **fields, "topology": topology}
    return json.dumps(document, indent=2)

  @classmethod
  def from_json(cls, text: str) -> "Plan":
    """Reads a plan that `to_json` wrote.

    Raises:
      ValueError: The text is no plan, is cut short, or of another release.
    """
    source = Source("the plan", "make it anew by `zenjax.planner.plan`")
    fields = checked_json.fields(text, _VERSION, source)
    if fields.get("topology") is not None:
      fields["topology"] = Topology.from_json(json.dumps(fields["topology"]))
    return checked_json.parse(cls, fields, source)

  def compare(
    self,
    measured: Mapping[str, Mapping[str, float]],
    seconds: float | None = None,
  ) -> str:
    """Returns a table of predictions beside what a run has shown.

    Args:
      measured: By leaf name, as `zenjax.stats(state)` returns it after some
        steps with this plan.
      seconds: Measured time of a whole step.

    Returns:
      Lines of text: for each leaf that travels sparse rows and bytes predicted
      and seen with their ratio, the largest error first; the whole step's last.

    Raises:
      ValueError: `measured` lacks a leaf that travels sparse, or `seconds` is
        not positive.
    """
    return _comparison(self, measured, seconds)


def require_tree(
  plan: Plan, shapes: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
  """Raises `ValueError` where a plan was made for other parameters.

  Args:
    plan: The plan.
    shapes: `(shape, dtype)` by name of the synchronized leaves.
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


# --- a plan as text -----------------------------------------------------------

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


# More bytes than rows explain, by this factor, are no error of a prediction.
_PADDED = 1.5
# Smaller gains than this factor are not worth a word.
_NOTICED = 1.05
ERROR_TOLD = (
  f"nine of ten measured steps differed from their prediction by up to"
  f" {ERROR:.0%}"
)


def _table(plan: Plan) -> str:
  axes = " x ".join(f"{name} {n}" for name, n in plan.mesh)
  machine = f" on {plan.machine}" if plan.machine else ""
  lines = [f"plan for {plan.devices} devices ({axes}){machine}"]
  open_to = [leaf for leaf in plan.leaves if _has_choice(leaf)]
  if open_to:
    lines += columns(
      [_HEADINGS, *(_line(leaf) for leaf in open_to)], last_left=True
    )
  lines += _rest([leaf for leaf in plan.leaves if not _has_choice(leaf)])
  lines += _row_sharded(plan)
  if plan.dense_seconds:
    lines.append(_times(plan))
  lines.append(_verdict(plan))
  return "\n".join(lines)


def _times(plan: Plan) -> str:
  """Tells of a whole step, or of its exchanges where no more is known."""
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


def _has_choice(leaf: LeafPlan) -> bool:
  """Tells if there was another way, or in a plan by hand a sparse one."""
  return bool(leaf.runner_up) or leaf.scheme != DENSE


def _rest(leaves: Sequence[LeafPlan]) -> list[str]:
  """Sums up leaves without another way: most leaves of most models."""
  if not leaves:
    return []
  count = f"{len(leaves)} leaves" if len(leaves) > 1 else leaves[0].name
  size = sum(leaf.wire_bytes for leaf in leaves) / 1e6
  least = _ms(max(leaf.seconds for leaf in leaves))
  return [
    f"pmean, {size:.3g} MB a device, at least {least} ms: {count} without"
    " another way"
  ]


def _verdict(plan: Plan) -> str:
  """Says in one sentence what the plan gains."""
  gain = plan._gain
  what = "a step is" if plan.compute_seconds else "exchanges are"
  if not plan.pays and gain <= _NOTICED:
    return "plain pmean is best for every leaf: leave zen_sync out."
  if not plan.dense_seconds:
    return "no time was predicted."
  told = f"{what} predicted to be {gain:.2f}x as fast"
  if gain <= 1 + ERROR:
    return f"no difference: {told} as with pmean alone, and {ERROR_TOLD}."
  if not plan.pays:
    return (
      "no leaf gains by a sparse exchange. zen_sync sums small leaves in one"
      f" buffer, and {told} for it."
    )
  return f"{told} as with pmean alone."


def _row_sharded(plan: Plan) -> list[str]:
  """Tells what the same tables would move in another program."""
  tables = [leaf for leaf in plan.leaves if leaf.sharded_bytes is not None]
  if not tables:
    return []
  axes = [axis for axis, _ in plan.mesh]
  spec = repr(tuple(axes)) if len(axes) > 1 else repr(axes[0])
  what = f"{len(tables)} tables" if len(tables) > 1 else tables[0].name
  guessed = [leaf for leaf in tables if leaf.look_ups is None]
  least = "at least " if guessed else ""
  if any(leaf.rows is None for leaf in guessed):
    least = "by assumed densities "
  mb = lambda sizes: f"{sum(sizes) / 1e6:.3g} MB"
  there_s = sum(leaf.sharded_seconds or 0.0 for leaf in tables)
  here_s = sum(leaf.seconds for leaf in tables)
  lines = [
    f"{what} sharded by rows, P({spec}, None), in plain jit:"
    f" {least}{mb(leaf.sharded_bytes or 0.0 for leaf in tables)} a device,"
    f" {_ms(there_s)} ms; as planned"
    f" {mb(leaf.wire_bytes for leaf in tables)}, {_ms(here_s)} ms. That is"
    " another program, which `zenjax.planner.plan_tables` chooses."
  ]
  if any(leaf.owned_bytes is None for leaf in tables):
    return lines
  owned_s = sum(leaf.owned_seconds or 0.0 for leaf in tables)
  lines.append(
    f"{what} with rows at their owners, zenjax.tables.shard:"
    f" {least}{mb(leaf.owned_bytes or 0.0 for leaf in tables)} a device,"
    f" {_ms(owned_s)} ms, and 1/{plan.devices} of table and optimizer state in"
    " its memory. Another program, too."
  )
  return lines


def _line(leaf: LeafPlan) -> tuple[str, ...]:
  dense = leaf.scheme == DENSE
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


def _comparison(
  plan: Plan, measured: Mapping[str, Mapping[str, float]], seconds: float | None
) -> str:
  if seconds is not None and not 0 < seconds < math.inf:
    raise ValueError(
      f"`seconds` must be what a step took, positive, got {seconds!r}; leave it"
      " out where it was not measured."
    )
  sparse = [leaf for leaf in plan.leaves if leaf.scheme != DENSE]
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
  """One leaf as planned and as measured."""

  def __init__(self, leaf: LeafPlan, seen: Mapping[str, float]):
    self.leaf = leaf
    self.union = seen["union_density"] * seen["num_rows"]
    self.bytes = seen["wire_bytes"]
    self.went_dense = bool(seen.get("went_dense", 0))

  @property
  def error(self) -> float:
    """Distance of measured bytes from planned ones, as the log of a factor."""
    if not self.leaf.wire_bytes or not self.bytes:
      return math.inf
    return abs(math.log(self.bytes / self.leaf.wire_bytes))

  @property
  def is_padded(self) -> bool:
    """True if bytes are more than planned, and rows do not explain it."""
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
