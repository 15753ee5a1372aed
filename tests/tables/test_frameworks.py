"""Sharded optimizers and tables in nnx, Equinox and Flax's TrainState."""

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runners
from sharded_steps import close
from sharded_steps import split
from sharded_steps import step_of
from sharded_steps import trained

import zenjax

ROWS, D, B = 600, 8, 16
rng = np.random.default_rng(0)
IDS = rng.integers(0, ROWS, (B, 3)).astype(np.int32)
Y = rng.normal(size=B).astype(np.float32)
EMBEDDINGS = lambda name, _: "emb" in name
MESH = runners.mesh(2)
WHOLE = jax.NamedSharding(MESH, jax.P())


class Net(nnx.Module):
  def __init__(self, rngs):
    self.emb = nnx.Embed(ROWS, D, rngs=rngs)
    self.out = nnx.Linear(D, 1, rngs=rngs)

  def __call__(self, ids):
    return self.out(self.emb(ids).mean(1))[:, 0]


def loss_fn(net, ids, y):
  return jnp.mean((net(ids) - y) ** 2)


def run(tx, value_and_grad, shard: bool):
  """Losses of an `nnx.Optimizer` in `nnx.jit`, and what it is after them."""
  graph, state = nnx.split(Net(nnx.Rngs(0)))
  state = jax.device_put(state, WHOLE)
  if shard:
    state = zenjax.tables.shard(state, MESH, "data", tables=EMBEDDINGS)
  net = nnx.merge(graph, state)
  optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
  # Its count of steps is on one device: a second step would compile again.
  kept = nnx.state(optimizer, nnx.OptState)
  lie = lambda x: WHOLE if x.size == 1 else x.sharding
  nnx.update(optimizer, jax.tree.map(lambda x: jax.device_put(x, lie(x)), kept))

  @nnx.jit
  def step(net, optimizer, ids, y):
    loss, grads = value_and_grad(loss_fn)(net, ids, y)
    optimizer.update(net, grads)
    return loss

  batch = split((IDS, Y), MESH)
  losses = [float(step(net, optimizer, *batch)) for _ in range(3)]
  return losses, net, optimizer


@functools.cache
def whole_run():
  return run(optax.adagrad(0.1), nnx.value_and_grad, False)


@pytest.mark.parametrize(
  "shard", [pytest.param(False, marks=pytest.mark.more), True]
)
def test_nnx_optimizer(shard):
  want, whole, _ = whole_run()
  given: Any = {} if shard else {"sparse": EMBEDDINGS}
  tx = zenjax.sharded_optimizer(optax.adagrad(0.1), "data", mesh=MESH, **given)
  losses, net, optimizer = run(tx, zenjax.value_and_grad, shard)
  np.testing.assert_allclose(losses, want, rtol=1e-5)
  got = zenjax.tables.unshard(nnx.state(net, nnx.Param))
  close(got, nnx.state(whole, nnx.Param), rtol=1e-4)
  assert optimizer.step[...] == 3
  state = optimizer.opt_state
  assert [*zenjax.stats(state)] == ["emb.embedding"]
  assert [*zenjax.planner.profile(state)] == ["emb.embedding"]


def test_equinox_modules():
  eqx = pytest.importorskip("equinox")

  class Model(eqx.Module):
    users: Any
    out: Any

    def __call__(self, ids):
      rows = jax.vmap(jax.vmap(self.users))(ids).mean(1)
      return jax.vmap(self.out)(rows)

  one, two = jax.random.split(jax.random.key(0))
  model: Any = Model(
    eqx.nn.Embedding(ROWS, D, key=one),
    eqx.nn.MLP(D, "scalar", 16, 1, key=two),
  )
  tables = lambda name, leaf: name.startswith("users")
  sharded = zenjax.tables.shard(model, MESH, "data", tables=tables)
  ids = split(IDS, MESH)
  loss = lambda model, ids: jnp.mean(model(ids) ** 2)
  both = zenjax.rows.filter_value_and_grad(loss)
  want = eqx.filter_value_and_grad(loss)(model, IDS)
  got, grads = eqx.filter_jit(both)(sharded, ids)
  np.testing.assert_allclose(got, want[0], rtol=1e-5)
  dense = grads.users.weight.value.to_dense()
  np.testing.assert_allclose(dense, want[1].users.weight, rtol=1e-4, atol=1e-6)
  whole = zenjax.tables.unshard(sharded)
  np.testing.assert_array_equal(whole.users.weight, model.users.weight)


def test_tables_that_are_looked_up_as_often_as_they_have_rows():
  """XLA has summed the gradients of "city", and "unused" has none."""
  params = {
    "big": np.ones((5000, D), np.float32),
    "city": np.ones((2100, D), np.float32),
    "unused": np.ones((3000, D), np.float32),
  }
  loss = lambda p, ids: ((p["big"][ids] * p["city"][ids % 2000]) ** 2).mean()
  ids = np.random.default_rng(1).integers(0, 5000, 2400).astype(np.int32)
  plain = optax.adagrad(0.1)
  tx = zenjax.sharded_optimizer(plain, "data", mesh=MESH)

  def run(tx, both, params, ids):
    step = jax.jit(step_of(tx, loss, both))
    state, _ = trained(step, (params, tx.init(params)), [(ids,)] * 2)
    return state[0]

  want = run(plain, jax.value_and_grad, params, ids)
  params = jax.device_put(params, WHOLE)
  close(run(tx, zenjax.value_and_grad, params, split(ids, MESH)), want)
