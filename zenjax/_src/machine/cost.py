"""Predicts the time of an exchange on links and devices.

    seconds = sum over messages (steps * latency + bytes / bandwidth)
              + mask + rows handled

Messages come from the scheme's own formula (`Scheme.expected_messages`).
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import devices_of
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import SPARSE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
  """Measured densities of a table's gradients.

  `zenjax.planner.profile(state)` returns one for each parameter that is sent
  sparsely. Pass them as `profile=` to `planner.plan` and `planner.utility`.
  All are numbers of rows, not shares of the table. A mean may be below 1.

  Attributes:
    rows: Mean number of nonzero rows of a device.
    fullest: Nonzero rows of the device with most.
    union: Different nonzero rows of all devices together.
    devices: Number of these devices.

  Raises:
    TypeError: A number of rows is not a number.
    ValueError: The numbers cannot be counts of rows and devices.

  Example:
    >>> import zenjax
    >>> seen = zenjax.planner.Profile(
    ...   rows=100, fullest=110, union=200, devices=4
    ... )
    >>> round(seen.union_of(16))
    400
  """

  rows: float
  fullest: float
  union: float
  devices: int

  def __post_init__(self):
    for name in ("rows", "fullest", "union"):
      value = arguments.number(name, getattr(self, name))
      if not 0 <= value < math.inf:
        raise ValueError(
          f"`{name}` of a Profile must be a number of rows, 0 or more, got"
          f" {value!r}. Count different rows, as `len(np.unique(ids))` does."
        )
    if not arguments.is_integer(self.devices):
      raise TypeError(
        "`devices` of a Profile must be an integer, got"
        f" {self.devices!r}. Give for example `mesh.size`."
      )
    if self.devices < 1 or self.union < 0.999 * self.rows:
      raise ValueError(
        "A Profile must count `devices`, one or more, which together touch at"
        f" least as many rows (`union`) as each of them (`rows`), got {self}."
      )

  def union_of(self, devices: int) -> float:
    """Returns the union for another number of devices, by a power law.

    One device shows no growth, so the growth of a vocabulary is assumed.
    """
    if self.rows <= 0:
      return self.union
    if self.devices <= 1:
      return self.rows * devices**buffer_sizes.GROWTH
    power = math.log(max(self.union / self.rows, 1.0)) / math.log(self.devices)
    return self.rows * devices**power


class Way(NamedTuple):
  """One way to synchronize a leaf, with the fields of `LeafPlan`."""

  scheme: str
  column_groups: int = 1  # Of zen; 1 for other schemes.
  wire_dtype: str | None = None
  compressor: str | None = None  # Of a dense leaf.


PMEAN = Way("dense")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
  """Predicted costs of one way to synchronize a table, or of one form of it.

  Attributes:
    exchange: Name of the exchange. Tables with the same name share it.
    seconds: Time on the links and on the device, if nothing overlaps.
    once_s: The part of `seconds` that all tables of an exchange pay together:
      the latencies.
    received: Bytes that a device receives in a step.
    memory: Bytes that a device needs.
    sizes: Buffer sizes of the first round, `(push, pull)` in rows, that the
      prediction assumes: just large enough. None for a dense sum.
    local_s: The part of `seconds` that the device works.
  """

  exchange: str
  seconds: float
  once_s: float
  received: float
  memory: float
  sizes: tuple[float, float] | None = None
  local_s: float = 0.0


# The ways of a leaf, or some of them.
Ways = Mapping[Way, Prediction]


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
  """Predicts costs on a machine.

  Attributes:
    context: The devices of an exchange.
    links: The link along each axis. The work of a device is a property of the
      link along the fastest axis.
  """

  context: Context
  links: Mapping[str, Link]

  @property
  def work(self) -> Work:
    """The time of a device's own work."""
    return self.links[self.context.axes[-1]].work

  def of_messages(
    self,
    exchange: str,
    messages: Sequence[Message],
    *,
    local_s: float = 0.0,
    memory: float | None = None,
    sizes: tuple[float, float] | None = None,
  ) -> Prediction:
    """Predicts an exchange; by default, its memory is the received bytes."""
    once_s = wire_s = 0.0
    for axis, op, n, received in _phases(messages, self.context):
      once_s += self.links[axis].seconds(op, n, 0.0)
      wire_s += self.links[axis].seconds(op, n, received)
    received = float(received_bytes(messages, self.context))
    return Prediction(
      exchange=exchange,
      seconds=wire_s + local_s,
      once_s=once_s,
      received=received,
      memory=received if memory is None else memory,
      sizes=sizes,
      local_s=local_s,
    )

  def of_ways(
    self, table: Table, profile: Profile, wire_dtypes: Sequence[str] = ()
  ) -> dict[Way, Prediction]:
    """Predicts every way that may be best for a table, pmean first.

    The Zen paper proves that the best scheme is either Balanced Parallelism or
    Hierarchical Centralization (Theorem 1). The predictions also include
    latency, local work, and the dense exchange. Schemes with contiguous ranges
    are left out, because zen sends the same messages with better balance (Lemma
    1).
    """
    n = self.context.sizes[-1]
    ways = [Way("all_gather"), Way("recursive_doubling")]
    if len(self.context.axes) > 1:
      ways += [Way("dense_inside"), Way("flat")]
    for groups in range(1, n + 1):
      if n % groups == 0 and groups <= max(table.width, 1):
        ways.append(Way("zen", groups))
    wires = None, *wire_dtypes
    ways = [way._replace(wire_dtype=wire) for wire in wires for way in ways]
    return {way: self.of_way(way, table, profile) for way in (PMEAN, *ways)}

  def of_way(self, way: Way, table: Table, profile: Profile) -> Prediction:
    """Predicts one way to synchronize a table."""
    size = table.num_rows * table.width * table.dtype.itemsize
    if way == PMEAN:
      # SparseRows are converted to an array first.
      array = dataclasses.replace(table, look_ups=None)
      messages = dense_sum.leaf_messages(array, self.context)
      return self.of_messages(way.scheme, messages, memory=size)
    if way.wire_dtype is not None:
      table = dataclasses.replace(table, wire_dtype=jnp.dtype(way.wire_dtype))
    scheme, n = SPARSE[way.scheme], self.context.devices
    m, g = scheme.groups(self.context.sizes, way.column_groups)
    plan = buffer_sizes.plan_table(
      [table],
      groups=m,
      column_groups=g,
      devices=n,
      sizes=[None],
      contiguous=scheme.contiguous,
    )
    # Buffers are just large enough for the fullest group of rows.
    union = min(profile.union_of(n), table.num_rows)
    push = buffer_sizes.fullest(profile.fullest, m, n * m)
    pull = buffer_sizes.fullest(union, m, m)
    push, pull = (float(min(x, plan.layout.slots)) for x in (push, pull))
    # The formulas also accept traced numbers. Here they must give constants.
    with jax.ensure_compile_time_eval():
      messages = scheme.expected_messages(plan, self.context, push, pull)
      messages = [m._replace(words=float(m.words)) for m in messages]
    work, local_s = self.work, 0.0
    if table.look_ups is None:
      local_s = size * work.mask_byte + table.num_rows * work.mask_row
    block_bytes = plan.row_wire.nbytes
    for message in messages:
      moved = float(received_bytes([message], self.context))
      if message.op == "reduce_scatter":  # It adds up without packing rows.
        local_s += moved * work.mask_byte
        continue
      # The column blocks of a summed row are joined and written as one row.
      joined = g if message.op == "all_gather" else 1
      rows = moved / (block_bytes * joined)
      local_s += moved * work.move_byte + rows * work.move_row
    return self.of_messages(
      way.scheme,
      messages,
      local_s=local_s,
      # A dense push copies the table, and cuts it into columns.
      memory=2.0 * size if scheme.dense_push else None,
      sizes=(push, pull),
    )


