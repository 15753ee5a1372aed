"""What a device selects: the large elements of its own partition."""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _bitmap
from zenjax import _collectives
from zenjax import _compat

# Words of a bitmap that are found at a time: of 32 elements each, which are
# to stay in a cache.
_CHUNK = 1 << 13


class Selection(NamedTuple):
  """The elements that one device selected, in ascending order."""

  bitmap: _bitmap.Bitmap  # over the whole vector
  forced: jax.Array  # [] int32, what is sent where nothing was selected
  sent: jax.Array  # [] int32, how many

  def indices(self, first: jax.Array, capacity: int, size: int) -> jax.Array:
    """`[capacity] int32` from number `first` on; `size` past the last."""
    number = first + jnp.arange(capacity, dtype=jnp.int32)
    index = jnp.minimum(_bitmap.select(self.bitmap, number), size)
    forced = (number == 0) & (self.bitmap.total == 0) & (self.sent > 0)
    return jnp.where(forced, self.forced, index)

  def start_of(self, number: int) -> jax.Array:
    """Where element number `number > 0` is, `[] int32`; past all if nowhere."""
    return _bitmap.select(self.bitmap, jnp.array([number], jnp.int32))[0]


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
  bitmap = _bitmap.index(words)
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
  chunk = min(_CHUNK, words)
  large = functools.partial(_large, start=start, end=end, bar=bar)
  bits = _compat.cast_like(jnp.zeros(words, jnp.uint32), acc)
  rest = acc[words * 32 :]
  rest = jnp.pad(large(rest, words * 32), (0, -rest.shape[0] % 32))

  def find(i, bits):
    # The last chunk overlaps the one before, and finds the same there.
    first = jnp.minimum(i * chunk, words - chunk)
    part = lax.dynamic_slice(acc, (first * 32,), (chunk * 32,))
    found = _bitmap.pack(large(part, first * 32))
    return lax.dynamic_update_slice(bits, found, (first,))

  if chunk:
    each = jnp.int32(chunk * 32)
    stop = lax.div(end - 1, each) + 1
    bits = lax.fori_loop(lax.div(start, each), stop, find, bits)
  return jnp.concatenate([bits, _bitmap.pack(rest)])


def _large(
  values: jax.Array,
  first: jax.Array | int,
  *,
  start: jax.Array,
  end: jax.Array,
  bar: jax.Array,
) -> jax.Array:
  """Which of the elements from number `first` on are selected, bool."""
  wide = _collectives.accumulator(values.dtype)
  large = ~(jnp.abs(values).astype(wide) < bar.astype(wide))
  at = first + jnp.arange(values.shape[0], dtype=jnp.int32)
  return large & (at >= start) & (at < end)
