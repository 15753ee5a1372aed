"""`retune`: plans again from the densities of the running job."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import numpy as np

from zenjax._src.machine.cost import Profile
from zenjax._src.planner import choosing
from zenjax._src.planner.choosing import Question
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.planner.strategies import PMEAN
from zenjax._src.planner.strategies import Space
from zenjax._src.report import stats
from zenjax._src.sync import sync_state
from zenjax._src.sync.plans import DENSE
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retuned:
  """The result of `retune`: print it.

  Attributes:
    plan: The plan for the densities seen, with capacities pinned.
    changed: Differences to the plan that runs, a line each.
    now_seconds: Predicted time of a step as it runs.
    then_seconds: Predicted time of a step with the new plan.
    compile_seconds: Time to compile the step, None if it was not given.
    steps_left: Steps still to be taken, None if they were not given.

  Example:
    >>> import zenjax
    >>> leaf = zenjax.planner.LeafPlan(
    ...   name="table", shape=(4096, 8), dtype="float32", scheme="dense"
    ... )
    >>> found = zenjax.planner.Retuned(
    ...   plan=zenjax.planner.Plan(leaves=(leaf,), mesh=(("data", 8),)),
    ...   changed=("table: zen/1 -> dense",),
    ...   now_seconds=0.5, then_seconds=0.25,
    ...   compile_seconds=5.0, steps_left=1000,
    ... )
    >>> found.earned_after, found.pays
    (20, True)
    >>> print(found)
    table: zen/1 -> dense
    a step: 500 ms as it runs, 250 ms planned anew
    compiling takes 5 s, earned back after 20 steps; 1,000 are left: it pays
  """

  plan: Plan
  changed: tuple[str, ...]
  now_seconds: float
  then_seconds: float
  compile_seconds: float | None = None
  steps_left: int | None = None

  @property
  def gain_seconds(self) -> float:
    """Predicted time that a step saves."""
    return self.now_seconds - self.then_seconds if self.changed else 0.0

  @property
  def earned_after(self) -> int | None:
    """Steps that save the time of compiling; None: none do, or unknown."""
    if self.compile_seconds is None or not self.gain_seconds > 0:
      return None
    return math.ceil(self.compile_seconds / self.gain_seconds)

  @property
  def pays(self) -> bool | None:
    """True if the steps left save more than compiling takes; None: unknown."""
    if not self.gain_seconds > 0:
      return False
    if self.compile_seconds is None or self.steps_left is None:
      return None
    return self.gain_seconds * self.steps_left > self.compile_seconds

  def __str__(self) -> str:
    if not self.changed:
      return "nothing changes: the plan is as it would be made now"
    step = (
      f"a step: {self.now_seconds * 1e3:.4g} ms as it runs,"
      f" {self.then_seconds * 1e3:.4g} ms planned anew"
    )
    return "\n".join([*self.changed, step, self._verdict()])

  def _verdict(self) -> str:
    if not self.gain_seconds > 0:
      return "nothing is gained: leave the plan as it is"
    if self.compile_seconds is None:
      return self._without_compile_seconds()
    told = (
      f"compiling takes {self.compile_seconds:.3g} s, earned back after"
      f" {self.earned_after:,} steps"
    )
    if self.steps_left is None:
      return f"{told}: it pays where more are left"
    pays = (
      "it pays" if self.pays else "it does not pay, leave the plan as it is"
    )
    return f"{told}; {self.steps_left:,} are left: {pays}"

  def _without_compile_seconds(self) -> str:
    if self.steps_left is None:
      return (
        f"1,000 steps gain {self.gain_seconds * 1e3:.3g} s: it pays where those"
        " left gain more than compiling takes"
      )
    won = self.gain_seconds * self.steps_left
    return (
      f"the {self.steps_left:,} steps left gain {won:.3g} s: it pays where"
      " compiling takes less"
    )


# Sizes that differ by less than this part stay: steps differ as much.
_NEAR = 0.1


def retune(
  state: Any,
  plan: Plan,
  *,
  compile_seconds: float | None = None,
  steps_left: int | None = None,
) -> Retuned:
  """Plans again from the densities of the running job, and tells if it pays.

  Densities are those of the last step (`zenjax.planner.profile`); leaves that
  take pmean are not looked at, and keep what they were planned for. First
  rounds are pinned to what recent steps needed (`zenjax.advise`) where a leaf's
  strategy stays, and elsewhere to what its rows should need by the new one.

  The gain is predicted: a step with the densities seen, as it runs, less one as
  planned anew. Bytes received beyond what the rows needed, as by first rounds
  that are too large, count at their link's rate, as if nothing hid them; they
  are saved where sizes are pinned or pmean takes over.

  Args:
    state: An optimizer state that has taken steps with `zen_sync(plan=plan)`.
    plan: A plan of `zenjax.planner.plan`.
    compile_seconds: Time to compile the step, as measured before.
    steps_left: Steps for which the new plan would run.

  Returns:
    The new plan, its differences, and the steps after which compiling it is
    earned back: print it. `zen_sync(plan=found.plan)` takes the state of the
    old one; where a table goes over to pmean, or comes back, its part of the
    state is made anew, and the optimizer's stays:
    `(tx.init(params)[0], *state[1:])`.

  Raises:
    TypeError: `plan` is no plan.
    ValueError: `state` is of another plan, of sharded tables alone, or has
      taken no step, `plan` does not
      say of which machine it is, or a number is negative.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> params = {"table": jnp.zeros((4096, 16))}
    >>> loss = lambda params, ids: jnp.sum(params["table"][ids])
    >>> plan = zenjax.planner.plan(
    ...   jax.value_and_grad(loss), params, jnp.zeros(8, jnp.int32),
    ...   topology=zenjax.planner.Topology.network("10mbit", 2),
    ... )
    >>> tx = zenjax.zen_sync("data", plan=plan)
    >>> def step(ids):
    ...   return tx.update(jax.grad(loss)(params, ids), tx.init(params))
    >>> ids = jnp.array([[3, 5], [5, 9]])
    >>> _, state = jax.jit(jax.vmap(step, axis_name="data"))(ids)
    >>> state = jax.tree.map(lambda x: x[0], state)
    >>> found = zenjax.planner.retune(
    ...   state, plan, compile_seconds=1.0, steps_left=1000
    ... )
    >>> found.plan.leaves[0].rows, found.plan.leaves[0].union, found.pays
    (2.0, 3.0, True)
  """
  _check(plan, compile_seconds, steps_left)
  nodes = sync_state.require(state)
  sharded = [name for node in nodes for name in sync_state.tables(node)]
  if sharded and not any(map(sync_state.whole_leaves, nodes)):
    raise ValueError(
      "`state` must be of `zen_sync(plan=plan)`, and its tables"
      f" {sorted(sharded)} are sharded: sharded_optimizer has no plan to"
      " change."
      " Give `profile=zenjax.planner.profile(state)` to"
      " `zenjax.planner.plan_tables`, which says what form they should have."
    )
  seen = stats.synced_leaves(state)
  _require_same(plan, seen)
  question = _question(plan, stats.profile(state))
  # The way that runs may have outgrown the memory, and is predicted too.
  space = dataclasses.replace(question, memory_bytes=None).space(1.0)
  kept = choosing.planned(question, space, _exchanges(plan, space))
  wasted = wasted_seconds(plan, space, seen)
  found = [choosing.answer(question)]
  if _fits(question, plan):
    found.insert(0, kept)
  pinned = [_pinned(x, plan, stats.advise(state)) for x in found]
  then = [x.seconds + still_wasted(x, plan, wasted) for x in pinned]
  best = int(np.argmin(then))  # The first of equals: what runs.
  return Retuned(
    plan=pinned[best],
    changed=changes(plan, pinned[best]),
    now_seconds=kept.seconds + sum(wasted.values()),
    then_seconds=then[best],
    compile_seconds=compile_seconds,
    steps_left=steps_left,
  )


def changes(plan: Plan, found: Plan) -> tuple[str, ...]:
  """Returns a line for each leaf whose program differs."""
  before = plan.by_name
  with_old, with_new = _together(plan), _together(found)
  lines = []
  for leaf in found.leaves:
    name, old = leaf.name, before[leaf.name]
    if leaf.choice != old.choice:
      lines.append(f"{name}: {old.choice} -> {leaf.choice}")
    elif leaf.capacities != old.capacities:
      lines.append(
        f"{name}: first round {_rows(old)} -> {_rows(leaf)} rows (push, pull)"
      )
    elif with_old.get(name) != with_new.get(name):
      members = ", ".join(sorted(with_new[name]))
      lines.append(f"{name}: in one exchange: {members}")
  return tuple(lines)


def _rows(leaf: LeafPlan) -> str:
  return "guessed" if leaf.capacities is None else str(leaf.capacities)


def _together(plan: Plan) -> dict[str, frozenset[str]]:
  """Returns the leaves with which each sparse one shares an exchange."""
  sparse = [x for x in plan.leaves if x.scheme != DENSE]
  key = lambda leaf: (leaf.choice, leaf.group)
  return {
    x.name: frozenset(y.name for y in sparse if key(y) == key(x))
    for x in sparse
  }


def wasted_seconds(
  plan: Plan, space: Space, seen: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
  """Returns the time of each leaf beyond what its rows should take."""
  found = {}
  for i, leaf in enumerate(plan.leaves):
    if leaf.name not in seen:
      continue
    own, bytes_seen = seen[leaf.name], seen[leaf.name]["wire_bytes"]
    least = space.predictions[i][leaf.choice]
    if own["went_dense"]:  # Which may take less: rows were too many.
      dense_s = space.predictions[i][PMEAN].seconds
      sent_s = dense_s * bytes_seen / max(own["dense_bytes"], 1.0)
      found[leaf.name] = sent_s - least.seconds
    elif least.received:
      bytes_s = max(least.wire_s - least.once_s, 0.0)
      found[leaf.name] = bytes_s * max(bytes_seen / least.received - 1, 0.0)
  return found


def still_wasted(found: Plan, plan: Plan, wasted: Mapping[str, float]) -> float:
  """Returns the part of `wasted` that a new plan wastes as well."""
  before = plan.by_name
  gone = {
    x.name
    for x in found.leaves
    if x.scheme == DENSE
    or x.capacities not in (None, before[x.name].capacities)
  }
  return sum(s for name, s in wasted.items() if name not in gone)


def _fits(question: Question, plan: Plan) -> bool:
  """Checks that every leaf's strategy still fits the memory."""
  ways = question.space(1.0).predictions
  return all(x.choice in found for x, found in zip(plan.leaves, ways))


