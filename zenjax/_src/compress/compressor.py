"""Compressors: how dense gradients are summed over devices in few bytes."""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.core.collectives import Axes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message

Shape = tuple[int, ...]
Leaves = Mapping[str, jax.Array]  # by name


class Reduced(NamedTuple):
  """The result of a compressed sum, of leaves by name or of one vector."""

  sums: Any  # or means; equal on all devices, zero where nothing was sent
  kept: Any  # what this device has to send later
  memory: Any  # for the next step; equal on all devices
  # Whether a number was sent whole, bool; None for compressors that send all.
  sent: Any = None
  # Of [] each, equal on all devices, as `Compressor.stats` names them.
  stats: tuple[jax.Array | float, ...] = ()
  more_bytes: jax.Array | float = 0.0  # received beyond `messages`


class Compressor(abc.ABC):
  """A rule by which dense gradients are summed over devices in few bytes.

  Give one to `zenjax.compress.all_reduce`. To write your own, derive from
  `zenjax.compress.Codec`.
  """

  # Whether errors are kept and sent later, unless the user says otherwise.
  error_feedback: ClassVar[bool] = True
  # False if results are not near the leaves, so that errors mean nothing.
  approximates: ClassVar[bool] = True
  # True if a number is sent whole or not at all.
  selects: ClassVar[bool] = False
  # Names of the numbers that `Reduced.stats` has.
  stats: ClassVar[tuple[str, ...]] = ()

  def init(self, shapes: Mapping[str, Shape], context: Context) -> Any:
    """Returns the memory before the first step, equal on all devices."""
    del shapes, context
    return ()

  @abc.abstractmethod
  def reduce(
    self, leaves: Leaves, memory: Any, key: jax.Array, context: Context
  ) -> Reduced:
    """Sums leaves over devices.

    `sum(kept) + n * mean` of all devices is the sum of their leaves, except for
    compressors with `error_feedback = False`.

    Args:
      leaves: Arrays of a device by name, float32.
      memory: What `init` or the last step returned.
      key: A random key, equal on all devices, and another one in each step.
      context: Axes of the devices, and whether to average.
    """

  @abc.abstractmethod
  def messages(
    self, shapes: Sequence[Shape], context: Context
  ) -> list[Message]:
    """Returns the collectives of a step, in order.

    Args:
      shapes: The shapes of all leaves.
      context: Axes of the devices.
    """

  def __str__(self) -> str:
    """The compressor as `zenjax.planner.Plan` names it, say `LowBit(4)`."""
    known: Any = dataclasses.is_dataclass(self) and dataclasses.fields(self)
    shown = []
    for i, field in enumerate(known or ()):
      value = _plain(getattr(self, field.name))
      if i == 0:
        shown.append(repr(value))
      elif value != field.default:
        shown.append(f"{field.name}={value!r}")
    return f"{type(self).__name__}({', '.join(shown)})"


def _plain(value: Any) -> Any:
  """Returns the name of a dtype, and numbers of NumPy as Python's."""
  if isinstance(value, np.generic):
    return value.item()
  return value.name if isinstance(value, np.dtype) else value


