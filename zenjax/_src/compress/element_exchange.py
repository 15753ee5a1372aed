"""Exchanges elements: indices by all-gather, values by all-reduce.

Each device selects in its own partition, so no index is selected twice, and
adds its value at every index that any device selected. Rounding errors of the
wire dtype stay on the device that rounded, and so does the part of a finite
value that the dtype cannot hold. Sums are taken in float32.
"""

import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.compress.compressor import in_dtype
from zenjax._src.compress.compressor import left
from zenjax._src.core import collectives
from zenjax._src.core import indexing
from zenjax._src.core.collectives import Axes
from zenjax._src.core.wire import from_words
from zenjax._src.core.wire import to_words
from zenjax._src.core.wire import words_for
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message

# Room for values, as a part of that for indices: devices select unevenly, but
# about as much as wanted together.
_FULL = 0.88


class Window(NamedTuple):
  """The magnitudes of a device's partition, within a range of fixed size."""

  first: jax.Array  # [] int32, the first element of the window
  magnitude: jax.Array  # [longest]
  inside: jax.Array  # [longest] bool, whether an element is in the partition


def window(
  acc: jax.Array, start: jax.Array, end: jax.Array, longest: int
) -> Window:
  """Returns the partition from `start` to `end`, of at most `longest`."""
  first = jnp.minimum(start, acc.shape[0] - longest)
  part = jnp.abs(lax.dynamic_slice(acc, (first,), (longest,)))
  index = first + jnp.arange(longest, dtype=jnp.int32)
  return Window(first, part, (index >= start) & (index < end))


class Selection(NamedTuple):
  """The elements that one device selected."""

  bitmap: indexing.Bitmap  # of what reached the bar, over the window
  first: jax.Array  # [] int32, the first element of the window
  turn: jax.Array  # [] int32, the number of the first one to send
  sent: jax.Array  # [] int32, how many to send
  forced: jax.Array  # [] int32, the element to send if none reached the bar

  def indices(self, first: jax.Array, capacity: int, size: int) -> jax.Array:
    """`[capacity] int32` from number `first` on; `size` past the last."""
    number = first + jnp.arange(capacity, dtype=jnp.int32)
    turned = lax.rem(self.turn + number, jnp.maximum(self.bitmap.total, 1))
    index = self.first + indexing.select(self.bitmap, turned)
    index = jnp.where(number < self.sent, index, size)
    forced = (number == 0) & (self.bitmap.total == 0) & (self.sent > 0)
    return jnp.where(forced, self.forced, index)


def select(
  seen: Window, bar: jax.Array, part: jax.Array | int, key: jax.Array
) -> Selection:
  """Selects a part of the elements of a window that reach a bar.

  These are the ones that follow on a random one. The others wait. If there are
  NaN or Inf, these alone are selected.

  Args:
    seen: The window.
    bar: The threshold, `[] float32`.
    part: The part of these elements to send, `[] float32`; 1 for all.
    key: A random key.
  """
  urgent = jnp.any(seen.inside & ~lax.is_finite(seen.magnitude))
  bar = jnp.where(urgent, jnp.inf, bar)
  part = jnp.where(urgent, 1, part)
  # NaN is not below anything.
  large = ~(seen.magnitude < bar) & seen.inside
  large = jnp.pad(large, (0, -large.shape[0] % 32))
  bitmap = indexing.index(indexing.pack(large))
  total = bitmap.total.astype(jnp.float32)
  sent = jnp.ceil(total * part).astype(jnp.int32)
  sent = jnp.where(part < 1, jnp.minimum(sent, bitmap.total), bitmap.total)
  most = jnp.maximum(bitmap.total, 1)
  turn = jax.random.randint(key, (), 0, most, jnp.int32)
  return Selection(bitmap, seen.first, turn, sent, jnp.zeros_like(sent))


def forced(
  chosen: Selection, start: jax.Array, end: jax.Array, step: jax.Array
) -> Selection:
  """Sends element `step mod length` of a partition if none was selected."""
  return chosen._replace(
    forced=start + lax.rem(step, end - start),
    sent=jnp.maximum(chosen.sent, 1),
  )


class Exchanged(NamedTuple):
  """The result of an exchange; all but `kept` equal on all devices."""

  update: jax.Array  # [N], sent elements, averaged or summed, zero elsewhere
  kept: jax.Array  # [N], elements and rounding errors that were not sent
  sent: jax.Array  # [N] bool
  counts: jax.Array  # [n] int32, by rank
  rounds: jax.Array  # [] int32, gathers of indices
  parts: jax.Array  # [] int32, all-reduces of values


