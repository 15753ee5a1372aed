"""Training of a model that looks up in a scan, as with whole tables."""

import jax
import numpy as np
from row_models import BATCH
from row_models import LENGTH
from row_models import loss_of
from row_models import MODELS
from row_models import VOCABULARY
from sharded_steps import close
from sharded_steps import mesh_of
from sharded_steps import step_of
from sharded_steps import trained

import zenjax

AXES = ("pod", "chip")


def test_steps_are_those_of_whole_tables(as_optax_computes):
  """Ids of which some are of many devices, and some of one alone."""
  params, apply = MODELS["linen scan"][0]()
  rng = np.random.default_rng(0)
  ids = (rng.zipf(1.3, (12, 1, BATCH, LENGTH)) % VOCABULARY).astype(np.int32)
  adagrad = zenjax.rows.rowwise_adagrad(0.02)
  mesh = mesh_of(2, 2, names=AXES)
  tables = lambda name, _: "embedding" in name
  split = zenjax.tables.shard(
    params, mesh, "chip", tables=tables, replicas="pod"
  )

  def run(tx, params):
    step = jax.jit(step_of(tx, loss_of(apply)))
    (params, _), losses = trained(step, (params, tx.init(params)), ids)
    return zenjax.tables.unshard(params), losses

  want, whole_losses = run(zenjax.lazy_rows(adagrad), params)
  tx = zenjax.sharded_optimizer(adagrad, AXES, mesh=mesh)
  got, losses = run(tx, split)
  np.testing.assert_allclose(losses, whole_losses, rtol=2e-4, atol=2e-5)
  close(got, want, rtol=2e-4, atol=2e-4)
  assert np.isfinite(losses).all() and losses[-1] != losses[0]
