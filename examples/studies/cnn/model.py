"""A small residual network whose gradients are dense.

Group norm, not batch norm: what an image gives does not depend on the others
of its device, so that the number of devices changes nothing but rounding.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import optax

_GROUPS = 8


class Block(nnx.Module):
  """Two convolutions beside a short cut."""

  def __init__(self, inner: int, outer: int, stride: int, *, rngs: nnx.Rngs):
    def conv(size, inner, stride):
      return nnx.Conv(
        inner,
        outer,
        kernel_size=(size, size),
        strides=stride,
        use_bias=False,
        rngs=rngs,
      )

    self.norm1 = nnx.GroupNorm(inner, num_groups=_GROUPS, rngs=rngs)
    self.conv1 = conv(3, inner, stride)
    self.norm2 = nnx.GroupNorm(outer, num_groups=_GROUPS, rngs=rngs)
    self.conv2 = conv(3, outer, 1)
    if stride > 1 or inner != outer:
      self.short: nnx.Conv | None = conv(1, inner, stride)
    else:
      self.short = None

  def __call__(self, x: jax.Array) -> jax.Array:
    y = nnx.relu(self.norm1(x))
    short = self.short(y) if self.short else x
    y = self.conv1(y)
    return short + self.conv2(nnx.relu(self.norm2(y)))


class ResNet(nnx.Module):
  """Three stages of one block; each halves the image and doubles the width."""

  def __init__(
    self, channels: int, classes: int, width: int, *, rngs: nnx.Rngs
  ):
    self.stem = nnx.Conv(
      channels, width, kernel_size=(3, 3), use_bias=False, rngs=rngs
    )
    self.stage1 = Block(width, width, 1, rngs=rngs)
    self.stage2 = Block(width, 2 * width, 2, rngs=rngs)
    self.stage3 = Block(2 * width, 4 * width, 2, rngs=rngs)
    self.norm = nnx.GroupNorm(4 * width, num_groups=_GROUPS, rngs=rngs)
    self.head = nnx.Linear(4 * width, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """Maps [m, H, W, C] images to [m, classes] logits."""
    x = self.stage3(self.stage2(self.stage1(self.stem(images))))
    return self.head(jnp.mean(nnx.relu(self.norm(x)), axis=(1, 2)))


def loss(model: ResNet, images: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the mean cross-entropy, nats an image."""
  return jnp.mean(
    optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
  )


def correct(model: ResNet, images: jax.Array, labels: jax.Array) -> jax.Array:
  """Counts the labels [m] that are the model's; no negative one is."""
  return jnp.sum(jnp.argmax(model(images), axis=-1) == labels)
