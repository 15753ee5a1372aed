"""One training step on one table: gradient, synchronization, SGD."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks.gradients import Gradient
from benchmarks.variants import AXIS
from benchmarks.variants import LEAF
import zenjax

LEARNING_RATE = 0.5  # A power of two: the products are exact.


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
  """A compiled step and the state it starts from."""

  compiled: Any  # (params, state, *batch) -> (params, state)
  state: Any
  seconds: float  # to trace, lower and compile


def compile_step(
  sync: optax.GradientTransformation,
  gradient: Gradient,
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
  start = time.perf_counter()
  lowered = jax.jit(mapped, donate_argnums=0).lower(params, state, *batch)
  compiled = lowered.compile()
  return Step(compiled, state, time.perf_counter() - start)


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
