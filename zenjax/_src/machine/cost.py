"""Predicts the time of an exchange on links and devices.

    seconds = sum over messages (steps * latency + bytes / bandwidth)
              + mask + rows handled

Messages come from the scheme's own formula (`Scheme.expected_messages`).
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.machine import link_models
from zenjax._src.machine.link_models import Links
from zenjax._src.machine.link_models import Phase
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

  `zenjax.planner.profile(state)` returns one for each parameter. Pass them as
  `profile=` to `planner.plan` and `planner.plan_tables`.

  Attributes:
    rows: Mean number of nonzero rows of a device.
    fullest: Nonzero rows of the device with most.
    union: Different nonzero rows of all devices together.
    devices: Number of these devices.

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
  """

  exchange: str
  seconds: float
  once_s: float
  received: float
  memory: float
  sizes: tuple[float, float] | None = None


def of_messages(
  exchange: str,
  messages: Sequence[Message],
  context: Context,
  link: Links,
  *,
  local_s: float = 0.0,
  memory: float | None = None,
  sizes: tuple[float, float] | None = None,
) -> Prediction:
  """Predicts an exchange; by default, its memory is the received bytes."""
  phases = phases_of(messages, context)
  received = float(received_bytes(messages, context))
  return Prediction(
    exchange=exchange,
    seconds=link_models.wire_s(phases, link) + local_s,
    once_s=link_models.wire_s([(*phase[:3], 0.0) for phase in phases], link),
    received=received,
    memory=received if memory is None else memory,
    sizes=sizes,
  )


def predictions(
  table: Table,
  profile: Profile,
  context: Context,
  link: Links,
  wire_dtypes: Sequence[str] = (),
) -> dict[Way, Prediction]:
  """Predicts every way that may be best for a table, pmean first.

  The Zen paper proves that the best scheme is either Balanced Parallelism or
  Hierarchical Centralization (Theorem 1). The predictions also include latency,
  local work, and the dense exchange. Schemes with contiguous ranges are left
  out, because zen sends the same messages with better balance (Lemma 1).
  """
  n = context.sizes[-1]
  ways = [Way("all_gather"), Way("recursive_doubling")]
  for groups in range(1, n + 1):
    if n % groups == 0 and groups <= max(table.width, 1):
      ways.append(Way("zen", groups))
  ways = [
    way._replace(wire_dtype=wire)
    for wire in (None, *wire_dtypes)
    for way in ways
  ]
  return {
    way: predict(way, table, profile, context, link) for way in (PMEAN, *ways)
  }


def predict(
  way: Way, table: Table, profile: Profile, context: Context, link: Links
) -> Prediction:
  """Predicts one way to synchronize a table.

  The work of the device is a property of the link along the fastest axis.
  """
  size = table.num_rows * table.width * table.dtype.itemsize
  if way == PMEAN:
    # SparseRows are converted to an array first.
    table = dataclasses.replace(table, look_ups=None)
    messages = dense_sum.leaf_messages(table, context)
    return of_messages(way.scheme, messages, context, link, memory=size)
  if way.wire_dtype is not None:
    table = dataclasses.replace(table, wire_dtype=jnp.dtype(way.wire_dtype))
  messages, block, sizes = _sparse_messages(way, table, profile, context)
  work = link_models.of_axis(context.axes[-1], link).work
  local_s = 0.0
  if table.look_ups is None:
    local_s = size * work.mask_byte + table.num_rows * work.mask_row
  for message in messages:
    moved = float(received_bytes([message], context))
    # The column blocks of a summed row are joined and written as one row.
    whole = message.op == "all_gather" and way.column_groups > 1
    row = block * way.column_groups if whole else block
    local_s += moved * work.move_byte + moved / row * work.move_row
  return of_messages(
    way.scheme, messages, context, link, local_s=local_s, sizes=sizes
  )


def _sparse_messages(
  way: Way, table: Table, profile: Profile, context: Context
) -> tuple[list[Message], int, tuple[float, float]]:
  """Returns messages with the smallest sufficient buffers.

  Returns:
    The messages, the bytes of a row (of one column block), and the buffer sizes
    `(push, pull)`.
  """
  scheme = SPARSE[way.scheme]
  m, g = scheme.groups(context.sizes, way.column_groups)
  plan = buffer_sizes.plan_table(
    [table],
    groups=m,
    column_groups=g,
    devices=context.devices,
    contiguous=scheme.contiguous,
  )
  n = context.devices
  union = min(profile.union_of(n), table.num_rows)
  push = buffer_sizes.fullest(profile.fullest, m, n * m)
  pull = buffer_sizes.fullest(union, m, m)
  push, pull = (float(min(x, plan.layout.slots)) for x in (push, pull))
  # The formulas also accept traced numbers. Here they must give constants.
  with jax.ensure_compile_time_eval():
    messages = scheme.expected_messages(plan, context, push, pull)
    messages = [m._replace(words=float(m.words)) for m in messages]
  return messages, plan.block_width * table.wire_dtype.itemsize, (push, pull)


def phases_of(messages: Sequence[Message], context: Context) -> list[Phase]:
  """Splits messages into collectives along single axes.

  Communication libraries reduce and gather level by level: each of the devices
  that share a slow link sends an equal part of the array over it.
  """
  sizes = dict(zip(context.axes, context.sizes))
  phases = []
  for message in messages:
    *fast, slowest = reversed([a for a in message.axes if a in sizes])
    part = message.words * 4.0
    if not fast or message.op not in ("all_reduce", "all_gather"):
      received = float(received_bytes([message], context))
      n = devices_of(message, context)
      phases.append((message.axes[0], message.op, n, received))
    elif message.op == "all_gather":
      for axis in (slowest, *reversed(fast)):
        n = sizes[axis]
        phases.append((axis, "all_gather", n, (n - 1) * part))
        part *= n
    else:
      for axis in fast:
        n = sizes[axis]
        part /= n
        phases.append((axis, "reduce_scatter", n, (n - 1) * part))
        phases.append((axis, "all_gather", n, (n - 1) * part))
      n = sizes[slowest]
      phases.append((slowest, "all_reduce", n, 2 * (n - 1) / n * part))
  return phases


def assumed(table: Table, devices: int) -> Profile:
  """Returns the densities of a vocabulary, for tables without measurements."""
  rows, union = buffer_sizes.assumed_rows(table, devices)
  return Profile(rows=rows, fullest=rows, union=union, devices=devices)
