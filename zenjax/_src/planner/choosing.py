"""Choice of the exchanges of a step, as a `Plan`.

Where exchanges overlap the backward pass, `timeline.search` answers. Where
nothing overlaps, order does not matter: all tensors of one strategy share its
exchange, and what an exchange pays once is paid once for each strategy that is
used. A strategy is then opened, at that price, or not, and every tensor takes
the best that is open. No set of so many strategies costs less than the cheapest
so many and every tensor's best: sets are tried by size until that bound is too
high.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import math

import jax
import numpy as np

from zenjax._src.machine import cost
from zenjax._src.machine import link_models
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import strategies
from zenjax._src.planner import table_forms
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.planner.strategies import PMEAN
from zenjax._src.planner.strategies import raised_by
from zenjax._src.planner.strategies import Space
from zenjax._src.planner.timeline import Exchange
from zenjax._src.planner.timeline import iteration_seconds
from zenjax._src.planner.timeline import NEVER
from zenjax._src.planner.timeline import Option
from zenjax._src.planner.timeline import search
from zenjax._src.planner.timeline import Tensor
from zenjax._src.rows import leaf_util
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan

# The exchanges of a step: a strategy's name, and the tensors that share it.
Exchanges = Sequence[tuple[str, tuple[int, ...]]]
# Predictions err: a sparse way is taken if it should take less than this part
# of pmean's time.
MARGIN = 0.8
# Steps differ: room for those with a few rows more than the mean of them.
_SPARE = 1.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
  """The gradients, the machine and the options of a plan.

  Attributes:
    gradients: Gradients, as the program completes them.
    topology: The machine.
    axes: A name for each of its levels.
    profiles: Densities by leaf.
    compute_seconds: Time of a step without any exchange.
    overlap: True if exchanges overlap the backward pass.
    wire_dtypes: Names of dtypes that rows may be rounded to.
    capacities: Capacities to pin, by leaf.
    memory_bytes: Limit on the buffers of a leaf; None for no limit.
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
    """Context of an exchange over all axes."""
    return Context(axes=self.axes, sizes=self.topology.sizes, mean=True)

  @property
  def links(self) -> dict[str, Link]:
    """Link along each axis."""
    return {
      axis: level.link for axis, level in zip(self.axes, self.topology.levels)
    }

  def space(self, margin: float) -> Space:
    """Returns the strategies to choose from, sparse ones raised by a margin."""
    return strategies.space(
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
  """Returns the plan with the shortest step."""
  honest = question.space(1.0)
  named = _best(question, question.space(MARGIN))
  if not question.overlap:
    # Where a sparse exchange is worth its risk, what joins it is a small one.
    named = _shortest(question, honest, named)
  return planned(question, honest, named)


def planned(question: Question, honest: Space, named: Exchanges) -> Plan:
  """Returns the plan of these exchanges, predicted without a margin."""
  # The time of pmean is told even where its copies do not fit.
  unlimited = dataclasses.replace(question, memory_bytes=None)
  whole = honest if question.memory_bytes is None else unlimited.space(1.0)
  dense = _best(question, _only_dense(whole))
  more_s = strategies.plain_pmean_s(
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


def _best(question: Question, space: Space) -> Exchanges:
  if not question.overlap:
    return _shortest(question, space, _one_each(space))
  found = search(space.groups)
  return [(e.option.name, tuple(range(e.first, e.stop))) for e in found]


def _shortest(question: Question, space: Space, named: Exchanges) -> Exchanges:
  """Returns these exchanges, or one for all sparse tensors if shorter."""
  return min(
    [named, *_uniform(space, named)],
    key=lambda each: seconds_of(question, space, each),
  )


def _only_dense(space: Space) -> Space:
  """Returns the space in which all leaves take pmean."""
  tensors = tuple(
    dataclasses.replace(t, options=(_option(t, PMEAN),)) for t in space.tensors
  )
  return dataclasses.replace(space, tensors=tensors)


def seconds_of(question: Question, space: Space, named: Exchanges) -> float:
  """Predicts the time of a whole step with these exchanges."""
  if question.overlap:
    exchanges = [
      Exchange(m[0], m[-1] + 1, _joint(space, name, m)) for name, m in named
    ]
    return iteration_seconds(space.tensors, exchanges)
  options = [_joint(space, name, members) for name, members in named]
  spent = sum(o.work_s + o.link_s for o in options)
  return question.compute_seconds + spent


def _joint(space: Space, name: str, members: Sequence[int]) -> Option:
  """Returns the option of these tensors in one exchange."""
  parts = [_option(space.tensors[i], name) for i in members]
  return Option(
    name,
    before_s=sum(o.before_s for o in parts),
    link_s=_link_s(space, name, members),
    after_s=sum(o.after_s for o in parts),
    bytes=sum(o.bytes for o in parts),
  )


def _option(tensor: Tensor, name: str) -> Option:
  option = tensor.option(name)
  assert option is not None, (tensor.name, name)
  return option


def _link_s(space: Space, name: str, members: Sequence[int]) -> float:
  """Returns the time of collectives that carry the bytes of all members."""
  found = [space.predictions[i][name] for i in members]
  received: dict[tuple[int, str, str, int], float] = {}
  for prediction in found:
    for k, (axis, op, n, more) in enumerate(prediction.phases):
      at = k, axis, op, n
      received[at] = received.get(at, 0.0) + more
  phases = [(*at[1:], total) for at, total in received.items()]
  seconds = link_models.wire_s(phases, space.links) + sum(
    p.apart_s for p in found
  )
  return seconds * raised_by(found[0].scheme, space.margin)


def _leaves(
  question: Question, space: Space, whole: Space, named: Exchanges
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
    **_row_sharded(question, gradient),
    reason=_reason(question, space, i, name, profile, dense_seconds),
  )


def _first_round(
  question: Question, gradient: Gradient, chosen: Prediction
) -> tuple[int, int] | None:
  """Returns rows to pin: those given, or those predicted from counted rows.

  zen_sync guesses the sizes of a first round that are not pinned, and a guess
  too small costs another round.
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


def _row_sharded(question: Question, gradient: Gradient) -> dict[str, float]:
  """Returns fields of `LeafPlan` about the table sharded by rows."""
  if not strategies.has_choice(gradient, question.context):
    return {}
  look_ups, context = gradient.look_ups, question.context
  profile = strategies.profile_of(gradient, question.profiles, context)
  if look_ups is None:  # At least one look-up has touched each nonzero row.
    look_ups = profile.rows
    if look_ups >= math.prod(gradient.shape[:-1]):  # As of a tied softmax.
      return {}
  received, seconds = _on_links(
    table_forms.row_sharded_messages(gradient, look_ups, context), question
  )
  found = {"sharded_bytes": received, "sharded_seconds": seconds}
  if len(context.axes) > 1 or len(gradient.shape) != 2:
    return found
  received, seconds = _on_links(
    table_forms.owned_messages(gradient, look_ups, profile, context), question
  )
  return found | {"owned_bytes": received, "owned_seconds": seconds}


def _on_links(
  messages: Sequence[Message], question: Question
) -> tuple[float, float]:
  """Returns bytes that a device receives, and seconds on the links."""
  phases = [
    phase
    for message in messages
    for phase in cost.phases_of(message, question.context)
  ]
  received = float(received_bytes(messages, question.context))
  return received, link_models.wire_s(phases, question.links)


def _union(question: Question, i: int) -> float | None:
  gradient = question.gradients[i]
  profile = question.profiles.get(gradient.name)
  if profile is None:
    return None
  leaf = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
  rows, _ = leaf_util.table_shape(leaf, "row")
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
  if ratio >= MARGIN:
    return f"{best} would take {ratio:.2f}x as long"
  if not question.overlap:
    return f"{best} would need an exchange of its own"
  return "pmean hides behind the backward pass"


# --- where nothing overlaps ---------------------------------------------------


def _one_each(space: Space) -> Exchanges:
  """Returns the best exchanges, at most one a strategy: exact."""
  names, own, once = _costs(space)
  forced = [o for o in range(len(names)) if _is_forced(own, o)]
  rest = [o for o in _undominated(own, once) if o not in forced]
  best, best_s = forced, _seconds(own, once, forced)
  floor = own.min(axis=0).sum() + once[forced].sum()
  cheapest = np.sort(once[rest])
  for size in range(1, len(rest) + 1):
    if floor + cheapest[:size].sum() >= best_s:
      break
    for more in itertools.combinations(rest, size):
      seconds = _seconds(own, once, [*forced, *more])
      if seconds < best_s:
        best, best_s = [*forced, *more], seconds
  best = sorted(best)
  taken = np.array(best, int)[own[best].argmin(axis=0)]
  members = {o: np.flatnonzero(taken == o).tolist() for o in best}
  return [(names[o], tuple(at)) for o, at in members.items() if at]


def _costs(space: Space) -> tuple[list[str], np.ndarray, np.ndarray]:
  """Returns names, costs of tensors `[S, N]` and of exchanges `[S]`."""
  names = list(dict.fromkeys(o.name for t in space.tensors for o in t.options))
  once = np.array([space.once[name] for name in names])
  own = np.full((len(names), len(space.tensors)), NEVER)
  for i, tensor in enumerate(space.tensors):
    for option in tensor.options:
      o = names.index(option.name)
      own[o, i] = max(option.work_s + option.link_s - once[o], 0.0)
  return names, own, once


def _is_forced(own: np.ndarray, o: int) -> bool:
  """Returns True if some tensor has no other strategy."""
  others = np.delete(own, o, axis=0)
  return bool((others >= NEVER).all(axis=0).any())


def _undominated(own: np.ndarray, once: np.ndarray) -> list[int]:
  """Returns strategies that no other equals or betters in every cost."""
  costs = np.concatenate([own, once[:, None]], axis=1)
  kept: list[int] = []
  for o in np.lexsort((np.arange(len(costs)), costs.sum(axis=1))).tolist():
    if not any((costs[p] <= costs[o]).all() for p in kept):
      kept.append(o)
  return sorted(kept)


def _seconds(own: np.ndarray, once: np.ndarray, ways: Sequence[int]) -> float:
  if not ways:
    return math.inf
  return float(own[ways].min(axis=0).sum() + once[ways].sum())


def _uniform(space: Space, named: Exchanges) -> Iterator[Exchanges]:
  """Yields the same with all sparse tensors by one strategy, for each.

  `_one_each` adds up tensors by themselves; a whole step is known better.
  """
  sparse = {i for name, at in named if name != PMEAN for i in at}
  if not sparse:
    return
  for way in space.strategies:
    having = {i for i, found in enumerate(space.predictions) if way in found}
    if way == PMEAN or not sparse <= having:
      continue
    for members in (sparse,) if sparse == having else (sparse, having):
      rest = [
        (name, tuple(i for i in at if i not in members)) for name, at in named
      ]
      yield [*[x for x in rest if x[1]], (way, tuple(sorted(members)))]
