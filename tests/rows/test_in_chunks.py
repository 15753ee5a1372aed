"""A chunk of rows at a time must be what all of them at once are."""

from typing import Any

import forced
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax
from zenjax import SparseRows
from zenjax._src.rows import lazy

ROWS = 500


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
  """Chunks of 8 rows; optax promotes dtypes and ranks."""
  forced.rows_in_chunks(monkeypatch)
  with jax.numpy_dtype_promotion("standard"):
    with jax.numpy_rank_promotion("allow"):
      yield


def gradients(seed):
  """Tables with room for many, some and too few rows for a chunk; a bias."""
  rng = np.random.default_rng(seed)

  def rows(capacity, count, width):
    ids = np.full(capacity, ROWS, np.int32)
    ids[:count] = rng.choice(ROWS, count, replace=False)
    values = rng.standard_normal((capacity, width)).astype(np.float32)
    values[count:] = 0
    return SparseRows(ids, values, ROWS).as_unique()

  return {
    "a": rows(53, 41, 3),
    "b": rows(19, 0 if seed == 1 else 19, 5),
    "few": rows(5, 4, 2),
    "bias": jnp.array(rng.standard_normal(4), jnp.float32),
  }


def parameters():
  return {
    "a": jnp.ones((ROWS, 3)),
    "b": jnp.ones((ROWS, 5)),
    "few": jnp.ones((ROWS, 2)),
    "bias": jnp.ones(4),
  }


ALONE = {
  "sgd": optax.sgd(0.1),
  "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
  "adagrad": optax.adagrad(0.1),
  "adamw": optax.adamw(optax.exponential_decay(0.1, 2, 0.5)),
  "rowwise_adagrad": zenjax.rows.rowwise_adagrad(0.1),
  "by label": optax.multi_transform(
    {"t": optax.adam(0.1), "d": optax.sgd(1.0)},
    {"a": "t", "b": "t", "few": "d", "bias": "d"},
  ),
}
TOGETHER = {
  "norm of all": optax.chain(optax.clip_by_global_norm(5.0), optax.adam(0.1)),
  "norm of a leaf": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
  "all is finite": optax.apply_if_finite(
    optax.chain(optax.clip_by_global_norm(5.0), optax.adagrad(0.1)), 3
  ),
  "two norms": optax.chain(
    optax.clip_by_global_norm(5.0),
    optax.clip_by_block_rms(0.05),
    optax.sgd(0.1, momentum=0.9),
  ),
}
OPTIMIZERS = ALONE | TOGETHER


@pytest.mark.usually("norm of all", "adamw", "by label", "rowwise_adagrad")
@pytest.mark.filterwarnings("ignore:weight decay")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_chunks_are_the_whole(name, monkeypatch):
  params = parameters()
  tx = zenjax.lazy_rows(OPTIMIZERS[name])

  def trained(whole):
    monkeypatch.setattr(lazy, "worth_it", lambda merged: not whole)

    @jax.jit
    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return zenjax.apply_updates(params, updates), state

    after, state = params, tx.init(params)
    for seed in range(3):
      after, state = step(after, state, gradients(seed))
    return after, state

  got, want = trained(False), trained(True)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
    got,
    want,
  )
  assert np.abs(got[0]["b"] - 1).max() > 0.01


def test_further_arguments_must_not_have_rows():
  """Nobody knows how they would be cut: here they are one for each row."""

  def scaled(updates, state, params=None, *, by=1.0):
    return jax.tree.map(lambda x: x * by, updates), state

  inner = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), scaled
  )
  tx = zenjax.lazy_rows(inner)
  grads: Any = gradients(0)["a"]
  params = jnp.ones((ROWS, 3))
  got: Any
  got, _ = tx.update(grads, tx.init(params), params, by=jnp.float32(3.0))
  np.testing.assert_array_equal(got.values, grads.values * 3)
  by = jnp.arange(1.0, 1 + grads.capacity)[:, None]
  with pytest.raises(ValueError, match="cannot be traced with these arguments"):
    tx.update(grads, tx.init(params), params, by=by)


def test_rows_without_room_for_more_are_not_worth_it():
  few = SparseRows(jnp.arange(16), jnp.ones((16, 3)), ROWS)
  more = SparseRows(jnp.arange(17), jnp.ones((17, 3)), ROWS)
  assert not lazy.worth_it({"t": few})
  assert lazy.worth_it({"t": few, "u": more})


def test_a_table_without_room_for_any_rows():
  params = {"a": jnp.ones((ROWS, 3)), "none": jnp.ones((ROWS, 2))}
  grads: Any = {
    "a": gradients(0)["a"],
    "none": SparseRows(jnp.arange(0), jnp.ones((0, 2)), ROWS),
  }
  assert lazy.worth_it(grads)
  tx = zenjax.lazy_rows(optax.sgd(1.0))
  updates: Any
  updates, _ = tx.update(grads, tx.init(params), params)
  assert updates["none"].values.shape == (0, 2)
  np.testing.assert_allclose(updates["a"].values, -grads["a"].values)
