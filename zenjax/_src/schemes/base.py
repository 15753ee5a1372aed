"""Defines a scheme: a push, a pull, and the bytes that each declares.

A scheme moves rows. It runs no rounds, takes no dense path, keeps no statistics
and knows nothing of optax, but all of these are made from it: from the counts
of `Held` and `Tally`, which it fills, and from `break_even`. CONTRIBUTING.md
says what to write to add one.
"""

import abc
from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import indexing
from zenjax._src.core import wire
from zenjax._src.core.collectives import Axes
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax.kernels.reference import Union


class Source(Protocol):
  """The local rows of one table."""

  def rows_from(
    self, start: jax.Array, plan: TablePlan, capacity: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first rows of every group from slot `start: [m] int32` on.

    Returns:
      `slots: [m, C] int32`, ascending, `S` where a group has no more rows;
      `rows: [m, C, D]`, zero there; and how many there are in all, `[m] int32`.
    """
    ...


class Room(NamedTuple):
  """Room for rows of one table in the buffer of a push or a pull; static."""

  plan: TablePlan
  capacity: int


class Outgoing(NamedTuple):
  """One table as it enters a push."""

  room: Room
  source: Source
  start: jax.Array  # [m] int32, slots below are done; equal on all devices
  # [m, p] int32, local counts of each group whose sums are wanted.
  probe: jax.Array


class Held(NamedTuple):
  """One table on a device between push and pull."""

  union: Union  # the rows that it owns, summed
  pushed: jax.Array  # [] int32, rows waiting at `start`, summed over devices
  fullest: jax.Array  # [] int32, the same of the device that had most
  probe: jax.Array  # [p] int32, sums of `Outgoing.probe` over devices
  # [q] int32, the largest of each: of stacked tables, else none.
  peak: jax.Array


class Asked(NamedTuple):
  """One table as it enters a pull."""

  room: Room
  held: Held
  offset: jax.Array | int  # [] int32, rows of the union that were sent


class Tally(NamedTuple):
  """Counts that every device knows after a pull, one for each row group."""

  limit: jax.Array  # [m] int32, everyone has the sums of all slots below
  end: jax.Array  # [m] int32, the owner has summed all slots below
  union: jax.Array  # [m] int32, rows that this pull brought
  total: jax.Array  # [m] int32, rows that the owner holds
  pending: jax.Array  # [m] int32, rows that it has still to send
  pushed: jax.Array  # [m] int32, see Held
  fullest: jax.Array  # [m] int32
  merged: jax.Array  # [m] int32, rows of all devices that were summed
  probe: jax.Array  # [m, p] int32, see Held
  peak: jax.Array  # [m, q] int32

  @classmethod
  def of(cls, counts: jax.Array, plan: TablePlan) -> "Tally":
    """Reads `[m, k]` counts in the order of fields."""
    numbers, rest = counts[:, :TALLY_NUMBERS], counts[:, TALLY_NUMBERS:]
    probe, peak = rest[:, : len(plan.tables)], rest[:, len(plan.tables) :]
    # Slices: XLA:CPU would transpose anew for each.
    each = [numbers[:, i] for i in range(numbers.shape[1])]
    return cls(*each, probe=probe, peak=peak)

  def line(self) -> jax.Array:
    """Returns one owner's counts, `[]` each, as `[k]`."""
    *numbers, probe, peak = self
    return jnp.concatenate([indexing.stacked(numbers), probe, peak])


# Fields of a tally that are one number of each group. The others are one of
# each table, `peak` of stacked ones only.
TALLY_NUMBERS = len(Tally._fields) - 2


def over_devices(
  probe: jax.Array, plan: TablePlan
) -> tuple[jax.Array, jax.Array]:
  """Returns sums and largest of `[n, p]` counts that came from `n` devices."""
  most = jnp.max(probe[:, : len(plan.members)], axis=0)
  return wire.sum_counts(probe), most


class Arrived(NamedTuple):
  """One table's share of what a pull brought, equal on all devices."""

  row: jax.Array  # [k] int32, R where there is none
  values: jax.Array  # [k, D] in the table's dtype
  tally: Tally


class Message(NamedTuple):
  """One collective, as the lowered program shows it."""

  op: str  # "all_to_all", .. as StableHLO has it, or "remote_copy"
  axes: Axes
  words: Any  # of 32 bits, one device's operand; of remote copies at most


class Fit(NamedTuple):
  """Says how much of the buffers of a first round is sent.

  Indices of `wire.PARTS`, equal on all devices.
  """

  push: Any  # [] int32, or an int
  pull: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
  """Facts that all tables of an exchange share."""

  axes: Axes  # slowest first
  sizes: tuple[int, ...]  # devices along each axis
  mean: bool
  # Whether ids and counts of SparseRows go in messages of their own, ahead.
  ids_first: bool = False
  # Whether devices copy to each other what there is, in place of collectives.
  remote_copies: bool = False
  # `[] bool`, equal on all devices: nobody has rows to send; None where
  # somebody always might.
  quiet: jax.Array | None = None
  # Of tables whose first round follows what was seen; None for all of it.
  fit: Fit | None = None

  @property
  def devices(self) -> int:
    return math.prod(self.sizes)

  def sent(self, room: Room, pull: bool = False) -> Any:
    """Rows of a buffer that travel, the first ones: an int, or `[] int32`."""
    if self.fit is None or room.plan.guess is None:
      return room.capacity
    parts = np.array(wire.PARTS, np.int32) * (room.capacity // wire.SLICES)
    level = self.fit.pull if pull else self.fit.push
    if isinstance(level, int):
      return int(parts[level])
    return jnp.asarray(parts)[level]

  def scaled(self, total: jax.Array) -> jax.Array:
    """The sum over devices, or their mean: divided once, at the owner."""
    if not self.mean or self.devices == 1:
      return total
    return total / jnp.asarray(self.devices, total.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme(abc.ABC):
  """A way of moving the nonzero rows of several tables in one exchange.

  Attributes:
    name: Its key in the table of schemes.
    contiguous: Whether owners hold ranges of rows and not a hash's share.
    unit: Elements that travel as a whole where the user says nothing; None for
      a row.
    break_even: The part of a dense exchange's bytes up to which it pays.
      Packing and merging cost local work that a dense sum does not have.
    fits: Whether it sends parts of buffers, as `Context.fit` says.
  """

  name: str
  contiguous: bool = False
  unit: int | None = None
  break_even: float = 0.5
  fits: bool = False

  def fitted(self, plan: TablePlan) -> TablePlan:
    """`plan` with sizes as this scheme needs them."""
    return plan

  @abc.abstractmethod
  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    """`(m, g)`: row and column groups over axes of `sizes`."""

  @abc.abstractmethod
  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Held]:
    """Sends the first rows from `start` on, as many as fit, and sums them."""

  def send(self, outgoing: Sequence[Outgoing], context: Context) -> Any:
    """Sends a push; `merge` sums it.

    By default `push` does both, and `merge` returns what it is given.
    """
    return self.push(outgoing, context)

  def mark(self, received: Any) -> jax.Array | None:
    """Returns a number that is known when `send` is over, `[] int32`.

    None where `send` has summed already and no `merge` could wait for it.
    """
    return None

  def merge(
    self,
    received: Any,
    rooms: Sequence[Room],
    context: Context,
    after: jax.Array | None = None,
  ) -> list[Held]:
    """Sums what `send` returned, once what `after` marks has arrived.

    By default there is nothing left to sum.
    """
    return received

  @abc.abstractmethod
  def pull(self, asked: Sequence[Asked], context: Context) -> list[Arrived]:
    """Brings everyone each owner's rows from number `offset` on."""

  @abc.abstractmethod
  def held_rows(self, room: Room, context: Context) -> int:
    """Rows that `Held.union` can hold after a push of such buffers."""

  def holds_all(self, room: Room, context: Context) -> bool:
    """Says whether a push of such buffers brings all rows that there may be.

    By default it does if each device's fit, and owners have room for those of
    all.
    """
    plan = room.plan
    fits = room.capacity >= plan.most.push
    return fits and self.held_rows(room, context) >= plan.most.pull

  @abc.abstractmethod
  def push_messages(
    self, rooms: Sequence[Room], context: Context
  ) -> list[Message]:
    """The collectives of one push, in order."""

  @abc.abstractmethod
  def pull_messages(
    self, rooms: Sequence[Room], context: Context
  ) -> list[Message]:
    """The collectives of one pull, in order.

    None at all promise that one pull brings all that owners hold, whatever its
    capacity: `sync/exchange.py` then plans no second one after a push.
    """

  @abc.abstractmethod
  def expected_messages(
    self,
    plan: TablePlan,
    context: Context,
    push: jax.Array | float,
    pull: jax.Array | float,
  ) -> list[Message]:
    """The collectives for one table with buffers just large enough.

    The formula of a scheme: its bytes and its time follow from it. `push` rows
    for the fullest pair of source and row group, `pull` rows in the fullest
    union of a row group.
    """


class DenseScheme(Protocol):
  """A way of summing a whole leaf."""

  @property
  def name(self) -> str:
    """Its key in the table of schemes."""
    ...

  def reduce(self, leaf: jax.Array, context: Context) -> jax.Array:
    """The sum or mean over all devices."""
    ...

  def messages(self, table: Table, context: Context) -> list[Message]:
    """The collectives outside any loop, in order."""
    ...

  def loop_messages(
    self, table: Table, context: Context
  ) -> list[tuple[int, Message]]:
    """Loops with one collective each: how often it turns, and which."""
    ...


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
      case "all_to_all" | "reduce_scatter" | "remote_copy":
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
  """By the scheme's formula: see `Scheme.expected_messages`."""
  messages = scheme.expected_messages(plan, context, push, pull)
  return received_bytes(messages, context)


def devices_of(message: Message, context: Context) -> int:
  """How many take part in a collective."""
  sizes = dict(zip(context.axes, context.sizes))
  return math.prod([sizes[axis] for axis in message.axes])


def section(
  union: Union,
  offset: jax.Array | int,
  capacity: int,
  sent: jax.Array | int | None = None,
) -> Union:
  """Rows number `offset` to `offset + capacity` of a union, and its limit.

  The limit is where this section ends, or the union's own after its last. Where
  only the first `sent` rows travel it ends there.
  """
  num_rows = union.slots.shape[0]
  if sent is None:
    sent = capacity
  column = jnp.arange(capacity, dtype=jnp.int32)
  wanted = offset + column
  past = jnp.iinfo(jnp.int32).max
  slots = indexing.take_or(union.slots, wanted, past)
  if not isinstance(sent, int):
    slots = jnp.where(column < sent, slots, past)
  end = jnp.minimum(offset + sent, num_rows - 1)
  more = union.total > offset + sent
  return union._replace(
    slots=slots,
    rows=indexing.take_or(union.rows, wanted, 0),
    total=jnp.clip(union.total - offset, 0, sent),
    limit=jnp.where(more, union.slots[end], union.limit),
  )
