"""What many rounds would be needed for: sums of all elements, chunk by chunk.

Each device shows which elements it selected, a bit each; no two devices the
same, so the sum of bitmaps is their union. All others are sent as zeros.
"""

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax import _compat
from zenjax._schemes.base import Context
from zenjax._sparsify import _rounding

# Elements that are summed at a time, which bounds the memory that it takes.
_CHUNK = 1 << 20
# A bit for an element.
MASK_BYTES = 1 / 8


def send(
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
  wide = _collectives.accumulator(kept.dtype)
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
    chosen = _bits(_collectives.psum(part, axes), at - word * 32) & new
    old, was = (
      lax.dynamic_slice(x, (first,), (chunk,)) for x in (kept, update)
    )
    values = jnp.where(chosen, old, 0).astype(wide)
    sent = values
    if wire is not None:
      sent = _rounding.saturated(values, wire, kept.dtype)
      sent = sent.astype(wire).astype(wide)
    total = _collectives.psum(sent, axes)
    if wire is None:
      mean, left = context.scaled(total), jnp.zeros_like(values)
    else:
      mean, lost = rounded(total, wire, kept.dtype, context)
      left = finite(values - sent) + jnp.where(own, lost, 0)
    came = jnp.where(chosen, mean.astype(update.dtype), was)
    left = jnp.where(chosen, left.astype(kept.dtype), old)
    # All is read before any is written, in place. JAX 0.10 types what a barrier
    # holds as varying where any of it does.
    came, left, update, kept = lax.optimization_barrier(
      (came, left, update, kept)
    )
    came, update = (_compat.as_invariant(x, axes) for x in (came, update))
    return (
      turn + 1,
      lax.dynamic_update_slice(update, came, (first,)),
      lax.dynamic_update_slice(kept, left, (first,)),
    )

  carry = (jnp.int32(0), update, kept)
  return lax.while_loop(lambda carry: carry[0] < turns, body, carry)


def sum_bytes(vector: jax.Array, n: int) -> float:
  """That a device receives for one of the sums: of values and of bits."""
  chunk, words = _chunk(vector.shape[0])
  item = _collectives.accumulator(vector.dtype).itemsize
  return 2 * (n - 1) / n * (chunk * item + 4 * words)


def rounded(
  total: jax.Array, wire: jnp.dtype, kept: jnp.dtype, context: Context
) -> tuple[jax.Array, jax.Array]:
  """The mean or sum as it goes on the wire, and what it lacks of `total`.

  A sum may exceed the wire's largest where no value does.
  """
  mean = _rounding.saturated(context.scaled(total), wire, kept).astype(wire)
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
  chunk = min(_CHUNK, size)
  return chunk, min(chunk // 32 + 2, -(-size // 32))
