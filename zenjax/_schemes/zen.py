"""Balanced Parallelism: push to hashed owners, merge, pull from them.

What device `s` does in a round:

    for every owner p:  send p the first C rows of p's that I hold   (push)
    sum what all sources sent me, in rank order, U rows at most      (merge)
    send my union to everyone; write all unions into my gradient     (pull)

An owner is a pair (row group, column group): `g = 1` hashes rows, `g = n`
splits columns, and between them lies the grid. A round is complete for the
slots below a limit that every owner finds: the first slot that some source
had no room for, or that the union had no room for. Rows beyond it wait.

Zen proves this scheme optimal for overlapping sparse gradients ("ZEN:
Empowering Distributed Training with Sparsity-driven Data Synchronization",
Wang et al., OSDI 2025); the hash keeps its balance with a bijection instead
of stored index sets, and columns are split for balance as nowhere there.
"""

from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax import _wire
from zenjax._plan import Capacity
from zenjax._plan import TablePlan
from zenjax._schemes import _across
from zenjax._schemes import _sections
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Message
from zenjax._schemes.base import Outgoing
from zenjax._schemes.base import Tally
from zenjax._schemes.base import waiting
from zenjax.kernels.compact.reference import compact
from zenjax.kernels.merge.reference import merge
from zenjax.kernels.merge.reference import Union

