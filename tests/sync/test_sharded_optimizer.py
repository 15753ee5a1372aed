"""Compares owners of rows with one device that updates all rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import oracle
import pytest
from refusals import refused
import runners

import zenjax

pytestmark = pytest.mark.usefixtures("as_optax_computes")

ROWS, WIDTH, N = 3000, 7, 4
CLIP = 0.05
TABLES = lambda name, _: name != "dense"


def parameters():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.array(rng.standard_normal(shape), jnp.float32)
  return {"dense": draw(WIDTH, WIDTH), "table": draw(ROWS, WIDTH)}


def loss(params, ids):
  hidden = jnp.take(params["table"], ids[..., :-1], axis=0)
  context = params["table"][ids[..., 1:]] @ params["dense"]
  return jnp.mean((hidden - context + 1.0) ** 2)


def stepped(step, params, state):
  """Losses of six steps on the batches of all devices, and what is left."""
  draw, losses = np.random.default_rng(1), []
  for _ in range(6):
    ids = jnp.array(draw.zipf(1.4, (N, 40)) % ROWS, jnp.int32)
    params, state, value = step(params, state, ids)
    losses.append(float(value))
  return losses, params, state


def by_owners(tx):
  mesh = runners.mesh(N)
  params = jax.device_put(parameters(), NamedSharding(mesh, P()))
  state = zenjax.init_state(tx, params, mesh, "data")
  specs = zenjax.state_specs(state, "data")

  def step(params, state, ids):
    view = zenjax.unreduced(params, "data")
    value, grads = zenjax.value_and_grad(loss)(view, ids[0])
    updates, state = tx.update(grads, state, params)
    params = zenjax.apply_updates(params, updates)
    return params, state, jax.lax.pmean(value, "data")

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), specs, P("data")),
    out_specs=(P(), specs, P()),
  )
  return stepped(jax.jit(mapped), params, state)


def alone(tx):
  """The same on one device, which has the batches of all."""

  @jax.jit
  def step(params, state, ids):
    value, grads = jax.value_and_grad(loss)(params, ids)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  params = parameters()
  return stepped(step, params, tx.init(params))


@functools.cache
def clipped_by_owners():
  """By owners, clipped, in buffers that are too small."""
  tx = zenjax.sharded_optimizer(
    optax.adagrad(0.3),
    "data",
    sparse=TABLES,
    clip_norm=CLIP,
    capacities=(2, 5),
  )
  return by_owners(tx)


def test_losses_are_those_of_one_device():
  losses, params, _ = clipped_by_owners()
  plain = optax.chain(optax.clip_by_global_norm(CLIP), optax.adagrad(0.3))
  want, want_params, _ = alone(plain)
  np.testing.assert_allclose(losses, want, rtol=1e-6)
  for name, x in params.items():
    np.testing.assert_allclose(x, want_params[name], rtol=1e-5, atol=1e-6)
    oracle.check_replicas(runners.shards(x), name)


def test_every_device_holds_its_share_of_the_state():
  """Counted by XLA: what the compiled step takes, except for parameters."""
  mesh, table = runners.mesh(N), jnp.zeros((64_000, 16))
  tx = zenjax.sharded_optimizer(optax.adam(0.1), "data", sparse=True)
  state = zenjax.init_state(tx, table, mesh, "data")
  specs = zenjax.state_specs(state, "data")
  mapped = jax.shard_map(
    lambda g, s: tx.update(zenjax.unreduced(g, "data"), s, g),
    mesh=mesh,
    in_specs=(P(), specs),
    out_specs=(P(), specs),
  )
  placed = jax.device_put(table, NamedSharding(mesh, P()))
  usage: Any = jax.jit(mapped).lower(placed, state).compile()
  share = usage.memory_analysis().argument_size_in_bytes - table.nbytes
  whole = 2 * table.nbytes  # Of Adam, which has two moments.
  assert 0.9 * whole / N < share < 1.05 * whole / N


def test_statistics_are_those_of_the_devices_that_a_state_is_on():
  _, _, state = clipped_by_owners()
  rows = lambda x: jax.tree.leaves(zenjax.tables.unshard(x.inner))
  same = zenjax.from_checkpoint(state, runners.mesh(N), "data")
  jax.tree.map(np.testing.assert_array_equal, same, state)
  stats = zenjax.stats(state)
  assert set(stats) == {"table"} and stats["table"]["devices"] == N
  assert 0 < stats["table"]["density"] < 40 / ROWS * 2
  away = zenjax.from_checkpoint(state, runners.mesh(2), "data")
  assert zenjax.stats(away) == {}
  back = zenjax.from_checkpoint(away, runners.mesh(N), "data")
  jax.tree.map(np.testing.assert_array_equal, rows(back), rows(state))


def init(tx, axes: Any = "data", **sizes):
  """Makes a state on a mesh of `sizes`."""
  mesh = jax.make_mesh(
    tuple(sizes.values()), tuple(sizes), devices=jax.devices()[:N]
  )
  owned = zenjax.sharded_optimizer(tx, axes, sparse=TABLES)
  return zenjax.init_state(owned, parameters(), mesh, axes)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
ACCUMULATED = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
TWO = ("host", "device")
REFUSED = {
  "clip": (lambda: init(CLIPPED, data=N), "give `clip_norm=`"),
  "accumulates": (
    lambda: init(ACCUMULATED, data=N),
    "`tx` must not be `optax.MultiSteps`",
  ),
  "axes": (
    lambda: init(optax.sgd(0.1), TWO, host=2, device=2),
    "`axis_name` must be one axis",
  ),
  "outside": (
    lambda: zenjax.sharded_optimizer(optax.sgd(0.1), "data").init(parameters()),
    "zenjax.init_state",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_owners_cannot_do(name):
  call, words = REFUSED[name]
  with refused(ValueError, words):
    call()


def test_small_leaves_are_clipped_where_no_table_has_an_owner():
  mesh = runners.mesh(N)
  params = {"table": jnp.ones((50, 8)), "weights": jnp.ones(8)}
  ids = jnp.arange(16) % 7
  both = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

  def of_batch(params, ids):
    return jnp.sum((params["table"][ids] * params["weights"]) ** 2)

  @jax.jit
  def whole(params, ids):
    grads = jax.grad(of_batch)(params, ids)
    updates, _ = both.update(grads, both.init(params))
    return optax.apply_updates(params, updates)

  want: Any = whole(params, ids)
  tx = zenjax.sharded_optimizer(
    optax.sgd(0.1), "data", mesh=mesh, clip_norm=1.0
  )

  @jax.jit
  def step(params, state, ids):
    _, grads = zenjax.value_and_grad(of_batch)(params, ids)
    updates, _ = tx.update(grads, state, params)
    return optax.apply_updates(params, updates)

  placed = jax.device_put(params, NamedSharding(mesh, P()))
  split = jax.device_put(ids, NamedSharding(mesh, P("data")))
  got = step(placed, tx.init(placed), split)
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-5)
