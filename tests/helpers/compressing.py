"""Steps of `compress.all_reduce` on stacked gradients, `[n, ...]` a leaf."""

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zenjax


def _local(stack: Any) -> Any:
  return jax.tree.map(lambda x: x[0], stack)


def once(tx: Any, stack: Any) -> Any:
  """The first update, on each device."""
  first = lambda grads: tx.update(grads, tx.init(grads))[0]
  return jax.jit(jax.vmap(first, axis_name="data"))(stack)


def in_data_parallel(tx: Any, mesh: Mesh, **jit: Any) -> Any:
  """Returns `(state, stack) -> (state, update)`, compiled for the mesh."""
  step = lambda state, stack: tx.update(_local(stack), state)[::-1]
  mapped = zenjax.data_parallel(step, mesh, "data", aux_specs="same")
  return jax.jit(mapped, **jit)


def in_shard_map(tx: Any, state: Any, mesh: Mesh) -> Any:
  """Returns `(stack, state) -> (update, state)`, compiled for the mesh.

  `shard_map` checks that what is declared to be equal on all devices is so.
  """
  axes = mesh.axis_names
  specs = zenjax.state_specs(state, axes)
  mapped = jax.shard_map(
    lambda stack, state: tx.update(_local(stack), state),
    mesh=mesh,
    in_specs=(P(axes), specs),
    out_specs=(P(), specs),
  )
  return jax.jit(mapped)


def lowered(tx: Any, params: Any, mesh: Mesh) -> Any:
  """The program of `in_shard_map` for gradients like `params`, not compiled."""
  init = lambda p: zenjax.init_state(tx, p, mesh, mesh.axis_names)
  state = jax.eval_shape(init, params)
  wide = lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype)
  stack = jax.tree.map(wide, params)
  return in_shard_map(tx, state, mesh).lower(stack, state)
