"""What a device selects: the large elements of its own partition."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from zenjax import _bitmap
from zenjax import _collectives


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
  wide = _collectives.accumulator(acc.dtype)
  large = ~(jnp.abs(acc).astype(wide) < bar.astype(wide))
  at = jnp.arange(acc.shape[0], dtype=jnp.int32)
  own = large & (at >= start) & (at < end)
  words = _bitmap.pack(jnp.pad(own, (0, -acc.shape[0] % 32)))
  bitmap = _bitmap.index(words)
  if step is None:
    return Selection(bitmap, jnp.zeros_like(start), bitmap.total)
  forced = start + jax.lax.rem(step, end - start)
  return Selection(bitmap, forced, jnp.maximum(bitmap.total, 1))
