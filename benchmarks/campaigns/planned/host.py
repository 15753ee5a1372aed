"""The program on every host: `python -m benchmarks.campaigns.planned.host`."""

import dataclasses
import hashlib
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import optax

from benchmarks import library
from benchmarks.campaigns.planned import cells
from benchmarks.campaigns.planned import programs
from benchmarks.cases import sync
from benchmarks.testbed import served
import zenjax


def plans(asked: library.questions.Question) -> dict[str, zenjax.planner.Plan]:
  """Returns the planner's plan, and one for each way for all tables."""
  model = library.plan_model
  predicted = library.predictions.every_way(asked)
  ways = [model.Way("all_gather"), model.Way("recursive_doubling")]
  # The ends of zen's grid, and SparCML's.
  ways += [model.Way("zen", g) for g in (1, asked.topology.devices)]
  found = {cells.PLANNED: model.answer(asked)}
  for way in (model.PMEAN, *ways):
    chosen = library.overlap.Strategy(
      tuple(way if way in each else model.PMEAN for each in predicted)
    )
    groups = f"/{way.column_groups}" if way.scheme == "zen" else ""
    found[way.scheme + groups] = model.planned(asked, predicted, chosen)
  return found


def program(plan: zenjax.planner.Plan) -> str:
  """Plans that agree in this are one program."""
  leaves = [
    (x.name, x.scheme, x.group, x.column_groups, x.wire_dtype, x.capacities)
    for x in plan.leaves
  ]
  return hashlib.blake2s(repr(leaves).encode(), digest_size=6).hexdigest()


def received_bytes(plan: zenjax.planner.Plan) -> float:
  """Returns the bytes that a host receives in a step, as predicted."""
  return sum(leaf.wire_bytes for leaf in plan.leaves)


# A plan is made of what so many steps touched, and others are timed.
RECORDED = 8


class _Worker(served.Worker):
  """This host's share of a run."""

  def model(self, name: str, rows: bool, batches: int, trace: str) -> None:
    """Takes a model in the place of the last, and records some steps."""
    self.programs.clear()
    self._built: dict[str, dict[str, Any]] = {}
    self._rows = rows
    model = programs.MODELS[name](self.mesh.size, RECORDED + batches)
    self._place = programs.Place(model, self)
    self._trace = trace
    self._record()
    del self._place.batches[:RECORDED]
    self.programs["none"] = programs.Program(self._place, programs.alone())
    plain = optax.chain(sync.PMEAN, programs.adagrad())
    self.programs["pmean"] = programs.Program(self._place, plain)
    self.programs["pmean"]()
    self._want = self.programs["pmean"].squares()

  def _record(self) -> None:
    place, params = self._place, self._place.params()
    gradients = sync.value_and_grad(place.model.loss, self._rows)
    recorder = zenjax.planner.record(self._trace, params, steps=RECORDED)
    seen = jax.shard_map(
      lambda params, *batch: recorder.rows(gradients(params, *batch)[1]),
      mesh=self.mesh,
      in_specs=(P(), *[P(sync.AXIS)] * len(place.batches[0])),
      out_specs=P(sync.AXIS),
      check_vma=False,
    )
    lowered = jax.jit(seen).lower(params, *place.batches[0])
    run, _ = self.compiler.compile(lowered)
    for batch in place.batches[:RECORDED]:
      recorder.write(run(params, *batch))

  def plans(self, topology: str, compute_seconds: float) -> dict[str, Any]:
    """Returns by name the plan, its program, and the bytes that it predicts."""
    model = self._place.model
    asked = library.questions.ask(
      sync.value_and_grad(model.loss, self._rows),
      (model.params, *self._place.own_part()),
      topology=zenjax.planner.Topology.from_json(topology),
      axis_name=sync.AXIS,
      trace=self._trace,
    )
    asked = dataclasses.replace(asked, compute_seconds=compute_seconds)
    return {
      name: {
        "plan": plan.to_json(),
        "program": program(plan),
        "predicted_s": plan.seconds,
        "pmean_s": plan.dense_seconds,
        "received_bytes": received_bytes(plan),
      }
      for name, plan in plans(asked).items()
    }

  def build(self, program: str, plan: str) -> dict[str, Any]:
    """Compiles a plan, and compares a step with that of pmean."""
    if program not in self._built:
      by_plan = zenjax.planner.Plan.from_json(plan)
      adagrad = programs.adagrad()
      tx = optax.chain(
        zenjax.zen_sync(sync.AXIS, plan=by_plan),
        zenjax.lazy_rows(adagrad) if self._rows else adagrad,
      )
      made = programs.Program(self._place, tx, self._rows)
      self.programs[program] = made
      made()
      self._built[program] = {
        "compile_s": made.compile_s,
        "wrong": programs.wrong(made.squares(), self._want),
      }
    return self._built[program]


if __name__ == "__main__":
  served.main(_Worker)
