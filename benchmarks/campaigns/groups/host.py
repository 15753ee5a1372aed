"""The program on every host: `python -m benchmarks.campaigns.groups.host`."""

import math
from typing import Any
import zlib

from jax import lax
import numpy as np
import optax

from benchmarks.campaigns.groups import ways as models
from benchmarks.campaigns.groups.cells import NONE
from benchmarks.campaigns.planned import programs
from benchmarks.cases import sync
from benchmarks.testbed import served
import zenjax

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


class _Worker(served.Worker):
  """This host's share of a run."""

  def model(
    self,
    width: int,
    batch: int,
    image_size: int,
    batches: int,
    density: float,
    least: int,
  ) -> dict[str, Any]:
    """Takes the network, and compiles one exchange and none."""
    n = self.mesh.size
    self._model = models.cnn(n, width, batch, image_size, batches)
    self._place = programs.Place(self._model, self)
    self._gradients = models.compressed(self._model, batch, least)
    self._names = [g.name for g in self._gradients]
    self._density, self._least = density, least
    self._capacities = {
      g.name: _capacity(density * math.prod(g.shape), n)
      for g in self._gradients
    }
    self.programs[NONE] = self._program(None)
    stops = (len(self._names),)
    one = self.programs[models.program(stops)] = self._program(stops)
    lost = self._lost(one)
    self._want = self._after_steps(one)
    for _ in range(_WARM_UP):
      one()
    self._profiles = zenjax.planner.profile(one.state_here())
    leaves = []
    for g in self._gradients:
      leaf = {"name": g.name, "elements": math.prod(g.shape), "ready": g.ready}
      seen = self._profiles[g.name]
      leaves.append(leaf | {"selected": seen.rows, "union": seen.union})
    return {"lost": lost, "leaves": leaves}

  def _program(self, stops: models.Stops | None) -> programs.Program:
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
      zenjax.sparsify.error_feedback(top, sync.AXIS),
      written,
      models.exchanges(names, stops, self._capacities, kept=whole),
      optax.sgd(_RATE),
    )
    return programs.Program(self._place, tx)

  def _after_steps(self, program: programs.Program) -> dict[str, np.ndarray]:
    """Parameters when a fresh program has taken so many steps."""
    while program.steps < _COMPARED:
      program()
    return program.params_here()

  def _lost(self, program: programs.Program) -> int:
    """Elements of which update and residuals are not the mean gradient."""
    tx = optax.chain(sync.PMEAN, optax.sgd(_RATE))
    pmean = programs.Program(self._place, tx)
    want = programs.sent_and_kept(pmean, _RATE)
    got = programs.sent_and_kept(program, _RATE)
    return sum(programs.count_far(got[k], want[k], _RELATIVE) for k in want)

  def ways(self, topology: str, compute_s: float) -> dict[str, Any]:
    """Returns by name the stops, and what the exchanges should take."""
    costs = models.priced(
      self._gradients,
      self._profiles,
      zenjax.planner.Topology.from_json(topology),
      compute_s,
    )
    named = models.by_hand(len(self._gradients)) | models.chosen(costs)
    return {
      name: {"stops": stops, "exchanges_s": costs.together(stops)}
      for name, stops in named.items()
    }

  def build(self, program: str, stops: list[int]) -> dict[str, Any]:
    """Compiles a way and compares parameters with those of one exchange."""
    got = self._want
    if program not in self.programs:
      self.programs[program] = self._program(tuple(stops))
      got = self._after_steps(self.programs[program])
    bits = b"".join(got[name].tobytes() for name in sorted(got))
    wrong = 0
    for name, start in self._model.params.items():
      moved = got[name] - start, self._want[name] - start
      wrong += programs.count_far(*moved, _RELATIVE)
    compile_s = self.programs[program].compile_s
    return {"compile_s": compile_s, "wrong": wrong, "digest": zlib.crc32(bits)}

  def told(self, program: str) -> dict[str, float]:
    """Returns zen_sync's counts of the last step."""
    leaves = zenjax.stats(self.programs[program].state_here()).values()
    return {
      "rounds": max(x["rounds"] for x in leaves),
      "went_dense": sum(x["went_dense"] for x in leaves),
      "wire_bytes": sum(x["wire_bytes"] for x in leaves),
    }

  def simulate(self) -> list[dict[str, Any]]:
    """Iteration times on machines that are not here."""
    return models.on_machines(self._model, self._profiles, self._least)


def _capacity(selected: float, hosts: int) -> tuple[int, int]:
  """Returns room for a hash's parts of one host's selection, and of all."""
  push, pull = (
    math.ceil(_MORE * x + _SPREADS * math.sqrt(_MORE * x))
    for x in (selected / hosts, selected)
  )
  return push, pull


if __name__ == "__main__":
  served.main(_Worker)
