"""Data-parallel training of the click model with zenjax: its step.

Letters: n devices, B rows of a device in a step.
"""

from dlrm_auc import auc
from dlrm_model import Dlrm
from dlrm_model import log_loss
from dlrm_rows import Batch
from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from train_loop import AXIS
from train_loop import pmean

import zenjax


def _adagrad(learning_rate: float) -> optax.GradientTransformation:
  # The accumulator starts at zero: gradients are means over thousands of rows,
  # and optax's default of 0.1 would drown them.
  return optax.adagrad(learning_rate, initial_accumulator_value=0.0, eps=1e-10)


# Name -> what makes it, and the learning rate that it has by default.
OPTIMIZERS = {
  "sgd": (optax.sgd, 1.0),
  "adagrad": (_adagrad, 0.02),
  "row_adagrad": (zenjax.row_adagrad, 0.02),
  "adam": (optax.adam, 3e-3),
}


def transform(
  sync: str, grads: str, optimizer: str, learning_rate: float
) -> optax.GradientTransformation:
  """Synchronization and optimizer, in the form that the gradients have."""
  make, _ = OPTIMIZERS[optimizer]
  inner = make(learning_rate)
  if sync == "pmean":
    return optax.chain(pmean(AXIS), inner)
  if grads == "rows":
    inner = zenjax.lazy_rows(inner)
  return optax.chain(zenjax.zen_sync(AXIS), inner)


class Trainer:
  """A model's parameters and optimizer state on a mesh, and its two programs.

  Attributes:
    params: parameters, equal on all devices.
    opt_state: optimizer state; it holds zen_sync's statistics.
  """

  def __init__(
    self,
    *,
    tables: tuple[int, ...],
    width: int,
    seed: int,
    sync: str,
    grads: str,
    optimizer: str,
    learning_rate: float,
    mesh: Mesh,
  ):
    tx = transform(sync, grads, optimizer, learning_rate)
    model = Dlrm(tables, width, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    self._sync = sync
    self.params = jax.device_put(params, NamedSharding(mesh, P()))
    self.opt_state = zenjax.init(tx, self.params, mesh, AXIS)
    self._split = NamedSharding(mesh, P(AXIS))
    specs = zenjax.state_specs(self.opt_state, AXIS)
    self._step = _compiled_step(graph, tx, mesh, specs, grads)
    self._logits = _compiled_logits(graph, mesh)

  def step(self, batch: Batch) -> float:
    """Trains on n * B rows and returns their loss."""
    self.params, self.opt_state, loss = self._step(
      self.params, self.opt_state, *self._placed(batch)
    )
    return float(loss)  # Waits for the step: it is timed, and can be stopped.

  def stats(self) -> dict[str, dict[str, float]]:
    """What zen_sync saw in the last step, by leaf; nothing for pmean."""
    return zenjax.stats(self.opt_state) if self._sync == "zen" else {}

  def auc(self, batch: Batch) -> float:
    """Exact AUC on some rows; devices divide their number."""
    _, numbers, ids = self._placed(batch)
    return auc(
      batch.labels, np.asarray(self._logits(self.params, numbers, ids))
    )

  def _placed(self, batch: Batch):
    return jax.device_put((batch.labels, batch.numbers, batch.ids), self._split)


def _compiled_step(graph, tx, mesh, specs, grads_are):
  def step(params, opt_state, labels, numbers, ids):
    def loss_fn(params):
      return log_loss(nnx.merge(graph, params), labels, numbers, ids)

    if grads_are == "rows":
      # Rows that were looked up, of the tables that only are; all are local.
      loss, grads = zenjax.value_and_grad(loss_fn)(params)
    else:
      # Of the varying view the gradients stay local: zen_sync averages them.
      varying = zenjax.as_varying(params, AXIS)
      loss, grads = jax.value_and_grad(loss_fn)(varying)
    updates, opt_state = tx.update(grads, opt_state, params)
    # As `optax.apply_updates`, and for updates that are rows.
    params = zenjax.apply_updates(params, updates)
    return params, opt_state, lax.pmean(loss, AXIS)

  split = P(AXIS)
  step = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), specs, split, split, split),
    out_specs=(P(), specs, P()),
  )
  return jax.jit(step, donate_argnums=(0, 1))


def _compiled_logits(graph, mesh):
  def logits(params, numbers, ids):
    return nnx.merge(graph, params)(numbers, ids)

  return jax.jit(
    jax.shard_map(
      logits, mesh=mesh, in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P(AXIS)
    )
  )
