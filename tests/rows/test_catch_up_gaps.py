"""Rows that catch up after gaps of any length, in any dtype."""

import functools
from typing import Any

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax
from zenjax import SparseRows

pytestmark = pytest.mark.usefixtures("as_optax_computes")

ROWS, WIDTH, LONGEST = 6, 4, 1500

GAPS = {
  "momentum": optax.sgd(0.1, 0.99),
  "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
  "schedule": optax.sgd(optax.cosine_decay_schedule(0.1, 700), 0.9),
  "adam": optax.adam(0.1),
  "adamw": optax.adamw(optax.cosine_decay_schedule(0.1, 900, 0.1)),
  "nadam": optax.nadam(0.1, b1=0.8),
  "rmsprop": optax.rmsprop(0.1),
  "yogi": optax.yogi(0.1),
}


@functools.cache
def after_gaps(name):
  """`(scale, gaps) -> both ways`: rows that catch up before their gap and at
  the end of all steps, after one gradient."""
  inner = GAPS[name]
  tx = zenjax.lazy_rows(inner, catch_up=True)
  draw = np.random.default_rng(0).standard_normal((2, ROWS, WIDTH))
  start, direction = jnp.array(draw, jnp.float32)
  nothing: Any = SparseRows(jnp.array([ROWS]), jnp.zeros((1, WIDTH)), ROWS)

  @jax.jit
  def run(scale, gaps):
    def dense(carry, _):
      params, state = carry
      updates, state = inner.update(jnp.zeros_like(params), state, params)
      return (optax.apply_updates(params, updates), state), None

    def lazy(carry, left):
      params, state = carry
      ids = jnp.where(gaps == left, jnp.arange(ROWS), ROWS)
      ids = SparseRows(ids, jnp.zeros((ROWS, WIDTH)), ROWS)
      params, state = zenjax.rows.catch_up(tx, params, state, ids)
      updates, state = tx.update(nothing, state, params)
      return (zenjax.apply_updates(params, updates), state), None

    grads: Any = scale * direction
    state: Any = tx.init(start)
    updates, state = tx.update(grads, state, start)
    params = zenjax.apply_updates(start, updates)
    left = LONGEST - jnp.arange(LONGEST)
    want, _ = jax.lax.scan(dense, (params, state.inner), length=LONGEST)
    (params, state), _ = jax.lax.scan(lazy, (params, state), left)
    params, state = zenjax.rows.catch_up(tx, params, state)
    return (params, state.inner), want

  return run


@pytest.mark.usually("adamw", "schedule", "nesterov", "rmsprop")
@pytest.mark.parametrize("name", GAPS)
@hypothesis.settings(max_examples=5)
@hypothesis.given(
  gaps=st.lists(st.integers(0, LONGEST), min_size=ROWS, max_size=ROWS),
  scale=st.sampled_from([1e-4, 1.0, 1e3]),
)
def test_any_gap(name, gaps, scale):
  got, want = after_gaps(name)(scale, jnp.array(gaps))
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    # A dense optimizer rounds at every step, relative to what there was.
    size = float(np.max(np.abs(np.asarray(w))))
    np.testing.assert_allclose(g, w, rtol=2e-4, atol=1e-6 * size + 1e-12)


def test_many_steps_are_a_power():
  rate, decay, momentum, steps = 0.01, 1e-4, 0.9, 10**5
  inner = optax.chain(
    optax.trace(momentum), optax.add_decayed_weights(decay), optax.scale(-rate)
  )
  tx = zenjax.lazy_rows(inner, catch_up=True)
  table = jnp.ones((3, 1))
  grads: Any = jnp.array([[1.0], [0.0], [-2.0]])
  state: Any = tx.init(table)
  updates, state = tx.update(grads, state, table)
  table = optax.apply_updates(table, updates)
  trace, want = np.array(grads, np.float64), np.array(table, np.float64)
  for _ in range(steps):
    trace = momentum * trace
    want = want - rate * (trace + decay * want)
  state = state._replace(steps=state.steps + steps)
  table, _ = zenjax.rows.catch_up(tx, table, state)
  np.testing.assert_allclose(table, want, rtol=1e-6)


@pytest.mark.parametrize("inner", [optax.sgd(0.1, 0.9), optax.adamw(0.1)])
def test_short_floats(inner):
  """Rounded once where the dense optimizer rounds at every step."""
  tx = zenjax.lazy_rows(inner, catch_up=True)
  start = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)

  @jax.jit
  def run(params):
    got = want = params.astype(jnp.bfloat16)
    state: Any = tx.init(got)
    want_state = inner.init(want)
    grads: Any = jnp.ones_like(got)
    updates, state = tx.update(grads, state, got)
    got = zenjax.apply_updates(got, updates)
    for i in range(20):
      grads: Any = jnp.full((ROWS, WIDTH), i == 0, jnp.bfloat16)
      updates, want_state = inner.update(grads, want_state, want)
      want = optax.apply_updates(want, updates)
    inner_state = jax.tree.map(
      lambda x: x + 19 if x.dtype == jnp.int32 else x, state.inner
    )
    state = state._replace(steps=state.steps + 19, inner=inner_state)
    return zenjax.rows.catch_up(tx, got, state)[0], want

  got, want = run(start)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.05
  )


@pytest.mark.usually("momentum")
@pytest.mark.filterwarnings("ignore:`catch_up=True` of `lazy_rows`")
@pytest.mark.parametrize("name", ["momentum", "schedule", "adam"])
def test_float64_is_kept(name):
  with jax.enable_x64(True):
    inner = GAPS[name]
    tx = zenjax.lazy_rows(inner, catch_up=True)
    got: Any = jnp.ones((ROWS, 1), jnp.float64)
    want: Any = got
    state: Any = tx.init(got)
    want_state = inner.init(want)
    grads: Any = jnp.linspace(-1.0, 1.0, ROWS)[:, None]
    nothing: Any = SparseRows(jnp.array([ROWS]), jnp.zeros((1, 1)), ROWS)
    for _ in range(5):
      updates, state = tx.update(grads, state, got)
      got = zenjax.apply_updates(got, updates)
      dense = jnp.zeros_like(want) if grads is nothing else grads
      updates, want_state = inner.update(dense, want_state, want)
      want = optax.apply_updates(want, updates)
      grads = nothing
    got, _ = zenjax.rows.catch_up(tx, got, state)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, rtol=1e-13)
