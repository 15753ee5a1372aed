"""What leaves the devices: indices by all-gather, values by all-reduce.

Devices select in partitions of their own, so no index comes twice, and each
device adds its value at every index that any of them selected. What rounding
for the wire takes from a value stays with the device that rounded it, and so
does what the wire cannot hold of a finite one. Sums are taken in 32 bits.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax import _wire
from zenjax._schemes.base import Context
from zenjax._sparsify import _rest
from zenjax._sparsify import _rounding
from zenjax._sparsify._selection import Selection

# Words before the indices of the first round: how many were selected, and a
# number of the caller's.
_HEADER = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
  """How the selected values of a vector travel.

  Attributes:
    size: Elements of the vector.
    dtype: That it is kept in.
    wire: What values are rounded to on their way; None for not at all.
    capacity: Indices that a device sends in a round.
  """

  size: int
  dtype: jnp.dtype
  wire: jnp.dtype | None
  capacity: int

  def round_bytes(self, n: int) -> int:
    """That a device receives: a ring gathers, and a ring sums."""
    values = self.wire or _collectives.accumulator(self.dtype)
    return (n - 1) * self.capacity * (4 + 2 * values.itemsize)

  def dense_bytes(self, n: int) -> float:
    """Those of a ring that sums the whole vector."""
    item = _collectives.accumulator(self.dtype).itemsize
    return 2 * (n - 1) / n * self.size * item

  def most_in_rounds(self, n: int) -> int:
    """The largest selection that travels in rounds; what exceeds it pays less
    for a sum of the whole vector after the first.
    """
    # Of one device too, where neither receives a byte: by what they touch.
    item = _collectives.accumulator(self.dtype).itemsize
    whole = 2 / n * self.size * (item + _rest.MASK_BYTES)
    each = self.round_bytes(2)
    return self.capacity * (1 + int(whole / each))


class Exchanged(NamedTuple):
  """The outcome of an exchange; all but `kept` equal on all devices."""

  update: jax.Array  # [N], what was sent, averaged or summed
  kept: jax.Array  # [N], what was not
  counts: jax.Array  # [n] int32, by rank
  numbers: jax.Array  # [n] float32, by rank
  rounds: jax.Array  # [] int32
  wire_bytes: jax.Array  # [] float32, received by a device


def exchange(
  acc: jax.Array,
  chosen: Selection,
  number: jax.Array,
  form: Form,
  context: Context,
) -> Exchanged:
  """Sends what devices selected, in as many rounds as the fullest one needs.

  Where those would cost more than to sum the whole vector, there is one round,
  and the rest goes in such a sum: of the selected elements, zeros elsewhere.

  Args:
    acc: `[N]` on a device.
    chosen: What it selected.
    number: `[] float32`, any number that all devices want to know.
    form: How values travel.
    context: Axes and operation.
  """
  size, capacity, axes = form.size, form.capacity, context.axes
  total = _sum_of(form, context)

  def own(turn):
    return chosen.indices(turn * capacity, capacity, size)

  def send(index, update, kept):
    # Distinct, also where there is none.
    flat = index.reshape(-1)
    nowhere = size + jnp.arange(flat.shape[0], dtype=jnp.int32)
    flat = jnp.where(flat < size, flat, nowhere)
    values = kept.at[flat].get(mode="fill", fill_value=0, unique_indices=True)
    # First read, then clear in place: else XLA copies the vector each round.
    values, kept = lax.optimization_barrier((values, kept))
    came, left = total(values.reshape(index.shape))
    into = dict(mode="drop", unique_indices=True)
    return (
      update.at[flat].set(came.reshape(-1).astype(acc.dtype), **into),
      kept.at[flat].set(left.reshape(-1).astype(acc.dtype), **into),
    )

  header = jnp.stack([chosen.sent, lax.bitcast_convert_type(number, jnp.int32)])
  first = jnp.concatenate([header, own(jnp.int32(0))])
  gathered = _collectives.all_gather(first, axes)
  counts = gathered[:, 0]
  numbers = lax.bitcast_convert_type(gathered[:, 1], jnp.float32)
  most = jnp.max(counts)
  dense = most > form.most_in_rounds(context.devices)
  in_rounds = jnp.where(dense, 0, most)

  def body(carry):
    turn, update, kept = carry
    index = _collectives.all_gather(own(turn), axes)
    return turn + 1, *send(index, update, kept)

  sent = send(gathered[:, _HEADER:], jnp.zeros(size, acc.dtype), acc)
  rounds, update, kept = lax.while_loop(
    lambda carry: carry[0] * capacity < in_rounds, body, (jnp.int32(1), *sent)
  )
  sums, update, kept = _rest.send(
    chosen.bitmap.words,
    chosen.start_of(capacity),
    dense,
    update,
    kept,
    form.wire,
    context,
  )
  n = context.devices
  of_rounds = rounds.astype(jnp.float32) * form.round_bytes(n)
  of_sums = sums.astype(jnp.float32) * _rest.sum_bytes(acc, n)
  wire_bytes = of_rounds + of_sums + 4.0 * _HEADER * (n - 1)
  return Exchanged(update, kept, counts, numbers, rounds + sums, wire_bytes)


def _sum_of(
  form: Form, context: Context
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
  """What `[n, C]` values come to over devices, and what stays of them."""
  wide = _collectives.accumulator(form.dtype)
  axes, wire = context.axes, form.wire

  def exact(values):
    total = _collectives.psum(values.astype(wide), axes)
    return context.scaled(total), jnp.zeros_like(values)

  if wire is None:
    return exact

  def rounded(values):
    # A sum in 16 bits would round where nobody can keep it. So each device sums
    # what it selected itself, and keeps what its own rounding takes.
    sent = _rounding.saturated(values.astype(wide), wire, form.dtype)
    sent = sent.astype(wire)
    left = _rest.finite(values.astype(wide) - sent.astype(wide))
    words = _collectives.all_to_all(_wire.to_words(sent), axes)
    shares = _wire.from_words(words, values.shape[1:], sent.dtype)
    total = jnp.sum(shares.astype(wide), axis=0)
    mean, lost = _rest.rounded(total, sent.dtype, form.dtype, context)
    words = _collectives.all_gather(_wire.to_words(mean[None])[0], axes)
    came = _wire.from_words(words, values.shape[1:], sent.dtype)
    return came, left.at[lax.axis_index(axes)].add(lost)

  return rounded
