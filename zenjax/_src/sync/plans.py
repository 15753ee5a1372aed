"""Defines `Plan`, which says how every parameter is held and synchronized."""

import collections
from collections.abc import Mapping
import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal

import jax

from zenjax._src.core import checked_json
from zenjax._src.core import text
from zenjax._src.schemes.registry import DENSE

# Predictions have errors, so smaller gains than this count as no difference.
ERROR = 0.2
# The better choice by predicted times.
Better = Literal["plan", "pmean", "neither"]

# The forms in which a program can hold a parameter, and train it.
REPLICATED, ROWS, ZERO1, XLA, SHARDED = FORMS = (
  "replicated",
  "replicated-sparse",
  "replicated-zero1",
  "sharded-xla",
  "sharded",
)
# Forms in which the optimizer sees arrays of all rows, touched or not.
OF_ARRAYS = (REPLICATED, XLA)
# Forms in which the optimizer of a device sees only the rows it owns.
OF_OWNERS = (ZERO1, SHARDED)
# Forms of tables that `zen_sync` synchronizes.
SYNCED = (REPLICATED, ROWS)
# Forms that are also the name of their scheme, since they have only one.
_BY_THEMSELVES = (XLA, *OF_OWNERS)
# From this many sharded tables of one width on, a plan advises to join them.
_MANY = 3

_Count = Annotated[int, checked_json.NOT_NEGATIVE]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
  """A way to hold and synchronize one parameter that a plan did not choose.

  Attributes:
    choice: The way in words, such as `"zen/2 bfloat16"`.
    form: The form of the parameter, one that `zenjax.planner.plan` lists.
    seconds: Predicted time of the leaf alone, local work included.
    wire_bytes: Predicted bytes that a device receives.
    memory_bytes: Predicted bytes of a table that a device holds; None if the
      plan was made without `tx`.

  Example:
    >>> import zenjax
    >>> zenjax.planner.Alternative(
    ...   choice="pmean", form="replicated", seconds=0.1, wire_bytes=1e6
    ... ).seconds
    0.1
  """

  choice: str
  form: str
  seconds: float
  wire_bytes: float
  memory_bytes: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlan:
  """Says how one parameter is held, and how its gradient is synchronized.

  `zenjax.planner.plan` makes it. Read it to see what was chosen, and why.

  Attributes:
    name: Name of the leaf, as `zenjax.report` shows it.
    shape: Shape of the parameter.
    dtype: Name of its dtype.
    scheme: `"dense"` for pmean, a sparse scheme of `zen_sync`, or one of the
      forms `"replicated-zero1"`, `"sharded-xla"` and `"sharded"`.
    group: Leaves of one scheme or compressor and one number share an exchange.
      For compressed leaves, it is the part of the backward pass after which
      they are sent, from 0 on.
    column_groups: Column groups of `"zen"`, a divisor of the number of
      devices: 1 for hashed rows, as many as devices for columns, or between.
    wire_dtype: Name of the dtype in which rows are sent; None for their own.
    compressor: Name of the compressor of a dense leaf, such as `"LowBit(8)"`;
      None for none.
    capacities: Buffer sizes `(push, pull)` in rows: as given, or enough for the
      rows that were counted; None for the default sizes.
    seconds: Predicted time of the leaf alone, local work included.
    dense_seconds: Predicted time of pmean.
    wire_bytes: Predicted bytes that a device receives.
    memory_bytes: Predicted bytes of a table that a device holds: rows, state,
      gradient and buffers. None for other leaves, and for plans without `tx`.
    look_ups: Lookups of a device, if the gradient is SparseRows; None for an
      array.
    rows: Mean nonzero rows of a device that the choice is based on; None if
      they were not counted.
    union: Nonzero rows of all devices together.
    others: All other ways that give the same training, the fastest first.
    reason: The reason for the choice, empty for leaves without a choice.

  Example:
    >>> import zenjax
    >>> zenjax.planner.LeafPlan(
    ...   name="table", shape=(4096, 8), dtype="float32", scheme="zen",
    ...   column_groups=2, wire_dtype="bfloat16",
    ... ).choice
    'zen/2 bfloat16'
  """

  name: str
  shape: tuple[_Count, ...]
  dtype: str
  scheme: str
  group: int = 0
  column_groups: int = 1
  wire_dtype: str | None = None
  compressor: str | None = None
  capacities: tuple[_Count, _Count] | None = None
  seconds: float = 0.0
  dense_seconds: float = 0.0
  wire_bytes: float = 0.0
  memory_bytes: float | None = None
  look_ups: int | None = None
  rows: float | None = None
  union: float | None = None
  others: tuple[Alternative, ...] = ()
  reason: str = ""

  @property
  def form(self) -> str:
    """The form of the parameter, one that `zenjax.planner.plan` lists."""
    return form_of(self.scheme)

  @property
  def choice(self) -> str:
    """Scheme, column groups and wire dtype in words: `zen/2 bfloat16`."""
    return in_words(
      self.scheme, self.column_groups, self.wire_dtype, self.compressor
    )


