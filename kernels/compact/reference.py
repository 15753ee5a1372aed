"""Select and gather a range of nonzero rows for every group."""

import jax
import jax.numpy as jnp

from zenjax._src.core import bitmaps
from zenjax._src.core import indexing
from zenjax._src.core.partition import Layout


def compact(
  table: jax.Array,
  bitmap: bitmaps.Bitmap,
  layout: Layout,
  first: jax.Array,
  capacity: int,
) -> tuple[jax.Array, jax.Array]:
  """The `capacity` nonzero rows of each group from rank `first` on.

  Args:
    table: `[R, D]`.
    bitmap: Of `[m, W]` words.
    layout: Where each row lives.
    first: `[m] int32`, rank of the first row wanted in each group.
    capacity: `C`.

  Returns:
    `slots: [m, C] int32`, ascending, `S` where a group has no more rows, and
    `rows: [m, C, D]`, zero there.
  """
  wanted = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None, :]
  slots = bitmaps.select(bitmap, wanted)
  group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
  row = layout.row(group, slots)
  return slots, indexing.take_or(table, row, 0)
