"""Trains the language model with an exchange in each step, or in each round."""

from collections.abc import Iterator
import dataclasses
import itertools

from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from examples.studies.common import cluster
from examples.studies.common import loop
from examples.studies.common.cluster import AXIS
from examples.studies.common.trainer import Trainer
from examples.studies.lm import model
from examples.studies.lm.data import Batch
from examples.studies.lm.data import LENGTH
from examples.studies.lm.study import mean_exact_loss
import zenjax


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
  """Holds the batches of one round.

  Attributes:
    windows: [every, n * B, L + 1] int32.
    negatives: [every, n * S] int32.
  """

  windows: np.ndarray
  negatives: np.ndarray

  @property
  def arrays(self) -> tuple[np.ndarray, ...]:
    """The arrays that a round takes."""
    return self.windows, self.negatives

  @property
  def size(self) -> int:
    """Tokens."""
    return self.windows.shape[0] * self.windows.shape[1] * LENGTH


def rounds(batches: Iterator[Batch], every: int) -> Iterator[Round]:
  """Yields so many batches at a time."""
  while group := list(itertools.islice(batches, every)):
    yield Round(
      np.stack([batch.windows for batch in group]),
      np.stack([batch.negatives for batch in group]),
    )


class LocalTrainer(Trainer):
  """Takes a round of local steps where `Trainer` takes a step.

  Args:
    vocab: Words.
    width: Of the two tables.
    inner: The optimizer of each device.
    outer: The optimizer of averaged pseudo-gradients.
    sync: Averages them.
    every: The steps of a round.
    mesh: The devices.
    seed: Draws the first parameters.
  """

  def __init__(
    self,
    vocab: int,
    width: int,
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    sync: optax.GradientTransformation,
    every: int,
    mesh: Mesh,
    seed: int,
  ):
    make = lambda: model.LanguageModel(vocab, width, rngs=nnx.Rngs(seed))
    super().__init__(
      make, model.sampled_loss, mean_exact_loss, outer, mesh, sync=sync
    )
    tx = optax.chain(sync, outer)
    graph, _ = nnx.split(nnx.eval_shape(make), nnx.Param)

    def loss_fn(params, batch):
      return model.sampled_loss(nnx.merge(graph, params), *batch)

    local = zenjax.local_steps(loss_fn, inner, every, AXIS)
    self._inner = zenjax.init_state(local, self.params, mesh, AXIS)
    self._by_step = NamedSharding(mesh, P(None, AXIS))

    def one_round(params, inner, opt_state, batches):
      (loss, grads), inner = local(params, inner, batches)
      updates, opt_state = tx.update(grads, opt_state, params)
      params = optax.apply_updates(params, updates)
      return params, inner, opt_state, lax.pmean(loss, AXIS)

    state = self.params, self._inner, self.opt_state
    specs = zenjax.state_specs(state, AXIS)
    self._round = jax.jit(
      jax.shard_map(
        one_round,
        mesh=mesh,
        in_specs=(*specs, P(None, AXIS)),
        out_specs=(*specs, P()),
      ),
      donate_argnums=(0, 1, 2),
    )

  def step(self, batch: loop.Batch) -> float:
    """Trains a round and returns its mean loss."""
    self.params, self._inner, self.opt_state, loss = self._round(
      self.params,
      self._inner,
      self.opt_state,
      cluster.place(batch.arrays, self._by_step),
    )
    return float(loss)
