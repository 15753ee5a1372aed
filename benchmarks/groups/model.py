"""`train_cnn.py`'s network on planted images; which leaves are compressed."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.planned.models import Model
from examples import cnn_model
from zenjax._src.core import leaf_util
from zenjax._src.planner import gradient_trace
from zenjax._src.planner.gradient_trace import Gradient

_CLASSES, _CHANNELS = 10, 3
_SEED, _NOISE = 0, 1.0


def cnn(hosts: int, width: int, batch: int, size: int, batches: int) -> Model:
  """Parameters by name; an image is its class's pattern behind noise.

  Args:
    hosts: How many train.
    width: Channels of the first stage.
    batch: Images of a host.
    size: Height and width of an image.
    batches: How many.
  """
  shapes = nnx.eval_shape(
    lambda: cnn_model.ResNet(_CHANNELS, _CLASSES, width, rngs=nnx.Rngs(_SEED))
  )
  graph, state = nnx.split(shapes, nnx.Param)
  structure = jax.tree.structure(state)
  named = leaf_util.named_leaves(state)
  rng = np.random.default_rng(_SEED)

  def loss(params, images, labels):
    leaves = [params[name] for name, _ in named]
    model = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
    return cnn_model.loss(model, images, labels)

  params = {name: _first(rng, name, leaf.shape) for name, leaf in named}
  return Model(params, loss, _batches(rng, hosts * batch, size, batches))


def _first(
  rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> np.ndarray:
  """As networks are usually begun, and no program compiled to draw it."""
  if len(shape) > 1:
    spread = math.sqrt(2 / math.prod(shape[:-1]))
    return spread * rng.standard_normal(shape, np.float32)
  return np.full(shape, float("scale" in name), np.float32)


def _batches(rng, images, size, batches) -> list[tuple[np.ndarray, ...]]:
  patterns = rng.standard_normal((_CLASSES, size, size, _CHANNELS), np.float32)
  found = []
  for _ in range(batches):
    labels = rng.integers(0, _CLASSES, images, np.int32)
    noise = rng.standard_normal((images, size, size, _CHANNELS), np.float32)
    found.append((patterns[labels] + _NOISE * noise, labels))
  return found


def compressed(model: Model, images: int, least: int) -> list[Gradient]:
  """Gradients of so many elements, as the backward pass completes them.

  A smaller one is sent whole, with all such: a hundredth of it is nothing, and
  where zen_sync finds one dense it adds a sum to whichever exchange it is in.
  """
  found = gradient_trace.gradients(
    jax.value_and_grad(model.loss), model.params, *_part(model, images)
  )
  return [g for g in found if math.prod(g.shape) >= least]


def require_several(model: Model, least: int) -> None:
  """Raises `ValueError` where fewer than two leaves are so large."""
  second = sorted(x.size for x in model.params.values())[-2]
  if least > second:
    raise ValueError(
      f"`--least` must be at most {second:,}, which two leaves of this network"
      f" have, got {least:,}: one leaf needs no groups."
    )


def moved_bytes(model: Model, images: int) -> float:
  """Of a step of so many images, as on a roofline: what memory lets take."""
  step = jax.make_jaxpr(jax.value_and_grad(model.loss))
  traced = step(model.params, *_part(model, images))
  return gradient_trace._walk(traced.jaxpr, 0.0)[0]


def _part(model: Model, images: int) -> list[jax.ShapeDtypeStruct]:
  """Shapes of so many images and labels."""
  return [
    jax.ShapeDtypeStruct((images, *x.shape[1:]), jnp.dtype(x.dtype))
    for x in model.batches[0]
  ]
