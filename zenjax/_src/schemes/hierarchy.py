"""The slow axes of a hierarchy: owners of the same rows, one a machine.

After the push along the fastest axis, the devices with the same rank on it
hold partial unions over the same slots. They exchange indices first; then
everyone knows the whole union, so its columns are split among them: balanced
for any ids, no index beside the rows, partial sums in the accumulator's
dtype until the last addition.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import wire_format
from zenjax._src.schemes import encoding
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax.kernels.merge.reference import Union
from zenjax.kernels.operations import merge

_COUNTS = 5


def sum_over(
  owned: Sequence[Held],
  plans: Sequence[TablePlan],
  capacities: Sequence[int],
  context: Context,
) -> list[Held]:
  """Sums each table's union over all axes but the fastest."""
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  sections = [
    part
    for own, plan in zip(owned, plans)
    for part in _index_sections(own, plan)
  ]
  indices = collectives.all_gather(wire_format.join(sections)[0], slow)
  lengths = [
    k for p, c in zip(plans, capacities) for k in (_COUNTS, _index_words(p, c))
  ]
  parts = iter(wire_format.split(indices, lengths))
  headers = [(next(parts), next(parts)) for _ in plans]

  rows = [_row_section(own, hosts) for own in owned]
  received = collectives.all_to_all(wire_format.join(rows), slow)
  lengths = [_row_words(p, c, hosts) for p, c in zip(plans, capacities)]
  merged = [
    _merge_hosts(*header, part, plan, capacity, hosts)
    for header, part, plan, capacity in zip(
      headers, wire_format.split(received, lengths), plans, capacities
    )
  ]
  sections = [wire_format.to_words(own.union.rows[None]) for own in merged]
  gathered = collectives.all_gather(wire_format.join(sections)[0], slow)
  return [
    own._replace(union=_whole_rows(own.union, part, plan, hosts))
    for own, part, plan in zip(
      merged, wire_format.split(gathered, lengths), plans
    )
  ]


def messages(
  plans: Sequence[TablePlan],
  capacities: Sequence[int],
  context: Context,
) -> list[Message]:
  """The three collectives of `sum_over`."""
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  index = sum(_COUNTS + _index_words(p, c) for p, c in zip(plans, capacities))
  rows = sum(_row_words(p, c, hosts) for p, c in zip(plans, capacities))
  return [
    Message("all_gather", slow, index),
    Message("all_to_all", slow, rows * hosts),
    Message("all_gather", slow, rows),
  ]


def expected_messages(
  plan: TablePlan, context: Context, rows: jax.Array | float
) -> list[Message]:
  """The same where the union of a machine has `rows` rows."""
  if len(context.axes) == 1:
    return []
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  wide = collectives.accumulator(plan.table.dtype).itemsize
  words = rows * (-(-plan.block_width // hosts)) * wide / 4
  return [
    Message("all_gather", slow, jnp.minimum(rows, plan.layout.words)),
    Message("all_to_all", slow, hosts * words),
    Message("all_gather", slow, words),
  ]


def _index_words(plan: TablePlan, capacity: int) -> int:
  return encoding.index_words(capacity, plan.layout.slots)


def _row_words(plan: TablePlan, capacity: int, hosts: int) -> int:
  columns = -(-plan.block_width // hosts)
  dtype = collectives.accumulator(plan.table.dtype)
  return wire_format.words_for(capacity * columns, dtype)


def _index_sections(own: Held, plan: TablePlan) -> list[jax.Array]:
  union = own.union
  counts = encoding.encode_counts(
    *(
      count[None]
      for count in (
        union.limit,
        union.merged,
        own.pushed,
        own.fullest,
        own.probe,
      )
    )
  )
  index = encoding.encode_index(union.slots[None], plan.layout.slots)
  return [counts, index]


def _row_section(own: Held, hosts: int) -> jax.Array:
  """`[hosts, words]`: a block of columns for each."""
  return wire_format.to_words(
    encoding.split_columns(own.union.rows[None], hosts)
  )


def _merge_hosts(
  counts: jax.Array,
  words: jax.Array,
  rows: jax.Array,
  plan: TablePlan,
  capacity: int,
  hosts: int,
) -> Held:
  num_slots = plan.layout.slots
  limit, merged, pushed, fullest, probe = encoding.decode_counts(counts)
  dtype = collectives.accumulator(plan.table.dtype)
  slots = encoding.decode_index(words, capacity, num_slots)
  shape = (capacity, -(-plan.block_width // hosts))
  union = merge(
    slots,
    wire_format.from_words(rows, shape, dtype),
    jnp.min(limit),
    num_slots,
    capacity,
    dtype,
  )
  # Rows above the limit that all agree on wait. How many devices of a machine
  # hold each is not known here: as many as hold one of the others, on average.
  below = jnp.sum(slots < union.limit, axis=1, dtype=jnp.int32)
  held = jnp.sum(slots < num_slots, axis=1, dtype=jnp.int32)
  all_rows = jnp.maximum(held, 1).astype(jnp.float32)
  share = below.astype(jnp.float32) / all_rows
  merged = jnp.floor(merged.astype(jnp.float32) * share).astype(jnp.int32)
  return Held(
    union=union._replace(merged=jnp.sum(merged, dtype=jnp.int32)),
    pushed=encoding.sum_counts(pushed),
    fullest=jnp.max(fullest),
    probe=jnp.sum(probe, dtype=jnp.int32),
  )


def _whole_rows(
  union: Union, words: jax.Array, plan: TablePlan, hosts: int
) -> Union:
  capacity, columns = union.rows.shape
  blocks = wire_format.from_words(words, (capacity, columns), union.rows.dtype)
  rows = encoding.join_columns(blocks, hosts, plan.block_width)
  return union._replace(rows=rows.reshape(capacity, plan.block_width))
