"""What `catch_up` and its transformation take, refuse, and cost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax
from zenjax import SparseRows

pytestmark = pytest.mark.usefixtures("as_optax_computes")

ROWS, WIDTH = 6, 4


def rows_of(ids, width=WIDTH):
  return SparseRows(jnp.array(ids), jnp.ones((len(ids), width)), ROWS)


ASKED = {
  "duplicates": (np.array([[1, 1], [3, 1]], np.int8), [1, 3]),
  "out of range": (np.array([-1, 99, -99]), [0, ROWS - 1]),
  "rows": ([2, ROWS, 2], [2]),
  "scalar": (np.uint8(4), [4]),
  "none": (np.zeros(0, np.int32), []),
}


@pytest.mark.filterwarnings("ignore:`catch_up=True` of `lazy_rows`")
@pytest.mark.parametrize("name", ASKED)
def test_only_the_rows_asked_for_catch_up(name):
  ids, moved = ASKED[name]
  ids = rows_of(ids, 1) if name == "rows" else ids
  tx = zenjax.lazy_rows(optax.sgd(1.0, 0.5), catch_up=True)
  start: Any = {"a": {"table": jnp.zeros((ROWS, 1))}, "b": jnp.zeros((2, 2))}

  @jax.jit
  def run(params):
    state: Any = tx.init(params)
    ones = jax.tree.map(jnp.ones_like, params)
    for grads in (ones, {"a": {"table": rows_of([ROWS], 1)}, "b": ones["b"]}):
      updates, state = tx.update(grads, state, params)
      params = zenjax.apply_updates(params, updates)
    new, state = zenjax.rows.catch_up(tx, params, state, {"a": {"table": ids}})
    return params, new, state

  params, new, state = run(start)
  want = np.full((ROWS, 1), -1.0)
  want[moved] = -1.5
  np.testing.assert_array_equal(new["a"]["table"], want)
  current = np.asarray(state.current["a"]["table"])
  assert np.nonzero(current == 2)[0].tolist() == moved
  np.testing.assert_array_equal(new["b"], params["b"])


# Gradients that are given depend on no rows that are behind.
@pytest.mark.filterwarnings("ignore:`catch_up=True` of `lazy_rows`")
def test_gradients_may_come_dense_and_as_rows_by_turns():
  inner = optax.adam(0.1)
  tx = zenjax.lazy_rows(inner, catch_up=True)

  @jax.jit
  def step(got, state, want, want_state, given):
    is_rows = isinstance(given, SparseRows)
    dense = given.to_dense() if is_rows else given
    grads: Any = given
    if not is_rows:
      got, state = zenjax.rows.catch_up(tx, got, state)
    updates, state = tx.update(grads, state, got)
    got = zenjax.apply_updates(got, updates)
    updates, want_state = inner.update(dense, want_state, want)
    return got, state, optax.apply_updates(want, updates), want_state

  table = jnp.ones((ROWS, WIDTH))
  carry = table, tx.init(table), table, inner.init(table)
  for ids in ([0, 1], [ROWS, 1], None, [3, 0], [ROWS, ROWS], None, [2, ROWS]):
    carry = step(*carry, table if ids is None else rows_of(ids))
  got, state, want, _ = carry
  got, _ = jax.jit(lambda *x: zenjax.rows.catch_up(tx, *x))(got, state)
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_step_holds_no_array_of_the_table_but_the_table():
  num_rows = 500_000
  tx = zenjax.lazy_rows(optax.adamw(0.1), catch_up=True)

  def step(table, state, ids, values):
    table, state = zenjax.rows.catch_up(tx, table, state, ids)
    grads: Any = SparseRows(ids, values, num_rows)
    updates, state = tx.update(grads, state, table)
    return zenjax.apply_updates(table, updates), state

  table = jax.ShapeDtypeStruct((num_rows, 8), jnp.float32)
  state = jax.eval_shape(tx.init, table)
  ids = jax.ShapeDtypeStruct((64,), jnp.int32)
  values = jax.ShapeDtypeStruct((64, 8), jnp.float32)
  jitted = jax.jit(step, donate_argnums=(0, 1))
  memory = jitted.lower(table, state, ids, values).compile().memory_analysis()
  assert memory is not None
  assert memory.temp_size_in_bytes < 1 << 18
  assert memory.alias_size_in_bytes >= num_rows * (3 * 8 + 1) * 4


def test_a_step_compiles_once():
  tx = zenjax.lazy_rows(optax.adam(0.1), catch_up=True)

  def step(table, state, ids):
    table, state = zenjax.rows.catch_up(tx, table, state, ids)
    grads: Any = SparseRows(ids, jnp.ones((2, WIDTH)), ROWS)
    updates, state = tx.update(grads, state, table)
    return zenjax.apply_updates(table, updates), state

  table = jnp.ones((ROWS, WIDTH))
  leaves, structure = jax.tree.flatten(tx.init(table))
  state = structure.unflatten(map(jnp.copy, leaves))  # as from a checkpoint
  jitted: Any = jax.jit(step)
  for _ in range(3):
    table, state = jitted(table, state, jnp.array([1, 2]))
  assert jitted._cache_size() == 1


REFUSED = {
  "lion": (optax.lion(0.1), "still moves a row after 4096"),
  "amsgrad": (optax.amsgrad(0.1), "by more than constant factors"),
  "L2": (
    optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1)),
    "by more than constant factors",
  ),
  "injected": (
    optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    "hyperparams",
  ),
}


@pytest.mark.parametrize(
  "clip", [optax.clip_by_global_norm(1.0), optax.clip_by_block_rms(1.0)]
)
def test_norms_of_what_waits_are_refused(clip):
  inner = optax.chain(optax.trace(0.9), clip)
  with pytest.raises(ValueError, match="needs state or parameters of rows"):
    zenjax.lazy_rows(inner, catch_up=True).init(jnp.ones((ROWS, WIDTH)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_up_for_is_refused(name):
  inner, why = REFUSED[name]
  params = {"table": jnp.ones((ROWS, WIDTH)), "bias": jnp.ones(2)}
  with pytest.raises(ValueError, match=f"must be one of which missed.*{why}"):
    zenjax.lazy_rows(inner, catch_up=True).init(params)


def test_errors_say_what_to_do():
  tx = zenjax.lazy_rows(optax.adam(0.1), catch_up=True)
  params = {"table": jnp.ones((ROWS, WIDTH)), "bias": jnp.ones(2)}
  state = tx.init(params)
  with pytest.raises(ValueError, match="`params` must be given"):
    tx.update(params, state)
  with pytest.raises(ValueError, match="no leaf at \\['tabel'\\]"):
    zenjax.rows.catch_up(tx, params, state, {"tabel": jnp.array([1])})
  with pytest.raises(ValueError, match="must be of tables"):
    zenjax.rows.catch_up(tx, params, state, {"bias": jnp.array([1])})
  with pytest.raises(TypeError, match="must be integers, got float32"):
    zenjax.rows.catch_up(tx, params, state, {"table": jnp.array([1.0])})
  plain = zenjax.lazy_rows(optax.adam(0.1))
  with pytest.raises(ValueError, match="must hold `lazy_rows"):
    zenjax.rows.catch_up(plain, params, plain.init(params))
