"""The search's answer for some gradients on some links, as a `Plan`."""

from collections.abc import Mapping, Sequence
import dataclasses
import math

from zenjax._cost import Link
from zenjax._cost import Prediction
from zenjax._cost import Profile
from zenjax._planner import _strategies
from zenjax._planner._plan import LeafPlan
from zenjax._planner._plan import Plan
from zenjax._planner._search import search
from zenjax._planner._strategies import PMEAN
from zenjax._planner._strategies import Space
from zenjax._planner._timeline import each_by
from zenjax._planner._timeline import Exchange
from zenjax._planner._timeline import Option
from zenjax._planner._timeline import Overlap
from zenjax._planner._timeline import simulate
from zenjax._planner._topology import Topology
from zenjax._planner._traced import Gradient
from zenjax._schemes.base import Context

# Predictions err: a sparse way is taken where it should take less than this
# part of what pmean takes.
_MARGIN = 0.8
# Steps differ: room for those with a few rows more than the mean of them.
_SPARE = 1.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
  """What a plan is to answer.

  Attributes:
    gradients: As the program completes them.
    topology: The machine.
    axes: A name for each of its levels.
    profiles: Densities by leaf.
    compute_seconds: Of a step without any exchange.
    overlap: Whether exchanges run beside the backward pass.
    wire_dtypes: Names of those that rows may be rounded to.
    capacities: To be pinned, by leaf.
    memory_bytes: For the buffers of a leaf; None for any.
  """

  gradients: tuple[Gradient, ...]
  topology: Topology
  axes: tuple[str, ...]
  profiles: Mapping[str, Profile] = dataclasses.field(default_factory=dict)
  compute_seconds: float = 0.0
  overlap: bool = False
  wire_dtypes: tuple[str, ...] = ()
  capacities: Mapping[str, tuple[int, int]] = dataclasses.field(
    default_factory=dict
  )
  memory_bytes: float | None = None

  @property
  def context(self) -> Context:
    """Of an exchange over all axes."""
    return Context(axes=self.axes, sizes=self.topology.sizes, mean=True)

  @property
  def links(self) -> dict[str, Link]:
    """That of each axis."""
    return {
      axis: level.link for axis, level in zip(self.axes, self.topology.levels)
    }

  @property
  def mode(self) -> Overlap:
    return "overlap" if self.overlap else "none"

  def space(self, margin: float) -> Space:
    return _strategies.space(
      self.gradients,
      self.profiles,
      self.context,
      self.links,
      compute_seconds=self.compute_seconds,
      wire_dtypes=self.wire_dtypes,
      margin=margin,
      memory_bytes=self.memory_bytes,
    )


def answer(question: Question) -> Plan:
  """The plan with the shortest step."""
  careful = question.space(_MARGIN)
  found = search(careful.tensors, careful.merged, overlap=question.mode)
  named = [
    (e.option.name, tuple(range(e.first, e.stop))) for e in found.assignment
  ]
  if not question.overlap:
    named = _joined(named)
  return planned(question, question.space(1.0), named)


def planned(question: Question, honest: Space, named: "Named") -> Plan:
  """The plan of these exchanges, as predicted without a margin."""
  return Plan(
    leaves=_leaves(question, honest, named),
    mesh=tuple(zip(question.context.axes, question.context.sizes)),
    machine=question.topology.name,
    topology=question.topology,
    compute_seconds=question.compute_seconds,
    seconds=seconds_of(question, honest, named),
    dense_seconds=seconds_of(question, honest, _all_dense(question)),
    overlap=question.overlap,
    wire_dtypes=question.wire_dtypes,
    memory_bytes=question.memory_bytes,
  )


# The exchanges of a step: a strategy's name, and the tensors that share it.
Named = Sequence[tuple[str, tuple[int, ...]]]


def _joined(named: Named) -> Named:
  """Where nothing runs beside it, what goes one way goes together."""
  groups: dict[str, tuple[int, ...]] = {}
  for name, members in named:
    groups[name] = groups.get(name, ()) + members
  return list(groups.items())


def _all_dense(question: Question) -> Named:
  members = tuple(range(len(question.gradients)))
  if question.overlap:  # As buckets of one, the finest that there are.
    return [(PMEAN, (i,)) for i in members]
  return [(PMEAN, members)] if members else []


