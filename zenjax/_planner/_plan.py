"""`Plan`: how every gradient of a model travels, and what that should take."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax

from zenjax._planner import _plan_json
from zenjax._planner import _plan_text
from zenjax._planner._topology import Topology

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
    >>> zenjax.LeafPlan(
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

  Made by `zenjax.plan`. It holds for one tree of parameters on one mesh: with
  others, and with another release of JAX, `zen_sync` refuses it.

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
    >>> leaf = zenjax.LeafPlan(
    ...   name="table", shape=(4096, 8), dtype="float32", scheme="zen"
    ... )
    >>> plan = zenjax.Plan(leaves=(leaf,), mesh=(("data", 8),))
    >>> zenjax.Plan.from_json(plan.to_json()) == plan
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
    return _plan_text.table(self)

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
    return _plan_json.dumps(self)

  @classmethod
  def from_json(cls, text: str) -> "Plan":
    """A plan that `to_json` wrote.

    Raises:
      ValueError: The text is no plan, is cut short, or of another release.
    """
    return _plan_json.loads(text, cls, LeafPlan)

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
    return _plan_text.comparison(self, measured, seconds)


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
      " `zenjax.plan` for the parameters of this model."
    )


def require_mesh(plan: Plan, mesh: tuple[tuple[str, int], ...]) -> None:
  """Raises `ValueError` where it was made for other devices."""
  if plan.mesh != mesh:
    raise ValueError(
      f"`plan` must be made for the devices at hand: it is for"
      f" {dict(plan.mesh)}, got {dict(mesh)}; call `zenjax.plan` with a"
      " topology of these."
    )


def require_version(plan: Plan) -> None:
  """Raises `ValueError` where another JAX made it."""
  if plan.jax_version != jax.__version__:
    raise ValueError(
      f"`plan` must be made by the JAX that runs it, {jax.__version__}, whose"
      f" programs it predicts; it was made by {plan.jax_version}. Call"
      " `zenjax.plan` again."
    )


def _shape(known: tuple[tuple[int, ...], str]) -> str:
  shape, dtype = known
  return f"{dtype}[{','.join(map(str, shape))}]"