def _phases(
  messages: Sequence[Message], context: Context
) -> Iterator[tuple[str, str, int, float]]:
  """Splits messages into collectives along single axes.

  Communication libraries reduce and gather level by level: each of the devices
  that share a slow link sends an equal part of the array over it.

  Yields:
    An axis, a collective along it, the number of devices, and the bytes that
    each device receives.
  """
  sizes = dict(zip(context.axes, context.sizes))
  for message in messages:
    *fast, slowest = reversed([a for a in message.axes if a in sizes])
    part = message.words * 4.0
    if fast and message.op == "all_to_all":
      inside, n = 1, devices_of(message, context)
      for axis in (*fast, slowest):
        others = (sizes[axis] - 1) * inside
        yield axis, message.op, others + 1, others * part / n
        inside *= sizes[axis]
    elif not fast or message.op not in ("all_reduce", "all_gather"):
      received = float(received_bytes([message], context))
      yield message.axes[0], message.op, devices_of(message, context), received
    elif message.op == "all_gather":
      for axis in (slowest, *reversed(fast)):
        yield axis, "all_gather", sizes[axis], (sizes[axis] - 1) * part
        part *= sizes[axis]
    else:
      for axis in fast:
        part /= sizes[axis]
        for op in ("reduce_scatter", "all_gather"):
          yield axis, op, sizes[axis], (sizes[axis] - 1) * part
      n = sizes[slowest]
      yield slowest, "all_reduce", n, 2 * (n - 1) / n * part


def assumed(table: Table, devices: int) -> Profile:
  """Returns the densities of a vocabulary, for tables without measurements."""
  rows, union = buffer_sizes.assumed_rows(table, devices)
  return Profile(rows=rows, fullest=rows, union=union, devices=devices)
