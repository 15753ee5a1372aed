"""Cost model: the predicted time of an exchange on links and devices.

    seconds = sum over messages (steps * latency + bytes / bandwidth)
              + mask + rows handled

Messages are the schemes' own formulas (`Scheme.expected_messages`), so the
predicted bytes are those that are sent.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax

from zenjax._src.machine import link_models
from zenjax._src.machine.link_models import Links
from zenjax._src.machine.link_models import Phase
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import devices_of
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
  """Measured densities of a table's gradients.

  Attributes:
    rows: Nonzero rows of a device, mean.
    fullest: Nonzero rows of the device that has most.
    union: Nonzero rows of all devices together.
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
    """Extrapolates the union to other devices by a power law.

    One device shows no growth: a vocabulary's is assumed.
    """
    if self.rows <= 0:
      return self.union
    if self.devices <= 1:
      return self.rows * devices**buffer_sizes.GROWTH
    power = math.log(max(self.union / self.rows, 1.0)) / math.log(self.devices)
    return self.rows * devices**power


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
  """Predicted time and bytes of one way to synchronize a table.

  Attributes:
    scheme: Name of the scheme.
    column_groups: Column groups of zen; 1 for other schemes.
    wire_s: Time on the links.
    once_s: The part of `wire_s` that tables of one exchange pay once together:
      its latencies.
    local_s: Time on the device.
    received: Bytes a device receives.
    sizes: Rows of the first round, `(push, pull)`, that this is predicted for:
      just large enough as far as is known. None for a dense sum.
    phases: Terms of `wire_s`: `(axis, collective, devices, bytes)`.
  """

  scheme: str
  column_groups: int = 1
  wire_s: float
  once_s: float
  local_s: float
  received: float
  sizes: tuple[float, float] | None = None
  phases: tuple[Phase, ...] = ()

  @property
  def seconds(self) -> float:
    """Total time, if nothing overlaps."""
    return self.wire_s + self.local_s


def predict(
  scheme: str,
  table: Table,
  profile: Profile,
  context: Context,
  link: Links,
  column_groups: int = 1,
) -> Prediction:
  """Predicts time and bytes of one scheme for one table.

  The device's own work is taken from the link along the fastest axis.
  """
  mask_s = local_s = 0.0
  sizes = None
  if scheme == "dense":
    messages = DENSE[scheme].messages(table, context)
  else:
    messages, block, sizes = _sparse_messages(
      scheme, table, profile, context, column_groups
    )
    work = link_models.of_axis(context.axes[-1], link).work
    if table.look_ups is None:
      size = table.num_rows * table.width * table.dtype.itemsize
      mask_s = size * work.mask_byte + table.num_rows * work.mask_row
    for message in messages:
      moved = float(received_bytes([message], context))
      # The blocks of a summed row arrive side by side and are written as one.
      whole = message.op == "all_gather" and column_groups > 1
      row = block * column_groups if whole else block
      local_s += moved * work.move_byte + moved / row * work.move_row
  phases = phases_of(messages, context)
  return Prediction(
    scheme=scheme,
    column_groups=column_groups,
    wire_s=link_models.wire_s(phases, link),
    once_s=link_models.wire_s([(*phase[:3], 0.0) for phase in phases], link),
    local_s=mask_s + local_s,
    received=float(received_bytes(messages, context)),
    sizes=sizes,
    phases=tuple(phases),
  )


def _sparse_messages(
  name: str,
  table: Table,
  profile: Profile,
  context: Context,
  column_groups: int,
) -> tuple[list[Message], int, tuple[float, float]]:
  """Returns messages of just sufficient sizes, bytes of a row, the sizes."""
  scheme = SPARSE[name]
  m, g = scheme.groups(context.sizes, column_groups)
  plan = buffer_sizes.plan_table(
    table,
    groups=m,
    column_groups=g,
    devices=context.devices,
    pinned=None,
    seed=0,
    hash_offset=0,
    contiguous=scheme.contiguous,
  )
  n = context.devices
  union = min(profile.union_of(n), table.num_rows)
  push = buffer_sizes.fullest(profile.fullest, m, n * m)
  pull = buffer_sizes.fullest(union, m, m)
  push, pull = (float(min(x, plan.layout.slots)) for x in (push, pull))
  # The schemes' formulas serve traced numbers as well: these are none.
  with jax.ensure_compile_time_eval():
    messages = scheme.expected_messages(plan, context, push, pull)
    messages = [m._replace(words=float(m.words)) for m in messages]
  return messages, plan.block_width * table.wire_dtype.itemsize, (push, pull)


def phases_of(messages: Sequence[Message], context: Context) -> list[Phase]:
  """Splits messages into the collectives along each axis that they cross.

  Libraries sum and gather level by level: devices that share a slow link each
  send an equal part of an array over it.
  """
  sizes = dict(zip(context.axes, context.sizes))
  found = []
  for message in messages:
    *fast, slowest = reversed([a for a in message.axes if a in sizes])
    part = message.words * 4.0
    if not fast or message.op not in ("all_reduce", "all_gather"):
      received = float(received_bytes([message], context))
      n = devices_of(message, context)
      found.append((message.axes[0], message.op, n, received))
    elif message.op == "all_gather":
      for axis in (slowest, *reversed(fast)):
        n = sizes[axis]
        found.append((axis, "all_gather", n, (n - 1) * part))
        part *= n
    else:
      for axis in fast:
        n = sizes[axis]
        part /= n
        found.append((axis, "reduce_scatter", n, (n - 1) * part))
        found.append((axis, "all_gather", n, (n - 1) * part))
      n = sizes[slowest]
      found.append((slowest, "all_reduce", n, 2 * (n - 1) / n * part))
  return found


def choices(
  table: Table,
  profile: Profile,
  context: Context,
  link: Links,
) -> list[Prediction]:
  """Predicts every way that may be best for a table, the fastest first.

  The Zen paper's rule, that the best scheme is either Balanced Parallelism or
  Hierarchical Centralization (Theorem 1), with latency and local work in it,
  and with the dense exchange.
  """
  found = [
    predict(scheme, table, profile, context, link, groups)
    for scheme, groups in [("dense", 1), *sparse_ways(table.width, context)]
  ]
  return sorted(found, key=lambda p: p.seconds)


def sparse_ways(width: int, context: Context) -> list[tuple[str, int]]:
  """Returns the schemes that may be best for a table, with column groups.

  Ranges are left out: zen sends the same messages in better balance (Lemma 1 of
  the Zen paper).
  """
  n = context.sizes[-1]
  groups = [g for g in range(1, n + 1) if n % g == 0 and g <= max(width, 1)]
  others = [("all_gather", 1), ("recursive_doubling", 1)]
  return others + [("zen", g) for g in groups]


def assumed(table: Table, devices: int) -> Profile:
  """Returns densities of a vocabulary, for tables that were not measured."""
  rows, union = buffer_sizes.assumed_rows(table, devices)
  return Profile(rows=rows, fullest=rows, union=union, devices=devices)
