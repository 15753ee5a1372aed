"""Data-parallel training of the click model with zenjax: its step.

Letters: n devices, B rows of a device in a step.
"""

from dlrm_auc import auc
from dlrm_model import Dlrm
from dlrm_model import log_loss
from dlrm_rows import Batch
from flax import nnx
import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
from processes import place
from processes import whole
from train_loop import AXIS
from train_step import adagrad
from train_step import descend
from train_step import transform

import zenjax

# Name -> what makes it, and the learning rate that it has by default.
OPTIMIZERS = {
  "adagrad": (adagrad, 0.02),
  "row_adagrad": (zenjax.rows.row_adagrad, 0.02),
  "adam": (optax.adam, 3e-3),
  "sgd": (optax.sgd, 1.0),
}


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
    make, _ = OPTIMIZERS[optimizer]
    tx = transform(make(learning_rate), sync, grads)
    model = Dlrm(tables, width, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    self._sync = sync
    self.params = place(params, NamedSharding(mesh, P()))
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
    return auc(batch.labels, whole(self._logits(self.params, numbers, ids)))

  def _placed(self, batch: Batch):
    return place((batch.labels, batch.numbers, batch.ids), self._split)


def _compiled_step(graph, tx, mesh, specs, grads_are):
  def step(params, opt_state, labels, numbers, ids):
    def loss_fn(params):
      return log_loss(nnx.merge(graph, params), labels, numbers, ids)

    params, opt_state, loss, _ = descend(
      loss_fn, tx, params, opt_state, grads_are
    )
    return params, opt_state, loss

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
