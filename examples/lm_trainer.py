"""Data-parallel training of the language model with zenjax: its step."""

from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lm_data import Batch
from lm_model import exact_loss
from lm_model import LanguageModel
from lm_model import sampled_loss
import lm_trace
import numpy as np
import optax
from processes import place
import sparsified
from sparsified import Sparsifier
from train_loop import AXIS
from train_step import adagrad
from train_step import descend
from train_step import transform

import zenjax

# Name -> what makes it, and the learning rate that it has by default. The first
# is the program's: it reads and writes one accumulator of a table's size, Adam
# two, and Adam's momentum moves even the rows that no word of the batch
# touched. On CPU devices that share two cores such sweeps of the tables hide
# the synchronization. SGD sweeps less still, but hardly learns rare words; with
# a sparsifier it is the one that learns as it does without.
OPTIMIZERS = {
  "adagrad": (adagrad, 0.03),
  "adam": (optax.adam, 0.01),
  "sgd": (optax.sgd, 1.0),
}


def is_lazy(grads: str, optimizer: str) -> bool:
  """Whether rows that a step does not touch rest, where else they would move.

  Adagrad leaves them alone whatever the gradients are; Adam does not.
  """
  return grads == "rows" and optimizer == "adam"


class Trainer:
  """A model's parameters and optimizer state on a mesh, and its two programs.

  Attributes:
    params: parameters, equal on all devices.
    opt_state: optimizer state; it holds zen_sync's or a sparsifier's numbers.
  """

  def __init__(
    self,
    *,
    vocab: int,
    width: int,
    seed: int,
    sync: str,
    grads: str,
    optimizer: str,
    learning_rate: float,
    mesh: Mesh,
    sparsifier: Sparsifier | None = None,
    recorder: lm_trace.Recorder | None = None,
  ):
    make, _ = OPTIMIZERS[optimizer]
    tx = transform(make(learning_rate), sync, grads, sparsifier)
    model = LanguageModel(vocab, width, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    self._tells = sync == "zen"
    self._sparsified = sparsifier is not None
    self.params = place(params, NamedSharding(mesh, P()))
    self.opt_state = zenjax.init(tx, self.params, mesh, AXIS)
    self._split = NamedSharding(mesh, P(AXIS))
    specs = zenjax.state_specs(self.opt_state, AXIS)
    self._step = _compiled_step(graph, tx, mesh, specs, grads)
    self._recorder = recorder
    if recorder:
      recorder.start(self.params)
      self._traced_step = _compiled_step(
        graph, tx, mesh, specs, grads, recorder.rows
      )
    self._exact_loss = _compiled_exact_loss(graph, mesh)

  def step(self, batch: Batch) -> float:
    """Trains on one batch and returns its loss."""
    windows, negatives = place((batch.windows, batch.negatives), self._split)
    recorder = self._recorder
    if recorder and not recorder.wants_more:
      recorder = self._recorder = None
    run = self._traced_step if recorder else self._step
    self.params, self.opt_state, loss, seen = run(
      self.params, self.opt_state, windows, negatives
    )
    if recorder:
      recorder.write(seen)
    return float(loss)  # Waits for the step: it is timed, and can be stopped.

  def stats(self) -> dict[str, dict[str, float]]:
    """What zen_sync or a sparsifier saw in the last step; else nothing."""
    if self._sparsified:
      return sparsified.stats(self.opt_state)
    return zenjax.stats(self.opt_state) if self._tells else {}

  def perplexity(self, windows: np.ndarray) -> float:
    """Exact perplexity of [m, L + 1] words; devices divide m."""
    windows = place(windows, self._split)
    return float(np.exp(self._exact_loss(self.params, windows)))


def _compiled_step(graph, tx, mesh, specs, grads_are, seen=lambda grads: ()):
  """`seen(grads)` of every device is returned beside the loss."""

  def step(params, opt_state, windows, negatives):
    def loss_fn(params):
      model = nnx.merge(graph, params)
      return sampled_loss(model, windows, negatives, AXIS)

    params, opt_state, loss, grads = descend(
      loss_fn, tx, params, opt_state, grads_are
    )
    return params, opt_state, loss, seen(grads)

  step = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), specs, P(AXIS), P(AXIS)),
    out_specs=(P(), specs, P(), P(AXIS)),
  )
  return jax.jit(step, donate_argnums=(0, 1))


def _compiled_exact_loss(graph, mesh):
  def loss(params, windows):
    return lax.pmean(exact_loss(nnx.merge(graph, params), windows, AXIS), AXIS)

  return jax.jit(
    jax.shard_map(loss, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
  )
