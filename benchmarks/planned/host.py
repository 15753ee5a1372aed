"""What runs on every host: `python -m benchmarks.planned.host`."""

import os
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

from benchmarks import served
from benchmarks.network.common_start import CommonStart
from benchmarks.planned import programs
from benchmarks.planned import ways
from benchmarks.planned.models import MODELS
from benchmarks.planned.programs import AXIS
from benchmarks.planned.programs import Place
from benchmarks.planned.programs import Program
from benchmarks.shared_compiler import SharedCompiler
import zenjax

# Bytes of a collective: the largest takes a second where links are slowest.
_SIZES = tuple(1 << log for log in (12, 14, 16, 18, 20, 22, 24))
# A plan is made of what so many steps touched, and others are timed.
RECORDED = 8


class Host:
  """This host's share of a run."""

  def __init__(self, compiler: SharedCompiler, epoch: float):
    self._compiler = compiler
    self._mesh = Mesh(np.array(jax.devices()), (AXIS,))
    self._start = CommonStart(self._mesh, epoch)
    self._programs: dict[str, Program] = {}
    self._built: dict[str, dict[str, Any]] = {}
    self._rows = False

  def links(self, repeats: int) -> str:
    """The machine, measured."""
    found = zenjax.planner.measure_links(
      self._mesh, AXIS, sizes=_SIZES, repeats=repeats, progress=False
    )
    return found.to_json()

  def model(self, name: str, rows: bool, batches: int, trace: str) -> None:
    """Takes a model in the place of the last, and records some steps."""
    self._programs.clear()
    self._built.clear()
    self._rows = rows
    model = MODELS[name](self._mesh.size, RECORDED + batches)
    self._place = Place(model, self._mesh)
    self._trace = trace
    self._record()
    del self._place.batches[:RECORDED]
    self._programs["none"] = self._program(programs.alone())
    self._programs["pmean"] = self._program(programs.pmean_then_adagrad())
    self._programs["pmean"]()
    self._want = self._programs["pmean"].squares()

  def _record(self) -> None:
    place, params = self._place, self._place.params()
    gradients = programs.value_and_grad(place.model.loss, self._rows)
    with zenjax.planner.record(self._trace, params, steps=RECORDED) as recorder:
      seen = jax.shard_map(
        lambda params, *batch: recorder.rows(gradients(params, *batch)[1]),
        mesh=self._mesh,
        in_specs=(P(), *[P(AXIS)] * len(place.batches[0])),
        out_specs=P(AXIS),
        check_vma=False,
      )
      lowered = jax.jit(seen).lower(params, *place.batches[0])
      run, _ = self._compiler.compile(lowered)
      for batch in place.batches[:RECORDED]:
        recorder.write(run(params, *batch))

  def _program(self, tx: Any, rows: bool = False) -> Program:
    return Program(self._place, tx, rows, self._compiler)

  def plans(self, topology: str, compute_seconds: float) -> dict[str, Any]:
    """By name: the plan, its program, and the bytes that it predicts."""
    place = self._place
    asked = ways.question(
      programs.value_and_grad(place.model.loss, self._rows),
      (place.model.params, *place.own_part()),
      topology=zenjax.planner.Topology.from_json(topology),
      trace=self._trace,
      compute_seconds=compute_seconds,
    )
    return {
      name: {
        "plan": plan.to_json(),
        "program": ways.program(plan),
        "predicted_s": plan.seconds,
        "pmean_s": plan.dense_seconds,
        "received_bytes": ways.received_bytes(plan),
      }
      for name, plan in ways.plans(asked).items()
    }

  def build(self, program: str, plan: str) -> dict[str, Any]:
    """Compiles a plan, and compares a step with that of pmean."""
    if program not in self._built:
      tx = programs.planned(zenjax.planner.Plan.from_json(plan), self._rows)
      made = self._programs[program] = self._program(tx, self._rows)
      made()
      self._built[program] = {
        "compile_s": made.compile_s,
        "wrong": programs.wrong(made.squares(), self._want),
      }
    return self._built[program]

  def time(self, program: str) -> float:
    """Seconds of one step."""
    return self._programs[program].time(self._start)


def main() -> None:
  """Serves until stdin ends."""
  served.configure()
  compiler = served.join()
  served.serve(Host(compiler, float(os.environ["ZENJAX_HOST_EPOCH"])))


if __name__ == "__main__":
  main()
