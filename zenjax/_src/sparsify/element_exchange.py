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


class Selection(NamedTuple):
  """The elements that one device selected, in ascending order."""

  bitmap: indexing.Bitmap  # over a window of the vector
  first: jax.Array  # [] int32, the first element of the window
  forced: jax.Array  # [] int32, the element to send if none was selected
  sent: jax.Array  # [] int32, the number of elements

  def indices(self, first: jax.Array, capacity: int, size: int) -> jax.Array:
    """`[capacity] int32` from number `first` on; `size` past the last."""
    number = first + jnp.arange(capacity, dtype=jnp.int32)
    index = self.first + indexing.select(self.bitmap, number)
    index = jnp.where(number < self.bitmap.total, index, size)
    forced = (number == 0) & (self.bitmap.total == 0) & (self.sent > 0)
    return jnp.where(forced, self.forced, index)


def select(
  acc: jax.Array,
  start: jax.Array,
  end: jax.Array,
  longest: int,
  bar: jax.Array,
  step: jax.Array | None,
) -> Selection:
  """Selects the elements of `acc: [N]` in a range that are not below `bar`.

  NaN is not below anything, so it is sent with the next selection.

  Args:
    acc: The vector.
    start: The first element of the range, `[] int32`.
    end: The end of the range, `[] int32`.
    longest: The largest size of any range.
    bar: The threshold, `[] float32`.
    step: If no element reaches the threshold, element `step mod length` is
      sent; None to send nothing then.
  """
  first = jnp.minimum(start, acc.shape[0] - longest)
  window = jnp.abs(lax.dynamic_slice(acc, (first,), (longest,)))
  index = first + jnp.arange(longest, dtype=jnp.int32)
  wide = collectives.accumulator(acc.dtype)
  inside = (index >= start) & (index < end)
  large = ~(window.astype(wide) < bar.astype(wide)) & inside
  words = indexing.pack(jnp.pad(large, (0, -longest % 32)))
  bitmap = indexing.index(words)
  if step is None:
    return Selection(bitmap, first, jnp.zeros_like(start), bitmap.total)
  forced = start + lax.rem(step, end - start)
  return Selection(bitmap, first, forced, jnp.maximum(bitmap.total, 1))


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
