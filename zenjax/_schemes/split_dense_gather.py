"""SparCML's dynamic split all-gather: the second half travels dense.

DSAR_Split_allgather (Renggli et al., SC 2019): rows go to the owner of their
range as in `split_all_gather`; the owner then sends its whole range, with no
index, for where the union is dense an index is all that sparsity would add.

    bytes = (n - 1) / n * (s * d * R * (D * size + index) + R * D * size)

which is never less than half of a dense exchange: at most twice as fast. What
SparCML decides when it runs, which format the second half has, a static program
decides when it is traced, by the choice of the scheme; where the first push
overflows, the table takes the dense path.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax import _wire
from zenjax._arguments import Capacity
from zenjax._plan import TablePlan
from zenjax._schemes import _sections
from zenjax._schemes import _whole
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Held
from zenjax._schemes.base import Message
from zenjax._schemes.base import Tally
from zenjax._schemes.split_all_gather import SplitAllGather

_COUNTS = len(Tally._fields) + 1
# Unpinned, the first push holds this part of the slots for every pair.
_PART = 16


@dataclasses.dataclass(frozen=True, slots=True)
class SplitDenseGather(SplitAllGather):
  """A sparse push to ranges, and ranges as they are for a pull."""

  name: str = "split_dense_gather"
  break_even: float = 1.0

  def fitted(self, plan: TablePlan) -> TablePlan:
    slots = plan.layout.slots
    push = max(-(-slots // _PART), plan.first.push)
    push = plan.first.push if plan.pinned else push
    whole = Capacity(push, slots)
    return dataclasses.replace(plan, first=whole, chunks=(whole, whole))

  def pull(
    self,
    held: Sequence[Held],
    offset: Sequence[jax.Array] | Sequence[int],
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Arrived]:
    del offset, capacities
    with jax.named_scope("split_dense_gather/pull"):
      sections: list[jax.Array] = []
      lengths: list[int] = []
      for own, plan in zip(held, plans):
        sections += _sections_of(own, plan, context)
        lengths += _lengths(plan)
      buffer = _wire.join(sections)[0]
      gathered = _collectives.all_gather(buffer, context.axes[-1:])
      parts = iter(_wire.split(gathered, lengths))
      return [_arrive(next(parts), next(parts), plan) for plan in plans]

  def pull_messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[int],
    context: Context,
  ) -> list[Message]:
    del capacities
    words = sum(sum(_lengths(plan)) for plan in plans)
    return [Message("all_gather", context.axes[-1:], words)]

  def expected_messages(
    self,
    plan: TablePlan,
    context: Context,
    push: jax.Array | float,
    pull: jax.Array | float,
  ) -> list[Message]:
    del pull
    axes, n = context.axes[-1:], context.sizes[-1]
    row = plan.table.width * plan.table.wire_dtype.itemsize
    return [
      Message("all_to_all", axes, n * push * (row + 4.0) / 4),
      Message("all_gather", axes, plan.layout.slots * row / 4.0),
    ]


def _lengths(plan: TablePlan) -> list[int]:
  elements = plan.layout.slots * plan.table.width
  return [_COUNTS, _wire.words_for(elements, plan.table.wire_dtype)]


def _sections_of(
  own: Held, plan: TablePlan, context: Context
) -> list[jax.Array]:
  """`[1, words]` each: counts and the whole range."""
  union, slots = own.union, plan.layout.slots
  counts = (*_whole.tally(own), union.slots[0])
  shape = (slots, plan.table.width)
  values = context.scaled(union.rows).astype(plan.table.dtype)
  dense = jnp.zeros(shape, plan.table.dtype)
  dense = dense.at[union.slots].set(values, mode="drop")
  return [
    _sections.encode_counts(*(count[None] for count in counts)),
    _sections.encode_rows(dense[None], plan.table.wire_dtype),
  ]


def _arrive(counts: jax.Array, words: jax.Array, plan: TablePlan) -> Arrived:
  table, layout = plan.table, plan.layout
  *tally, lowest = _sections.decode_counts(counts)
  tally = Tally(*tally)
  shape = (layout.slots, table.width)
  values = _wire.from_words(words, shape, table.wire_dtype)
  slot = jnp.arange(layout.slots, dtype=jnp.int32)[None]
  group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
  # Between its first row and its limit an owner knows every row: those that
  # it does not hold are zero on all devices.
  known = (slot >= lowest[:, None]) & (slot < tally.limit[:, None])
  row = jnp.where(known, layout.row(group, slot), table.num_rows)
  return Arrived(
    row=row.reshape(-1),
    values=values.astype(table.dtype).reshape(-1, table.width),
    tally=tally,
  )
