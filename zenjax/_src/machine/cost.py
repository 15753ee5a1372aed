"""Cost model: the predicted time of an exchange on links and devices.

    seconds = sum over messages (steps * latency + bytes / bandwidth)
              + mask + rows handled

Messages are the schemes' own formulas (`Scheme.expected_messages`), so the
predicted bytes are those that are sent.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from zenjax._src.machine import link_models
from zenjax._src.machine.link_models import Links
from zenjax._src.machine.link_models import Phase
from zenjax._src.machine.link_models import Work
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
    skew: Load of the fullest of as many ranges of rows over the mean, for a
      device's rows and for the union's; None if it was not measured, and ranges
      are then not predicted.

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
  skew: tuple[float, float] | None = None

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
    wire_s: Time on the link.
    local_s: Time on the device.
    mask_s: The part of `local_s` before anything is sent.
    once_s: The part of `wire_s` that tables of one exchange pay once together.
    received: Bytes a device receives.
    collectives: Number of collectives.
    sizes: Rows of the first round, `(push, pull)`, that this is predicted for:
      just large enough as far as is known. None for dense schemes.
    phases: Terms of `wire_s`: `(axis, collective, devices, bytes)`.
    apart_s: A further term of `wire_s`, which no exchange shares.
  """

  scheme: str
  column_groups: int
  wire_s: float
  local_s: float
  received: float
  collectives: int
  mask_s: float = 0.0
  once_s: float = 0.0
  sizes: tuple[float, float] | None = None
  phases: tuple[Phase, ...] = ()
  apart_s: float = 0.0

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

  Raises:
    ValueError: A scheme of ranges, and `profile.skew` is None.
  """
  if scheme in DENSE:
    messages = DENSE[scheme].messages(table, context)
    mask = local = 0.0
    sizes = None
  else:
    messages, block, sizes = _sparse_messages(
      scheme, table, profile, context, column_groups
    )
    work = link_models.of_axis(context.axes[-1], link).work
    mask = _mask_s(table, work)
    local = mask
    for message in messages:
      received = float(received_bytes([message], context))
      # The blocks of a summed row arrive side by side and are written as one.
      whole = message.op == "all_gather" and column_groups > 1
      row = block * column_groups if whole else block
      local += _move_s(row, received, work)
  phases = [phase for m in messages for phase in phases_of(m, context)]
  return Prediction(
    scheme=scheme,
    column_groups=column_groups,
    wire_s=link_models.wire_s(phases, link),
    once_s=link_models.wire_s([(*phase[:3], 0.0) for phase in phases], link),
    local_s=local,
    mask_s=mask,
    received=float(received_bytes(messages, context)),
    collectives=len(messages),
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
    first_word=0,
    contiguous=scheme.contiguous,
  )
  n = context.devices
  union = min(profile.union_of(n), table.num_rows)
  push = buffer_sizes.fullest(profile.fullest, m, n * m)
  pull = buffer_sizes.fullest(union, m, m)
  if scheme.contiguous:
    if profile.skew is None:
      raise ValueError(
        f"`profile.skew` must be known to predict {name!r}, got None: it is"
        " the load of the fullest range of rows over the mean, for a device and"
        " for the union."
      )
    both = zip(profile.skew, (profile.fullest, union))
    push, pull = (skew * rows / m for skew, rows in both)
  push, pull = (min(x, plan.layout.slots) for x in (push, pull))
  messages = scheme.expected_messages(plan, context, push, pull)
  block = plan.block_width * table.wire_dtype.itemsize
  as_floats = [m._replace(words=float(m.words)) for m in messages]
  return as_floats, block, (float(push), float(pull))


def phases_of(message: Message, context: Context) -> list[Phase]:
  """Splits a message into the collectives along each axis that it crosses.

  Libraries sum and gather level by level: devices that share a slow link each
  send an equal part of an array over it.
  """
  sizes = dict(zip(context.axes, context.sizes))
  *fast, slowest = reversed([axis for axis in message.axes if axis in sizes])
  part = message.words * 4.0
  if not fast or message.op not in ("all_reduce", "all_gather"):
    n = devices_of(message, context)
    received = float(received_bytes([message], context))
    return [(message.axes[0], message.op, n, received)]
  found = []
  if message.op == "all_gather":
    for axis in (slowest, *reversed(fast)):
      n = sizes[axis]
      found.append((axis, "all_gather", n, (n - 1) * part))
      part *= n
    return found
  for axis in fast:
    n = sizes[axis]
    part /= n
    found.append((axis, "reduce_scatter", n, (n - 1) * part))
    found.append((axis, "all_gather", n, (n - 1) * part))
  n = sizes[slowest]
  return [*found, (slowest, "all_reduce", n, 2 * (n - 1) / n * part)]


def _mask_s(table: Table, work: Work) -> float:
  if table.look_ups is not None:
    return 0.0
  size = table.num_rows * table.width * table.dtype.itemsize
  return size * work.mask_byte + table.num_rows * work.mask_row


def _move_s(row: int, moved: float, work: Work) -> float:
  return moved * work.move_byte + moved / row * work.move_row


# Ranges are left out: zen sends the same messages in better balance (Lemma 1 of
# the Zen paper), and a ring is what a dense all-reduce is already.
CANDIDATES = ("dense", "all_gather", "recursive_doubling", "zen")


def choices(
  table: Table,
  profile: Profile,
  context: Context,
  link: Links,
) -> list[Prediction]:
  """Predicts every way that may be best for a table, the fastest first.

  The Zen paper's rule, that the best scheme is either Balanced Parallelism or
  Hierarchical Centralization (Theorem 1), with latency, local work and the
  efficiency of each collective in it, and with the dense exchange.
  """
  n = context.sizes[-1]
  found = []
  for scheme in CANDIDATES:
    divisors = [g for g in range(1, n + 1) if n % g == 0 and g <= table.width]
    for g in divisors if scheme == "zen" else [1]:
      found.append(predict(scheme, table, profile, context, link, g))
  return sorted(found, key=lambda p: p.seconds)


def assumed(table: Table, devices: int) -> Profile:
  """Returns densities of a vocabulary, for tables that were not measured."""
  rows, union = buffer_sizes.assumed_rows(table, devices)
  return Profile(rows=rows, fullest=rows, union=union, devices=devices)


def check_profile(profile: Any) -> None:
  """Raises `TypeError` unless it is None or a mapping of `Profile`s."""
  fit = isinstance(profile, Mapping) and all(
    isinstance(p, Profile) for p in profile.values()
  )
  if profile is not None and not fit:
    raise TypeError(
      "`profile` must map leaf names to what was measured of them, got"
      f" {profile!r}; give what `zenjax.planner.profile(state)` returns."
    )
