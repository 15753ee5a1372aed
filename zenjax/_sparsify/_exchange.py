"""What leaves the devices: indices by all-gather, values by all-reduce.

Devices select in partitions of their own, so no index comes twice, and each
device adds its value at every index that any of them selected.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax._schemes.base import Context
from zenjax._sparsify._selection import Selection

# Words before the indices of the first round: how many were selected, and a
# number of the caller's.
_HEADER = 2


class Exchanged(NamedTuple):
  """The outcome of an exchange; all but `kept` equal on all devices."""

  update: jax.Array  # [N], what was sent, averaged or summed
  kept: jax.Array  # [N], what was not
  counts: jax.Array  # [n] int32, by rank
  numbers: jax.Array  # [n] float32, by rank
  rounds: jax.Array  # [] int32


def exchange(
  acc: jax.Array,
  chosen: Selection,
  number: jax.Array,
  capacity: int,
  context: Context,
) -> Exchanged:
  """Sends what devices selected, in as many rounds as the fullest one needs.

  Args:
    acc: `[N]` on a device.
    chosen: What it selected.
    number: `[] float32`, any number that all devices want to know.
    capacity: Indices that a device sends in a round.
    context: Axes and operation.
  """
  size, axes = acc.shape[0], context.axes

  def own(turn):
    return chosen.indices(turn * capacity, capacity, size)

  def send(index, update, kept):
    # Distinct, also where there is none.
    index = index.reshape(-1)
    nowhere = size + jnp.arange(index.shape[0], dtype=jnp.int32)
    index = jnp.where(index < size, index, nowhere)
    values = kept.at[index].get(mode="fill", fill_value=0, unique_indices=True)
    values = values.astype(_collectives.accumulator(values.dtype))
    total = context.scaled(_collectives.psum(values, axes)).astype(acc.dtype)
    into = dict(mode="drop", unique_indices=True)
    return (
      update.at[index].set(total, **into),
      kept.at[index].set(jnp.zeros((), acc.dtype), **into),
    )

  header = jnp.stack([chosen.sent, lax.bitcast_convert_type(number, jnp.int32)])
  first = jnp.concatenate([header, own(jnp.int32(0))])
  gathered = _collectives.all_gather(first, axes)
  counts = gathered[:, 0]
  numbers = lax.bitcast_convert_type(gathered[:, 1], jnp.float32)
  most = jnp.max(counts)

  def body(carry):
    turn, update, kept = carry
    index = _collectives.all_gather(own(turn), axes)
    return turn + 1, *send(index, update, kept)

  sent = send(gathered[:, _HEADER:], jnp.zeros(size, acc.dtype), acc)
  rounds, update, kept = lax.while_loop(
    lambda carry: carry[0] * capacity < most, body, (jnp.int32(1), *sent)
  )
  return Exchanged(update, kept, counts, numbers, rounds)


def received_bytes(
  rounds: jax.Array, capacity: int, dtype: jnp.dtype, n: int
) -> jax.Array:
  """Bytes that a device receives: a ring gathers, and a ring reduces."""
  values = 2 * capacity * _collectives.accumulator(dtype).itemsize
  each = (n - 1) * (4 * capacity + values)
  return rounds.astype(jnp.float32) * each + 4.0 * _HEADER * (n - 1)
