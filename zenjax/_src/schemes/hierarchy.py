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
from zenjax._src.core import wire
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Held
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Room
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax.kernels.operations import merge
from zenjax.kernels.reference import Union

_NUMBERS = 4


def sum_over(
  owned: Sequence[Held], rooms: Sequence[Room], context: Context
) -> list[Held]:
  """Sums each table's union over all axes but the fastest.

  Args:
    owned: Unions of this machine.
    rooms: Rows that each has room for.
    context: Axes and operation.
  """
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  plans = [room.plan for room in rooms]
  headers = wire.exchange(
    [_index_sections(own, plan) for own, plan in zip(owned, plans)],
    collectives.all_gather,
    slow,
  )
  blocks = wire.exchange(
    [[_row_section(own, hosts)] for own in owned], collectives.all_to_all, slow
  )
  merged = [
    _merge_hosts([*header, *block], room, hosts)
    for header, block, room in zip(headers, blocks, rooms)
  ]
  gathered = wire.exchange(
    [[own.union.rows[None]] for own in merged],
    collectives.all_gather,
    slow,
  )
  return [
    own._replace(union=_whole_rows(own.union, blocks, plan, hosts))
    for own, (blocks,), plan in zip(merged, gathered, plans)
  ]


def messages(rooms: Sequence[Room], context: Context) -> list[Message]:
  """Returns the three collectives of `sum_over`."""
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  index = sum(_counts(room.plan) + _index_words(room) for room in rooms)
  rows = sum(_row_words(room, hosts) for room in rooms)
  return [
    Message("all_gather", slow, index),
    Message("all_to_all", slow, rows * hosts),
    Message("all_gather", slow, rows),
  ]


def expected_messages(
  plan: TablePlan, context: Context, rows: jax.Array | float
) -> list[Message]:
  """Returns the same where the union of a machine has `rows` rows."""
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  wide = collectives.accumulator(plan.table.dtype).itemsize
  words = rows * (-(-plan.block_width // hosts)) * wide / 4
  return [
    Message("all_gather", slow, jnp.minimum(rows, plan.layout.words)),
    Message("all_to_all", slow, hosts * words),
    Message("all_gather", slow, words),
  ]


def _counts(plan: TablePlan) -> int:
  return _NUMBERS + len(plan.tables) + len(plan.members)


def _index_words(room: Room) -> int:
  return wire.index_words(room.capacity, room.plan.layout.slots)


def _row_words(room: Room, hosts: int) -> int:
  plan, capacity = room
  columns = -(-plan.block_width // hosts)
  dtype = collectives.accumulator(plan.table.dtype)
  return wire.words_for(capacity * columns, dtype)


def _index_sections(own: Held, plan: TablePlan) -> list[jax.Array]:
  union = own.union
  numbers = [union.limit, union.merged, own.pushed, own.fullest]
  counts = jnp.concatenate([jnp.stack(numbers), own.probe, own.peak])
  index = wire.encode_index(union.slots[None], plan.layout.slots)
  return [counts[None], index]


def _row_section(own: Held, hosts: int) -> jax.Array:
  """`[hosts, U, block]`: a block of columns for each."""
  return wire.split_columns(own.union.rows[None], hosts)


def _merge_hosts(came: Sequence[jax.Array], room: Room, hosts: int) -> Held:
  counts, index, rows = came
  plan, capacity = room
  num_slots = plan.layout.slots
  limit, merged, pushed, fullest = counts[:, :_NUMBERS].T
  rest = counts[:, _NUMBERS:]
  probe, peak = rest[:, : len(plan.tables)], rest[:, len(plan.tables) :]
  dtype = collectives.accumulator(plan.table.dtype)
  slots = wire.decode_index(index, capacity, num_slots)
  union = merge(
    slots,
    rows,
    jnp.min(limit),
    num_slots,
    capacity,
    dtype,
    kernels=plan.kernels,
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
    pushed=wire.sum_counts(pushed),
    fullest=jnp.max(fullest),
    probe=wire.sum_counts(probe),
    peak=jnp.max(peak, axis=0, initial=0),
  )


def _whole_rows(
  union: Union, blocks: jax.Array, plan: TablePlan, hosts: int
) -> Union:
  capacity = union.rows.shape[0]
  rows = wire.join_columns(blocks, hosts, plan.block_width)
  return union._replace(rows=rows.reshape(capacity, plan.block_width))
