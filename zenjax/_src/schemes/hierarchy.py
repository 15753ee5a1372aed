"""Sums unions over the slow axes of a hierarchy.

After the push along the fastest axis, the devices with the same rank on it (one
per machine) hold partial unions over the same slots. They first exchange their
indices. Then all of them know the union of the indices, and split its columns:
each sums some columns of all rows. This is balanced for any ids, sends no
indices with the rows, and keeps partial sums in the accumulator's dtype until
the last addition. A sum is complete below the lowest limit of the machines.
"""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Number
from zenjax._src.schemes.base import Sums
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax.kernels.operations import merge

_NUMBERS = 4


def sum_over(
  owned: Sequence[Sums],
  plans: Sequence[ExchangePlan],
  rooms: Sequence[int],
  context: Context,
) -> list[Sums]:
  """Sums each table's union over all axes except the fastest.

  Args:
    owned: The union of a machine for each table.
    plans: The plan of each table.
    rooms: How many rows the union of all machines can hold.
    context: The devices.
  """
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  headers = wire.send(
    [_index_sections(own, plan) for own, plan in zip(owned, plans)],
    collectives.all_gather,
    slow,
  )
  # Columns wait for the ids, so that all devices run collectives in the same
  # order.
  blocks = [wire.split_columns(own.union.rows[None], hosts) for own in owned]
  headers, blocks = lax.optimization_barrier((headers, blocks))
  blocks = wire.send([[x] for x in blocks], collectives.all_to_all, slow)
  merged = [
    _merge_hosts(own, [*header, *block], plan, room)
    for own, header, block, plan, room in zip(
      owned, headers, blocks, plans, rooms
    )
  ]
  gathered = wire.send(
    [[own.union.rows[None]] for own in merged], collectives.all_gather, slow
  )
  summed = []
  for own, (blocks,), plan in zip(merged, gathered, plans):
    rows = wire.join_columns(blocks, hosts, plan.row_wire.columns)
    union = own.union._replace(rows=jnp.squeeze(rows, 0))
    summed.append(own._replace(union=union))
  return summed


def messages(
  plans: Sequence[ExchangePlan],
  inside: Sequence[int],
  rooms: Sequence[int],
  context: Context,
) -> list[Message]:
  """Returns the three collectives of `sum_over`.

  Args:
    plans: The plan of each table.
    inside: How many rows the union of a machine can hold.
    rooms: How many rows the union of all machines can hold.
    context: The devices.
  """
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  index = pushed = pulled = 0
  for plan, held, room in zip(plans, inside, rooms):
    index += _NUMBERS + wire.index_words(held, plan.layout.slots)
    columns = -(-plan.row_wire.columns // hosts)
    dtype = collectives.accumulator(plan.table.dtype)
    pushed += wire.words_for(held * columns, dtype)
    pulled += wire.words_for(room * columns, dtype)
  return [
    Message("all_gather", slow, index),
    Message("all_to_all", slow, pushed * hosts),
    Message("all_gather", slow, pulled),
  ]


def expected_messages(
  plan: ExchangePlan, context: Context, push: Number, pull: Number
) -> list[Message]:
  """Returns the same collectives, of buffers that are just large enough.

  Arguments are as for `Scheme.expected_messages`.
  """
  slow = context.axes[:-1]
  hosts = context.devices // context.sizes[-1]
  wide = collectives.accumulator(plan.table.dtype).itemsize
  inside = jnp.minimum(pull, push * context.sizes[-1])
  row_words = -(-plan.row_wire.columns // hosts) * wide / 4
  return [
    Message("all_gather", slow, jnp.minimum(inside, plan.layout.words)),
    Message("all_to_all", slow, hosts * inside * row_words),
    Message("all_gather", slow, pull * row_words),
  ]


def _index_sections(own: Sums, plan: ExchangePlan) -> list[jax.Array]:
  union = own.union
  counts = jnp.stack([union.limit, union.summed, own.pushed, own.fullest])
  return [counts[None], wire.encode_index(union.slots[None], plan.layout.slots)]


def _merge_hosts(
  own: Sums, came: Sequence[jax.Array], plan: ExchangePlan, room: int
) -> Sums:
  counts, index, rows = came
  num_slots, held = plan.layout.slots, own.union.slots.shape[0]
  limit, summed, pushed, fullest = counts.T
  slots = wire.decode_index(index, held, num_slots)
  union = merge(
    slots,
    rows,
    jnp.min(limit),
    num_slots,
    room,
    collectives.accumulator(plan.table.dtype),
    kernels=plan.kernels,
  )
  # Rows above the common limit wait for the next round. How many devices of a
  # machine hold each row is not known here, so the mean over its rows is used.
  below = jnp.sum(slots < union.limit, axis=1, dtype=jnp.int32)
  held = jnp.sum(slots < num_slots, axis=1, dtype=jnp.int32)
  share = below.astype(jnp.float32) / jnp.maximum(held, 1).astype(jnp.float32)
  summed = jnp.floor(summed.astype(jnp.float32) * share).astype(jnp.int32)
  return Sums(
    union=union._replace(summed=jnp.sum(summed, dtype=jnp.int32)),
    pushed=wire.sum_counts(pushed),
    fullest=jnp.max(fullest),
  )
