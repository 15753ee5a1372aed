"""Training steps on one workload: built, checked against NumPy, ready to time.

Letters: `n` devices, `T` look-ups a device, `R` rows, `D` width.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from benchmarks import compiled_step
from benchmarks import oracle
from benchmarks import workloads
from benchmarks.gradients import Arrays
from benchmarks.gradients import GRADIENTS
from benchmarks.harness import Built
from benchmarks.variants import LEAF
from benchmarks.variants import Variant
from benchmarks.workloads import Workload
import zenjax

# What zenjax counts itself; density and bytes come from the ids.
_COUNTED = ("push_imbalance", "pull_imbalance", "rounds", "overflow_rows")


# Steps from which capacities are advised, on batches of their own.
_REHEARSALS = 8
_REHEARSAL_SEED = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
  """One step's inputs, on the host and on the devices."""

  ids: list[np.ndarray]  # n x [T] int32, the rows looked up
  inputs: list[Arrays]  # n pairs, what `Gradient.inputs` returns
  placed: tuple[jax.Array, jax.Array]  # [n, ...] each


class Training:
  """What the variants of one workload share: batches and parameters.

  Attributes:
    workload: Table and ids.
    mesh: One axis.
    gradient: How the step comes by its gradient.
    params: Handed from step to step, whichever variant runs it, for every step
      donates what it got: one table a device is enough for all variants.
  """

  def __init__(self, workload: Workload, mesh: Mesh, num_batches: int):
    self.workload = workload
    self.mesh = mesh
    self.gradient = GRADIENTS[workload.gradient]
    self.params: Any = None
    self._num_batches = 1 if workload.density == 1 else num_batches

  @functools.cached_property
  def batches(self) -> list[_Batch]:
    return [self._draw(seed) for seed in range(self._num_batches)]

  def _draw(self, seed):
    rng = np.random.default_rng(seed)
    ids = workloads.ids(self.workload, self.mesh.size, seed)
    inputs = [self.gradient.inputs(self.workload, i, rng) for i in ids]
    a, b = (compiled_step.split(self.mesh, np.stack(x)) for x in zip(*inputs))
    return _Batch(ids, inputs, (a, b))

  def zeros(self) -> Any:
    """Fresh parameters of value zero, on every device."""
    return compiled_step.zeros(
      self.mesh, self.workload.rows, self.workload.width
    )

  def build(self, variant: Variant) -> Built:
    """Compiles `variant`, checks it on every batch, collects its figures."""
    capacities = self._advice(variant) if variant.pinned else None
    runner = self._runner(variant, capacities)
    wrong, seen = runner.check()
    if self.params is None:
      self.params = self.zeros()
    return Built(
      run=runner,
      wrong=wrong,
      compile_s=runner.compile_s,
      facts=self._facts(variant, seen),
    )

  def _advice(self, variant):
    """What zenjax advises to pin after steps that are not the timed ones."""
    runner = self._runner(variant, None)
    for seed in range(_REHEARSALS):
      runner.rehearse(self._draw(_REHEARSAL_SEED + seed))
    return zenjax.advise(runner.state)[LEAF]

  def _runner(self, variant, capacities):
    sync = variant.make(capacities)
    placed = self.batches[0].placed
    compiled = compiled_step.compile_step(
      sync, self.gradient, self.mesh, self.zeros(), placed
    )
    return _Runner(self, compiled, variant)

  def _facts(self, variant, seen):
    facts = self._volume()
    wire = {"none": 0.0, "dense": facts["dense_bytes"]}
    if variant.volume == "counted":
      counted = _mean(seen)
      wire["counted"] = counted["wire_bytes"]
      facts |= {key: counted[key] for key in _COUNTED}
    facts["wire_bytes"] = wire[variant.volume]
    facts["over_bound"] = facts["wire_bytes"] / facts["bound_bytes"]
    return facts

  def _volume(self):
    """Bytes that a ring all-reduce moves, and those that any scheme must."""
    n, rows, width = self.mesh.size, self.workload.rows, self.workload.width
    local, union = [], []
    for batch in self.batches:
      local.append(np.mean([len(np.unique(ids)) for ids in batch.ids]))
      union.append(len(np.unique(np.concatenate(batch.ids))))
    moved = float(np.mean(local) + np.mean(union)) * width * 4
    return {
      "devices": n,
      "rows": rows,
      "width": width,
      "density": float(np.mean(local)) / rows,
      "union_density": float(np.mean(union)) / rows,
      "dense_bytes": 2 * (n - 1) / n * self.workload.bytes,
      "bound_bytes": (n - 1) / n * moved,
    }

  def wanted(self, batch: _Batch, device: int, *, synced: bool) -> np.ndarray:
    """`[R, D]` parameters of a device after one step from zero, float64."""
    inputs = batch.inputs if synced else batch.inputs[device : device + 1]
    total = np.zeros((self.workload.rows, self.workload.width))
    for a, b in inputs:
      total += self.gradient.expected(self.workload.rows, a, b)
    return total * (-compiled_step.LEARNING_RATE / len(inputs))


class _Runner:
  """One variant's compiled step; calling it runs one on the next batch."""

  def __init__(
    self, training: Training, built: compiled_step.Step, variant: Variant
  ):
    self.compile_s = built.seconds
    self._training = training
    self._built = built
    self._variant = variant
    self._state = built.state  # What the next step starts from.
    self.state = built.state  # What the last step left.
    self._batches = itertools.cycle(training.batches)

  def __call__(self) -> Any:
    params = self._training.params
    self._training.params = None  # Donated: never to be seen again.
    self._training.params = self._step(params, next(self._batches))
    return self._training.params

  def _step(self, params, batch):
    state = self._state
    params, state = self._built.compiled(params, state, *batch.placed)
    if self._variant.keeps_state:
      self._state = state
    self.state = state
    return params

  def rehearse(self, batch: _Batch) -> None:
    """Runs one step from zero parameters for what it leaves in the state."""
    jax.block_until_ready(self._step(self._training.zeros(), batch))

  def check(self) -> tuple[int, list[dict[str, float]]]:
    """Wrong elements over all batches and devices, and each step's figures."""
    for _ in range(self._variant.warm_steps):
      self.rehearse(next(self._batches))
    wrong, seen = 0, []
    for batch in self._training.batches:
      params = self._step(self._training.zeros(), batch)
      wrong += self._count_wrong(batch, params[LEAF])
      if self._variant.volume == "counted":
        seen.append(zenjax.stats(self.state)[LEAF])
    return wrong, seen

  def _count_wrong(self, batch, table):
    synced = self._variant.volume != "none"
    shards = [np.asarray(shard.data) for shard in table.addressable_shards]
    want = self._training.wanted(batch, 0, synced=synced)
    wrong = oracle.count_wrong(shards[0], want)
    for device, shard in enumerate(shards[1:], 1):
      if synced:  # Replicas must agree to the bit.
        wrong += oracle.count_different(shard, shards[0])
      else:
        want = self._training.wanted(batch, device, synced=False)
        wrong += oracle.count_wrong(shard, want)
    return wrong


def _mean(seen: list[dict[str, float]]) -> dict[str, float]:
  return {key: float(np.mean([s[key] for s in seen])) for key in seen[0]}