def form_of(scheme: str) -> str:
  """Returns the form of parameters whose gradients take a scheme."""
  if scheme in _BY_THEMSELVES:
    return scheme
  return REPLICATED if scheme == DENSE else ROWS


def in_words(
  scheme: str,
  column_groups: int,
  wire_dtype: str | None,
  compressor: str | None,
) -> str:
  """Returns a way to synchronize a leaf in words."""
  if scheme == DENSE:
    return compressor or "pmean"
  groups = f"/{column_groups}" if scheme == "zen" else ""
  return f"{scheme}{groups} {wire_dtype or ''}".strip()


def with_form(choice: str, form: str) -> str:
  """Returns a way of a table in words that name its form."""
  return f"{ROWS} ({choice})" if form == ROWS else choice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan(checked_json.Document):
  """Says how every parameter is held, and its gradient synchronized.

  `zenjax.planner.plan` makes it. Print it to see what it gains, save it with
  `to_json`, and follow it in one of three ways:

  - `zenjax.planner.set_up(plan, params, tx, mesh)` makes a whole program,
  - `zenjax.compress.all_reduce(plan, axis_name)` synchronizes gradients if the
    plan compresses some,
  - `zen_sync(axis_name, plan=plan)` synchronizes them if it does not.

  Tables that the plan shards need `set_up`.

  It is valid for one tree of parameters, one mesh and one release of JAX, and
  refused for others.

  Attributes:
    leaves: The plan of every parameter.
    mesh: `(axis, devices)` for the axes that gradients are averaged over, the
      slowest link first.
    machine: Name of the topology that it was made for.
    compute_seconds: Time of a step on one device, without any exchange.
    seconds: Predicted time of a whole step.
    dense_seconds: Predicted time of a whole step if all leaves take pmean.
    memory_bytes: Predicted bytes that a device holds, except for activations;
      None for plans without `tx`.
    dense_memory_bytes: The same if all leaves take pmean.
    limit_bytes: Limit on the memory of a device; None if none is known.
    clip_norm: Norm to which `set_up` clips gradients; None for no clipping.
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
  mesh: tuple[tuple[str, Annotated[int, checked_json.POSITIVE]], ...]
  machine: str = ""
  compute_seconds: float = 0.0
  seconds: float = 0.0
  dense_seconds: float = 0.0
  memory_bytes: float | None = None
  dense_memory_bytes: float | None = None
  limit_bytes: float | None = None
  clip_norm: float | None = None
  jax_version: str = jax.__version__

  _VERSION: ClassVar[tuple[str, int]] = "zenjax_plan", 3
  _SOURCE: ClassVar[checked_json.Source] = checked_json.Source(
    "the plan", "make it anew by `zenjax.planner.plan`"
  )

  def __post_init__(self):
    names = [leaf.name for leaf in self.leaves]
    if len(set(names)) != len(names):
      raise ValueError(
        f"`leaves` of a Plan must be named once each, got {sorted(names)}."
      )

  def __str__(self) -> str:
    axes = " x ".join(f"{name} {n}" for name, n in self.mesh)
    machine = f" on {self.machine}" if self.machine else ""
    lines = [f"plan for {self.devices} devices ({axes}){machine}"]
    lines += _table(self)
    if self.dense_seconds:
      by_xla = _sharded_by_xla_s(self)
      lines.append(
        f"{_timed(self)}: {text.ms(self.seconds)} ms, with pmean alone"
        f" {text.ms(self.dense_seconds)} ms"
        + (
          f", with tables sharded by XLA {text.ms(by_xla)} ms" if by_xla else ""
        )
      )
    if self.memory_bytes is not None and self.dense_memory_bytes is not None:
      limit = self.limit_bytes
      lines.append(
        "a device holds, without activations:"
        f" {text.size(self.memory_bytes)}, with pmean alone"
        f" {text.size(self.dense_memory_bytes)}"
        + ("" if limit is None else f"; the limit is {text.size(limit)}")
      )
    return "\n".join([*lines, *_advice(self), _verdict(self)])

  @property
  def by_name(self) -> dict[str, LeafPlan]:
    """The leaves by their names."""
    return {leaf.name: leaf for leaf in self.leaves}

  @property
  def devices(self) -> int:
    """Number of devices of the mesh."""
    return math.prod(n for _, n in self.mesh)

  @property
  def per_device(self) -> bool:
    """True if gradients are compressed, which takes a per-device step.

    `zenjax.planner.set_up` then makes a program for `zenjax.data_parallel`.
    """
    return any(leaf.compressor for leaf in self.leaves)

  @property
  def pays(self) -> bool:
    """True if any leaf is synchronized otherwise than by pmean."""
    return any(leaf.choice != "pmean" for leaf in self.leaves)

  @property
  def better(self) -> Better:
    """The better choice by predicted times.

    It is "neither" if the predicted gain is within the error of predictions,
    which is taken to be 20 %.
    """
    if not self.pays:
      return "pmean"
    if self.gain > 1 + ERROR or not self.dense_fits:
      return "plan"
    return "pmean" if self.gain < 1 / (1 + ERROR) else "neither"

  @property
  def dense_fits(self) -> bool:
    """False if a device's memory is too small for pmean alone."""
    return (self.dense_memory_bytes or 0) <= (self.limit_bytes or math.inf)

  @property
  def gain(self) -> float:
    """Predicted speedup of a step over pmean."""
    return self.dense_seconds / self.seconds if self.seconds else 1.0

  def sparse(self, name: str, leaf: Any) -> bool:
    """Returns True for leaves that are sent sparse, for `zen_sync(sparse=)`."""
    del leaf
    planned = self.by_name.get(name)
    return planned is not None and planned.scheme != DENSE

  def compare(
    self,
    measured: Mapping[str, Mapping[str, float]],
    seconds: float | None = None,
  ) -> str:
    """Returns a text that compares predictions with a run.

    Args:
      measured: What `zenjax.stats(state)` returns after some steps with this
        plan.
      seconds: Measured time of a whole step.

    Returns:
      A line for each leaf that is sent sparse, with predicted and measured rows
      and bytes and their ratio, and a line for all of them together, because
      bytes of tables that share an exchange are estimates; a line for all
      compressed leaves; and a line for the step.

    Raises:
      ValueError: `measured` lacks a leaf that is sent sparse or compressed, or
        `seconds` is not positive.
    """
    if seconds is not None and not 0 < seconds < math.inf:
      raise ValueError(
        f"`seconds` must be the positive time of a step, got {seconds!r}. Leave"
        " it out if it was not measured."
      )
    sparse = [leaf for leaf in self.leaves if leaf.form not in OF_ARRAYS]
    missing = sorted(leaf.name for leaf in sparse if leaf.name not in measured)
    if missing:
      raise ValueError(
        f"`measured` lacks {missing}, which the plan sends sparse. Give"
        " `zenjax.stats(state)` after a step with the plan."
      )
    rows: list[tuple[str, ...]] = [_COMPARED]
    for leaf in sparse:
      seen = measured[leaf.name]
      union = seen["union_density"] * seen["num_rows"]
      rows.append(
        (
          leaf.name,
          leaf.choice,
          "assumed" if leaf.union is None else f"{leaf.union:.0f}",
          f"{union:.0f}",
          _ratio(union, leaf.union),
          f"{leaf.wire_bytes / 1e6:.3g}",
          f"{seen['wire_bytes'] / 1e6:.3g}",
          _ratio(seen["wire_bytes"], leaf.wire_bytes),
        )
      )
    if len(sparse) > 1:
      both = (
        sum(leaf.wire_bytes for leaf in sparse),
        sum(measured[leaf.name]["wire_bytes"] for leaf in sparse),
      )
      mb = [f"{nbytes / 1e6:.3g}" for nbytes in both]
      ratio = _ratio(both[1], both[0])
      rows.append(("all tables", "", "", "", "", *mb, ratio))
    lines = text.columns(rows, left=2) if sparse else []
    lines += self._compared_compressed(measured)
    planned = text.ms(self.seconds)
    if seconds is not None and self.compute_seconds:
      ratio = _ratio(seconds, self.seconds)
      lines.append(
        f"a step: {planned} ms planned, {text.ms(seconds)} ms seen, ratio"
        f" {ratio}"
      )
    elif seconds is not None:
      lines.append(
        f"a step: {text.ms(seconds)} ms seen. compute_seconds was not given:"
        f" only exchanges were planned, {planned} ms"
      )
    return "\n".join(lines)

  def _compared_compressed(
    self, measured: Mapping[str, Mapping[str, float]]
  ) -> list[str]:
    """Compares the bytes of all compressed leaves."""
    planned = [leaf.wire_bytes for leaf in self.leaves if leaf.compressor]
    seen = [
      known["wire_bytes"]
      for name, known in measured.items()
      if name.partition(" ")[0] == "compressed" and name not in self.by_name
    ]
    if not planned:
      return []
    if not seen:
      raise ValueError(
        "`measured` lacks the compressed leaves of the plan. Give"
        " `zenjax.stats(state)` after a step with"
        " `zenjax.compress.all_reduce(plan, axis_name)`."
      )
    sizes = f"{text.size(sum(planned))} planned, {text.size(sum(seen))} seen"
    ratio = _ratio(sum(seen), sum(planned))
    count = text.count(len(planned), "compressed gradient")
    return [f"{count}: {sizes}, ratio {ratio}"]


