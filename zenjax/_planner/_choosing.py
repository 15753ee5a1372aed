"""The search's answer for some gradients on some links, as a `Plan`."""

from collections.abc import Mapping
import dataclasses
import math

import jax

from zenjax import _select
from zenjax._cost import Prediction
from zenjax._cost import Profile
from zenjax._link import Link
from zenjax._planner import _sharing
from zenjax._planner import _strategies
from zenjax._planner._plan import LeafPlan
from zenjax._planner._plan import Plan
from zenjax._planner._search import search
from zenjax._planner._sharing import Named
from zenjax._planner._strategies import PMEAN
from zenjax._planner._strategies import Space
from zenjax._planner._timeline import each_by
from zenjax._planner._timeline import Exchange
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
  honest = question.space(1.0)
  named = _best(question, question.space(_MARGIN))
  if not question.overlap:
    # Where a sparse exchange is worth its risk, what joins it is a small one.
    named = _shortest(question, honest, named)
  return planned(question, honest, named)


def planned(question: Question, honest: Space, named: Named) -> Plan:
  """The plan of these exchanges, as predicted without a margin."""
  # What pmean would take is told even where its copies do not fit.
  unlimited = dataclasses.replace(question, memory_bytes=None)
  whole = honest if question.memory_bytes is None else unlimited.space(1.0)
  dense = _best(question, _only_dense(whole))
  more_s = _strategies.plain_pmean_s(
    question.gradients, question.context, question.links
  )
  return Plan(
    leaves=_leaves(question, honest, whole, named),
    mesh=tuple(zip(question.context.axes, question.context.sizes)),
    machine=question.topology.name,
    topology=question.topology,
    compute_seconds=question.compute_seconds,
    seconds=seconds_of(question, honest, named),
    dense_seconds=seconds_of(question, whole, dense) + more_s,
    overlap=question.overlap,
    wire_dtypes=question.wire_dtypes,
    memory_bytes=question.memory_bytes,
  )


def _best(question: Question, space: Space) -> Named:
  if not question.overlap:
    return _shortest(question, space, _sharing.shared(space))
  found = search(space.tensors, space.merged, overlap="overlap").assignment
  return [(e.option.name, tuple(range(e.first, e.stop))) for e in found]


def _shortest(question: Question, space: Space, named: Named) -> Named:
  """Of these exchanges and those of all by one way."""
  return min(
    [named, *_sharing.alike(space, named)],
    key=lambda each: seconds_of(question, space, each),
  )


def _only_dense(space: Space) -> Space:
  """The same, where all leaves take pmean."""
  tensors = tuple(
    dataclasses.replace(t, options=(each_by([t], [PMEAN])[0].option,))
    for t in space.tensors
  )
  return dataclasses.replace(space, tensors=tensors)


def seconds_of(question: Question, space: Space, named: Named) -> float:
  """Of a whole step with these exchanges."""
  if question.overlap:
    exchanges = [
      Exchange(m[0], m[-1] + 1, _sharing.together(space, name, m))
      for name, m in named
    ]
    return simulate(space.tensors, exchanges, "overlap").iteration_s
  options = [_sharing.together(space, name, members) for name, members in named]
  spent = sum(o.work_s + o.link_s for o in options)
  return question.compute_seconds + spent


def _leaves(
  question: Question, space: Space, whole: Space, named: Named
) -> tuple[LeafPlan, ...]:
  found = {}
  for group, (name, members) in enumerate(named):
    for i in members:
      dense_s = whole.predictions[i][PMEAN].seconds
      found[i] = _leaf(question, space, i, name, group, dense_s)
  return tuple(found[i] for i in sorted(found))


def _leaf(
  question: Question,
  space: Space,
  i: int,
  name: str,
  group: int,
  dense_seconds: float,
) -> LeafPlan:
  gradient, strategy = question.gradients[i], space.strategies[name]
  ways = space.predictions[i]
  chosen = ways[name]
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
    dense_seconds=dense_seconds,
    wire_bytes=chosen.received,
    rows=None if profile is None else float(profile.rows),
    fullest=None if profile is None else float(profile.fullest),
    union=_union(question, i),
    runner_up=second,
    runner_up_seconds=second_s,
    reason=_reason(question, space, i, name, profile, dense_seconds),
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
  # Where all devices have the same rows, chance makes a push the fuller one.
  return push, max(push, pull)


def _union(question: Question, i: int) -> float | None:
  gradient = question.gradients[i]
  profile = question.profiles.get(gradient.name)
  if profile is None:
    return None
  leaf = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
  rows, _ = _select.table_shape(leaf, "row")
  return float(min(profile.union_of(question.context.devices), rows))


def _reason(
  question: Question,
  space: Space,
  i: int,
  name: str,
  profile: Profile | None,
  dense_seconds: float,
) -> str:
  ways = space.predictions[i]
  if name != PMEAN:
    gain = dense_seconds / max(ways[name].seconds, 1e-12)
    if gain < 1 and PMEAN in ways:
      return f"joins an exchange; alone it would take {1 / gain:.1f}x as long"
    assumed = "" if profile else ", of assumed densities"
    unfit = "" if PMEAN in ways else ", whose copy does not fit the memory"
    return f"{gain:.1f}x less time than pmean{unfit}{assumed}"
  if question.context.devices == 1:
    return "one device"
  if len(ways) == 1:
    return "no table"
  best_s, best = min((p.seconds, k) for k, p in ways.items() if k != PMEAN)
  ratio = best_s / max(ways[PMEAN].seconds, 1e-12)
  if ratio >= _MARGIN:
    return f"{best} would take {ratio:.2f}x as long"
  if not question.overlap:
    return f"{best} would need an exchange of its own"
  return "pmean hides behind the backward pass"
