"""The image model as a study: accuracy on held-out images."""

import argparse
from collections.abc import Iterator
import os

from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
import numpy as np
import optax

from examples.studies.cnn import images as sources
from examples.studies.cnn import model
from examples.studies.common import flags as common
from examples.studies.common import plots
from examples.studies.common.cluster import AXIS
from examples.studies.common.study import Study
from examples.studies.common.trainer import Trainer

_MOMENTUM = 0.9


class Pictures(Study):
  """Labelled images, and the labels that a network gives them."""

  unit, measure, form, table_form = "images", "accuracy", ".2%", ".2%"
  measured_on = "accuracy on held-out images"
  panels = (
    plots.losses("image"),
    plots.measures("Accuracy on held-out images", "%", factor=100),
    plots.densities,
  )

  def __init__(self, flags: argparse.Namespace, devices: int):
    super().__init__(flags, devices)
    try:
      self._images = sources.load(flags.data, flags.image_size)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--data {error}") from error
    train, held_out = self._images.train, self._images.held_out
    if flags.batch % devices or flags.batch > train.size:
      raise SystemExit(
        f"--batch must be a multiple of the {devices} devices and at most the"
        f" {train.size:,} images to train on, got {flags.batch}"
      )
    self.steps = flags.steps or flags.epochs * (train.size // flags.batch)
    print(
      f"{train.size:,} images to train on, {held_out.size:,} held out,"
      f" {self._images.classes} classes; {devices} devices, {flags.batch}"
      " images a step",
      flush=True,
    )

  def trainer(self, mesh: Mesh, seed: int, **how) -> Trainer:
    flags, images = self._flags, self._images
    channels = images.train.images.shape[-1]
    return Trainer(
      lambda: model.ResNet(
        channels, images.classes, flags.width, rngs=nnx.Rngs(seed)
      ),
      model.loss,
      _correct,
      optax.sgd(flags.lr, momentum=_MOMENTUM),
      mesh,
      **how,
    )

  def batches(
    self, devices: int, seed: int, first_step: int = 0
  ) -> Iterator[sources.Batch]:
    del devices
    train = self._images.train
    return sources.batches(train, self._flags.batch, seed, first_step)

  def measured(self, trainer: Trainer) -> float:
    held_out = self._images.held_out
    padding = -held_out.size % self._devices
    labels = np.pad(held_out.labels, (0, padding), constant_values=-1)
    images = np.pad(held_out.images, ((0, padding), (0, 0), (0, 0), (0, 0)))
    return int(trainer.evaluate(images, labels)) / held_out.size

  def settings(self) -> dict[str, object]:
    names = ("sparsifier", "density", "batch", "width", "lr", "seed")
    found = common.settings(self._flags, (*names, "image_size"))
    # The images may lie elsewhere by now.
    data = self._flags.data
    found["--data"] = data and os.path.basename(os.path.abspath(data))
    return found | {"--devices": self._devices}


def _correct(
  network: model.ResNet, images: jax.Array, labels: jax.Array
) -> jax.Array:
  return lax.psum(model.correct(network, images, labels), AXIS)
