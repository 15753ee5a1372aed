"""Exchanges elements: indices by all-gather, values by all-reduce.

Each device selects in its own partition, so no index is selected twice, and
adds its value at every index that any device selected. Rounding errors of the
wire dtype stay on the device that rounded, and so does the part of a finite
value that the dtype cannot hold. Sums are taken in 32 bits.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import indexing
from zenjax._src.core.wire import from_words
from zenjax._src.core.wire import to_words
from zenjax._src.schemes.base import Context
from zenjax._src.sparsify import flat_vector


class Window(NamedTuple):
  """The magnitudes of a device's partition, within a range of fixed size."""

  first: jax.Array  # [] int32, the first element of the window
  magnitude: jax.Array  # [longest], of at least 32 bits
  inside: jax.Array  # [longest] bool, whether an element is in the partition

  def reaching(self, bar: jax.Array) -> jax.Array:
    """`[longest] bool`, the elements that are not below `bar`.

    NaN is not below anything, so it is sent with the next selection.
    """
    return ~(self.magnitude < bar.astype(self.magnitude.dtype)) & self.inside


def window(
  acc: jax.Array, start: jax.Array, end: jax.Array, longest: int
) -> Window:
  """Returns the partition from `start` to `end`, of at most `longest`."""
  first = jnp.minimum(start, acc.shape[0] - longest)
  part = jnp.abs(lax.dynamic_slice(acc, (first,), (longest,)))
  index = first + jnp.arange(longest, dtype=jnp.int32)
  wide = collectives.accumulator(acc.dtype)
  inside = (index >= start) & (index < end)
  return Window(first, part.astype(wide), inside)


class Selection(NamedTuple):
  """The elements that one device selected, in ascending order."""

  bitmap: indexing.Bitmap  # of what reached the bar, over the window
  first: jax.Array  # [] int32, the first element of the window
  forced: jax.Array  # [] int32, the element to send if none reached it
  sent: jax.Array  # [] int32, the number of elements

  def indices(self, first: jax.Array, capacity: int, size: int) -> jax.Array:
    """`[capacity] int32` from number `first` on; `size` past the last."""
    number = first + jnp.arange(capacity, dtype=jnp.int32)
    index = self.first + indexing.select(self.bitmap, number)
    index = jnp.where(number < self.sent, index, size)
    forced = (number == 0) & (self.bitmap.total == 0) & (self.sent > 0)
    return jnp.where(forced, self.forced, index)


def select(seen: Window, bar: jax.Array, part: jax.Array) -> Selection:
  """Selects a part of the elements of a window that reach a bar.

  The first ones are selected. The others wait and grow, so that their turn
  comes in later steps.

  Args:
    seen: The window.
    bar: The threshold, `[] float32`.
    part: The part of these elements to send, `[] float32`; 1 for all.
  """
  large = jnp.pad(seen.reaching(bar), (0, -seen.inside.shape[0] % 32))
  bitmap = indexing.index(indexing.pack(large))
  total = bitmap.total.astype(jnp.float32)
  sent = jnp.ceil(total * part).astype(jnp.int32)
  sent = jnp.where(part < 1, jnp.minimum(sent, bitmap.total), bitmap.total)
  return Selection(bitmap, seen.first, jnp.zeros_like(sent), sent)


def forced(
  chosen: Selection, start: jax.Array, end: jax.Array, step: jax.Array
) -> Selection:
  """Sends element `step mod length` of a partition if none was selected."""
  return chosen._replace(
    forced=start + lax.rem(step, end - start),
    sent=jnp.maximum(chosen.sent, 1),
  )


# Words before the indices of the first round: the number of selected elements,
# and a number of the caller.
HEADER = 2


class Exchanged(NamedTuple):
  """The result of an exchange; all but `kept` equal on all devices."""

  update: jax.Array  # [N], sent elements, averaged or summed, zero elsewhere
  kept: jax.Array  # [N], elements and rounding errors that were not sent
  counts: jax.Array  # [n] int32, by rank
  numbers: jax.Array  # [n] float32, by rank
  rounds: jax.Array  # [] int32


