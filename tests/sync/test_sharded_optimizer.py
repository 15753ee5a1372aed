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
import runners

import zenjax

pytestmark = [
  pytest.mark.usefixtures("as_optax_computes"),
  pytest.mark.filterwarnings("ignore:weight decay"),
]

ROWS, WIDTH, N = 3000, 7, 4
CLIP = 0.05
_TWO: Any = ("host", "device")
TABLES = lambda name, _: name != "dense"


def parameters():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.array(rng.standard_normal(shape), jnp.float32)
  return {
    "dense": draw(WIDTH, WIDTH),
    "table": draw(ROWS, WIDTH),
  }


def loss(params, ids):
  hidden = jnp.take(params["table"], ids[..., :-1], axis=0)
  context = params["table"][ids[..., 1:]] @ params["dense"]
  return jnp.mean((hidden - context + 1.0) ** 2)


def trained(tx, check_vma=True, n=N):
  """Losses of six steps on devices, and the parameters after them."""
  mesh = runners.mesh(n)
  params = jax.device_put(parameters(), NamedSharding(mesh, P()))
  state = zenjax.init_state(tx, params, mesh, "data")
  specs = zenjax.state_specs(state, "data")

  def step(params, state, ids):
    view = zenjax.unreduced(params, "data")
    value, grads = zenjax.value_and_grad(loss)(view, ids[0])
    updates, state = tx.update(grads, state, params)
    params = zenjax.apply_updates(params, updates)
    return params, state, jax.lax.pmean(value, "data")

  mapped = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P("data")),
      out_specs=(P(), specs, P()),
      check_vma=check_vma,
    )
  )
  return stepped(mapped, params, state, n)


def stepped(step, params, state, n=N):
  draw, losses = np.random.default_rng(1), []
  for _ in range(6):
    ids = jnp.array(draw.zipf(1.4, (n, 40)) % ROWS, jnp.int32)
    params, state, value = step(params, state, ids)
    losses.append(float(value))
  return losses, params, state


def alone(name, clip=False):
  """The same of one device that has the batches of all."""
  tx = OPTIMIZERS[name]
  if clip:
    tx = optax.chain(optax.clip_by_global_norm(CLIP), tx)
  tx = zenjax.lazy_rows(tx)

  @jax.jit
  def step(params, state, ids):
    value, grads = zenjax.value_and_grad(loss)(params, ids)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state, value

  params = parameters()
  return stepped(step, params, tx.init(params))


def anchored(strength):
  """Pulls a row to half of where it began, which is its state."""

  def update(updates, state, params=None):
    pull = lambda u, p, start: u + strength * (p - 0.5 * start)
    return jax.tree.map(pull, updates, params, state.trace), state

  init = lambda params: optax.TraceState(params)
  return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, Any] = {
  "adamw": optax.adamw(0.03, weight_decay=0.1),
  "adagrad": optax.adagrad(0.3),
  "anchored": optax.chain(anchored(0.1), optax.adagrad(0.3)),
  "rowwise_adagrad": zenjax.rows.rowwise_adagrad(0.3),
  "by label": optax.multi_transform(
    {"a": optax.sgd(0.1), "b": optax.adam(0.03)},
    {"dense": "a", "table": "b"},
  ),
}


@functools.cache
def by_owners(name, **options):
  tx = zenjax.sharded_optimizer(
    OPTIMIZERS[name], "data", sparse=TABLES, **options
  )
  return trained(tx)


@pytest.mark.parametrize(
  ("name", "options"),
  [
    pytest.param(
      "anchored", dict(hash_seed=3), id="anchored", marks=pytest.mark.more
    ),
    pytest.param(
      "adagrad", dict(clip_norm=CLIP, capacities=(2, 5)), id="clipped"
    ),
    pytest.param("by label", {}, id="by label"),
  ],
)
def test_losses_are_those_of_one_device(name, options):
  losses, params, _ = by_owners(name, **options)
  want, want_params, _ = alone(name, "clip_norm" in options)
  np.testing.assert_allclose(losses, want, rtol=1e-6)
  for leaf in params:
    np.testing.assert_allclose(
      params[leaf], want_params[leaf], rtol=1e-5, atol=1e-6
    )
    oracle.check_replicas(runners.shards(params[leaf]), leaf)
  assert losses[-1] != losses[0]


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
  _, _, state = by_owners("adagrad", clip_norm=CLIP, capacities=(2, 5))
  rows = lambda x: jax.tree.leaves(zenjax.tables.unshard(x.inner))
  same = zenjax.from_checkpoint(state, runners.mesh(N), "data")
  jax.tree.map(np.testing.assert_array_equal, same, state)
  stats = zenjax.stats(state)
  assert set(stats) == {"table"} and stats["table"]["devices"] == N
  assert 0 < stats["table"]["density"] < 40 / ROWS * 2
  away = zenjax.from_checkpoint(state, runners.mesh(2), "data")
  assert zenjax.stats(away) == {}
  back = zenjax.from_checkpoint(away, runners.mesh(N), "data")
  for x, y in zip(rows(back), rows(state), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: trained(
        zenjax.sharded_optimizer(optax.lamb(0.1), "data", sparse=TABLES),
      ),
      "`tx` must update a row by that row alone",
    ),
    (
      lambda: trained(
        zenjax.sharded_optimizer(
          optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "data"
        ),
      ),
      "give `clip_norm=`",
    ),
    (
      lambda: trained(
        zenjax.sharded_optimizer(
          optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), "data"
        ),
      ),
      "`tx` must not be `optax.MultiSteps`",
    ),
    (
      lambda: zenjax.init_state(
        zenjax.sharded_optimizer(optax.sgd(0.1), _TWO),
        parameters(),
        jax.make_mesh((2, 2), _TWO, devices=jax.devices()[:4]),
        _TWO,
      ),
      "`axis_name` must be one axis",
    ),
    (
      lambda: zenjax.sharded_optimizer(optax.sgd(0.1), "data").init(
        parameters()
      ),
      r"zenjax\.init_state",
    ),
  ],
  ids=["norm", "clip", "accumulates", "axes", "init"],
)
def test_what_owners_cannot_do(make, message):
  with pytest.raises(ValueError, match=message):
    make()


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
