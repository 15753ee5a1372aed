"""Defines a scheme: a push, a pull, and the bytes that each declares.

A scheme moves rows. It runs no rounds, takes no dense path, keeps no statistics
and knows nothing of optax; `sync/exchange.py` builds all of these from what a
scheme returns. CONTRIBUTING.md says what to write to add one.
"""

import abc
from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from zenjax._src.core.collectives import Axes
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax.kernels.reference import Union


class Source(Protocol):
  """The local rows of one table."""

  def take(
    self, start: jax.Array, plan: TablePlan
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the first rows of every group from slot `start: [m] int32` on.

    Returns:
      `slots: [m, C] int32`, ascending, `S` where a group has no more rows;
      `rows: [m, C, D]`, zero there; and how many rows are left in each group,
      these included, `[m] int32`. `C` is `plan.push`.
    """
    ...


class Outgoing(NamedTuple):
  """One table as it enters a push."""

  plan: TablePlan
  source: Source
  start: jax.Array  # [m] int32, slots below are done; equal on all devices


class Sums(NamedTuple):
  """The sums that a device holds between push and pull."""

  union: Union  # the rows that it owns, summed
  pushed: (
    jax.Array
  )  # [] int32, rows that devices had left at `start`, all added
  fullest: jax.Array  # [] int32, rows that the device with most had left


class Tally(NamedTuple):
  """Counts that every device knows after a pull, one for each row group."""

  limit: jax.Array  # [m] int32, everyone has the sums of all slots below
  union: jax.Array  # [m] int32, rows that this pull brought
  pushed: jax.Array  # [m] int32, see `Sums`
  fullest: jax.Array  # [m] int32
  summed: jax.Array  # [m] int32, rows of all devices that were summed


def counts_of(sums: Sums) -> jax.Array:
  """Returns an owner's `Tally`, `[5] int32`."""
  union = sums.union
  return jnp.stack(
    [union.limit, union.total, sums.pushed, sums.fullest, union.summed]
  )


class Arrived(NamedTuple):
  """What a pull brought for one table, equal on all devices."""

  row: jax.Array  # [k] int32, R as padding
  values: jax.Array  # [k, D] in the table's dtype
  tally: Tally


class Message(NamedTuple):
  """One collective, as the lowered program shows it."""

  op: str  # "all_to_all", .. as StableHLO has it
  axes: Axes
  words: Any  # of 32 bits, one device's operand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
  """The devices of an exchange, and the operation."""

  axes: Axes  # slowest first
  sizes: tuple[int, ...]  # devices along each axis
  mean: bool

  @property
  def devices(self) -> int:
    return math.prod(self.sizes)

  def scaled(self, total: jax.Array) -> jax.Array:
    """Returns the sum over devices, or their mean."""
    if not self.mean or self.devices == 1:
      return total
    return total / jnp.asarray(self.devices, total.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme(abc.ABC):
  """A way of moving the nonzero rows of several tables in one exchange.

  Attributes:
    name: Its key in the table of schemes.
    contiguous: Whether owners hold ranges of rows instead of a hash's share.
    unit: Elements that are sent as a whole by default; None for a row.
    break_even: The part of a dense exchange's bytes up to which it pays.
      Packing and merging cost local work that a dense sum does not have.
  """

  name: str
  contiguous: bool = False
  unit: int | None = None
  break_even: float = 0.5

  @abc.abstractmethod
  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    """Returns `(m, g)`: row and column groups over axes of `sizes`."""

  @abc.abstractmethod
  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Sums]:
    """Sends the first rows from `start` on to owners, who sum them.

    What a device returns that owns nothing is ignored, unless `pull` reads it.
    """

  @abc.abstractmethod
  def pull(
    self, plans: Sequence[TablePlan], sums: Sequence[Sums], context: Context
  ) -> list[Arrived]:
    """Brings everyone all rows that owners hold, and their `Tally`.

    The result is equal on all devices, also by type: `collectives.all_gather`
    sees to that, and `compat.agreed` does where nothing is gathered.
    """

  @abc.abstractmethod
  def held_rows(self, plan: TablePlan, context: Context) -> int:
    """Returns how many rows `Sums.union` can hold after a push."""

  def holds_all(self, plan: TablePlan, context: Context) -> bool:
    """Returns True if one round always brings all rows that there may be.

    Override it if rows can overflow on the way too, as between the hops of
    `recursive_doubling`.
    """
    fits = plan.push >= plan.most_push
    return fits and self.held_rows(plan, context) >= plan.most_pull

  @abc.abstractmethod
  def push_messages(
    self, plans: Sequence[TablePlan], context: Context
  ) -> list[Message]:
    """Returns the collectives of one push, in order."""

  @abc.abstractmethod
  def pull_messages(
    self, plans: Sequence[TablePlan], context: Context
  ) -> list[Message]:
    """Returns the collectives of one pull, in order."""

  @abc.abstractmethod
  def expected_messages(
    self,
    plan: TablePlan,
    context: Context,
    push: jax.Array | float,
    pull: jax.Array | float,
  ) -> list[Message]:
    """Returns the collectives for one table with buffers just large enough.

    Bytes and predicted times follow from this formula.

    Args:
      plan: The plan of the table.
      context: The devices.
      push: Rows of the fullest pair of source and row group.
      pull: Rows of the union in the fullest row group.
    """


def received_bytes(
  messages: Sequence[Message], context: Context
) -> jax.Array | float:
  """Bytes a device receives from others for the `messages` of a round."""
  total = 0.0
  for message in messages:
    n = devices_of(message, context)
    # Of `n` devices' operands, how much one of them receives.
    match message.op:
      case "all_gather":
        part = n - 1
      case "all_reduce":  # a ring
        part = 2 * (n - 1) / n
      case "collective_permute":
        part = 1
      case "all_to_all" | "reduce_scatter":
        part = (n - 1) / n
      case _:
        raise ValueError(f"`message` must be of a known op, got {message}.")
    total = total + message.words * 4 * part
  return total


def expected_bytes(
  scheme: Scheme,
  plan: TablePlan,
  push: jax.Array | float,
  pull: jax.Array | float,
  context: Context,
) -> jax.Array | float:
  """Bytes by the scheme's formula, see `Scheme.expected_messages`."""
  messages = scheme.expected_messages(plan, context, push, pull)
  return received_bytes(messages, context)


def dense_bytes(table: Table, devices: int) -> float:
  """Bytes a device receives in a ring all-reduce of the whole table."""
  itemsize = 4 if table.dtype.itemsize < 4 else table.dtype.itemsize
  return 2 * (devices - 1) / devices * table.num_rows * table.width * itemsize


def devices_of(message: Message, context: Context) -> int:
  """Returns how many devices take part in a collective."""
  sizes = dict(zip(context.axes, context.sizes))
  return math.prod([sizes[axis] for axis in message.axes])
