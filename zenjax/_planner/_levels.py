"""One level of a machine: devices along a mesh axis and what connects them."""

import dataclasses

from zenjax._link import Link


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
  """A straight line through what one collective took on one level.

  Attributes:
    op: The collective.
    latency_s: Of one that carries nothing.
    bandwidth: Bytes a second that a device receives; infinite where larger
      ones took no longer.
    error: Largest distance of a measured time from the line, over that time.
  """

  op: str
  latency_s: float
  bandwidth: float
  error: float

  def seconds(self, received: float) -> float:
    """For so many bytes."""
    return self.latency_s + received / self.bandwidth


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
  """Devices along one axis of a mesh, and what connects them.

  Attributes:
    name: Of the axis.
    devices: Along it.
    link: What connects a device to those.
    fits: Of each collective that was measured.

  Example:
    >>> import zenjax
    >>> link = zenjax.Link(bandwidth=3e9, latency_s=2e-5)
    >>> rack = zenjax.Level(name="data", devices=16, link=link)
    >>> zenjax.Topology(levels=(rack,)).devices
    16
  """

  name: str
  devices: int
  link: Link
  fits: tuple[Fit, ...] = ()

  def __post_init__(self):
    if not isinstance(self.devices, int) or self.devices < 1:
      raise ValueError(
        f"`devices` of level {self.name!r} must be a positive integer, got"
        f" {self.devices!r}."
      )
