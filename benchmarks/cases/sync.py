"""`sync`: a training step on one table, synchronized in different ways.

Letters: `n` devices, `T` look-ups a device, `R` rows, `D` width.
"""

import argparse
from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any, Literal, NamedTuple

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
from benchmarks.workloads import Workload
import zenjax

Arrays = tuple[np.ndarray, np.ndarray]


class ScatterAdd:
  """A look-up: autodiff adds one row for each id into zeros, `[R, D]`."""

  def inputs(self, workload, ids, rng: np.random.Generator) -> Arrays:
    """Returns one device's inputs for the rows that it looks up."""
    return ids, oracle.values(rng, (len(ids), workload.width))

  def loss(self, table: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a loss linear in `table: [R, D]`, whose gradient is known."""
    return jnp.sum(jnp.take(table, a, axis=0, mode="clip") * b)

  def expected(self, rows: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the gradient of `loss`, `[R, D] float64`."""
    return oracle.row_sums(a, b, rows)


class Matmul(ScatterAdd):
  """A dense layer, say a tied softmax: the gradient is a product.

  Of inner dimension 4 only: it costs little more than writing `[R, D]`.
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


GRADIENTS = {"matmul": Matmul(), "scatter-add": ScatterAdd()}
AXIS = "data"
LEAF = "table"


class Variant(NamedTuple):
  """A way to synchronize one table."""

  name: str
  transformation: optax.GradientTransformation
  # Bytes on the wire: none, a ring all-reduce's, or what zenjax counts.
  volume: Literal["none", "dense", "counted"] = "counted"
  tuned: bool = False  # Whether `zenjax.tune` plans it after a step a batch.


PMEAN = optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))


def _zen(**options):
  return zenjax.zen_sync(AXIS, sparse=True, **options)


VARIANTS = (
  Variant("none", optax.identity(), volume="none"),
  Variant("pmean", PMEAN, volume="dense"),
  Variant("all_gather", _zen(scheme="all_gather")),
  Variant("zen", _zen()),
  Variant("zen-tuned", _zen(), tuned=True),
  Variant("zen-columns", _zen(partition="columns")),
)


LEARNING_RATE = 0.5  # A power of two: the products are exact.


class Step(NamedTuple):
  """A compiled step and the state it starts from."""

  compiled: Any  # (params, state, *batch) -> (params, state[, loss])
  state: Any
  seconds: float  # to trace, lower and compile


def value_and_grad(loss: Callable[..., Any], rows: bool) -> Callable[..., Any]:
  """Returns gradients of arrays, or of rows where a table is only looked up."""
  return zenjax.value_and_grad(loss) if rows else jax.value_and_grad(loss)


def tuned(first: Any, seen: Any) -> Any:
  """Returns a first state with the plan that `zenjax.tune` makes of others."""
  plan = jax.tree.structure(zenjax.tune(seen))
  return jax.tree.unflatten(plan, jax.tree.leaves(first))


def compile_step(
  tx: optax.GradientTransformation,
  loss: Callable[..., jax.Array],
  mesh: Mesh,
  params: Any,
  batch: Sequence[Any],
  *,
  rows: bool = False,
  tell: bool = False,
  seen: Any = None,
  **options: Any,
) -> Step:
  """Compiles a step; arguments may be arrays or their abstract shapes.

  `loss` is of the parameters, which are replicated or tables of
  `zenjax.tables.shard`, and of one device's part of the batch; with `rows`
  gradients are SparseRows, with `tell` the step returns the mean loss too. With
  a state that steps have `seen`, it is planned by `zenjax.tune`.
  `options` are those of `harness.compiled`.
  """
  if isinstance(jax.tree.leaves(params)[0], jax.Array):
    state = zenjax.init_state(tx, params, mesh, AXIS)
  else:
    replicated = NamedSharding(mesh, P())
    state = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
      jax.eval_shape(tx.init, params),
    )
  if seen is not None:
    state = tuned(state, seen)
  lies, specs = zenjax.state_specs((params, state), AXIS)
  gradients = value_and_grad(loss, rows)

  def step(params, state, *batch):
    mean, grads = gradients(params, *batch)
    updates, state = tx.update(grads, state, params)
    found = zenjax.apply_updates(params, updates), state
    return (*found, jax.lax.pmean(mean, AXIS)) if tell else found

  # check_vma=False: gradients of replicated parameters stay local, and "none"
  # may leave replicas different.
  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(lies, specs, *[P(AXIS)] * len(batch)),
    out_specs=(lies, specs, P()) if tell else (lies, specs),
    check_vma=False,
  )
  compiled, seconds = harness.compiled(mapped, params, state, *batch, **options)
  return Step(compiled, state, seconds)


class Runner:
  """A compiled step: every call takes the next batch and keeps what it left.

  `seen` are parameters and state after some steps, for `zenjax.tune`;
  `options` are those of `compile_step`; `steps` were taken so far.
  """

  def __init__(
    self, tx, loss, mesh, params, batches, seen: Any = None, **options: Any
  ):
    if seen is not None:
      planned, seen = zenjax.tune(seen)
      plan = jax.tree.structure(planned)
      params = jax.tree.unflatten(plan, jax.tree.leaves(params))
    self.params, self.batches, self.steps = params, batches, 0
    options["seen"] = seen
    self.compiled, self.state, self.compile_s = compile_step(
      tx, loss, mesh, params, batches[0], donate_argnums=(0, 1), **options
    )

  def __call__(self) -> Any:
    batch = self.batches[self.steps % len(self.batches)]
    self.steps += 1
    self.params, self.state, *_ = self.compiled(self.params, self.state, *batch)
    return self.params


def zeros(mesh: Mesh, rows: int, width: int) -> dict[str, jax.Array]:
  """Parameters of value zero, `{LEAF: [R, D]}`, on every device of `mesh`."""
  make = lambda: {LEAF: jnp.zeros((rows, width), jnp.float32)}
  return jax.jit(make, out_shardings=NamedSharding(mesh, P()))()


def place(mesh: Mesh, x: np.ndarray, *axes: str) -> jax.Array:
  """Places an array on devices, of whichever process, split along `axes`."""
  sharding = NamedSharding(mesh, P(*axes))
  # `device_put` would have processes compare what they hold.
  return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])


# What zenjax counts itself; density and bytes come from the ids.
_COUNTED = ("push_imbalance", "pull_imbalance", "rounds")


class _Batch(NamedTuple):
  """One step's inputs, on the host and on the devices."""

  ids: list[np.ndarray]  # n x [T] int32, the rows looked up
  inputs: list[Arrays]  # n pairs, as the gradient gives them
  placed: tuple[jax.Array, jax.Array]  # [n, ...] each


class Training:
  """Batches and parameters that the variants of one workload share.

  Attributes:
    params: Handed from step to step, whichever variant runs it, for every step
      donates what it got: one table a device is enough for all variants.
  """

  def __init__(self, workload: Workload, mesh: Mesh, num_batches: int):
    self.workload, self.mesh = workload, mesh
    self.gradient = GRADIENTS[workload.gradient]
    self.params: Any = None
    self._num_batches = 1 if workload.density == 1 else num_batches

  @functools.cached_property
  def batches(self) -> list[_Batch]:
    return [self.draw(seed) for seed in range(self._num_batches)]

  def draw(self, seed: int) -> _Batch:
    """Returns one step's inputs, always the same of a seed."""
    rng = np.random.default_rng(seed)
    ids = workloads.ids(self.workload, self.mesh.size, seed)
    inputs = [self.gradient.inputs(self.workload, i, rng) for i in ids]
    a, b = (place(self.mesh, np.stack(x), AXIS) for x in zip(*inputs))
    return _Batch(ids, inputs, (a, b))

  def zeros(self) -> Any:
    return zeros(self.mesh, self.workload.rows, self.workload.width)

  def build(self, variant: Variant) -> harness.Built:
    """Compiles `variant`, checks it on every batch, collects its figures."""
    runner = _Runner(self, variant)
    if variant.tuned:
      runner.check()
      runner = _Runner(self, variant, runner.state)
    wrong, seen = runner.check()
    if self.params is None:
      self.params = self.zeros()
    facts: dict[str, float] = {
      "devices": self.mesh.size,
      "rows": self.workload.rows,
      "width": self.workload.width,
      **workloads.volume(self.workload, [batch.ids for batch in self.batches]),
    }
    wire = {"none": 0.0, "dense": facts["dense_bytes"]}
    if seen:
      mean = {k: float(np.mean([s[k] for s in seen])) for k in seen[0]}
      wire["counted"] = mean["wire_bytes"]
      facts |= {key: mean[key] for key in _COUNTED}
    facts["wire_bytes"] = wire[variant.volume]
    facts["over_bound"] = facts["wire_bytes"] / facts["bound_bytes"]
    return harness.Built(runner, wrong, runner.compile_s, facts)


class _Runner:
  """One variant's compiled step; calling it runs one on the next batch.

  With a state that steps have `seen`, it is planned by `zenjax.tune`.

  Attributes:
    state: What the last step left.
  """

  def __init__(self, training: Training, variant: Variant, seen: Any = None):
    self._training, self._variant = training, variant
    self._compiled, self.state, self.compile_s = compile_step(
      optax.chain(variant.transformation, optax.sgd(LEARNING_RATE)),
      lambda params, a, b: training.gradient.loss(params[LEAF], a[0], b[0]),
      training.mesh,
      training.zeros(),
      training.batches[0].placed,
      seen=seen,
      donate_argnums=0,
    )
    self._batches = itertools.cycle(training.batches)

  def __call__(self) -> Any:
    params = self._training.params
    self._training.params = None  # Donated: never to be seen again.
    self._training.params = self._step(params, next(self._batches))
    return self._training.params

  def _step(self, params, batch):
    params, self.state = self._compiled(params, self.state, *batch.placed)
    return params

  def check(self) -> tuple[int, list[dict[str, float]]]:
    """Wrong elements over all batches and devices, and each step's figures."""
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
    expected, wrong = self._training.gradient.expected, 0
    for device, shard in enumerate(shards):
      if synced and device:  # Replicas must agree to the bit.
        wrong += oracle.count_different(shard, shards[0])
        continue
      inputs = batch.inputs if synced else batch.inputs[device : device + 1]
      parts = (expected(len(shard), a, b) for a, b in inputs)
      want = functools.reduce(np.add, parts)
      wrong += oracle.count_wrong(shard, want * -LEARNING_RATE / len(inputs))
    return wrong


COLUMNS = (
  table.fact("dense\nMB", "dense_bytes", unit=1e6),
  table.fact("density\n%", "density", ".2f", unit=0.01),
  table.fact("union\n%", "union_density", ".2f", unit=0.01),
  table.fact("wire\nMB", "wire_bytes", ".2f", unit=1e6),
  table.fact("wire/\nbound", "over_bound", ".2f"),
  table.fact("imbalance\npush", "push_imbalance", ".2f"),
  table.fact("\npull", "pull_imbalance", ".2f"),
  table.fact("rounds", "rounds", ".1f"),
  *table.MEASURED,
  table.time_over("pmean", "over\npmean"),
  table.added_over("pmean", "none", "added/\nadded"),
)


def cases(options: argparse.Namespace) -> list[harness.Case]:
  """One case for each workload and variant asked for.

  Raises:
    ValueError: Too few devices, too little memory, or no such variant.
  """
  known = [v.name for v in VARIANTS]
  names = harness.named("--variants", options.variants, known)
  mesh, found = harness.mesh(options.devices, AXIS), []
  for name in options.workloads or workloads.NAMES:
    workload = workloads.get(name, full_size=options.full_size)
    need = 4 * mesh.size * workload.bytes  # Parameters, gradient, scratch.
    remedy = "Ask for fewer devices, other workloads or the scaled size."
    harness.require_memory(mesh, need, "--full-size", remedy)
    group = f"{name}  {workload.rows:,} x {workload.width}"
    build = Training(workload, mesh, options.batches).build
    found += [
      harness.case(group, v.name, build, v) for v in VARIANTS if v.name in names
    ]
  return found
