"""Models of papers, as programs that are traced only.

A model is a list of layers, the first layer first. A layer is the shape of its
weight, and the positions that it is applied to: of an image or of a sentence.
"""

from collections.abc import Sequence
import math

import jax
from jax import lax
import jax.numpy as jnp

Layer = tuple[tuple[int, ...], int]


def resnet(blocks: tuple[int, ...]) -> list[Layer]:
  """Bottleneck ResNets for ImageNet: (3, 4, 6, 3) is ResNet-50."""
  layers, channels, size = [((7, 7, 3, 64), 112**2)], 64, 56
  for stage, count in enumerate(blocks):
    width = 64 * 2**stage
    for block in range(count):
      before = size
      if stage and not block:
        size //= 2
      layers += [
        ((1, 1, channels, width), before**2),
        ((3, 3, width, width), size**2),
        ((1, 1, width, 4 * width), size**2),
      ]
      if not block:
        layers.append(((1, 1, channels, 4 * width), size**2))
      channels = 4 * width
  return [*layers, ((channels, 1000), 1)]


def vgg16() -> list[Layer]:
  layers, channels, size = [], 3, 224
  for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
    for _ in range(count):
      layers.append(((3, 3, channels, width), size**2))
      channels = width
    size //= 2
  return [*layers, ((25088, 4096), 1), ((4096, 4096), 1), ((4096, 1000), 1)]


def transformer(depth: int, width: int, tokens: int) -> list[Layer]:
  """The layers of BERT or GPT-2, without their tables."""
  block = [(width, 3 * width), (width, width)]
  block += [(width, 4 * width), (4 * width, width)]
  return [(shape, tokens) for _ in range(depth) for shape in block]


def lstm(width: int, tokens: int) -> list[Layer]:
  """Two layers, and the softmax over 10,000 words."""
  layers = [((2 * width, 4 * width), tokens)] * 2
  return [*layers, ((width, 10_000), tokens)]


MODELS = {
  "ResNet-50": resnet((3, 4, 6, 3)),
  "ResNet-101": resnet((3, 4, 23, 3)),
  "VGG16": vgg16(),
  "BERT-base": transformer(12, 768, 384),
  "GPT-2": transformer(12, 768, 1024),
  "LSTM": lstm(1500, 35),
}


def parameters(layers: Sequence[Layer]) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in layers]


def elements(layers: Sequence[Layer]) -> int:
  return sum(math.prod(shape) for shape, _ in layers)


def loss(layers: Sequence[Layer]):
  """A chain of the layers, each applied to as many positions as it has."""

  def of_params(params):
    x = jnp.ones(())
    for w, (shape, positions) in zip(params, layers, strict=True):
      given = jnp.broadcast_to(x, (positions, shape[-2]))
      if len(shape) == 4:
        given = given.reshape(1, 1, positions, shape[-2])
        x = jnp.mean(
          lax.conv_general_dilated(
            given,
            w,
            (1, 1),
            [((k - 1) // 2, (k - 1) // 2) for k in shape[:2]],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
          )
        )
      else:
        x = jnp.mean(given @ w)
    return x

  return of_params
