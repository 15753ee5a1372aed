"""PowerSGD where matrices have a low rank; the contract has its model."""

from typing import Any

import compressing
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zenjax import compress


def of_rank(rank) -> Any:
  return compress.all_reduce(compress.PowerSGD(rank), "data", leaves=True)


def test_a_matrix_of_its_rank_is_sent_exactly():
  rng = np.random.default_rng(0)
  a, b = rng.standard_normal((40, 2)), rng.standard_normal((2, 30))
  g = np.stack([a @ b, 2 * a @ b]).astype(np.float32)
  update = compressing.once(of_rank(2), g)
  np.testing.assert_allclose(update[0], 1.5 * (a @ b), atol=1e-4)


def test_zeros_stay_zeros():
  """Also in the second step, from factors of the first."""
  tx = of_rank(2)

  def second(g):
    return tx.update(g, tx.update(g, tx.init(g))[1])[0]

  update = jax.jit(jax.vmap(second, axis_name="data"))(np.zeros((2, 40, 30)))
  assert not np.any(update)


def test_it_finds_the_matrix_again_after_zeros():
  """A zero gradient makes Q zero, from which no iteration would come back."""
  rng = np.random.default_rng(0)
  g = rng.standard_normal((2, 40, 1)) @ rng.standard_normal((2, 1, 30))
  g = np.broadcast_to(g[:1], g.shape).astype(np.float32)
  tx = of_rank(2)

  def steps(g):
    _, state = tx.update(jnp.zeros_like(g), tx.init(g))
    first, state = tx.update(g, state)
    second, state = tx.update(jnp.zeros_like(g), state)
    return first + second, state

  update, _ = jax.jit(jax.vmap(steps, axis_name="data"))(g)
  np.testing.assert_allclose(update[0], g[0], atol=1e-4)


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e20])
@pytest.mark.parametrize("rank", [2, 4])
def test_equal_rows_of_any_size(rank, size):
  """Columns of `P` depend on each other then."""
  rng = np.random.default_rng(0)
  tx = of_rank(rank)

  def steps(g):
    first, state = tx.update(g, tx.init(g))
    second, state = tx.update(g, state)
    return (first, second), state

  run = jax.jit(jax.vmap(steps, axis_name="data"))
  drawn = [rng.standard_normal((1 + i % rank, 64)) for i in range(30)]
  for rows in [np.ones((1, 64)), np.eye(64)[3:4], *drawn]:
    g = np.resize(rows * size, (64, 64)).astype(np.float32)
    updates, state = run(np.stack([g, g]))
    for update in updates:
      np.testing.assert_allclose(update[0], g, rtol=1e-3, atol=1e-3 * size)
    assert np.isfinite(state.memory["leaf"]).all()
