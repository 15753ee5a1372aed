"""`sync`: a training step on one table, synchronized in different ways.

Letters: `n` devices, `T` look-ups a device, `R` rows, `D` width.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks import harness
from benchmarks import oracle
from benchmarks import table
from benchmarks import workloads
from benchmarks.harness import Built
from benchmarks.harness import Case
from benchmarks.workloads import Workload
import zenjax

Arrays = tuple[np.ndarray, np.ndarray]


class ScatterAdd:
  """A look-up: autodiff adds one row for each id into zeros, `[R, D]`.

  The loss is linear in the table, so that its gradient is known.
  """

  def inputs(
    self, workload: Workload, ids: np.ndarray, rng: np.random.Generator
  ) -> Arrays:
    """Returns one device's inputs for the rows that it looks up."""
    return ids, oracle.values(rng, (len(ids), workload.width))

  def loss(self, table: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the loss for `table: [R, D]`."""
    return jnp.sum(jnp.take(table, a, axis=0, mode="clip") * b)

  def expected(self, rows: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the gradient of `loss`, `[R, D] float64`."""
    return oracle.row_sums(a, b, rows)


class Matmul(ScatterAdd):
  """A dense layer, say a tied softmax: the gradient is a product.

  Of inner dimension 4 only: it costs little more than writing `[R, D]`, so what
  synchronization costs is not lost beside it.
  """

  def inputs(self, workload, ids, rng):
    del ids  # A dense layer touches every row.
    left = oracle.values(rng, (4, workload.rows))
    return left, oracle.values(rng, (4, workload.width))

  def loss(self, table, a, b):
    logits = jnp.einsum("rd,kd->kr", table, b, precision="highest")
    return jnp.sum(logits * a)

  def expected(self, rows, a, b):
    return a.astype(np.float64).T @ b


GRADIENTS = {
  "matmul": Matmul(),
  "scatter-add": ScatterAdd(),
}


AXIS = "data"
LEAF = "table"

# (push, pull) rows of the first round, as `zenjax.advise` gives them.
Capacities = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
  """A way to synchronize one table.

  Attributes:
    name: As in the first column.
    volume: Bytes on the wire: "none", those of a ring all-reduce ("dense"), or
      what zenjax counts ("counted").
    make: Builds the transformation, with or without pinned capacities.
    pinned: Whether capacities are found by an unpinned run and pinned.
    warm_steps: Steps run before the first timed one, state fed back.
    keeps_state: Whether timed steps feed the state back. Without it each one
      is a first step.
  """

  name: str
  volume: Literal["none", "dense", "counted"] = "counted"
  make: Callable[[Capacities | None], optax.GradientTransformation]
  pinned: bool = False
  warm_steps: int = 0
  keeps_state: bool = True


def _pmean(_):
  return optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))


def _zen(**options):
  def make(capacities):
    return zenjax.zen_sync(AXIS, sparse=True, capacities=capacities, **options)

  return make


BASELINES = (
  Variant(name="none", volume="none", make=lambda _: optax.identity()),
  Variant(name="pmean", volume="dense", make=_pmean),
)
SPARSE = (
  Variant(name="all_gather", make=_zen(scheme="all_gather")),
  Variant(name="zen", make=_zen(partition="auto")),
  Variant(name="zen-hash", make=_zen(partition="hash")),
  Variant(name="zen-columns", make=_zen(partition="columns")),
)
PINNED = tuple(
  dataclasses.replace(variant, name=f"{variant.name}-pinned", pinned=True)
  for variant in SPARSE
  if variant.name != "all_gather"
)
# At density 100 % the first step finds out what later ones remember.
DENSE = (
  Variant(name="zen-first", make=_zen(), keeps_state=False),
  Variant(name="zen-remembered", make=_zen(), warm_steps=8),
)


def chosen(
  variants: Sequence[Variant], names: Sequence[str] | None
) -> list[Variant]:
  """Returns those of `variants` that are called for; all if `names` is None.

  Raises:
    ValueError: A name is none of any variant.
  """
  known = [v.name for v in (*BASELINES, *SPARSE, *PINNED, *DENSE)]
  if unknown := sorted(set(names or ()) - set(known)):
    raise ValueError(
      f"`--variants` must be among {', '.join(known)}, got {unknown[0]!r}."
    )
  return [v for v in variants if not names or v.name in names]


LEARNING_RATE = 0.5  # A power of two: the products are exact.


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
  """A compiled step and the state it starts from."""

  compiled: Any  # (params, state, *batch) -> (params, state)
  state: Any
  seconds: float  # to trace, lower and compile


def compile_step(
  sync: optax.GradientTransformation,
  gradient: ScatterAdd,
  mesh: Mesh,
  params: Any,
  batch: tuple[Any, Any],
) -> Step:
  """Compiles a step; arguments may be arrays or their abstract shapes.

  Args:
    sync: Makes global gradients of local ones.
    gradient: The loss.
    mesh: One axis, `AXIS`, of `n` devices.
    params: `{LEAF: [R, D]}`, replicated; donated to the step.
    batch: The inputs of `gradient.loss`, `[n, ...]`, split over devices.
  """
  optimizer = optax.chain(sync, optax.sgd(LEARNING_RATE))
  state = _initial_state(optimizer, params, mesh)
  specs = zenjax.state_specs(state, AXIS)

  def loss(params, a, b):
    return gradient.loss(params[LEAF], a[0], b[0])

  def step(params, state, a, b):
    grads = jax.grad(loss)(params, a, b)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  # check_vma=False: gradients of replicated parameters stay local, and "none"
  # may leave replicas different.
  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), specs, P(AXIS), P(AXIS)),
    out_specs=(P(), specs),
    check_vma=False,
  )
  compiled, seconds = harness.compiled(
    mapped, params, state, *batch, donate_argnums=0
  )
  return Step(compiled, state, seconds)


