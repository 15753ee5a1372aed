"""Models links between devices by latency and bandwidth, as the Zen paper."""

import dataclasses
from typing import Annotated

from zenjax._src.core import checked_json
from zenjax._src.core.checked_json import NOT_NEGATIVE
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Source

# How many messages follow each other in a collective of `n` devices.
_STEPS = {
  "all_gather": lambda n: n - 1,
  "all_reduce": lambda n: 2 * (n - 1),
  "all_to_all": lambda n: n - 1,
  "collective_permute": lambda n: 1,
  "reduce_scatter": lambda n: n - 1,
}

_Amount = Annotated[float, NOT_NEGATIVE]
_UNITS = "bandwidths are in bytes per second, times in seconds"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
  """The time of a device's own work in an exchange, in seconds.

  `zenjax.planner.measure_work` measures it. Pass it to `Link(work=...)`.

  Attributes:
    mask_byte: Time to find the nonzero rows, per byte of the table.
    mask_row: Time to find the nonzero rows, per row of the table.
    move_byte: Time to pack, merge and write rows, per byte received.
    move_row: The same, per row received; a part of a row takes as long.

  Example:
    >>> import zenjax
    >>> work = zenjax.planner.Work(mask_byte=3e-13)
    >>> link = zenjax.planner.Link(
    ...   bandwidth=12.5e9, latency_s=5e-6, work=work
    ... )
    >>> link.work.mask_byte
    3e-13
  """

  mask_byte: _Amount = 0.0
  mask_row: _Amount = 0.0
  move_byte: _Amount = 0.0
  move_row: _Amount = 0.0

  def __post_init__(self):
    checked_json.check(self, Source("the device's work", _UNITS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
  """The connection of a device to the others along a mesh axis.

  Use it to describe a machine by hand: `Topology(links=(link,), ...)`, or
  `zenjax.tune(state, link=link)`.

  Attributes:
    bandwidth: Bytes per second that a device receives while it sends as many.
    latency_s: Latency of a message between two devices, in seconds.
    work: Time of the device's own work; by default it takes no time.

  Example:
    >>> import zenjax
    >>> zenjax.planner.Link(bandwidth=12.5e9, latency_s=5e-6).bandwidth
    12500000000.0
  """

  bandwidth: Annotated[float, POSITIVE]
  latency_s: _Amount
  work: Work = Work()

  def __post_init__(self):
    checked_json.check(self, Source("the link", _UNITS))

  def seconds(self, op: str, devices: int, received: float) -> float:
    """Returns the time of a collective.

    Args:
      op: The collective, for example "all_gather".
      devices: Number of devices that take part.
      received: Bytes that a device receives.
    """
    return steps(op, devices) * self.latency_s + received / self.bandwidth


def steps(op: str, devices: int) -> int:
  """Returns the number of messages that follow each other in a collective."""
  return _STEPS[op](devices)
