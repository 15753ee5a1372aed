"""Implements dense sums: the scheme "dense", and the dense path of the others.

Every scheme is compared with `psum`. In a ring all-reduce, every device
receives `2 (n - 1) / n` times the table.
"""

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.buffer_sizes import Table


def all_reduce(leaf: jax.Array, context: Context) -> jax.Array:
  """Returns `psum` or `pmean` of a leaf; narrow floats sum in float32."""
  reduce = collectives.pmean if context.mean else collectives.psum
  return reduce(leaf, context.axes)


def leaf_messages(table: Table, context: Context) -> list[Message]:
  """Returns the collective that `all_reduce` runs for a leaf."""
  wide = collectives.accumulator(table.dtype).itemsize
  # SparseRows need one more column: the number of devices that hold a row.
  columns = table.width + (table.look_ups is not None)
  return [
    Message("all_reduce", context.axes, table.num_rows * columns * wide // 4)
  ]


# How many elements the dense path sums at a time. A conditional collective
# needs a second copy of its operand, so large tables are summed in chunks.
CHUNK_ELEMENTS = 1 << 24


def chunk_rows(num_rows: int, width: int) -> int:
  """Returns how many rows the dense path sums at a time."""
  chunks = -(-num_rows // max(1, CHUNK_ELEMENTS // width))
  return -(-num_rows // chunks)


def reduce_where(
  table: jax.Array, wanted: jax.Array, context: Context
) -> jax.Array:
  """Returns `psum` or `pmean` of `table: [R, D]` if `wanted: [] bool` is true.

  Otherwise it returns the table unchanged, and exchanges nothing. `wanted` must
  be equal on all devices. The implementation is a loop, because a branch would
  copy the table.
  """
  num_rows = table.shape[0]
  rows = chunk_rows(*table.shape)
  turns = jnp.where(wanted, -(-num_rows // rows), 0)

  def body(turn, table):
    # The last chunk overlaps the one before, whose rows are already sums.
    start = jnp.minimum(turn * rows, num_rows - rows)
    chunk = lax.dynamic_slice_in_dim(table, start, rows)
    wide = chunk.astype(collectives.accumulator(chunk.dtype))
    total = context.scaled(collectives.psum(wide, context.axes))
    total = compat.cast_like(total.astype(chunk.dtype), chunk)
    if num_rows % rows:
      row = start + jnp.arange(rows, dtype=jnp.int32)[:, None]
      total = jnp.where(row >= turn * rows, total, chunk)
    return lax.dynamic_update_slice_in_dim(table, total, start, axis=0)

  return lax.fori_loop(jnp.zeros_like(turns), turns, body, table)
