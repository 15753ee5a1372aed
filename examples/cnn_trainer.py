"""Data-parallel training of the image model with zenjax: its step."""

from cnn_images import Batch
from cnn_model import correct
from cnn_model import loss
from cnn_model import ResNet
from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from processes import place
import sparsified
from sparsified import Sparsifier
from train_loop import AXIS
from train_step import descend
from train_step import transform

import zenjax

_MOMENTUM = 0.9


class Trainer:
  """A model's parameters and optimizer state on a mesh, and its two programs.

  Attributes:
    params: parameters, equal on all devices.
    opt_state: optimizer state; it holds a sparsifier's numbers.
  """

  def __init__(
    self,
    *,
    shape: tuple[int, ...],
    classes: int,
    width: int,
    seed: int,
    learning_rate: float,
    mesh: Mesh,
    sparsifier: Sparsifier | None = None,
  ):
    optimizer = optax.sgd(learning_rate, momentum=_MOMENTUM)
    tx = transform(optimizer, "pmean", "dense", sparsifier)
    model = ResNet(shape[-1], classes, width, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    self.params = place(params, NamedSharding(mesh, P()))
    self.opt_state = zenjax.init(tx, self.params, mesh, AXIS)
    self._devices = mesh.devices.size
    self._sparsified = sparsifier is not None
    self._split = NamedSharding(mesh, P(AXIS))
    specs = zenjax.state_specs(self.opt_state, AXIS)
    self._step = _compiled_step(graph, tx, mesh, specs)
    self._correct = _compiled_correct(graph, mesh)

  def step(self, batch: Batch) -> float:
    """Trains on one batch, which devices divide, and returns its loss."""
    images, labels = place((batch.images, batch.labels), self._split)
    self.params, self.opt_state, loss = self._step(
      self.params, self.opt_state, images, labels
    )
    return float(loss)  # Waits for the step: it is timed, and can be stopped.

  def stats(self) -> dict[str, dict[str, float]]:
    """What a sparsifier did in the last step; nothing where there is none."""
    if not self._sparsified:
      return {}
    return sparsified.stats(self.opt_state)

  def accuracy(self, images: Batch) -> float:
    """The part of images whose label is the model's."""
    padding = -images.size % self._devices
    labels = np.pad(images.labels, (0, padding), constant_values=-1)
    pixels = np.pad(images.images, ((0, padding), (0, 0), (0, 0), (0, 0)))
    found = self._correct(self.params, *place((pixels, labels), self._split))
    return int(found) / images.size


def _compiled_step(graph, tx, mesh, specs):
  def step(params, opt_state, images, labels):
    def loss_fn(params):
      return loss(nnx.merge(graph, params), images, labels)

    params, opt_state, mean, _ = descend(
      loss_fn, tx, params, opt_state, "dense"
    )
    return params, opt_state, mean

  step = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), specs, P(AXIS), P(AXIS)),
    out_specs=(P(), specs, P()),
  )
  return jax.jit(step, donate_argnums=(0, 1))


def _compiled_correct(graph, mesh):
  def count(params, images, labels):
    return lax.psum(correct(nnx.merge(graph, params), images, labels), AXIS)

  return jax.jit(
    jax.shard_map(
      count, mesh=mesh, in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P()
    )
  )