def exchange(
  acc: jax.Array,
  chosen: Selection,
  number: jax.Array,
  capacity: int,
  wire: jnp.dtype | None,
  context: Context,
) -> Exchanged:
  """Sends all selections, in as many rounds as the largest one needs.

  Args:
    acc: The vector of a device, `[N]`.
    chosen: The selection of the device.
    number: Any number to tell all devices, `[] float32`.
    capacity: Indices that a device sends in a round.
    wire: The dtype to round values to; None for no rounding.
    context: Axes and operation.
  """
  size, axes = acc.shape[0], context.axes

  def local_indices(turn):
    return chosen.indices(turn * capacity, capacity, size)

  def send(index, update, kept):
    # Indices must be distinct, also those past the last selected element.
    flat = index.reshape(-1)
    nowhere = size + jnp.arange(flat.shape[0], dtype=jnp.int32)
    flat = jnp.where(flat < size, flat, nowhere)
    values = kept.at[flat].get(mode="fill", fill_value=0, unique_indices=True)
    # First read, then clear in place: else XLA copies the vector each round.
    values, kept = lax.optimization_barrier((values, kept))
    came, left = _summed(values.reshape(index.shape), wire, context)
    into = dict(mode="drop", unique_indices=True)
    return (
      update.at[flat].set(came.reshape(-1).astype(acc.dtype), **into),
      kept.at[flat].set(left.reshape(-1).astype(acc.dtype), **into),
    )

  header = jnp.stack([chosen.sent, lax.bitcast_convert_type(number, jnp.int32)])
  first = jnp.concatenate([header, local_indices(jnp.int32(0))])
  gathered = collectives.all_gather(first, axes)
  counts = gathered[:, 0]
  numbers = lax.bitcast_convert_type(gathered[:, 1], jnp.float32)
  largest = jnp.max(counts)

  def body(carry):
    turn, update, kept = carry
    index = collectives.all_gather(local_indices(turn), axes)
    return turn + 1, *send(index, update, kept)

  sent = send(gathered[:, HEADER:], jnp.zeros(size, acc.dtype), acc)
  rounds, update, kept = lax.while_loop(
    lambda carry: carry[0] * capacity < largest, body, (jnp.int32(1), *sent)
  )
  return Exchanged(update, kept, counts, numbers, rounds)


def _summed(
  values: jax.Array, wire: jnp.dtype | None, context: Context
) -> tuple[jax.Array, jax.Array]:
  """Sums `[n, C]` values over devices; returns also the part that is kept."""
  axes, kept = context.axes, values.dtype
  wide = values.astype(collectives.accumulator(kept))
  if wire is None:
    total = collectives.psum(wide, axes)
    return context.scaled(total), jnp.zeros_like(values)
  # An all-reduce in 16 bits would lose its rounding errors. So each device sums
  # the elements that it selected, and keeps the errors of its own rounding.
  sent = flat_vector.saturated(wide, wire, kept).astype(wire)
  left = flat_vector.finite(wide - sent.astype(wide.dtype))
  words = collectives.all_to_all(to_words(sent), axes)
  shares = from_words(words, values.shape[1:], wire)
  total = jnp.sum(shares.astype(wide.dtype), axis=0)
  # A sum may exceed the largest number of the dtype although no value does.
  mean = flat_vector.saturated(context.scaled(total), wire, kept).astype(wire)
  times = context.devices if context.mean else 1
  back = mean.astype(total.dtype) * jnp.asarray(times, total.dtype)
  lost = flat_vector.finite(total - back)
  words = collectives.all_gather(to_words(mean[None])[0], axes)
  came = from_words(words, values.shape[1:], wire)
  return came, left.at[lax.axis_index(axes)].add(lost)
