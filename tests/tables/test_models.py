"""Training of a model that looks up in a scan, as with whole tables."""

import jax
import numpy as np
from row_models import BATCH
from row_models import LENGTH
from row_models import loss_of
from row_models import MODELS
from row_models import VOCABULARY

import zenjax

STEPS = 12
AXES = ("pod", "chip")


def _batches():
  """Ids of which some are of many devices, and some of one alone."""
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    yield (rng.zipf(1.3, (BATCH, LENGTH)) % VOCABULARY).astype(np.int32)


def _trained(tx, loss, params):
  """Parameters after all steps, and the losses of each."""

  @jax.jit
  def step(params, opt_state, ids):
    value, grads = zenjax.value_and_grad(loss)(params, ids)
    updates, opt_state = tx.update(grads, opt_state, params)
    return zenjax.apply_updates(params, updates), opt_state, value

  opt_state, losses = tx.init(params), []
  for ids in _batches():
    params, opt_state, value = step(params, opt_state, ids)
    # JAX 0.10 hangs if steps run ahead: see docs/reference/platforms.md.
    losses.append(float(value))
  return params, np.array(losses)


def test_steps_are_those_of_whole_tables(as_optax_computes):
  del as_optax_computes
  params, apply = MODELS["linen scan"][0]()
  loss = loss_of(apply)
  adagrad = zenjax.rows.rowwise_adagrad(0.02)
  want, whole_losses = _trained(zenjax.lazy_rows(adagrad), loss, params)
  mesh = jax.make_mesh(
    (2, 2),
    AXES,
    devices=jax.devices()[:4],
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  tables = lambda name, _: "embedding" in name
  split = zenjax.tables.shard(
    params, mesh, "chip", tables=tables, replicas="pod"
  )
  tx = zenjax.sharded_optimizer(adagrad, AXES, mesh=mesh)
  got, losses = _trained(tx, loss, split)
  np.testing.assert_allclose(losses, whole_losses, rtol=2e-4, atol=2e-5)
  leaves = jax.tree.leaves(zenjax.tables.unshard(got))
  for one, other in zip(leaves, jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)
  assert np.isfinite(losses).all() and losses[-1] != losses[0]