def _table(plan: Plan) -> list[str]:
  """Returns a table of leaves, and a line for the leaves without a choice."""
  # Most leaves of most models have no choice.
  leaves, lines = plan.leaves, []
  shown = [x for x in leaves if x.reason or x.choice != "pmean"]
  if shown:
    rows = [_HEADINGS, *map(_line, shown)]
    if plan.memory_bytes is None:  # Made without `tx`.
      rows = [(*row[:6], row[-1]) for row in rows]
    lines += text.columns(rows, last_left=True)
  others = [x for x in leaves if x not in shown]
  if others:
    size = text.size(sum(leaf.wire_bytes for leaf in others))
    what = f"{len(others)} other leaves" if others[1:] else others[0].name
    lines.append(f"pmean, the only way: {what}, {size} received")
  return lines


def require_tree(
  plan: Plan, shapes: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
  """Raises `ValueError` if a plan was made for other parameters.

  Args:
    plan: The plan.
    shapes: `(shape, dtype)` by name of the synchronized leaves.
  """
  planned = {x.name: (x.shape, x.dtype) for x in plan.leaves}
  require_same(planned, shapes, "`plan` was made for other gradients")


def require_same(
  planned: Mapping[str, tuple[tuple[int, ...], str]],
  shapes: Mapping[str, tuple[tuple[int, ...], str]],
  what: str,
) -> None:
  """Raises `ValueError` if leaves are not as planned.

  Args:
    planned: `(shape, dtype)` of the planned leaves, by name.
    shapes: The same of the leaves that came.
    what: The beginning of the message.
  """
  if planned == dict(shapes):
    return
  described = lambda x: f"{x[1]}[{','.join(map(str, x[0]))}]" if x else "none"
  names = sorted({*planned, *shapes})
  names = [name for name in names if planned.get(name) != shapes.get(name)]
  more = f" ({len(names)} such leaves)" if len(names) > 1 else ""
  remedy = "Make a new plan for these parameters."
  if set(shapes) < set(planned):
    remedy = (
      "A plan is for all parameters of a model, so `optax.partition` and"
      " `optax.masked` must not leave some of them out."
    )
  raise ValueError(
    f"{what}: {names[0]!r} is {described(planned.get(names[0]))} there and"
    f" {described(shapes.get(names[0]))} here{more}. {remedy}"
  )


def require_mesh(plan: Plan, mesh: tuple[tuple[str, int], ...]) -> None:
  """Raises `ValueError` if a plan was made for other devices."""
  if plan.mesh != mesh:
    axes = tuple([name for name, _ in mesh])
    raise ValueError(
      f"`plan` was made for {dict(plan.mesh)}, but it is used on {dict(mesh)}."
      " Make a new plan with a topology of these devices, and with"
      f" `axis_name={axes if axes[1:] else axes[0]!r}`."
    )


def require_version(plan: Plan) -> None:
  """Raises `ValueError` if another JAX made a plan."""
  if plan.jax_version != jax.__version__:
    raise ValueError(
      f"`plan` was made by JAX {plan.jax_version}, but this is"
      f" {jax.__version__}, whose programs may differ. Make a new plan."
    )


# The columns of a plan, and of its comparison with a run.
_HEADINGS = (
  *("leaf", "shape", "by", "ms", "pmean ms", "received"),
  *("memory", "other forms", "because"),
)
# How many other forms of a table a plan prints, the fastest first.
_SHOWN = 3
_COMPARED = (
  *("leaf", "by", "union planned", "seen", "ratio"),
  *("MB planned", "seen", "ratio"),
)


def _verdict(plan: Plan) -> str:
  """Returns one sentence about what a plan gains."""
  if not plan.pays:
    return "every leaf stays with plain pmean: leave zen_sync out."
  if not plan.dense_seconds:
    return "no time was predicted."
  what = _timed(plan) + (" is" if plan.compute_seconds else " are")
  gain = f"{what} predicted to be {plan.gain:.2f}x as fast as with pmean alone"
  if not plan.dense_fits:
    return f"{gain}, which does not fit in memory."
  if plan.better != "neither":
    return f"{gain}."
  return f"no difference: {gain}, which is within the error of predictions."


def _sharded_by_xla_s(plan: Plan) -> float | None:
  """Returns the time without zenjax if XLA shards the tables that it can."""
  saved = 0.0
  for leaf in plan.leaves:
    both = [(leaf.form, leaf.seconds)]
    both += [(other.form, other.seconds) for other in leaf.others]
    seconds = [x for form, x in both if form == XLA]
    saved += max(0.0, leaf.dense_seconds - min(seconds, default=math.inf))
  return plan.dense_seconds - saved if saved else None


def _timed(plan: Plan) -> str:
  """Returns what the times of a plan are of."""
  if plan.compute_seconds:
    return "a step"
  if plan.memory_bytes is None:
    return "all exchanges"
  return "all exchanges and updates of tables"


def _advice(plan: Plan) -> list[str]:
  """Returns what to do about a plan before it is run."""
  widths = collections.Counter(
    leaf.shape[-1] for leaf in plan.leaves if leaf.form == SHARDED
  )
  notes = [
    f"{n} sharded tables have {width} columns: joined to one, as the guide"
    ' "Many tables of one width" shows, they compile much faster'
    for width, n in widths.items()
    if n >= _MANY
  ]
  if plan.per_device and plan.memory_bytes is not None:
    notes.append(
      "the step of `set_up` is for `zenjax.data_parallel`, because gradients"
      " are compressed"
    )
  return notes


def _line(leaf: LeafPlan) -> tuple[str, ...]:
  fastest: dict[str, str] = {}
  for other in leaf.others:  # The fastest are first.
    if other.form != leaf.form:
      fastest.setdefault(
        other.form, f"{other.form} {text.ms(other.seconds)} ms"
      )
  choice = leaf.choice
  if leaf.memory_bytes is not None:
    choice = with_form(choice, leaf.form)
  return (
    leaf.name,
    "x".join(map(str, leaf.shape)),
    choice,
    text.ms(leaf.seconds),
    text.ms(leaf.dense_seconds),
    text.size(leaf.wire_bytes),
    "-" if leaf.memory_bytes is None else text.size(leaf.memory_bytes),
    ", ".join([*fastest.values()][:_SHOWN]) or "-",
    leaf.reason or "-",
  )


def _ratio(seen: float, planned: float | None) -> str:
  return f"{seen / planned:.2f}" if planned else "-"
