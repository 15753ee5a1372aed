"""Optimizers on rows beside the same on dense gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax
from zenjax import SparseRows

pytestmark = [
  pytest.mark.each_jax,
  pytest.mark.usefixtures("as_optax_computes"),
]

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
  "rowwise_adagrad": zenjax.rows.rowwise_adagrad(0.1),
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


def test_what_moves_rows_without_gradients_is_told():
  params = {"table": jnp.ones((ROWS, WIDTH)), "bias": jnp.zeros(3)}
  for inner in (optax.adamw(0.1), optax.lion(0.1), optax.yogi(0.1)):
    with pytest.warns(UserWarning, match="only on the rows of table 'table'"):
      zenjax.lazy_rows(inner).init(params)
  bias = {"table": False, "bias": True}
  zenjax.lazy_rows(optax.adamw(0.1, mask=bias)).init(params)


@pytest.mark.parametrize(
  "scaled",
  [
    lambda g: g * jnp.arange(1.0, 1 + len(g))[:, None],
    lambda g: g * np.arange(1.0, 1 + len(g), dtype=np.float32)[:, None],
    lambda g: g * jax.random.uniform(jax.random.key(0), g.shape),
    lambda g: jnp.cumsum(g, axis=0),
    lambda g: g[::-1],
    lambda g: g - jnp.roll(g, 1, axis=0),
    lambda g: jnp.sort(g, axis=0),
    lambda g: g.reshape(g.shape[::-1]).reshape(g.shape) @ (g.T @ g) @ g.T @ g,
    lambda g: g / (1 + jnp.max(g)) + jnp.argmax(g),
    lambda g: g * jnp.unique(g, size=len(g))[:, None],
    lambda g: jax.lax.fori_loop(0, 2, lambda _, x: x - jnp.mean(x, 0), g),
    lambda g: jnp.where(jnp.linalg.norm(g, axis=0) > 1, jnp.flip(g), g),
  ],
)
def test_a_users_own_mixing_of_rows_is_refused(scaled):
  """Whatever the numbers are: some of these do nothing to small gradients."""
  inner = optax.stateless(lambda updates, _: jax.tree.map(scaled, updates))
  with pytest.raises(ValueError, match="must update a row by that row alone"):
    zenjax.lazy_rows(inner).init(jnp.ones((ROWS, WIDTH)))


@pytest.mark.filterwarnings("ignore:weight decay")
@pytest.mark.parametrize(
  "scaled",
  [
    lambda g: g / jnp.sqrt(jnp.sum(g**2) + 1.0),
    lambda g: g / (1.0 + jnp.linalg.norm(g)),
    lambda g: g / (1.0 + jnp.mean(jnp.abs(g))),
    lambda g: g / (1.0 + jnp.max(jnp.abs(g))),
    lambda g: g + jnp.min(g),
    lambda g: g * jnp.mean(jnp.cos(g)),
    lambda g: g @ (g.T @ g),
    lambda g: g / (1.0 + jnp.vdot(g, g)),
    lambda g: jnp.where(jnp.any(jnp.abs(g) > 1e3), 0.0, g),
    lambda g: g * (jnp.mean(g == 0) + jnp.sum(jnp.ravel(g) ** 2)),
    lambda g: g - jnp.mean(g, axis=0),
    lambda g: g * (2.0 if len(g) == ROWS else 1.0) * len(g),
    lambda g: g / (1e-3 + jnp.std(g, axis=1, keepdims=True)),
    lambda g: g / (1.0 + jnp.sum(g * g / (1.0 + jnp.sum(g**2)))),
  ],
)
def test_a_users_own_values_of_all_rows_are_those_of_the_table(scaled):
  def update(updates, state, params=None):
    state += optax.tree.sum(jax.tree.map(jnp.abs, updates))
    return jax.tree.map(scaled, updates), state

  inner: Any = optax.GradientTransformation(
    lambda params: jnp.zeros(()), update
  )
  tx: Any = zenjax.lazy_rows(inner)
  table = jnp.ones((ROWS, WIDTH))
  for ids, values in batches(1):
    rows: Any = SparseRows(ids, 50.0 * values, ROWS).combine()
    got, total = tx.update(rows, tx.init(table), table)
    want, sum_ = inner.update(rows.to_dense(), inner.init(table), table)
    np.testing.assert_allclose(total, sum_, rtol=1e-5)
    at = np.unique(ids)
    got = np.asarray(got.to_dense())[at]
    np.testing.assert_allclose(got, want[at], rtol=2e-4, atol=1e-5)


def by_size(leaf):
  return "tall" if leaf.shape[0] > 100 else "short"


def of_size(x):
  return x * (1.0 if x.shape[0] > 100 else 0.5)


RATE_BY_SIZE = optax.stateless(lambda u, _: jax.tree.map(of_size, u))
BY_SIZE = {
  "labels": optax.partition(
    {"tall": optax.sgd(0.5), "short": optax.sgd(0.1)},
    lambda tree: jax.tree.map(by_size, tree),
  ),
  "mask": optax.masked(
    optax.scale(0.1), lambda tree: jax.tree.map(lambda x: len(x) > 100, tree)
  ),
  "mask of a state": optax.masked(
    optax.adagrad(0.1), lambda tree: jax.tree.map(lambda x: len(x) > 100, tree)
  ),
}


def test_a_number_chosen_by_size_is_that_of_the_table():
  got, _ = run(zenjax.lazy_rows(RATE_BY_SIZE), 2, rows=True)
  want, _ = run(RATE_BY_SIZE, 2, rows=False)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-6), got, want)


@pytest.mark.parametrize("name", BY_SIZE)
def test_another_program_by_size_is_refused(name):
  with pytest.raises(ValueError, match="masks and labels that depend on sizes"):
    run(zenjax.lazy_rows(BY_SIZE[name]), 1, rows=True)


def test_what_updates_in_some_steps_only_is_refused():
  inner = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
  inner = optax.chain(optax.scale(2.0), inner)
  with pytest.raises(
    ValueError, match="`inner` must not be `optax.MultiSteps`"
  ):
    zenjax.lazy_rows(inner).init(jnp.ones((ROWS, WIDTH)))


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
    zenjax.rows.rowwise_adagrad(0.1, **options)
