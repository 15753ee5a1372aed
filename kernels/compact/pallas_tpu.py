"""Nonzero rows gathered into the send buffer, on a TPU.

The slots are found by XLA: they are few, and their search is no more than that.
Only the rows that are there move, straight to their place in the buffer.
"""

from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.core import indexing
from zenjax._src.core.partition import Layout
from zenjax.kernels import _rows_tpu


def check(
  table: jax.Array,
  bitmap: indexing.Bitmap,
  layout: Layout,
  first: jax.Array,
  capacity: int,
) -> None:
  """Raises NotImplementedError where the kernel cannot serve."""
  del bitmap, layout, first
  _rows_tpu.check(table)
  if capacity < 1:
    raise NotImplementedError(f"a capacity of at least 1, got {capacity}")


def compact(
  table: jax.Array,
  bitmap: indexing.Bitmap,
  layout: Layout,
  first: jax.Array,
  capacity: int,
  *,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """See `reference.compact`."""
  check(table, bitmap, layout, first, capacity)
  wanted = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None, :]
  slots = indexing.select(bitmap, wanted)
  group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
  row = layout.row(group, slots)
  name = "zenjax_compact"
  return slots, _rows_tpu.gather(table, row, name, interpret=interpret)
