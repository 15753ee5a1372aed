"""What runs on every host: `python -m benchmarks.groups.host`."""

import math
import os
from typing import Any
import zlib

import jax
from jax import lax
from jax.sharding import Mesh
import numpy as np
import optax

from benchmarks import served
from benchmarks.groups import model as models
from benchmarks.groups import simulated
from benchmarks.groups import ways
from benchmarks.network.common_start import CommonStart
from benchmarks.planned.programs import AXIS
from benchmarks.planned.programs import Place
from benchmarks.planned.programs import Program
from benchmarks.shared_compiler import SharedCompiler
import zenjax
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState

NONE = "none"
# Bytes of a collective: from what a small leaf brings to several times all.
_SIZES = tuple(1 << log for log in (8, 11, 14, 17, 20))
_RATE = 0.05
# Steps that tell what is selected.
_WARM_UP = 8
# Over the mean, of what is drawn by a hash: no step of a way is to need a
# second round where one of another does not.
_SPREADS, _MORE = 4, 1.1
# Steps after which parameters are compared.
_COMPARED = 3
# float32 sums in another order; a rate that was multiplied with and divided by.
_RELATIVE = 1e-3


class Host:
  """This host's share of a run."""

  def __init__(self, compiler: SharedCompiler, epoch: float):
    self._compiler = compiler
    self._mesh = Mesh(np.array(jax.devices()), (AXIS,))
    self._start = CommonStart(self._mesh, epoch)
    self._programs: dict[str, Program] = {}

  def links(self, repeats: int) -> str:
    """The machine, measured."""
    found = zenjax.planner.measure_links(
      self._mesh,
      AXIS,
      sizes=_SIZES,
      repeats=repeats,
      progress=False,
    )
    return found.to_json()

  def model(
    self,
    width: int,
    batch: int,
    size: int,
    batches: int,
    density: float,
    least: int,
  ) -> dict[str, Any]:
    """Takes the network, and compiles one exchange and none."""
    n = self._mesh.size
    self._model = models.cnn(n, width, batch, size, batches)
    self._place = Place(self._model, self._mesh)
    self._gradients = models.compressed(self._model, batch, least)
    self._names = [g.name for g in self._gradients]
    self._density, self._least = density, least
    self._capacities = {
      g.name: _capacity(density * math.prod(g.shape), n)
      for g in self._gradients
    }
    self._programs[NONE] = self._program(None)
    stops = (len(self._names),)
    one = self._programs[ways.program(stops)] = self._program(stops)
    lost = self._lost(one)
    self._want = self._after_steps(one)
    for _ in range(_WARM_UP):
      one()
    self._profiles = zenjax.planner.profile(one.state())
    return {
      "lost": lost,
      "leaves": [
        {
          "name": g.name,
          "elements": math.prod(g.shape),
          "ready": g.ready,
          "selected": self._profiles[g.name].rows,
          "union": self._profiles[g.name].union,
        }
        for g in self._gradients
      ],
    }

  def _program(self, stops: ways.Stops | None) -> Program:
    """A way's; of None all but the exchanges of what is compressed."""
    names, whole = self._names, ()
    if stops is None:
      names, stops, whole = [], (), tuple(self._names)
    chosen = lambda name, leaf: name in self._names
    top = zenjax.sparsify.top_k(self._density, sparse=chosen, method="sampled")
    # Gradients and selections are written to memory in all ways alike, and the
    # program up to there is the same.
    written = optax.stateless(lambda x, _: lax.optimization_barrier(x))
    tx = optax.chain(
      written,
      zenjax.sparsify.error_feedback(top, AXIS),
      written,
      ways.exchanges(names, stops, self._capacities, kept=whole),
      optax.sgd(_RATE),
    )
    return Program(self._place, tx, False, self._compiler)

  def _after_steps(self, program: Program) -> dict[str, np.ndarray]:
    """Parameters when a fresh program has taken so many steps."""
    while program.steps < _COMPARED:
      program()
    return program.params()

  def _lost(self, program: Program) -> int:
    """Elements of which update and residuals are not the mean gradient."""
    mean = optax.stateless(lambda grads, _: lax.pmean(grads, AXIS))
    pmean = Program(
      self._place, optax.chain(mean, optax.sgd(_RATE)), False, self._compiler
    )
    want, got = self._step_of(pmean), self._step_of(program)
    for name, residual in _residuals(program.state(whole=True)).items():
      got[name] += residual.mean(axis=0)
    far = lambda x, y: np.abs(x - y) > _RELATIVE * np.abs(y).max()
    return sum(int(np.sum(far(got[name], want[name]))) for name in want)

  def _step_of(self, program: Program) -> dict[str, np.ndarray]:
    """What the first step takes from the parameters, over the rate."""
    before = self._model.params
    program()
    return {
      name: (before[name] - after.astype(np.float64)) / _RATE
      for name, after in program.params().items()
    }

  def ways(self, topology: str, compute_s: float) -> dict[str, Any]:
    """By name: stops, and what the exchanges should take."""
    costs = ways.priced(
      self._gradients,
      self._profiles,
      zenjax.planner.Topology.from_json(topology),
      compute_s,
    )
    named = ways.by_hand(len(self._gradients)) | ways.chosen(costs)
    return {
      name: {"stops": stops, "exchanges_s": costs.together(stops)}
      for name, stops in named.items()
    }

  def build(self, program: str, stops: list[int]) -> dict[str, Any]:
    """Compiles a way and compares parameters with those of one exchange."""
    got = self._want
    if program not in self._programs:
      self._programs[program] = self._program(tuple(stops))
      got = self._after_steps(self._programs[program])
    bits = b"".join(got[name].tobytes() for name in sorted(got))
    return {
      "compile_s": self._programs[program].compile_s,
      "wrong": self._wrong(got),
      "digest": zlib.crc32(bits),
    }

  def _wrong(self, got: dict[str, np.ndarray]) -> int:
    """Parameters that did not go where those of one exchange went."""
    found = 0
    for name, want in self._want.items():
      most = np.abs(want - self._model.params[name]).max()
      found += int(np.sum(np.abs(got[name] - want) > _RELATIVE * most))
    return found

  def time(self, program: str) -> float:
    """Seconds of one step."""
    return self._programs[program].time(self._start)

  def told(self, program: str) -> dict[str, float]:
    """What zen_sync counts of the last step."""
    leaves = zenjax.stats(self._programs[program].state()).values()
    return {
      "rounds": max(x["rounds"] for x in leaves),
      "went_dense": sum(x["went_dense"] for x in leaves),
      "wire_bytes": sum(x["wire_bytes"] for x in leaves),
    }

  def simulate(self) -> list[dict[str, Any]]:
    """Iteration times on machines that are not here."""
    return simulated.simulate(self._model, self._profiles, self._least)


def _capacity(selected: float, hosts: int) -> tuple[int, int]:
  """For a hash's parts of what a host selects, and of what all do."""
  push, pull = (
    math.ceil(_MORE * x + _SPREADS * math.sqrt(_MORE * x))
    for x in (selected / hosts, selected)
  )
  return push, pull


def _residuals(state: Any) -> dict[str, np.ndarray]:
  """`[n, ...]` of each leaf that has one."""
  is_one = lambda x: isinstance(x, ErrorFeedbackState)
  nodes = jax.tree.leaves(state, is_leaf=is_one)
  leaves = next(x for x in nodes if is_one(x)).leaves
  return {k: np.asarray(x.residual, np.float64) for k, x in leaves.items()}


def main() -> None:
  """Serves until stdin ends."""
  served.configure()
  compiler = served.join()
  served.serve(Host(compiler, float(os.environ["ZENJAX_HOST_EPOCH"])))


if __name__ == "__main__":
  main()
