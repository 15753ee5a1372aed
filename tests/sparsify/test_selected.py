"""`zen_sync(unit="element")` behind a sparsifier sends what it selected."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from refusals import names
import runners

import zenjax

PARAMS = {"bias": jnp.zeros(30), "kernel": jnp.zeros((300, 100))}
EF = lambda **k: zenjax.sparsify.error_feedback(TOP(), "data", **k)
TOP = lambda: zenjax.sparsify.top_k(0.01)
ELEMENT: Any = "element"
ZEN = lambda unit=ELEMENT, **k: zenjax.zen_sync("data", unit=unit, **k)


def made(tx, params: Any = None) -> Any:
  return zenjax.init_state(tx, params or PARAMS, runners.mesh(2), "data")


def program(tx, state) -> str:
  """What a device does in a step."""
  specs = zenjax.state_specs(state, "data")
  step = jax.shard_map(
    lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
    mesh=runners.mesh(2),
    in_specs=(P("data"), specs),
    out_specs=(P(), specs),
  )
  stack = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), PARAMS
  )
  return str(jax.make_jaxpr(step)(stack, state))


def test_a_step_is_that_of_the_largest():
  tx = optax.chain(EF(), ZEN())
  rng = np.random.default_rng(0)
  stack = jax.tree.map(
    lambda x: rng.normal(size=(2, *x.shape)).astype(np.float32), PARAMS
  )
  step = lambda g: tx.update(g, tx.init(g))
  update, state = jax.jit(jax.vmap(step, axis_name="data"))(stack)
  want = np.zeros(30_000)
  for local in stack["kernel"].reshape(2, -1):
    largest = np.argsort(-np.abs(local))[:300]
    want[largest] += local[largest] / 2
  np.testing.assert_allclose(update["kernel"][0].ravel(), want, rtol=1e-6)
  np.testing.assert_allclose(
    update["bias"][1], stack["bias"].mean(axis=0), rtol=1e-5, atol=1e-6
  )
  assert sorted(state[1].leaves) == ["kernel"]


def test_float16_of_what_was_rounded_to_it():
  wire = {"wire_dtype": jnp.float16}
  tx = optax.chain(EF(**wire), ZEN(**wire))
  program(tx, made(tx))
  tx = optax.chain(EF(**wire), ZEN(op="sum", **wire))
  with pytest.raises(ValueError) as error:
    program(tx, made(tx))
  names(error, "`wire_dtype`", "float16")


@pytest.mark.parametrize("first", [EF, TOP])
def test_a_forgotten_zen_sync(first):
  tx = optax.chain(first(), optax.sgd(0.1))
  state = made(tx)

  def step(state, x):
    params, state = state
    loss = lambda p: jnp.sum(p["kernel"] * x[0])
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return (optax.apply_updates(params, updates), state), 0.0

  step = zenjax.data_parallel(step, runners.mesh(2), "data")
  with pytest.raises(ValueError) as error:
    jax.eval_shape(step, (PARAMS, state), jnp.zeros(2))
  names(error, "`zenjax.zen_sync('data')`", "right behind a sparsifier")


def test_leaves_that_nothing_is_selected_from_pass_in_plain_jit():
  """XLA sums gradients of short vectors, such as biases, by itself."""
  mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  tx = optax.chain(EF(), ZEN())
  x = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
  with jax.set_mesh(mesh):
    params = jax.tree.map(
      lambda x: jax.device_put(x, jax.NamedSharding(mesh, P())), PARAMS
    )
    batch = jax.device_put(x, jax.NamedSharding(mesh, P("data")))

    def loss(params, x):
      return jnp.mean((x @ params["kernel"] + 1) ** 2) + params["bias"].sum()

    @jax.jit
    def step(params, state, x):
      local = zenjax.unreduced(params, "data")
      return tx.update(jax.grad(loss)(local, x), state, params)[0]

    state = zenjax.init_state(tx, params, mesh, "data")
    got = step(params, state, batch)
  want = jax.grad(loss)(PARAMS, x)
  np.testing.assert_allclose(got["bias"], want["bias"], rtol=1e-5)
  kept = np.asarray(got["kernel"]) != 0
  assert 300 <= kept.sum() <= 600
