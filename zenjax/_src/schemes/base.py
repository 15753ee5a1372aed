"""Defines a scheme: a push, a pull, and the bytes that each declares.

A scheme only moves rows. `sync/exchange.py` adds rounds, the dense path and
statistics, and schemes do not depend on optax. CONTRIBUTING.md explains how to
add a scheme.
"""

import abc
from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from zenjax._src.core.collectives import Axes
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.schemes.buffer_sizes import Table
from zenjax.kernels.reference import Union

# A number of rows or bytes, which in a traced program may be an array.
Number = jax.Array | float


class Source(Protocol):
  """The local rows of one table."""

  def take(
    self, start: jax.Array, plan: ExchangePlan
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the first rows of every group from slot `start: [m] int32` on.

    Returns:
      `slots: [m, C] int32`, ascending, padded with `S`; `rows: [m, C, D]`,
      padded with zeros; and `[m] int32`, how many rows each group has from
      `start` on, including the returned ones. `C` is `plan.push`.
    """
    ...

  def whole(self, plan: ExchangePlan) -> tuple[jax.Array, jax.Array]:
    """Returns the table `[R, D]`, and which of its rows this device has.

    The latter is a bitmap `[m, W] uint32` in (group, slot) order. It may also
    have rows before the `start` of a round, whose values mean nothing then.
    """
    ...


class Outgoing(NamedTuple):
  """One table as it enters a push."""

  plan: ExchangePlan
  source: Source
  start: jax.Array  # [m] int32, first slot not done; equal on all devices


class Sums(NamedTuple):
  """The sums that a device holds between push and pull."""

  union: Union  # the sums of the rows that the device owns
  pushed: jax.Array  # [] int32, rows left at `start`, summed over devices
  fullest: jax.Array  # [] int32, rows left at `start` on the fullest device


class Tally(NamedTuple):
  """Counts that every device knows after a pull, one for each row group."""

  limit: jax.Array  # [m] int32, all slots below it are complete
  union: jax.Array  # [m] int32, rows that this pull brought
  pushed: jax.Array  # [m] int32, `Sums.pushed`
  fullest: jax.Array  # [m] int32, `Sums.fullest`
  summed: jax.Array  # [m] int32, rows of all devices that were summed


def counts_of(sums: Sums) -> jax.Array:
  """Returns an owner's `Tally`, `[5] int32`."""
  union = sums.union
  return jnp.stack(
    [union.limit, union.total, sums.pushed, sums.fullest, union.summed]
  )


class Arrived(NamedTuple):
  """The summed rows of one table after a pull, equal on all devices."""

  row: jax.Array  # [k] int32, R as padding
  values: jax.Array  # [k, D] in the table's dtype
  tally: Tally


class Message(NamedTuple):
  """One collective, as it appears in the lowered program."""

  op: str  # name in StableHLO, for example "all_to_all"
  axes: Axes
  words: Any  # words of 32 bits in one device's operand, used or not


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
  """The devices of an exchange, and whether it computes a sum or a mean."""

  axes: Axes  # slowest first
  sizes: tuple[int, ...]  # devices along each axis
  mean: bool

  @property
  def devices(self) -> int:
    return math.prod(self.sizes)

  def scaled(self, total: jax.Array) -> jax.Array:
    """Returns the sum itself, or divided by the number of devices."""
    if not self.mean or self.devices == 1:
      return total
    return total / jnp.asarray(self.devices, total.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme(abc.ABC):
  """A way to move the nonzero rows of several tables in one exchange.

  Attributes:
    name: The scheme's key in the registry.
    contiguous: Whether owners hold ranges of rows instead of hashed rows.
    unit: Number of elements that are sent together by default; None for a row.
    break_even: The scheme pays up to this part of the bytes of a dense
      exchange. It is less than 1 because packing and merging are local work
      that a dense sum does not have.
    dense_push: Whether each push sums whole tables. Buffers then hold all rows
      until you give sizes or call `zenjax.tune`, to have one push.
    union_margin: How many times the rows of `plan.pull` a union may have in one
      round; infinite if any union fits that was pushed.
  """

  name: str
  contiguous: bool = False
  unit: int | None = None
  break_even: float = 0.5
  dense_push: bool = False
  union_margin: float = 1.0

  @abc.abstractmethod
  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    """Returns `(m, g)`: the row and column groups over axes of `sizes`.

    With `m = 1`, rows are not divided. The pull of `zen` then sends no ids,
    because every device has received every row.
    """

  @abc.abstractmethod
  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Sums]:
    """Sends the first rows from `start` on to owners, which sum them.

    If a device owns nothing, its result is used only by `pull`.
    """

  @abc.abstractmethod
  def pull(
    self, plans: Sequence[ExchangePlan], sums: Sequence[Sums], context: Context
  ) -> list[Arrived]:
    """Sends all devices the rows that owners hold, and the owners' `Tally`.

    The result must be equal on all devices, also by type. Results of
    `collectives.all_gather` are. A scheme that gathers nothing uses
    `compat.agreed`.
    """

  @abc.abstractmethod
  def held_rows(self, plan: ExchangePlan, context: Context) -> int:
    """Returns the most rows that `Sums.union` can hold after a push.

    A pull that sends rows has buffers for `plan.pull` of them.
    """

  def holds_all(self, plan: ExchangePlan, context: Context) -> bool:
    """Returns True if one round is always enough.

    Override it if rows can overflow elsewhere too, for example between the hops
    of `recursive_doubling`.
    """
    fits = plan.push >= plan.most_push
    return fits and self.held_rows(plan, context) >= plan.most_pull

  @abc.abstractmethod
  def messages(
    self, plans: Sequence[ExchangePlan], context: Context
  ) -> list[Message]:
    """Returns the collectives of one round, a push and a pull, in order."""

  @abc.abstractmethod
  def expected_messages(
    self, plan: ExchangePlan, context: Context, push: Number, pull: Number
  ) -> list[Message]:
    """Returns the collectives for one table with the smallest buffers.

    Predicted bytes and times come from this formula.

    Args:
      plan: The plan of the table.
      context: The devices.
      push: Rows of the fullest pair of source and row group.
      pull: Rows of the union in the fullest row group.
    """


def received_bytes(messages: Sequence[Message], context: Context) -> Number:
  """Returns the bytes that a device receives from others by `messages`."""
  total = 0.0
  for message in messages:
    n = devices_of(message, context)
    # Received bytes as a multiple of one device's operand.
    factors = {
      "all_gather": n - 1,
      "all_reduce": 2 * (n - 1) / n,  # a ring
      "all_to_all": (n - 1) / n,
      "collective_permute": 1,
      "reduce_scatter": (n - 1) / n,
    }
    total = total + message.words * 4 * factors[message.op]
  return total


def dense_bytes(table: Table, devices: int) -> float:
  """Returns the bytes that a device receives in a dense ring all-reduce."""
  itemsize = 4 if table.dtype.itemsize < 4 else table.dtype.itemsize
  return 2 * (devices - 1) / devices * table.num_rows * table.width * itemsize


def devices_of(message: Message, context: Context) -> int:
  """Returns how many devices take part in a collective."""
  sizes = dict(zip(context.axes, context.sizes))
  return math.prod([sizes[axis] for axis in message.axes])
