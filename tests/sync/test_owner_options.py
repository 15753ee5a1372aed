"""What owners are given: shapes, options, and optimizers with needs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax
from zenjax.kernels._dispatch import interpreted

pytestmark = pytest.mark.usefixtures("as_optax_computes")

N = 4


def few_rows(shape):
  """Gradients `[N, *shape]` of which two devices share a row."""
  grads = np.zeros((N, *shape), np.float32)
  rows = grads.reshape(N, -1, shape[-1])
  rows[1, 67] = np.linspace(1, 3, shape[-1])
  rows[2, 67] = 1.0
  rows[2, 3:20] = np.linspace(-1, 1, shape[-1])
  return grads


def updates(inner, grads, extra=None, **options) -> tuple[Any, Any]:
  """What every device gets, and its state, after a step from parameters 1."""
  tx = zenjax.sharded_optimizer(inner, "data", sparse=True, **options)
  params = jnp.ones(grads.shape[1:])

  @jax.jit
  def step(grads):
    return tx.update(grads, tx.init(params), params, **(extra or {}))

  return jax.tree.map(np.asarray, jax.vmap(step, axis_name="data")(grads))


@pytest.mark.parametrize(
  ("inner", "shape", "capacities"),
  [
    (optax.adagrad(0.5), (5, 30, 4), None),  # The last dimension makes rows.
    # 128 columns would be split if a row could be. Buffers of all rows pass:
    # owners have no dense path, of which `zen_sync` would warn.
    (zenjax.rows.rowwise_adagrad(0.5), (96, 128), (96, 96)),
  ],
  ids=["folded", "whole rows"],
)
def test_a_step_is_that_of_the_optimizer_on_the_sum(inner, shape, capacities):
  """Further arguments reach the optimizer."""

  def scaled(updates, state, params=None, *, by=1.0):
    return jax.tree.map(lambda x: x * by, updates), state

  scale = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), scaled
  )
  tx, grads = optax.chain(inner, scale), few_rows(shape)
  got, _ = updates(tx, grads, {"by": -3.0}, op="sum", capacities=capacities)
  params = jnp.ones(shape)
  whole = lambda g: inner.update(g, inner.init(params), params)[0]
  want = -3.0 * np.asarray(jax.jit(whole)(grads.sum(0)))
  for device in got:
    np.testing.assert_allclose(device, want, rtol=1e-6)


@functools.cache
def in_rounds() -> tuple[Any, Any]:
  """Updates and states of a step whose buffers are too small."""
  options = dict(capacities=(1, 2), kernels="xla")
  return updates(optax.adagrad(0.5), few_rows((300, 6)), **options)


def test_options_are_those_of_the_exchange():
  inner, grads = optax.adagrad(0.5), few_rows((300, 6))
  plain, _ = updates(inner, grads)
  assert not np.array_equal(plain, plain.astype(jnp.bfloat16))
  short, _ = updates(inner, grads, wire_dtype=jnp.bfloat16)
  np.testing.assert_array_equal(short, short.astype(jnp.bfloat16))
  np.testing.assert_allclose(short, plain, rtol=0.02)
  pinned, after = in_rounds()
  np.testing.assert_array_equal(pinned, plain)
  after = jax.tree.map(lambda x: x[0], after)
  assert zenjax.stats(after)["leaf"]["rounds"] > 1


def test_kernels_give_the_bits_of_plain_jax():
  """Interpreted; two rounds or more."""
  inner, grads = optax.adagrad(0.5), few_rows((300, 6))
  with interpreted("cuda"):
    by_kernels = updates(inner, grads, kernels="pallas", capacities=(1, 2))
  for a, b in zip(
    *map(jax.tree.leaves, (by_kernels, in_rounds())), strict=True
  ):
    np.testing.assert_array_equal(a, b)
