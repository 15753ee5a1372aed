"""Local gradients of replicated parameters, taken by autodiff."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import oracle
import pytest
import runners
import steps

import zenjax

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])


def lookup_loss(params, batch):
  ids, targets = batch
  rows = params["embedding"][ids]
  return jnp.mean((rows @ params["kernel"] - targets) ** 2)


def lookup_problem(n, rows=300, width=8):
  rng = np.random.default_rng(0)
  params = {
    "embedding": jnp.asarray(rng.standard_normal((rows, width)), jnp.float32),
    "kernel": jnp.asarray(rng.standard_normal((width, 3)), jnp.float32),
  }
  ids = rng.integers(0, rows, (6, n * 16))
  targets = rng.standard_normal((6, n * 16, 3)).astype(np.float32)
  return params, ids, targets


def train(sync, n, check_vma):
  """Losses and parameters of six steps over `n` devices."""
  params, ids, targets = lookup_problem(n)
  mesh = runners.mesh(n)
  tx = optax.chain(sync, optax.sgd(0.3))

  def step(params, state, batch):
    varying = zenjax.unsummed(zenjax.unsummed(params, "data"), "data")
    loss, grads = jax.value_and_grad(lookup_loss)(varying, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss[None]

  state = zenjax.init(tx, params, mesh, "data")
  specs = zenjax.state_specs(state, "data")
  params = jax.device_put(params, NamedSharding(mesh, P()))
  run = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P("data")),
      out_specs=(P(), specs, P("data")),
      check_vma=check_vma,
    )
  )
  losses = []
  for batch in zip(ids, targets, strict=True):
    params, state, loss = run(params, state, batch)
    losses.append(float(np.mean(loss)))
  return losses, params


@CHECK_VMA
def test_training_matches_pmean_and_one_device(check_vma):
  """Gradients by autodiff, not handed in: none is summed twice or missed."""
  losses, params = train(zenjax.zen_sync("data"), 8, check_vma)
  theirs, _ = train(steps.pmean("data"), 8, check_vma)
  np.testing.assert_allclose(losses, theirs, rtol=1e-5)
  alone = _train_alone(8)
  np.testing.assert_allclose(losses, alone, rtol=1e-5)
  assert losses[-1] < losses[0]
  for leaf in jax.tree.leaves(params):
    oracle.check_replicas(runners.shards(leaf))


def _train_alone(n):
  params, ids, targets = lookup_problem(n)
  losses = []
  for batch in zip(ids, targets, strict=True):
    loss, grads = jax.value_and_grad(lookup_loss)(params, batch)
    params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
    losses.append(float(loss))
  return losses


def test_data_parallel_is_the_same_step_in_one_call():
  params, ids, targets = lookup_problem(8)
  mesh = runners.mesh(8)
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.3))

  def step(state, ids, targets):
    params, state = state
    loss, grads = jax.value_and_grad(lookup_loss)(params, (ids, targets))
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss

  run = jax.jit(zenjax.data_parallel(step, mesh, "data"), donate_argnums=0)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  state = params, zenjax.init(tx, params, mesh, "data")
  losses = []
  for batch in zip(ids, targets, strict=True):
    with steps.compilations() as compiled:
      state, loss = run(state, *batch)
    losses.append(float(loss))
    assert len(compiled) == (1 if len(losses) == 1 else 0)
  np.testing.assert_allclose(losses, _train_alone(8), rtol=1e-5)
  for leaf in jax.tree.leaves(state[0]):
    oracle.check_replicas(runners.shards(leaf))


def test_unsummed_does_nothing_where_gradients_are_local():
  params = {"w": jnp.arange(3.0)}
  for run in ("vmap", "pmap", "shard_map_shards"):
    same = runners.RUNNERS[run](lambda x, axis: zenjax.unsummed(x, axis), 2)
    stack = {"w": np.stack([np.asarray(params["w"])] * 2)}
    np.testing.assert_array_equal(same(stack)["w"], stack["w"])
