"""Sparsifiers: compressors that send a few numbers whole, and keep the rest."""

import abc
from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any, ClassVar
import warnings

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.compressor import Leaves
from zenjax._src.compress.compressor import levels
from zenjax._src.compress.compressor import Reduced
from zenjax._src.compress.compressor import Shape
from zenjax._src.compress.compressor import summed
from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import packing
from zenjax._src.core import wire
from zenjax._src.core.collectives import Axes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message

# A larger density saves little; 1 for 1 % is the usual slip.
_MUCH = 0.25


class Sparsifier(Compressor):
  """A compressor that sends a few numbers of each device, and no others.

  All leaves are one vector. Over several axes, vectors are first added up along
  the last axis, whose links are fast, and numbers are selected of the sums.
  """

  selects = True
  by_level: ClassVar[bool] = True

  @abc.abstractmethod
  def select(
    self,
    x: jax.Array,
    sizes: Sequence[int],
    memory: Any,
    key: jax.Array,
    context: Context,
  ) -> Reduced:
    """Selects numbers of a vector, and sums them over devices.

    Args:
      x: The vector of a device, `[S] float32`.
      sizes: The length of each leaf in it.
      memory: What `first` or the last step returned.
      key: A random key, equal on all devices.
      context: The devices to send to.
    """

  def first(self, size: int, context: Context) -> Any:
    """Returns the memory for a vector of `size` numbers."""
    del size, context
    return ()

  @abc.abstractmethod
  def sent(self, sizes: Sequence[int], context: Context) -> list[Message]:
    """Returns the collectives of `select`, in order."""

  def init(self, shapes: Mapping[str, Shape], context: Context) -> Any:
    _, across, sizes = self._parts([*shapes.values()], context)
    return self.first(sum(sizes), across)

  def reduce(
    self, leaves: Leaves, memory: Any, key: jax.Array, context: Context
  ) -> Reduced:
    shapes = [x.shape for x in leaves.values()]
    within, across, sizes = self._parts(shapes, context)
    devices = context.devices // across.devices
    # A row for each device of a level: its part of every leaf.
    rows = []
    for x, size in zip(leaves.values(), sizes):
      flat = jnp.pad(x.reshape(-1), (0, size * devices - x.size))
      rows.append(flat.reshape(devices, size))
    rows = part = wire.constant(jnp.concatenate(rows, axis=1))
    if within:
      part = summed(collectives.all_to_all(rows, within), within)
    out = self.select(part.reshape(-1), sizes, memory, key, across)
    sums, kept, sent = (x[None] for x in (out.sums, out.kept, out.sent))
    stats = out.stats
    if within:
      # Momentum has to know what the sum of its level has sent.
      codes = jnp.pad(sent, ((0, 0), (0, -sent.shape[1] % 32)))
      sections = sums, packing.packed(codes.astype(jnp.int32), 1)
      ((sums, words, *stats),) = wire.send(
        [(*sections, *(jnp.reshape(x, (1, 1)) for x in stats))],
        collectives.all_gather,
        within,
      )
      # They are equal on all devices, though what is sent beside them is not.
      sums, *stats = (
        compat.as_invariant(x, across.axes) for x in (sums, *stats)
      )
      sums = sums / jnp.float32(devices if context.mean else 1)
      sent = packing.unpacked(words, 1)[:, : out.sent.size] != 0
      stats = tuple(jnp.mean(x) for x in stats)
      rank = lax.axis_index(within)
      kept = jnp.zeros_like(rows).at[rank].set(out.kept)
    named = lambda rows: dict(zip(leaves, _leaves(rows, shapes, sizes)))
    return out._replace(
      sums=named(sums), kept=named(kept), sent=named(sent), stats=tuple(stats)
    )

  def messages(
    self, shapes: Sequence[Shape], context: Context
  ) -> list[Message]:
    within, across, sizes = self._parts(shapes, context)
    messages = self.sent(sizes, across)
    if not within:
      return messages
    devices, size = context.devices // across.devices, sum(sizes)
    gathered = size + -(-size // 32) + len(self.stats)
    return [
      Message("all_to_all", within, devices * size),
      *messages,
      Message("all_gather", within, gathered),
    ]

  def _parts(
    self, shapes: Sequence[Shape], context: Context
  ) -> tuple[Axes, Context, list[int]]:
    """Returns the fast axes, the devices across, and the sizes of all parts."""
    across, within = context.axes, ()
    if self.by_level:
      across, within = levels(context.axes)
    slow = context.sizes[: len(across)]
    devices = math.prod(context.sizes[len(across) :])
    sizes = [-(-math.prod(shape) // devices) for shape in shapes]
    if sum(sizes) >= 2**31 - 2**24:
      raise ValueError(
        f"`params` have {sum(sizes)} elements for {type(self).__name__}, and"
        " there may be at most 2**31. Give parts of the model to several"
        " `zenjax.compress.all_reduce` with `leaves=` and `others=`."
      )
    return within, Context(axes=across, sizes=slow, mean=context.mean), sizes


def _leaves(
  rows: jax.Array, shapes: Sequence[Shape], sizes: Sequence[int]
) -> list[jax.Array]:
  """Splits `[devices, S]` to leaves of their own shapes."""
  ends = list(itertools.accumulate(sizes))[:-1]
  return [
    x.reshape(-1)[: math.prod(shape)].reshape(shape)
    for x, shape in zip(jnp.split(rows, ends, axis=1), shapes)
  ]


def sample(
  values: jax.Array, stride: int, key: jax.Array
) -> tuple[jax.Array, float]:
  """Samples `values: [N]`; zero where not finite.

  Args:
    values: Magnitudes.
    stride: The distance of samples.
    key: Others are taken in every step, or some would never be.

  Returns:
    The sample, and how many numbers each one stands for.
  """
  size = values.shape[0]
  stride = min(stride, size)
  # Odd, so that every column of a matrix of 2^i columns is sampled.
  stride -= 1 - stride % 2
  length = (size // stride - 1) * stride + 1
  first = jax.random.randint(key, (), 0, size - length + 1, jnp.int32)
  part = lax.dynamic_slice(values, (first,), (length,))[::stride]
  part = jnp.where(part < jnp.inf, part, jnp.zeros_like(part))
  return part, size / part.shape[0]


def check_density(value: Any) -> None:
  """Raises `ValueError` outside of (0, 1], and warns of a large density."""
  if not 0 < arguments.number("density", value) <= 1:
    raise ValueError(
      f"`density` must be in (0, 1], got {value!r}. Give 0.01 for 1 %."
    )
  # 1.0 may be meant, but the int 1 is more likely one percent.
  if _MUCH <= value < 1 or isinstance(value, int):
    warnings.warn(
      f"`density` is {value:g}, so {value:.0%} of the model is sent in each"
      " step, which can take longer than a dense all-reduce. For"
      f" {value:g} % give {value / 100:g}.",
      stacklevel=4,
    )