def _check(
  plan: Any, compile_seconds: float | None, steps_left: int | None
) -> None:
  if not isinstance(plan, Plan):
    raise TypeError(
      f"`plan` must be a zenjax.planner.Plan, got {type(plan).__name__}; give"
      " the one that zen_sync has."
    )
  if plan.topology is None:
    raise ValueError(
      "`plan` must say for which machine it was made, and its `topology` is"
      " None; make it by `zenjax.planner.plan`."
    )
  if compile_seconds is not None and not 0 <= compile_seconds < math.inf:
    raise ValueError(
      "`compile_seconds` must be what compiling takes, not negative, got"
      f" {compile_seconds!r}; leave it out where it is not known."
    )
  if steps_left is None:
    return
  if not isinstance(steps_left, int) or steps_left < 0:
    raise ValueError(
      "`steps_left` must be a whole number, not negative, got"
      f" {steps_left!r}; leave it out where it is not known."
    )


def _require_same(plan: Plan, seen: Mapping[str, Mapping[str, float]]) -> None:
  """Raises `ValueError` unless the state is of a run with this plan."""
  sparse = sorted(x.name for x in plan.leaves if x.scheme != DENSE)
  if not sparse:
    raise ValueError(
      "`plan` must send a leaf sparse for a run to see anything, and sends"
      " none; record steps with `zenjax.planner.record` and plan by their"
      " trace."
    )
  if not seen:
    raise ValueError(
      "`state` must have taken a step with `zen_sync(plan=plan)`, and has taken"
      " none; call `retune` later."
    )
  devices = {int(s["devices"]) for s in seen.values()}
  if sorted(seen) != sparse or devices != {plan.devices}:
    raise ValueError(
      f"`state` must be of a run with this plan, which sends {sparse} sparse on"
      f" {plan.devices} devices, got {sorted(seen)} on {sorted(devices)}."
    )


