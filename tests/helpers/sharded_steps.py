"""Steps on sharded tables, as users write them in plain `jit`."""

from collections.abc import Iterable
import math
from typing import Any

import jax
from jax import lax
import numpy as np
import optax

import zenjax


def mesh_of(*shape: int, names=("data", "model"), kinds: str = "") -> Any:
  """The first devices; of `kinds`, "e" is an explicit axis."""
  types = jax.sharding.AxisType
  return jax.make_mesh(
    shape,
    names[: len(shape)],
    devices=jax.devices()[: math.prod(shape)],
    axis_types=tuple(
      types.Explicit if kind == "e" else types.Auto
      for kind in kinds or "a" * len(shape)
    ),
  )


def split(batch: Any, mesh: Any, axes: Any = None) -> Any:
  """A batch in parts along all axes of a mesh, or along some."""
  spec = jax.P(axes or mesh.axis_names)
  return jax.device_put(batch, jax.NamedSharding(mesh, spec))


def step_of(tx: Any, loss_fn: Any, both=zenjax.value_and_grad, **how: Any):
  """A step of `state`, which is parameters and the optimizer's state."""

  def step(state, *batch):
    params, opt_state = state
    loss, grads = both(loss_fn, **how)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  return step


def in_shard_map(
  tx: Any, loss_fn: Any, state: Any, mesh: Any, axes: Any, check_vma: bool
):
  """The same inside `shard_map`, with gradients that nobody has summed."""
  specs = zenjax.state_specs(state, axes)

  def local(state, *batch):
    params, opt_state = state
    own = zenjax.unreduced(params, axes)
    loss, grads = zenjax.value_and_grad(loss_fn)(own, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    state = zenjax.apply_updates(params, updates), opt_state
    return state, lax.pmean(loss, axes)

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(specs, jax.P(axes), jax.P(axes)),
    out_specs=(specs, jax.P()),
    check_vma=check_vma,
  )


def trained(step: Any, state: Any, batches: Iterable[Any]) -> tuple[Any, Any]:
  """The state after all batches, and the loss of each."""
  losses = []
  for batch in batches:
    state, loss = step(state, *batch)
    # JAX 0.10 hangs if steps run ahead: see docs/reference/platforms.md.
    losses.append(float(loss))
  return state, losses


def is_table(x: Any) -> bool:
  return isinstance(x, zenjax.tables.ShardedTable)


def value_and_arrays(loss_fn: Any):
  """`zenjax.value_and_grad` with arrays for the rows of sharded tables."""
  dense = lambda x: x.value.to_dense().reshape(x.shape) if is_table(x) else x

  def run(*args, **how):
    value, grads = zenjax.value_and_grad(loss_fn, **how)(*args)
    return value, jax.tree.map(dense, grads, is_leaf=is_table)

  return run


def close(
  got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-6, name: str = ""
) -> None:
  """Compares the numbers of two trees, leaf by leaf."""
  for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=name)


def remembers() -> optax.GradientTransformation:
  """Its state is what parameters were as it was made."""
  return optax.GradientTransformation(
    lambda params: optax.TraceState(params),
    lambda updates, state, params=None: (updates, state),
  )
