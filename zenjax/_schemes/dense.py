"""The dense exchange: `psum`, whatever the density.

What JAX gives its users today and what every scheme is measured against. A ring
moves `2 (n - 1) / n` times the table to every device.
"""

import dataclasses

import jax

from zenjax import _collectives
from zenjax._plan import Table
from zenjax._schemes.base import Context
from zenjax._schemes.base import Message


@dataclasses.dataclass(frozen=True, slots=True)
class Dense:
  """One all-reduce of the leaf as it is."""

  name: str = "dense"

  def reduce(self, leaf: jax.Array, context: Context) -> jax.Array:
    reduce = _collectives.pmean if context.mean else _collectives.psum
    return reduce(leaf, context.axes)

  def messages(self, table: Table, context: Context) -> list[Message]:
    wide = _collectives.accumulator(table.dtype).itemsize
    words = table.num_rows * table.width * wide // 4
    return [Message("all_reduce", context.axes, words)]

  def loop_messages(
    self, table: Table, context: Context
  ) -> list[tuple[int, Message]]:
    del table, context
    return []