def exchange(
  acc: jax.Array,
  chosen: Selection,
  capacity: int,
  wire: jnp.dtype | None,
  context: Context,
) -> Exchanged:
  """Sends all selections, in as many rounds as the largest one needs.

  Values follow when all indices are known, so that no room is sent for what a
  device has not selected.

  Args:
    acc: The vector of a device, `[N]`.
    chosen: The selection of the device.
    capacity: Indices that a device sends in a round.
    wire: The dtype to round values to; None for no rounding.
    context: Axes and operation.
  """
  size, axes = acc.shape[0], context.axes
  room = _room(context.devices, capacity)

  def local_indices(turn):
    return chosen.indices(turn * capacity, capacity, size)

  def mark(union, index):
    flat = distinct(index.reshape(-1), size)
    return indexing.put(union, flat, jnp.ones(flat.shape, bool))

  first = jnp.append(chosen.sent, local_indices(jnp.int32(0)))
  gathered = collectives.all_gather(first, axes)
  counts = gathered[:, 0]
  union = mark(jnp.zeros(size + -size % 32, bool), gathered[:, 1:])

  def gather(carry):
    turn, union = carry
    index = collectives.all_gather(local_indices(turn), axes)
    return turn + 1, mark(union, index)

  largest = jnp.max(counts)
  rounds, union = lax.while_loop(
    lambda carry: carry[0] * capacity < largest, gather, (jnp.int32(1), union)
  )
  bitmap = indexing.index(indexing.pack(union))

  def send(carry):
    part, update, kept = carry
    number = part * room + jnp.arange(room, dtype=jnp.int32)
    index = distinct(indexing.select(bitmap, number), size)
    values = indexing.take_or(kept, index, 0)
    # First read, then clear in place: else XLA copies the vector each time.
    values, kept = lax.optimization_barrier((values, kept))
    came, rest = _summed(values, wire, context)
    update = indexing.put(update, index, came)
    return part + 1, update, indexing.put(kept, index, rest)

  sent = send((jnp.int32(0), jnp.zeros(size, acc.dtype), acc))
  parts, update, kept = lax.while_loop(
    lambda carry: carry[0] * room < bitmap.total, send, sent
  )
  return Exchanged(update, kept, union[:size], counts, rounds, parts)


def index_messages(capacity: int, axes: Axes) -> list[Message]:
  """Returns the collective of a round of indices."""
  return [Message("all_gather", axes, 1.0 + capacity)]


def value_messages(
  n: int, capacity: int, wire: jnp.dtype | None, axes: Axes
) -> list[Message]:
  """Returns the collectives of a part of the values."""
  room = _room(n, capacity)
  if wire is None:
    return [Message("all_reduce", axes, float(room))]
  part = float(words_for(room // n, wire))
  return [
    Message("all_to_all", axes, n * part),
    Message("all_gather", axes, part),
  ]


def _room(n: int, capacity: int) -> int:
  """Returns how many values are added up at once, a multiple of `n`."""
  return n * math.ceil(_FULL * capacity)


def distinct(index: jax.Array, size: int) -> jax.Array:
  """Makes padding, `size` and more, distinct."""
  nowhere = size + jnp.arange(index.shape[0], dtype=jnp.int32)
  return jnp.where(index < size, index, nowhere)


def _summed(
  values: jax.Array, wire: jnp.dtype | None, context: Context
) -> tuple[jax.Array, jax.Array]:
  """Sums `[V]` values over devices; returns also the part that is kept."""
  axes = context.axes
  if wire is None:
    total = collectives.psum(values, axes)
    return context.scaled(total), jnp.zeros_like(values)
  # An all-reduce in 16 bits would lose its rounding errors. So each device sums
  # a share of the elements, and keeps the errors of its own rounding.
  shape = context.devices, values.shape[0] // context.devices
  sent, rest = in_dtype(values.reshape(shape), wire)
  words = collectives.all_to_all(to_words(sent), axes)
  shares = from_words(words, shape[1:], wire)
  total = jnp.sum(shares.astype(values.dtype), axis=0)
  # A sum may exceed the largest number of the dtype although no value does.
  mean, _ = in_dtype(context.scaled(total), wire)
  times = jnp.float32(context.devices if context.mean else 1)
  lost = left(total, mean.astype(total.dtype) * times)
  words = collectives.all_gather(to_words(mean[None])[0], axes)
  came = from_words(words, shape[1:], wire).astype(values.dtype)
  rest = rest.at[lax.axis_index(axes)].add(lost)
  return came.reshape(-1), rest.reshape(-1)
