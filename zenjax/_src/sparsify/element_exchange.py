"""Exchanges elements: indices by all-gather, values by all-reduce.

Devices select in partitions of their own, so no index comes twice, and each
device adds its value at every index that any of them selected. What rounding
for the wire takes from a value stays with the device that rounded it, and so
does what the wire cannot hold of a finite one. Sums are taken in 32 bits.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core.wire import from_words
from zenjax._src.core.wire import to_words
from zenjax._src.schemes.base import Context
from zenjax._src.sparsify import flat_vector

# What many rounds would be needed for: sums of all elements, chunk by chunk.
#
# Each device shows which elements it selected, a bit each; no two devices the
# same, so the sum of bitmaps is their union. All others are sent as zeros.


# Elements that are summed at a time, which bounds the memory that it takes.
_REST_CHUNK = 1 << 20
# A bit for an element.
MASK_BYTES = 1 / 8


def send_rest(
  words: jax.Array,
  start: jax.Array,
  wanted: jax.Array,
  update: jax.Array,
  kept: jax.Array,
  wire: jnp.dtype | None,
  context: Context,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sums what `words` of any device name and was not sent, if `wanted`.

  Args:
    words: `[ceil(N / 32)] uint32`, this device's selection.
    start: `[] int32`, the first element of it that was not sent yet.
    wanted: `[] bool`, equal on all devices.
    update: `[N]`, so far.
    kept: `[N]`, so far.
    wire: What values and sums are rounded to; they travel wide.
    context: Axes and operation.

  Returns:
    How many sums there were, `[] int32`, the update, and what is kept.
  """
  size, axes = kept.shape[0], context.axes
  wide = collectives.accumulator(kept.dtype)
  chunk, words_each = _chunk(size)
  turns = jnp.where(wanted, jnp.int32(-(-size // chunk)), 0)

  def body(carry):
    turn, update, kept = carry
    # The last chunk overlaps the one before, and leaves that as it is.
    first = jnp.minimum(turn * chunk, size - chunk)
    at = first + jnp.arange(chunk, dtype=jnp.int32)
    new = at >= turn * chunk
    word = jnp.minimum(first >> 5, words.shape[0] - words_each)
    part = lax.dynamic_slice(words, (word,), (words_each,))
    part = _from(part, start - word * 32)
    own = _bits(part, at - word * 32) & new
    chosen = _bits(collectives.psum(part, axes), at - word * 32) & new
    old, was = (
      lax.dynamic_slice(x, (first,), (chunk,)) for x in (kept, update)
    )
    values = jnp.where(chosen, old, 0).astype(wide)
    sent = values
    if wire is not None:
      sent = flat_vector.saturated(values, wire, kept.dtype)
      sent = sent.astype(wire).astype(wide)
    total = collectives.psum(sent, axes)
    if wire is None:
      mean, left = context.scaled(total), jnp.zeros_like(values)
    else:
      mean, lost = rounded_rest(total, wire, kept.dtype, context)
      left = finite(values - sent) + jnp.where(own, lost, 0)
    came = jnp.where(chosen, mean.astype(update.dtype), was)
    left = jnp.where(chosen, left.astype(kept.dtype), old)
    # All is read before any is written, in place. JAX 0.10 types what a barrier
    # holds as varying where any of it does.
    came, left, update, kept = lax.optimization_barrier(
      (came, left, update, kept)
    )
    came, update = (compat.as_invariant(x, axes) for x in (came, update))
    return (
      turn + 1,
      lax.dynamic_update_slice(update, came, (first,)),
      lax.dynamic_update_slice(kept, left, (first,)),
    )

  carry = (jnp.int32(0), update, kept)
  return lax.while_loop(lambda carry: carry[0] < turns, body, carry)


def sum_bytes(vector: jax.Array, n: int) -> float:
  """Returns the bytes that a device receives for one of the sums."""
  chunk, words = _chunk(vector.shape[0])
  item = collectives.accumulator(vector.dtype).itemsize
  return 2 * (n - 1) / n * (chunk * item + 4 * words)


def rounded_rest(
  total: jax.Array, wire: jnp.dtype, kept: jnp.dtype, context: Context
) -> tuple[jax.Array, jax.Array]:
  """The mean or sum as it goes on the wire, and what it lacks of `total`.

  A sum may exceed the wire's largest where no value does.
  """
  mean = flat_vector.saturated(context.scaled(total), wire, kept).astype(wire)
  back = mean.astype(total.dtype)
  times = context.devices if context.mean else 1
  return mean, finite(total - back * jnp.asarray(times, total.dtype))


def finite(error: jax.Array) -> jax.Array:
  """An error that is to be kept: one of an Inf or a NaN would never leave."""
  return jnp.where(jnp.abs(error) < jnp.inf, error, jnp.zeros_like(error))


def _from(words: jax.Array, start: jax.Array) -> jax.Array:
  """`words` without the bits before bit `start`, which may be anywhere."""
  first = jnp.arange(words.shape[0], dtype=jnp.int32) * 32
  before = jnp.clip(start - first, 0, 32)
  some = jnp.uint32(2**32 - 1) << jnp.minimum(before, 31).astype(jnp.uint32)
  return jnp.where(before == 32, jnp.uint32(0), words & some)


def _bits(words: jax.Array, at: jax.Array) -> jax.Array:
  """Bit number `at: [k] int32` of `words`, bool."""
  word = words.at[at >> 5].get(mode="promise_in_bounds")
  return (word >> (at & 31).astype(jnp.uint32)) & jnp.uint32(1) == 1


def _chunk(size: int) -> tuple[int, int]:
  """Elements of a chunk, and words that hold their bits wherever it starts."""
  chunk = min(_REST_CHUNK, size)
  return chunk, min(chunk // 32 + 2, -(-size // 32))


# What a device selects: the large elements of its own partition.


# Words of a bitmap that are found at a time: of 32 elements each, which are
# to stay in a cache.
_SELECT_CHUNK = 1 << 13


class Selection(NamedTuple):
  """The elements that one device selected, in ascending order."""

  bitmap: indexing.Bitmap  # over the whole vector
  forced: jax.Array  # [] int32, what is sent where nothing was selected
  sent: jax.Array  # [] int32, how many

  def indices(self, first: jax.Array, capacity: int, size: int) -> jax.Array:
    """`[capacity] int32` from number `first` on; `size` past the last."""
    number = first + jnp.arange(capacity, dtype=jnp.int32)
    index = jnp.minimum(indexing.select(self.bitmap, number), size)
    forced = (number == 0) & (self.bitmap.total == 0) & (self.sent > 0)
    return jnp.where(forced, self.forced, index)

  def start_of(self, number: int) -> jax.Array:
    """Where element number `number > 0` is, `[] int32`; past all if nowhere."""
    return indexing.select(self.bitmap, jnp.array([number], jnp.int32))[0]


def select(
  acc: jax.Array,
  start: jax.Array,
  end: jax.Array,
  bar: jax.Array,
  step: jax.Array | None,
) -> Selection:
  """Elements `[start, end)` of `acc` that are not below `bar`.

  NaN is not below anything: it leaves with the next selection.

  Args:
    acc: `[N]`.
    start: `[] int32`.
    end: `[] int32`, larger.
    bar: `[] float32`.
    step: Where nothing is large, element `step mod length` is sent; None if
      nothing is.
  """
  words = _words(acc, start, end, bar)
  bitmap = indexing.index(words)
  if step is None:
    return Selection(bitmap, jnp.zeros_like(start), bitmap.total)
  forced = start + lax.rem(step, end - start)
  return Selection(bitmap, forced, jnp.maximum(bitmap.total, 1))


def _words(
  acc: jax.Array, start: jax.Array, end: jax.Array, bar: jax.Array
) -> jax.Array:
  """Bitmap of what is selected, `[ceil(N / 32)] uint32`.

  Only chunks that hold elements of the partition are read: partitions are of
  no static length, so this is a loop of as many turns as there are.
  """
  words = acc.shape[0] // 32
  chunk = min(_SELECT_CHUNK, words)
  large = functools.partial(_large, start=start, end=end, bar=bar)
  bits = compat.cast_like(jnp.zeros(words, jnp.uint32), acc)
  rest = acc[words * 32 :]
  rest = jnp.pad(large(rest, words * 32), (0, -rest.shape[0] % 32))

  def find(i, bits):
    # The last chunk overlaps the one before, and finds the same there.
    first = jnp.minimum(i * chunk, words - chunk)
    part = lax.dynamic_slice(acc, (first * 32,), (chunk * 32,))
    found = indexing.pack(large(part, first * 32))
    return lax.dynamic_update_slice(bits, found, (first,))

  if chunk:
    each = jnp.int32(chunk * 32)
    stop = lax.div(end - 1, each) + 1
    bits = lax.fori_loop(lax.div(start, each), stop, find, bits)
  return jnp.concatenate([bits, indexing.pack(rest)])


def _large(
  values: jax.Array,
  first: jax.Array | int,
  *,
  start: jax.Array,
  end: jax.Array,
  bar: jax.Array,
) -> jax.Array:
  """Which of the elements from number `first` on are selected, bool."""
  wide = collectives.accumulator(values.dtype)
  large = ~(jnp.abs(values).astype(wide) < bar.astype(wide))
  at = first + jnp.arange(values.shape[0], dtype=jnp.int32)
  return large & (at >= start) & (at < end)


# Words before the indices of the first round: how many were selected, and a
# number of the caller's.
_HEADER = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
  """How the selected values of a vector travel.

  Attributes:
    size: Elements of the vector.
    dtype: That it is kept in.
    wire: What values are rounded to on their way; None for not at all.
    capacity: Indices that a device sends in a round.
  """

  size: int
  dtype: jnp.dtype
  wire: jnp.dtype | None
  capacity: int

  def round_bytes(self, n: int) -> int:
    """Returns the bytes of a round: a ring gathers, and a ring sums."""
    values = self.wire or collectives.accumulator(self.dtype)
    return (n - 1) * self.capacity * (4 + 2 * values.itemsize)

  def dense_bytes(self, n: int) -> float:
    """Those of a ring that sums the whole vector."""
    item = collectives.accumulator(self.dtype).itemsize
    return 2 * (n - 1) / n * self.size * item

  def most_in_rounds(self, n: int) -> int:
    """The largest selection that travels in rounds; what exceeds it pays less
    for a sum of the whole vector after the first.
    """
    # Of one device too, where neither receives a byte: by what they touch.
    item = collectives.accumulator(self.dtype).itemsize
    whole = 2 / n * self.size * (item + MASK_BYTES)
    each = self.round_bytes(2)
    return self.capacity * (1 + int(whole / each))


class Exchanged(NamedTuple):
  """The outcome of an exchange; all but `kept` equal on all devices."""

  update: jax.Array  # [N], what was sent, averaged or summed
  kept: jax.Array  # [N], what was not
  counts: jax.Array  # [n] int32, by rank
  numbers: jax.Array  # [n] float32, by rank
  rounds: jax.Array  # [] int32
  wire_bytes: jax.Array  # [] float32, received by a device


def exchange(
  acc: jax.Array,
  chosen: Selection,
  number: jax.Array,
  form: Form,
  context: Context,
) -> Exchanged:
  """Sends what devices selected, in as many rounds as the fullest one needs.

  Where those would cost more than to sum the whole vector, there is one round,
  and the rest goes in such a sum: of the selected elements, zeros elsewhere.

  Args:
    acc: `[N]` on a device.
    chosen: What it selected.
    number: `[] float32`, any number that all devices want to know.
    form: How values travel.
    context: Axes and operation.
  """
  size, capacity, axes = form.size, form.capacity, context.axes
  total = _sum_of(form, context)

  def own(turn):
    return chosen.indices(turn * capacity, capacity, size)

  def send(index, update, kept):
    # Distinct, also where there is none.
    flat = index.reshape(-1)
    nowhere = size + jnp.arange(flat.shape[0], dtype=jnp.int32)
    flat = jnp.where(flat < size, flat, nowhere)
    values = kept.at[flat].get(mode="fill", fill_value=0, unique_indices=True)
    # First read, then clear in place: else XLA copies the vector each round.
    values, kept = lax.optimization_barrier((values, kept))
    came, left = total(values.reshape(index.shape))
    into = dict(mode="drop", unique_indices=True)
    return (
      update.at[flat].set(came.reshape(-1).astype(acc.dtype), **into),
      kept.at[flat].set(left.reshape(-1).astype(acc.dtype), **into),
    )

  header = jnp.stack([chosen.sent, lax.bitcast_convert_type(number, jnp.int32)])
  first = jnp.concatenate([header, own(jnp.int32(0))])
  gathered = collectives.all_gather(first, axes)
  counts = gathered[:, 0]
  numbers = lax.bitcast_convert_type(gathered[:, 1], jnp.float32)
  most = jnp.max(counts)
  dense = most > form.most_in_rounds(context.devices)
  in_rounds = jnp.where(dense, 0, most)

  def body(carry):
    turn, update, kept = carry
    index = collectives.all_gather(own(turn), axes)
    return turn + 1, *send(index, update, kept)

  sent = send(gathered[:, _HEADER:], jnp.zeros(size, acc.dtype), acc)
  rounds, update, kept = lax.while_loop(
    lambda carry: carry[0] * capacity < in_rounds, body, (jnp.int32(1), *sent)
  )
  sums, update, kept = send_rest(
    chosen.bitmap.words,
    chosen.start_of(capacity),
    dense,
    update,
    kept,
    form.wire,
    context,
  )
  n = context.devices
  of_rounds = rounds.astype(jnp.float32) * form.round_bytes(n)
  of_sums = sums.astype(jnp.float32) * sum_bytes(acc, n)
  wire_bytes = of_rounds + of_sums + 4.0 * _HEADER * (n - 1)
  return Exchanged(update, kept, counts, numbers, rounds + sums, wire_bytes)


def _sum_of(
  form: Form, context: Context
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
  """Sums `[n, C]` values over devices; returns also what stays of them."""
  wide = collectives.accumulator(form.dtype)
  axes, wire = context.axes, form.wire

  def exact(values):
    total = collectives.psum(values.astype(wide), axes)
    return context.scaled(total), jnp.zeros_like(values)

  if wire is None:
    return exact

  def rounded(values):
    # A sum in 16 bits would round where nobody can keep it. So each device sums
    # what it selected itself, and keeps what its own rounding takes.
    sent = flat_vector.saturated(values.astype(wide), wire, form.dtype)
    sent = sent.astype(wire)
    left = finite(values.astype(wide) - sent.astype(wide))
    words = collectives.all_to_all(to_words(sent), axes)
    shares = from_words(words, values.shape[1:], sent.dtype)
    total = jnp.sum(shares.astype(wide), axis=0)
    mean, lost = rounded_rest(total, sent.dtype, form.dtype, context)
    words = collectives.all_gather(to_words(mean[None])[0], axes)
    came = from_words(words, values.shape[1:], sent.dtype)
    return came, left.at[lax.axis_index(axes)].add(lost)

  return rounded
