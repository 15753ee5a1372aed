"""The dense exchange: `psum`, whatever the density.

What JAX gives its users today and what every scheme is measured against. A ring
moves `2 (n - 1) / n` times the table to every device.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.buffer_sizes import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Dense:
  """One all-reduce of the leaf as it is."""

  name: str = "dense"

  def reduce(self, leaf: jax.Array, context: Context) -> jax.Array:
    reduce = collectives.pmean if context.mean else collectives.psum
    return reduce(leaf, context.axes)

  def messages(self, table: Table, context: Context) -> list[Message]:
    wide = collectives.accumulator(table.dtype).itemsize
    words = table.num_rows * table.width * wide // 4
    return [Message("all_reduce", context.axes, words)]

  def loop_messages(
    self, table: Table, context: Context
  ) -> list[tuple[int, Message]]:
    del table, context
    return []


# The ring all-reduce, step by step: a control for the dense exchange.
#
# Every device sends one of `n` chunks to the next device, `n - 1` times to sum
# and `n - 1` times to spread the sums (Patarasuk and Yuan, 2009). It moves the
# same bytes as a `psum` that is built as a ring, so what differs in time
# between the two is the library underneath and not the algorithm.
#
#     bytes = 2 (n - 1) ceil(N / n) * size,    2 (n - 1) messages one by one


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
  """A ring along each axis, the fastest first."""

  name: str = "ring"

  def reduce(self, leaf: jax.Array, context: Context) -> jax.Array:
    total = leaf.astype(collectives.accumulator(leaf.dtype))
    for axis, size in reversed([*zip(context.axes, context.sizes)]):
      total = _around(total, axis, size)
    total = context.scaled(total).astype(leaf.dtype)
    return compat.as_invariant(total, context.axes)

  def messages(self, table: Table, context: Context) -> list[Message]:
    del table, context
    return []

  def loop_messages(
    self, table: Table, context: Context
  ) -> list[tuple[int, Message]]:
    """A loop to sum and one to spread along every axis, with their turns."""
    elements = table.num_rows * table.width
    each = collectives.accumulator(table.dtype).itemsize // 4
    loops = []
    for axis, size in reversed([*zip(context.axes, context.sizes)]):
      words = -(-elements // size) * each
      hop = (size - 1, Message("collective_permute", (axis,), words))
      loops += [hop, hop] if size > 1 else []
    return loops


def _around(x: jax.Array, axis: str, size: int) -> jax.Array:
  """The sum of `x` over `axis`; every chunk is summed on one device."""
  if size == 1:
    return x
  flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
  chunks = flat.reshape(size, -1)
  rank = lax.axis_index(axis)

  def step(first, add):
    def body(turn, chunks):
      sent = (rank + first - turn) % size
      chunk = lax.dynamic_index_in_dim(chunks, sent, keepdims=False)
      chunk = collectives.shift(chunk, axis, 1)
      at = (sent - 1) % size
      if add:
        chunk += lax.dynamic_index_in_dim(chunks, at, keepdims=False)
      return lax.dynamic_update_index_in_dim(chunks, chunk, at, axis=0)

    return body

  # After the first loop a device holds the sum of the chunk after its own.
  chunks = lax.fori_loop(0, size - 1, step(0, add=True), chunks)
  chunks = lax.fori_loop(0, size - 1, step(1, add=False), chunks)
  return chunks.reshape(-1)[: x.size].reshape(x.shape)
