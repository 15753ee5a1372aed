"""Training of the models of row_models, sharded as with whole tables."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from row_models import BATCH
from row_models import LENGTH
from row_models import loss_of
from row_models import MODELS
from row_models import VOCABULARY

import zenjax
from zenjax import SparseRows

STEPS = 50
OPTIMIZERS = {
  "adagrad": optax.adagrad(0.02),
  "rowwise_adagrad": zenjax.rows.rowwise_adagrad(0.02),
  "adam": optax.adam(2e-3),
}
AXES = ("pod", "chip")


def _batches():
  """Ids of which some are of many devices, and some of one alone."""
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    yield (rng.zipf(1.3, (BATCH, LENGTH)) % VOCABULARY).astype(np.int32)


def _trained(tx, loss, params, opt_state, tables=None):
  """Parameters after all steps, and the losses of each."""

  @jax.jit
  def step(params, opt_state, ids):
    both = zenjax.value_and_grad(loss, tables=tables)
    value, grads = both(params, ids)
    updates, opt_state = tx.update(grads, opt_state, params)
    return zenjax.apply_updates(params, updates), opt_state, value

  losses = []
  for ids in _batches():
    params, opt_state, value = step(params, opt_state, ids)
    # JAX 0.10 hangs if steps run ahead: see docs/reference/platforms.md.
    losses.append(float(value))
  return params, np.array(losses)


def _tables_of(loss, params):
  """Which leaves have row gradients."""
  ids = next(_batches())
  _, grads = jax.eval_shape(zenjax.value_and_grad(loss), params, ids)
  is_rows = lambda x: isinstance(x, SparseRows)
  return jax.tree.map(is_rows, grads, is_leaf=is_rows)


@functools.cache
def _whole_run(name, optimizer):
  params, apply = MODELS[name][0]()
  loss = loss_of(apply)
  tx = zenjax.lazy_rows(OPTIMIZERS[optimizer])
  tables = _tables_of(loss, params)
  return _trained(tx, loss, params, tx.init(params), tables)


@pytest.mark.parametrize(
  ("name", "sizes", "optimizer"),
  [
    ("linen scan", (2, 2), "rowwise_adagrad"),
    ("equinox", (4,), "adam"),
    ("linen tied", (4,), "adagrad"),
  ],
)
def test_steps_are_those_of_whole_tables(
  name, sizes, optimizer, as_optax_computes
):
  del as_optax_computes
  params, apply = MODELS[name][0]()
  loss = loss_of(apply)
  axes = AXES[-len(sizes) :]
  mesh = jax.make_mesh(
    sizes,
    axes,
    devices=jax.devices()[: math.prod(sizes)],
    axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
  )
  split = zenjax.tables.shard(
    params,
    mesh,
    "chip",
    tables=_tables_of(loss, params),
    replicas=axes[:-1] or None,
  )
  tx = zenjax.sharded_optimizer(OPTIMIZERS[optimizer], axes, mesh=mesh)
  got, losses = _trained(tx, loss, split, tx.init(split))
  want, whole_losses = _whole_run(name, optimizer)
  np.testing.assert_allclose(losses, whole_losses, rtol=2e-4, atol=2e-5)
  leaves = jax.tree.leaves(zenjax.tables.unshard(got))
  for one, other in zip(leaves, jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)
  assert jnp.isfinite(losses).all() and losses[-1] != losses[0]