class Codec(Compressor):
  """A compressor that turns blocks of numbers to words, and words to numbers.

  Leaves are cut into blocks of `block` numbers, and the last block of a leaf is
  filled up with numbers from its start, which are dropped later. Each device
  encodes its blocks and sends a part of them to each other device. That device
  decodes what came, adds it up in float32 in the order of ranks, encodes the
  sum or mean, and sends it to all. So a step takes `2 (n - 1) / n` times the
  bytes of the words, however many devices there are.

  Over several axes, numbers are first added up in float32 along the last axis,
  whose links are fast. Only sums of it are encoded.

  `encode` and `decode` see arrays of many blocks, and treat each block alone. A
  NaN must not decode to a number, nor Inf to a finite one that stands for a
  magnitude. The rest of its block may become NaN, too.
  """

  block: int

  @property
  @abc.abstractmethod
  def words(self) -> int:
    """The words of 32 bits that a block becomes."""

  @abc.abstractmethod
  def encode(self, x: jax.Array, key: jax.Array) -> jax.Array:
    """Converts `[m, block] float32` to `[m, words] uint32`."""

  @abc.abstractmethod
  def decode(self, words: jax.Array) -> jax.Array:
    """Converts `[m, words] uint32` to `[m, block] float32`."""

  def reduce(
    self, leaves: Leaves, memory: Any, key: jax.Array, context: Context
  ) -> Reduced:
    across, within = levels(context.axes)
    arrays = [*leaves.values()]
    blocks = _in_blocks(arrays, self.block, context.devices)
    part = blocks
    if within:
      part = summed(collectives.all_to_all(blocks, within), within)
    key = jax.random.fold_in(key, lax.axis_index(context.axes))
    push, pull = jax.random.split(key)
    words = self.encode(wire.constant(part), push)
    kept = left(part, self.decode(words))
    came = self.decode(collectives.all_to_all(words, across))
    total = summed(came, across)
    words = self.encode(context.scaled(total), pull)
    times = jnp.float32(context.devices if context.mean else 1)
    lost = left(total, self.decode(words) * times)
    # A device has summed the part whose number is its rank.
    kept = _added(kept, lost, lax.axis_index(across))
    if within:
      rank = lax.axis_index(within)
      kept = _added(jnp.zeros_like(blocks), kept, rank)
    words = collectives.all_gather(words, context.axes)
    if within:  # Ranks count along the last axis first, and blocks last.
      slices = collectives.size(within)
      words = words.reshape(-1, slices, *words.shape[1:]).swapaxes(0, 1)
    sums = self.decode(words.reshape(-1, self.words))
    named = lambda blocks: dict(zip(leaves, _in_leaves(blocks, arrays)))
    return Reduced(named(sums), named(kept), memory)

  def messages(
    self, shapes: Sequence[Shape], context: Context
  ) -> list[Message]:
    blocks = sum(-(-math.prod(shape) // self.block) for shape in shapes)
    blocks += -blocks % context.devices
    across, within = levels(context.axes)
    messages, slices = [], 1
    if within:
      slices = context.sizes[-1]
      messages.append(Message("all_to_all", within, blocks * self.block))
    words = blocks // slices * self.words
    messages.append(Message("all_to_all", across, words))
    words = blocks // context.devices * self.words
    return [*messages, Message("all_gather", context.axes, words)]


def levels(axes: Axes) -> tuple[Axes, Axes]:
  """Returns the axes over which words travel, and those with fast links."""
  return (axes[:-1], axes[-1:]) if len(axes) > 1 else (axes, ())


def summed(came: jax.Array, axes: Axes) -> jax.Array:
  """Sums the blocks that came from each device, `[M, block]`, by rank."""
  devices = collectives.size(axes)
  return jnp.sum(came.reshape(devices, -1, came.shape[1]), axis=0)


def left(x: jax.Array, sent: jax.Array) -> jax.Array:
  """Returns what is left of `x`; nothing of its own NaN and Inf."""
  rest = jnp.where(lax.is_finite(sent), x - sent, x)
  return jnp.where(lax.is_finite(rest), rest, jnp.zeros_like(rest))


def in_dtype(x: jax.Array, wire: jnp.dtype) -> tuple[jax.Array, jax.Array]:
  """Rounds numbers to a dtype, and returns also what is left of them.

  Finite ones become at most the largest number of the dtype.
  """
  most = min(float(jnp.finfo(wire).max), float(jnp.finfo(x.dtype).max))
  near = jnp.where(lax.is_finite(x), jnp.clip(x, -most, most), x).astype(wire)
  return near, left(x, near.astype(x.dtype))


def _added(x: jax.Array, part: jax.Array, number: jax.Array) -> jax.Array:
  """Adds `part` to the part of `x` with this number."""
  start = number * part.shape[0]
  here = lax.dynamic_slice_in_dim(x, start, part.shape[0])
  return lax.dynamic_update_slice_in_dim(x, here + part, start, 0)


def _in_blocks(
  leaves: Sequence[jax.Array], block: int, devices: int
) -> jax.Array:
  """Returns `[M, block]` of all leaves; `devices` divides `M`."""
  parts = []
  for leaf in leaves:
    flat = leaf.reshape(-1)
    parts.append(flat)
    if rest := leaf.size % block:
      # The last block is filled with its own numbers: zeros would make its mean
      # smaller, and others could change its scale.
      parts.append(jnp.resize(flat[-rest:], (block - rest,)))
  blocks = jnp.concatenate(parts).reshape(-1, block)
  return jnp.pad(blocks, ((0, -blocks.shape[0] % devices), (0, 0)))


def _in_leaves(blocks: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
  """Inverse of `_in_blocks`."""
  flat, block, start, leaves = blocks.reshape(-1), blocks.shape[1], 0, []
  for leaf in like:
    x = lax.slice_in_dim(flat, start, start + leaf.size)
    leaves.append(x.reshape(leaf.shape))
    start += -(-leaf.size // block) * block
  return leaves
