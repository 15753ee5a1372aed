"""What owners are given: shapes, options, and optimizers with needs."""

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
  ("inner", "shape"),
  [
    (optax.adagrad(0.5), (5, 30, 4)),  # The last dimension makes the rows.
    # 128 columns would be split if a row could be.
    (zenjax.rows.rowwise_adagrad(0.5), (96, 128)),
  ],
  ids=["folded", "whole rows"],
)
def test_a_step_is_that_of_the_optimizer_on_the_sum(inner, shape):
  grads = few_rows(shape)
  got, _ = updates(inner, grads, op="sum")
  params = jnp.ones(shape)
  want: Any
  want, _ = inner.update(jnp.array(grads.sum(0)), inner.init(params), params)
  for device in got:
    np.testing.assert_allclose(device, want, rtol=1e-6)


def test_options_are_those_of_the_exchange():
  inner, grads = optax.adagrad(0.5), few_rows((300, 6))
  plain, _ = updates(inner, grads)
  assert not np.array_equal(plain, plain.astype(jnp.bfloat16))
  short, _ = updates(inner, grads, wire_dtype=jnp.bfloat16)
  np.testing.assert_array_equal(short, short.astype(jnp.bfloat16))
  np.testing.assert_allclose(short, plain, rtol=0.02)
  pinned, after = updates(inner, grads, capacities=(1, 2))
  np.testing.assert_array_equal(pinned, plain)
  after = jax.tree.map(lambda x: x[0], after)
  assert zenjax.stats(after)["leaf"]["rounds"] > 1


def test_kernels_give_the_bits_of_plain_jax():
  """Interpreted; two rounds or more."""
  inner, grads = optax.adagrad(0.5), few_rows((300, 6))
  options = dict(capacities=(1, 2))
  with interpreted("cuda"):
    by_kernels = updates(inner, grads, kernels="pallas", **options)
  plain = updates(inner, grads, kernels="xla", **options)
  for a, b in zip(*map(jax.tree.leaves, (by_kernels, plain)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_pins_of_all_rows_pass():
  """Owners have no dense path, of which `zen_sync` would warn."""
  inner, grads = optax.sgd(0.5), few_rows((96, 4))
  got, _ = updates(inner, grads, capacities=(96, 96), op="sum")
  for device in got:
    np.testing.assert_allclose(device, -0.5 * grads.sum(0), rtol=1e-6)


def test_further_arguments_reach_the_optimizer():
  def scaled(updates, state, params=None, *, by=1.0):
    return jax.tree.map(lambda x: x * by, updates), state

  inner = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), scaled
  )
  grads = few_rows((96, 4))
  got, _ = updates(inner, grads, extra={"by": -3.0})
  np.testing.assert_allclose(got[0], -3.0 * grads.mean(0), rtol=1e-6)