_PUSH_COUNTS = 2
_PULL_COUNTS = len(Tally._fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Zen:
  """Push along the fastest axis, sum over the others, pull back."""

  name: str = "zen"

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    return sizes[-1] // column_groups, column_groups

  def round(
    self,
    outgoing: Sequence[Outgoing],
    plans: Sequence[TablePlan],
    capacities: Sequence[Capacity],
    context: Context,
  ) -> list[Arrived]:
    fast = context.axes[-1:]
    with jax.named_scope("zen/push"):
      sections: list[jax.Array] = []
      for out, plan, capacity in zip(outgoing, plans, capacities):
        sections += _push_sections(out, plan, capacity)
      received = _collectives.all_to_all(_wire.join(sections), fast)
    with jax.named_scope("zen/merge"):
      owned = _merge_all(received, plans, capacities)
      if len(context.axes) > 1:
        owned = _across.sum_over(owned, plans, capacities, context)
    with jax.named_scope("zen/pull"):
      me = lax.axis_index(fast[0])
      sections = []
      for own, plan, capacity in zip(owned, plans, capacities):
        sections += _pull_sections(own, plan, capacity, context, me)
      gathered = _collectives.all_gather(_wire.join(sections)[0], fast)
      return _arrivals(gathered, owned, plans, capacities)

  def messages(
    self,
    plans: Sequence[TablePlan],
    capacities: Sequence[Capacity],
    context: Context,
  ) -> list[Message]:
    fast = context.axes[-1:]
    pushed, pulled = 0, 0
    for plan, capacity in zip(plans, capacities):
      pushed += sum(_push_lengths(plan, capacity))
      pulled += sum(_pull_lengths(plan, capacity))
    push = Message("all_to_all", fast, pushed * context.sizes[-1])
    pull = Message("all_gather", fast, pulled)
    if len(context.axes) == 1:
      return [push, pull]
    return [push, *_across.messages(plans, capacities, context), pull]

  def expected_bytes(
    self,
    plan: TablePlan,
    context: Context,
    push: jax.Array | float,
    pull: jax.Array | float,
  ) -> jax.Array | float:
    block = plan.block_width * plan.table.wire_dtype.itemsize
    pull_index = 0 if plan.layout.groups == 1 else 4 / plan.column_groups
    rows = push * (block + 4.0) + pull * (block + pull_index)
    return (context.devices - 1) * rows


def _push_lengths(plan: TablePlan, capacity: Capacity) -> list[int]:
  """Words for one owner: counts, index, rows."""
  return [
    _PUSH_COUNTS,
    _sections.index_words(capacity.push, plan.layout.slots),
    _wire.words_for(capacity.push * plan.block_width, plan.table.wire_dtype),
  ]


def _pull_lengths(plan: TablePlan, capacity: Capacity) -> list[int]:
  """Words from one owner; the owners of a row group share out its index."""
  index = _sections.index_words(capacity.pull, plan.layout.slots)
  whole = plan.layout.groups == 1
  return [
    _PULL_COUNTS,
    0 if whole else -(-index // plan.column_groups),
    _wire.words_for(capacity.pull * plan.block_width, plan.table.wire_dtype),
  ]


def _push_sections(
  out: Outgoing, plan: TablePlan, capacity: Capacity
) -> list[jax.Array]:
  """`[n, words]` each."""
  first, remaining = waiting(out)
  slots, rows = compact(
    out.table, out.bitmap, plan.layout, first, capacity.push
  )
  probe = jnp.broadcast_to(out.probe, remaining.shape)
  counts = _sections.encode_counts(remaining, probe)
  index = _sections.encode_index(slots, plan.layout.slots)
  rows = _sections.split_columns(rows, plan.column_groups)
  return [
    jnp.repeat(counts, plan.column_groups, axis=0),
    jnp.repeat(index, plan.column_groups, axis=0),
    _sections.encode_rows(rows, plan.table.wire_dtype),
  ]


def _merge_all(
  received: jax.Array,
  plans: Sequence[TablePlan],
  capacities: Sequence[Capacity],
) -> list[_across.Owned]:
  lengths = [
    length
    for plan, capacity in zip(plans, capacities)
    for length in _push_lengths(plan, capacity)
  ]
  parts = iter(_wire.split(received, lengths))
  return [
    _merge_one(next(parts), next(parts), next(parts), plan, capacity)
    for plan, capacity in zip(plans, capacities)
  ]


def _merge_one(
  counts: jax.Array,
  index: jax.Array,
  rows: jax.Array,
  plan: TablePlan,
  capacity: Capacity,
) -> _across.Owned:
  table, num_slots = plan.table, plan.layout.slots
  remaining, probe = _sections.decode_counts(counts)
  slots = _sections.decode_index(index, capacity.push, num_slots)
  shape = (capacity.push, plan.block_width)
  # A source that did not fit is complete up to the last row that it sent.
  ends = jnp.where(remaining > capacity.push, slots[:, -1] + 1, num_slots)
  union = merge(
    slots,
    _wire.from_words(rows, shape, table.wire_dtype),
    jnp.min(ends),
    num_slots,
    capacity.pull,
    _collectives.accumulator(table.dtype),
  )
  return _across.Owned(
    union=union,
    pushed=jnp.sum(remaining, dtype=jnp.int32),
    fullest=jnp.max(remaining),
    probe=jnp.sum(probe, dtype=jnp.int32),
  )


def _pull_sections(
  own: _across.Owned,
  plan: TablePlan,
  capacity: Capacity,
  context: Context,
  me: jax.Array,
) -> list[jax.Array]:
  """`[1, words]` each."""
  union = own.union
  tally = Tally(
    limit=union.limit,
    union=union.total,
    pushed=own.pushed,
    fullest=own.fullest,
    merged=union.merged,
    probe=own.probe,
  )
  counts = _sections.encode_counts(*(count[None] for count in tally))
  values = context.scaled(union.rows).astype(plan.table.dtype)
  return [
    counts,
    _index_share(union, plan, capacity, me),
    _sections.encode_rows(values[None], plan.table.wire_dtype),
  ]


def _index_share(
  union: Union, plan: TablePlan, capacity: Capacity, me: jax.Array
) -> jax.Array:
  """This owner's part of its row group's index, `[1, words]`."""
  length = _pull_lengths(plan, capacity)[1]
  if not length:
    return jnp.zeros((1, 0), jnp.uint32)
  index = _sections.encode_index(union.slots[None], plan.layout.slots)
  g = plan.column_groups
  if g == 1:
    return index
  index = jnp.pad(index, ((0, 0), (0, length * g - index.shape[1])))
  return lax.dynamic_slice_in_dim(index, (me % g) * length, length, axis=1)


def _arrivals(
  gathered: jax.Array,
  owned: Sequence[_across.Owned],
  plans: Sequence[TablePlan],
  capacities: Sequence[Capacity],
) -> list[Arrived]:
  lengths = [
    length
    for plan, capacity in zip(plans, capacities)
    for length in _pull_lengths(plan, capacity)
  ]
  parts = iter(_wire.split(gathered, lengths))
  return [
    _arrive(next(parts), next(parts), next(parts), own, plan, capacity)
    for own, plan, capacity in zip(owned, plans, capacities)
  ]


def _arrive(
  counts: jax.Array,
  index: jax.Array,
  rows: jax.Array,
  own: _across.Owned,
  plan: TablePlan,
  capacity: Capacity,
) -> Arrived:
  table, layout, g = plan.table, plan.layout, plan.column_groups
  m, num_slots = layout.groups, layout.slots
  if m == 1:
    # Every owner was sent all ids and formed the same union.
    slots = own.union.slots[None]
  else:
    index_size = _sections.index_words(capacity.pull, num_slots)
    index = index.reshape(m, -1)[:, :index_size]
    slots = _sections.decode_index(index, capacity.pull, num_slots)
  shape = (capacity.pull, plan.block_width)
  values = _wire.from_words(rows, shape, table.wire_dtype)
  values = _sections.join_columns(values, g, table.width).astype(table.dtype)
  group = jnp.arange(m, dtype=jnp.int32)[:, None]
  return Arrived(
    row=layout.row(group, slots).reshape(-1),
    values=values.reshape(-1, table.width),
    tally=Tally(*_sections.decode_counts(counts[::g])),
  )
