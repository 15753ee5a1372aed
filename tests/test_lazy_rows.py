"""Optimizers on rows beside the same on dense gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax
from zenjax import SparseRows

pytestmark = pytest.mark.usefixtures("as_optax_computes")

ROWS, WIDTH, LOOK_UPS = 4000, 4, 48


def batches(steps):
  """Ids as a text has them: a few at nearly every step, most hardly ever."""
  rng = np.random.default_rng(0)
  weights = 1.0 / (np.arange(ROWS) + 2.7)
  for _ in range(steps):
    ids = rng.choice(ROWS, LOOK_UPS, p=weights / weights.sum())
    values = rng.standard_normal((LOOK_UPS, WIDTH)).astype(np.float32)
    yield ids.astype(np.int32), values


def run(tx, steps, rows):
  """Parameters after training on the same gradients, as rows or dense."""
  params = {"table": jnp.ones((ROWS, WIDTH)), "bias": jnp.zeros(3)}
  state = tx.init(params)

  @jax.jit
  def step(params, state, ids, values):
    table = SparseRows(ids, values, ROWS).combine()
    grads = {"table": table if rows else table.to_dense()}
    grads["bias"] = jnp.sum(values) * jnp.ones(3)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  for ids, values in batches(steps):
    params, state = step(params, state, ids, values)
  return params, state


EXACT = {
  "sgd": optax.sgd(0.1),
  "adagrad": optax.adagrad(0.1),
  "row_adagrad": zenjax.row_adagrad(0.1),
  "schedule": optax.sgd(optax.exponential_decay(0.1, 10, 0.5)),
  "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
  "elementwise clip": optax.chain(optax.clip(0.5), optax.adagrad(0.1)),
  "by table": optax.multi_transform(
    {"a": optax.adagrad(0.1), "b": optax.adam(0.1)}, {"table": "a", "bias": "b"}
  ),
}


@pytest.mark.parametrize("name", EXACT)
def test_equals_the_dense_optimizer(name):
  got, got_state = run(zenjax.lazy_rows(EXACT[name]), 200, rows=True)
  want, want_state = run(EXACT[name], 200, rows=False)
  # The same numbers in the same order but where a norm is summed; whether a
  # product and a sum are rounded once or twice is the compiler's choice.
  tol = 1e-4 if name == "clipped" else 1e-6
  for g, w in zip(
    jax.tree.leaves((got, got_state)), jax.tree.leaves((want, want_state))
  ):
    np.testing.assert_allclose(g, w, rtol=tol, atol=tol)


def test_lazy_adam_keeps_what_it_does_not_touch():
  grads: Any
  state: Any
  tx = zenjax.lazy_rows(optax.adam(0.1))
  table = jnp.ones((ROWS, WIDTH))
  state = tx.init(table)
  first = SparseRows(jnp.array([5, 7]), jnp.ones((2, WIDTH)), ROWS)
  second = SparseRows(jnp.array([7]), jnp.ones((1, WIDTH)), ROWS)
  for grads in (first, second):
    updates, state = tx.update(grads, state, table)
    table = zenjax.apply_updates(table, updates)
  (adam, *_) = state
  assert int(adam.count) == 2
  np.testing.assert_allclose(adam.mu[5], 0.1, rtol=1e-6)
  np.testing.assert_allclose(adam.mu[7], 0.19, rtol=1e-6)
  assert not np.any(np.delete(adam.mu, [5, 7], axis=0))
  moved = np.unique(np.nonzero(np.asarray(table) != 1)[0])
  assert moved.tolist() == [5, 7]


def test_step_holds_no_array_of_the_table_but_the_table():
  num_rows = 500_000
  tx = zenjax.lazy_rows(optax.adam(0.1))

  def step(table, state, ids, values):
    grads: Any = SparseRows(ids, values, num_rows)
    updates, state = tx.update(grads, state, table)
    return zenjax.apply_updates(table, updates), state

  table = jax.ShapeDtypeStruct((num_rows, 8), jnp.float32)
  state = jax.eval_shape(optax.adam(0.1).init, table)
  ids = jax.ShapeDtypeStruct((64,), jnp.int32)
  values = jax.ShapeDtypeStruct((64, 8), jnp.float32)
  jitted = jax.jit(step, donate_argnums=(0, 1))
  memory = jitted.lower(table, state, ids, values).compile().memory_analysis()
  assert memory is not None
  assert memory.temp_size_in_bytes < 1 << 17
  assert memory.alias_size_in_bytes >= 3 * num_rows * 8 * 4


@pytest.mark.parametrize("inner", [optax.lamb(0.1), optax.lars(0.1)])
def test_what_mixes_rows_is_refused(inner):
  with pytest.raises(ValueError, match="must update a row by that row alone"):
    zenjax.lazy_rows(inner).init(jnp.ones((ROWS, WIDTH)))


@pytest.mark.parametrize("catch_up", [False, True])
def test_what_updates_in_some_steps_only_is_refused(catch_up):
  inner = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
  inner = optax.chain(optax.scale(2.0), inner)
  with pytest.raises(
    ValueError, match="`inner` must not be `optax.MultiSteps`"
  ):
    zenjax.lazy_rows(inner, catch_up=catch_up).init(jnp.ones((ROWS, WIDTH)))


def test_rows_of_another_table_are_refused():
  tx = zenjax.lazy_rows(optax.sgd(0.1))
  params = {"table": jnp.ones((ROWS, WIDTH))}
  grads: Any = {
    "table": SparseRows(jnp.array([1]), jnp.ones((1, WIDTH)), ROWS + 1)
  }
  with pytest.raises(ValueError, match="SparseRows of 'table' must be rows"):
    tx.update(grads, tx.init(params), params)
  with pytest.raises(ValueError, match="SparseRows of 'table' must be rows"):
    zenjax.apply_updates(params, grads)


def test_none_leaves_a_parameter_alone():
  params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}
  got = zenjax.apply_updates(params, {"a": None, "b": jnp.ones(2)})
  assert got["a"].tolist() == [1, 1]
  assert got["b"].tolist() == [2, 2] and got["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize("argument", ["initial_accumulator_value", "eps"])
def test_row_adagrad_takes_no_negative(argument):
  with pytest.raises(ValueError, match=f"`{argument}` must not be negative"):
    options: dict[str, Any] = {argument: -1.0}
    zenjax.row_adagrad(0.1, **options)
