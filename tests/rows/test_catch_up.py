"""Rows that catch up, beside dense optimizers on the same text."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import runners
import text_steps
from text_steps import furthest

import zenjax

pytestmark = pytest.mark.usefixtures("as_optax_computes")

RATE = 0.01


def sgd_in_float64(step, rate, momentum, nesterov):
  """Momentum SGD by its formulas."""
  params = {k: np.array(v, np.float64) for k, v in text_steps.start().items()}
  trace = {k: np.zeros_like(v) for k, v in params.items()}
  for ids, wanted in zip(*text_steps.batches()):
    for k, g in step(params, ids, wanted).items():
      trace[k] = g + momentum * trace[k]
      move = g + momentum * trace[k] if nesterov else trace[k]
      params[k] -= rate * move
  return params


def adam_in_float64(step, rate, decay, b1=0.9, b2=0.999, eps=1e-8):
  """AdamW by its formulas."""
  params = {k: np.array(v, np.float64) for k, v in text_steps.start().items()}
  m = {k: np.zeros_like(v) for k, v in params.items()}
  v = {k: np.zeros_like(v) for k, v in params.items()}
  for t, (ids, wanted) in enumerate(zip(*text_steps.batches()), 1):
    for k, g in step(params, ids, wanted).items():
      m[k] = b1 * m[k] + (1 - b1) * g
      v[k] = b2 * v[k] + (1 - b2) * g**2
      root = np.sqrt(v[k] / (1 - b2**t)) + eps
      params[k] -= rate * (m[k] / (1 - b1**t) / root + decay * params[k])
  return params


def gradient_in_float64(params, ids, wanted):
  error = params["table"][ids] + params["bias"] - wanted
  table = np.zeros_like(params["table"])
  np.add.at(table, ids, error)
  return {"table": table, "bias": error.sum(0)}


ORACLES = {
  "momentum": (
    optax.sgd(RATE, 0.9),
    lambda: sgd_in_float64(gradient_in_float64, RATE, 0.9, False),
  ),
  "nesterov": (
    optax.sgd(RATE, 0.9, nesterov=True),
    lambda: sgd_in_float64(gradient_in_float64, RATE, 0.9, True),
  ),
  "adam": (
    optax.adam(RATE),
    lambda: adam_in_float64(gradient_in_float64, RATE, 0.0),
  ),
  "adamw": (
    optax.adamw(RATE, weight_decay=0.1),
    lambda: adam_in_float64(gradient_in_float64, RATE, 0.1),
  ),
}


@pytest.mark.usually("adamw")
@pytest.mark.parametrize(
  "name",
  [
    pytest.param("momentum", marks=pytest.mark.more),
    "nesterov",
    pytest.param("adam", marks=pytest.mark.more),
    "adamw",
  ],
)
def test_is_as_near_to_the_formulas_as_the_dense_optimizer(name):
  tx, oracle = ORACLES[name]
  want = oracle()
  dense, dense_state = text_steps.train_dense(tx)
  got, got_state = text_steps.train_rows(tx)
  assert furthest(got, want) < 2 * furthest(dense, want) + 1e-6
  assert furthest(got, dense) < 1e-5
  assert furthest(got_state.inner, dense_state) < 1e-5
  assert int(got_state.late) == 0


SCHEDULED = {
  "momentum": optax.sgd(optax.exponential_decay(RATE, 50, 0.5), 0.9),
  "nesterov with decay": optax.chain(
    optax.add_decayed_weights(0.01),
    optax.sgd(optax.linear_schedule(0.0, RATE, 100), 0.8, nesterov=True),
  ),
  "adamw": optax.adamw(
    optax.warmup_cosine_decay_schedule(0.0, RATE, 20, 150), weight_decay=0.1
  ),
  "by table": optax.multi_transform(
    {"a": optax.adam(RATE), "b": optax.sgd(RATE)}, {"table": "a", "bias": "b"}
  ),
}


@pytest.mark.usually("adamw", "by table")
@pytest.mark.parametrize("name", SCHEDULED)
def test_equals_the_dense_optimizer(name):
  dense, _ = text_steps.train_dense(SCHEDULED[name])
  got, _ = text_steps.train_rows(SCHEDULED[name])
  assert furthest(got, dense) < 1e-5


def test_a_clip_of_optax_inside_is_refused():
  """One row's change depends on others there; the error says what to do."""
  clipped = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(RATE))
  tx = zenjax.lazy_rows(clipped, catch_up=True)
  with pytest.raises(ValueError, match="clip before it by `zenjax.rows.clip"):
    tx.init(text_steps.start())


@pytest.mark.usually("adam")
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_without_the_call_gradients_are_of_rows_that_are_behind(name):
  dense, _ = text_steps.train_dense(ORACLES[name][0])
  with pytest.warns(
    UserWarning, match="should come with `zenjax.rows.catch_up`"
  ):
    got, state = text_steps.train_rows(ORACLES[name][0], before=False)
  # `lazy_rows` states how far they part.
  assert 1e-2 < furthest(got, dense) < 1.0
  assert int(state.late) == text_steps.seen_again_after_a_gap()


def devices_step(tx, params, state, ids, wanted):
  """A step on one of several devices that look up ids of their own."""
  every = jax.lax.all_gather(ids, "data", to="invarying", tiled=True)
  params, state = zenjax.rows.catch_up(tx, params, state, {"table": every})
  local = zenjax.unreduced(params, "data")
  grads = jax.grad(text_steps.loss)(local, ids, wanted)
  updates, state = tx.update(grads, state, params)
  return zenjax.apply_updates(params, updates), state


@pytest.mark.parametrize(
  "check_vma", [True, pytest.param(False, marks=pytest.mark.more)]
)
def test_devices_agree_with_one_that_sees_all(check_vma):
  inner = optax.adamw(RATE)
  tx = optax.chain(
    zenjax.zen_sync(
      "data", op="sum", output="rows", sparse={"table": True, "bias": False}
    ),
    zenjax.lazy_rows(inner, catch_up=True),
  )
  params = text_steps.start()
  state = tx.init(params)
  mesh = runners.mesh(2)
  step: Any = jax.jit(
    jax.shard_map(
      functools.partial(devices_step, tx),
      mesh=mesh,
      in_specs=(P(), P(), P("data"), P("data")),
      out_specs=P(),
      check_vma=check_vma,
    )
  )
  for ids, wanted in list(zip(*text_steps.batches()))[:15]:
    params, state = step(params, state, ids, wanted)
  params, _ = jax.jit(lambda *x: zenjax.rows.catch_up(tx, *x))(params, state)
  want, _ = text_steps.train_dense(inner, 15)
  assert furthest(params, want) < 1e-5
  for leaf in jax.tree.leaves((params, state)):
    copies = runners.shards(leaf)
    assert all(np.array_equal(copies[0], x) for x in copies)
