"""Sums whole tables along the fastest axis, and rows along the others."""

from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import indexing
from zenjax._src.core import wire
from zenjax._src.schemes import hierarchy
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Number
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import Sums
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.schemes.zen import Zen
from zenjax.kernels.reference import Union


@dataclasses.dataclass(frozen=True, slots=True)
class DenseInside(Zen):
  """Zen with a dense push along the fastest axis.

  This is how Zen synchronizes several GPUs per machine (Wang et al., OSDI
  2025): within a machine, links are so fast that finding and packing rows costs
  more than it saves. Letters: `m` devices along the fastest axis, `h` groups of
  them; `R` rows of `D` elements of `size` bytes; `u` the density of the sum of
  a machine, and `dn` the density of the sum of all.

  Each device sums `D / m` columns of all rows by a `reduce_scatter`. Devices
  with the same columns then exchange the rows that any device of their machine
  has, as in `hierarchy`, and a pull along the fastest axis brings all columns
  together.

      bytes along the fastest axis = (m - 1) / m * (1 + dn) * R * D * size
      bytes along the others = (h - 1) / h * (u + dn) / m * R * D * size

  Every round repeats the dense push. So the first buffers hold all rows, and
  `zenjax.tune` keeps them large enough for one round.
  """

  name: str = "dense_inside"
  break_even: float = 1.0  # The dense push counts, although its links are fast.
  dense_push: bool = True

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    del column_groups
    return 1, sizes[-1]

  def held_rows(self, plan: ExchangePlan, context: Context) -> int:
    del context
    return plan.pull

  def holds_all(self, plan: ExchangePlan, context: Context) -> bool:
    del context
    return plan.pull >= plan.most_pull

  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Sums]:
    fast = context.axes[-1:]
    wholes = [out.source.whole(out.plan) for out in outgoing]
    with jax.named_scope("dense_inside/push"):
      came = wire.send(
        [[words] for _, words in wholes], collectives.all_gather, fast
      )
      tables = [table for table, _ in wholes]
      # Devices run collectives in the same order.
      tables, came = lax.optimization_barrier((tables, came))
      sums = [
        _summed(out, table, words, context)
        for out, table, (words,) in zip(outgoing, tables, came)
      ]
    if len(context.axes) > 1:
      with jax.named_scope("dense_inside/slow_axes"):
        # Its ids would not wait for the columns.
        sums = lax.optimization_barrier(sums)
        plans = [out.plan for out in outgoing]
        rooms = [plan.pull for plan in plans]
        sums = hierarchy.sum_over(sums, plans, rooms, context)
    return sums

  def messages(
    self, plans: Sequence[ExchangePlan], context: Context
  ) -> list[Message]:
    _, *after = Zen.messages(self, plans, context)
    return [*_dense_push(plans, context), *after]

  def expected_messages(
    self, plan: ExchangePlan, context: Context, push: Number, pull: Number
  ) -> list[Message]:
    _, *after = Zen.expected_messages(self, plan, context, push, pull)
    return [*_dense_push([plan], context), *after]


def _dense_push(
  plans: Sequence[ExchangePlan], context: Context
) -> list[Message]:
  """Returns the collectives of bitmaps, and of each whole table."""
  axes, words = context.axes[-1:], sum(plan.layout.words for plan in plans)
  messages = [Message("all_gather", axes, words)]
  for plan in plans:
    wide = collectives.accumulator(plan.table.dtype)
    columns = plan.row_wire.columns * plan.column_groups
    words = wire.words_for(plan.table.num_rows * columns, wide)
    messages.append(Message("reduce_scatter", axes, words))
  return messages


def _summed(
  out: Outgoing, table: jax.Array, words: jax.Array, context: Context
) -> Sums:
  """Returns the sums of this device's columns.

  Args:
    out: The plan of the table, and the first slot that is not done.
    table: `[R, D]`, the table of this device.
    words: `[m, W] uint32`, which rows each device of the machine has.
    context: The devices.
  """
  plan, num_slots, room = out.plan, out.plan.layout.slots, out.plan.pull
  wide = collectives.accumulator(table.dtype)
  blocks = wire.split_columns(table.astype(wide)[None], plan.column_groups)
  columns = collectives.reduce_scatter(blocks, context.axes[-1:])
  any_has = lax.reduce(words, np.uint32(0), lax.bitwise_or, (0,))
  union, each = indexing.index(any_has), indexing.index(words)
  first = indexing.rank(union, out.start)
  # One more slot is found than is sent, because it is the limit.
  wanted = first + jnp.arange(room + 1, dtype=jnp.int32)
  slots = indexing.select(union, wanted)
  limit, slots = slots[room], slots[:room]
  row = plan.layout.row(jnp.zeros_like(slots), slots)
  start = jnp.broadcast_to(out.start, (words.shape[0], 1))
  done = indexing.rank(each, start)[:, 0]
  below = indexing.rank(each, jnp.broadcast_to(limit, start.shape))[:, 0]
  return Sums(
    union=Union(
      slots=slots,
      rows=indexing.take_or(columns, row, 0),
      total=jnp.sum(slots < num_slots, dtype=jnp.int32),
      limit=limit,
      summed=jnp.sum(below - done, dtype=jnp.int32),
    ),
    pushed=wire.sum_counts(each.total - done),
    fullest=jnp.max(each.total - done),
  )