def _question(plan: Plan, seen: Mapping[str, Profile]) -> Question:
  """Returns the question of the plan, with the densities seen."""
  assert plan.topology is not None
  own = {x.name: p for x in plan.leaves if (p := _planned_for(x, plan))}
  return Question(
    gradients=tuple(
      Gradient(
        name=leaf.name,
        shape=leaf.shape,
        dtype=np.dtype(leaf.dtype),
        look_ups=leaf.look_ups,
        ready=leaf.ready,
      )
      for leaf in plan.leaves
    ),
    topology=plan.topology,
    axes=tuple(axis for axis, _ in plan.mesh),
    profiles={**own, **seen},
    compute_seconds=plan.compute_seconds,
    overlap=plan.overlap,
    wire_dtypes=plan.wire_dtypes,
    memory_bytes=plan.memory_bytes,
  )


def _planned_for(leaf: LeafPlan, plan: Plan) -> Profile | None:
  rows, fullest, union = leaf.rows, leaf.fullest, leaf.union
  if rows is None or fullest is None or union is None:
    return None
  return Profile(rows=rows, fullest=fullest, union=union, devices=plan.devices)


def _exchanges(plan: Plan, space: Space) -> list[tuple[str, tuple[int, ...]]]:
  """Returns the exchanges of a plan, as the search has them."""
  groups: dict[tuple[str, int], tuple[int, ...]] = {}
  for i, leaf in enumerate(plan.leaves):
    name = leaf.choice
    if name not in space.predictions[i]:
      raise ValueError(
        f"`plan` must be one that `zenjax.planner.plan` made: {leaf.name!r}"
        f" travels by {name!r}, and it may by {sorted(space.predictions[i])}."
      )
    key = name, leaf.group
    groups[key] = groups.get(key, ()) + (i,)
  return [(name, members) for (name, _), members in groups.items()]


def _pinned(
  found: Plan, plan: Plan, advice: Mapping[str, tuple[int, int]]
) -> Plan:
  """Pins what recent steps needed, for leaves of the same strategy.

  Others keep the capacities that the planner derives from the rows seen.
  """
  before = plan.by_name
  leaves = []
  for leaf in found.leaves:
    old, capacities = before[leaf.name], leaf.capacities
    if leaf.scheme != DENSE and leaf.choice == old.choice:
      capacities = advice.get(leaf.name, old.capacities)
      if _near(old.capacities, capacities):
        capacities = old.capacities
    leaves.append(dataclasses.replace(leaf, capacities=capacities))
  return dataclasses.replace(found, leaves=tuple(leaves))


def _near(old: tuple[int, int] | None, new: tuple[int, int] | None) -> bool:
  """Returns True if they differ by no more than steps do from each other."""
  if old is None or new is None:
    return old is new
  return all(abs(a - b) <= _NEAR * max(a, b) for a, b in zip(old, new))
