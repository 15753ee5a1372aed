"""The ways that a plan is measured beside, as plans with their predictions."""

from collections.abc import Callable
import hashlib
from typing import Any

from benchmarks.planned.programs import AXIS
import zenjax
from zenjax._src.planner import choosing
from zenjax._src.planner import gradient_trace
from zenjax._src.planner import recorded_runs
from zenjax._src.planner.choosing import Question

PLANNED = "planned"
DENSE = "dense"


def question(
  value_and_grad: Callable[..., Any],
  arguments: tuple[Any, ...],
  *,
  topology: zenjax.planner.Topology,
  trace: str,
  compute_seconds: float,
) -> Question:
  """What `zenjax.planner.plan` asks, with these arguments."""
  gradients = gradient_trace.gradients(value_and_grad, *arguments)
  return Question(
    gradients=tuple(gradients),
    topology=topology,
    axes=(AXIS,),
    profiles=recorded_runs.profiles(trace, gradients, topology.devices),
    compute_seconds=compute_seconds,
  )


def plans(asked: Question) -> dict[str, zenjax.planner.Plan]:
  """By name: the plan of `zenjax.planner`, and every way for all tables alike.

  `... alone` has an exchange for each table, the others one for all.
  """
  space = asked.space(1.0)
  tables = [i for i, found in enumerate(space.predictions) if len(found) > 1]
  dense = tuple(i for i in range(len(asked.gradients)) if i not in tables)
  rest = [(DENSE, dense)] if dense else []
  n = asked.topology.devices
  found = {PLANNED: choosing.answer(asked)}
  every = (DENSE, tuple(range(len(asked.gradients))))
  found[DENSE] = choosing.planned(asked, space, [every])
  for way in _ways(n):
    named = [*rest, (way, tuple(tables))]
    found[way] = choosing.planned(asked, space, named)
  if len(tables) > 2:
    alone = [*rest, *[("zen/1", (i,)) for i in tables]]
    found["zen/1 alone"] = choosing.planned(asked, space, alone)
  return found


def _ways(n: int) -> list[str]:
  """The ends of zen's grid, and SparCML's."""
  return ["all_gather", "recursive_doubling", "zen/1", f"zen/{n}"]


def program(plan: zenjax.planner.Plan) -> str:
  """Plans that agree in this are one program."""
  leaves = [
    (x.name, x.scheme, x.group, x.column_groups, x.wire_dtype, x.capacities)
    for x in plan.leaves
  ]
  return hashlib.blake2s(repr(leaves).encode(), digest_size=6).hexdigest()


def received_bytes(plan: zenjax.planner.Plan) -> float:
  """What a host receives in a step, as predicted."""
  return sum(leaf.wire_bytes for leaf in plan.leaves)