def seconds_of(question: Question, space: Space, named: Named) -> float:
  """Of a whole step with these exchanges."""
  if question.overlap:
    exchanges = [
      Exchange(m[0], m[-1] + 1, together(space, name, m)) for name, m in named
    ]
    return simulate(space.tensors, exchanges, "overlap").iteration_s
  options = [together(space, name, members) for name, members in named]
  spent = sum(o.work_s + o.link_s for o in options)
  return question.compute_seconds + spent


def together(space: Space, name: str, members: Sequence[int]) -> Option:
  """What these tensors take in one exchange."""
  parts = [each_by([space.tensors[i]], [name])[0].option for i in members]
  saved = (len(parts) - 1) * space.once[name]
  return Option(
    name,
    before_s=sum(o.before_s for o in parts),
    link_s=max(sum(o.link_s for o in parts) - saved, 0.0),
    after_s=sum(o.after_s for o in parts),
    bytes=sum(o.bytes for o in parts),
  )


def _leaves(
  question: Question, space: Space, named: Named
) -> tuple[LeafPlan, ...]:
  found = {}
  for group, (name, members) in enumerate(named):
    for i in members:
      found[i] = _leaf(question, space, i, name, group)
  return tuple(found[i] for i in sorted(found))


def _leaf(
  question: Question, space: Space, i: int, name: str, group: int
) -> LeafPlan:
  gradient, strategy = question.gradients[i], space.strategies[name]
  ways = space.predictions[i]
  chosen, dense = ways[name], ways.get(PMEAN)
  others = [(p.seconds, other) for other, p in ways.items() if other != name]
  second_s, second = min(others, default=(0.0, ""))
  sparse = name != PMEAN
  profile = question.profiles.get(gradient.name)
  return LeafPlan(
    name=gradient.name,
    shape=gradient.shape,
    dtype=gradient.dtype.name,
    look_ups=gradient.look_ups,
    ready=gradient.ready,
    scheme=strategy.scheme,
    group=group,
    column_groups=strategy.column_groups,
    wire_dtype=strategy.wire_dtype,
    capacities=_first_round(question, gradient, chosen) if sparse else None,
    seconds=chosen.seconds,
    dense_seconds=dense.seconds if dense else 0.0,
    wire_bytes=chosen.received,
    rows=profile and profile.rows,
    fullest=profile and profile.fullest,
    union=_union(question, i),
    runner_up=second,
    runner_up_seconds=second_s,
    reason=_reason(question, space, i, name, profile),
  )


def _first_round(
  question: Question, gradient: Gradient, chosen: Prediction
) -> tuple[int, int] | None:
  """Rows to pin: as given, or else what was predicted where rows were counted.

  zen_sync guesses the sizes of a first round that nobody knows, and of a guess
  too small another round follows.
  """
  given = question.capacities.get(gradient.name)
  if given or gradient.name not in question.profiles or chosen.sizes is None:
    return given
  rows = math.prod(gradient.shape[:-1])
  push, pull = (
    min(max(math.ceil(size * _SPARE), 1), rows) for size in chosen.sizes
  )
  return push, pull


def _union(question: Question, i: int) -> float | None:
  gradient = question.gradients[i]
  profile = question.profiles.get(gradient.name)
  if profile is None:
    return None
  rows = gradient.shape[0]
  return min(profile.union_of(question.context.devices), float(rows))


def _reason(
  question: Question,
  space: Space,
  i: int,
  name: str,
  profile: Profile | None,
) -> str:
  ways = space.predictions[i]
  if name != PMEAN:
    assumed = "" if profile else ", of assumed densities"
    if PMEAN not in ways:
      return "pmean's copy does not fit the memory"
    gain = ways[PMEAN].seconds / max(ways[name].seconds, 1e-12)
    return f"{gain:.1f}x less time than pmean{assumed}"
  if question.context.devices == 1:
    return "one device"
  if len(ways) == 1:
    return "no table"
  best_s, best = min((p.seconds, k) for k, p in ways.items() if k != PMEAN)
  ratio = best_s / max(ways[PMEAN].seconds, 1e-12)
  if ratio >= _MARGIN:
    return f"{best} would take {ratio:.2f}x as long"
  return "pmean hides behind the backward pass"
