"""What attackers found: states of others, overflow, types, numbers of NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import zenjax
from zenjax import compress

SPARSIFIERS = {
  "exdyna": compress.ExDyna(0.01),
  "micro": compress.MiCRO(0.01),
  "top_k": compress.TopK(0.01),
  "threshold": compress.Threshold(2.0),
  "random_k": compress.RandomK(0.01),
}
SIZE = 40_000


def mesh_of(*sizes):
  names = ("data",) if len(sizes) == 1 else ("host", "device")
  devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
  return jax.sharding.Mesh(devices, names)


@functools.cache
def program(name, sizes, **options):
  """`(state, step)` of `shard_map`, which checks what is equal on devices."""
  mesh = mesh_of(*sizes)
  axis = mesh.axis_names if len(sizes) > 1 else mesh.axis_names[0]
  tx = compress.all_reduce(SPARSIFIERS[name], axis, leaves=True, **options)
  state = zenjax.init_state(tx, jnp.zeros(SIZE), mesh, axis)
  specs = zenjax.state_specs(state, axis)
  step = lambda g, state: tx.update(g[0], state)
  return state, jax.jit(
    jax.shard_map(
      step, mesh=mesh, in_specs=(P(axis), specs), out_specs=(P(), specs)
    )
  )


@pytest.mark.parametrize("name", ["micro", "random_k"])
def test_momentum_is_cleared_where_a_level_has_sent(name):
  state, step = program(name, (2, 2), momentum=0.9, dense_steps=0)
  g = jnp.ones((4, SIZE)).at[:, :7].set(1000.0)
  update, state = step(g, state)
  sent = np.asarray(update != 0)
  assert 7 <= sent.sum() <= 0.03 * SIZE or name == "random_k"
  momenta = np.asarray(state.momenta["leaf"].value)
  assert (momenta[:, ~sent] != 0).all()
  assert (momenta[:, sent] == 0).all()


def test_a_state_of_another_sparsifier_is_refused():
  of = lambda name: compress.all_reduce(SPARSIFIERS[name], "data", leaves=True)
  for name in ("micro", "top_k"):
    first, other = of("exdyna"), of(name)
    step = lambda g, first=first, other=other: other.update(g, first.init(g))
    with pytest.raises(ValueError, match="made for other gradients"):
      jax.vmap(step, axis_name="data")(jnp.ones((2, SIZE)))
  tx = compress.all_reduce(compress.LowBit(8), "data")
  with pytest.raises(TypeError, match="must be a CompressState"):
    jax.vmap(
      lambda g: tx.update(g, zenjax.zen_sync("data").init(g)), axis_name="data"
    )(jnp.ones((2, SIZE)))


@pytest.mark.parametrize("name", SPARSIFIERS)
def test_nothing_to_compress_is_no_error(name):
  tx = compress.all_reduce(SPARSIFIERS[name], "data")
  init = lambda g: tx.update({"b": g}, tx.init({"b": g}))
  mapped: Any = jax.vmap(init, axis_name="data")
  update, state = mapped(jnp.ones((2, 5)))
  np.testing.assert_array_equal(update["b"], 1)
  assert state.wire_bytes[0] == 0


def test_numbers_of_numpy_are_numbers_of_plans():
  shapes = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)]
  plan = zenjax.planner.plan(
    jax.value_and_grad(lambda p: jnp.sum(p[0])),
    shapes,
    topology=zenjax.planner.Topology.network("1 Gbit/s", 4),
    allow=[compress.TopK(np.float64(0.001))],
  )
  assert plan.leaves[0].compressor == "TopK(0.001)"
  compress.all_reduce(plan, "data")


@pytest.mark.parametrize("name", ["exdyna", "micro", "top_k", "random_k"])
def test_keys_are_used_once(name):
  with jax.debug_key_reuse(True):
    state, step = program(name, (2,), seed=1)
    jax.eval_shape(step, jnp.ones((2, SIZE)), state)