def _initial_state(optimizer, params, mesh):
  if isinstance(params[LEAF], jax.Array):
    return zenjax.init(optimizer, params, mesh, AXIS)
  replicated = NamedSharding(mesh, P())
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
    jax.eval_shape(optimizer.init, params),
  )


def zeros(mesh: Mesh, rows: int, width: int) -> dict[str, jax.Array]:
  """Parameters of value zero, `{LEAF: [R, D]}`, on every device of `mesh`."""
  replicated = NamedSharding(mesh, P())
  make = jax.jit(
    lambda: {LEAF: jnp.zeros((rows, width), jnp.float32)},
    out_shardings=replicated,
  )
  return make()


def split(mesh: Mesh, x: np.ndarray) -> jax.Array:
  """Places `[n, ...]` with one entry a device, of whichever process."""
  sharding = NamedSharding(mesh, P(AXIS))
  # `device_put` would have processes compare what they hold.
  return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])


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
  """Batches and parameters that the variants of one workload share.

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
    a, b = (split(self.mesh, np.stack(x)) for x in zip(*inputs))
    return _Batch(ids, inputs, (a, b))

  def zeros(self) -> Any:
    """Fresh parameters of value zero, on every device."""
    return zeros(self.mesh, self.workload.rows, self.workload.width)

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
    """Returns zenjax's advice after steps that are not the timed ones."""
    runner = self._runner(variant, None)
    for seed in range(_REHEARSALS):
      runner.rehearse(self._draw(_REHEARSAL_SEED + seed))
    return zenjax.advise(runner.state)[LEAF]

  def _runner(self, variant, capacities):
    sync = variant.make(capacities)
    placed = self.batches[0].placed
    compiled = compile_step(
      sync, self.gradient, self.mesh, self.zeros(), placed
    )
    return _Runner(self, compiled, variant)

  def _facts(self, variant, seen):
    workload = self.workload
    facts: dict[str, float] = {
      "devices": self.mesh.size,
      "rows": workload.rows,
      "width": workload.width,
      **workloads.volume(workload, [batch.ids for batch in self.batches]),
    }
    wire = {"none": 0.0, "dense": facts["dense_bytes"]}
    if variant.volume == "counted":
      counted = _mean(seen)
      wire["counted"] = counted["wire_bytes"]
      facts |= {key: counted[key] for key in _COUNTED}
    facts["wire_bytes"] = wire[variant.volume]
    facts["over_bound"] = facts["wire_bytes"] / facts["bound_bytes"]
    return facts

  def wanted(self, batch: _Batch, device: int, *, synced: bool) -> np.ndarray:
    """`[R, D]` parameters of a device after one step from zero, float64."""
    inputs = batch.inputs if synced else batch.inputs[device : device + 1]
    total = np.zeros((self.workload.rows, self.workload.width))
    for a, b in inputs:
      total += self.gradient.expected(self.workload.rows, a, b)
    return total * (-LEARNING_RATE / len(inputs))


class _Runner:
  """One variant's compiled step; calling it runs one on the next batch."""

  def __init__(self, training: Training, built: Step, variant: Variant):
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


MB = 1e6
COLUMNS = (
  table.fact("dense\nMB", "dense_bytes", unit=MB),
  table.fact("density\n%", "density", ".2f", unit=0.01),
  table.fact("union\n%", "union_density", ".2f", unit=0.01),
  table.fact("wire\nMB", "wire_bytes", ".2f", unit=MB),
  table.fact("wire/\nbound", "over_bound", ".2f"),
  table.fact("imbalance\npush", "push_imbalance", ".2f"),
  table.fact("\npull", "pull_imbalance", ".2f"),
  table.fact("rounds", "rounds", ".1f"),
  table.WRONG,
  table.COMPILE,
  table.TIME,
  table.SPREAD,
  table.time_over("pmean", "over\npmean"),
  table.added_over("pmean", "none", "added/\nadded"),
)
# Tables alive at once on a device: parameters, gradient, two of scratch.
_TABLES = 4


def cases(options: argparse.Namespace) -> list[Case]:
  """One case for each workload and variant asked for.

  Raises:
    ValueError: There are too few devices, or too little memory.
  """
  mesh = harness.mesh(options.devices, AXIS)
  return [
    case
    for name in options.workloads or workloads.NAMES
    for case in _cases_of(name, mesh, options)
  ]


def _cases_of(name, mesh, options):
  workload = workloads.get(name, full_size=options.full_size)
  if mesh.devices.flat[0].platform == "cpu":
    # Others have memory of their own, and say when it is full.
    harness.require_memory(
      mesh.size * _TABLES * workload.bytes,
      "--full-size",
      "Ask for fewer devices, other workloads or the scaled size.",
    )
  group = f"{name}  {workload.rows:,} x {workload.width}"
  training = Training(workload, mesh, options.batches)
  return [
    Case(
      group=group,
      name=variant.name,
      build=functools.partial(training.build, variant),
    )
    for variant in _variants(workload, options)
  ]


def _variants(workload, options):
  if workload.density == 1:
    candidates = (*BASELINES, *DENSE)
  elif options.pinned:
    candidates = (*BASELINES, *SPARSE, *PINNED)
  else:
    candidates = (*BASELINES, *SPARSE)
  return chosen(candidates, options.variants)
