"""Topologies: the links of a machine along each axis, and its memory.

A topology comes from a preset of published figures, from the line rate of a
network, from `measure_links`, or from a file.
"""

import dataclasses
import math
import os
import pathlib
from typing import Annotated, ClassVar

from zenjax._src.core import checked_json
from zenjax._src.core.checked_json import NOT_EMPTY
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Source
from zenjax._src.machine import rates
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work
from zenjax._src.machine.machines import known_machine
from zenjax._src.machine.machines import Machine
from zenjax._src.machine.machines import NCCL_NETWORK_S

_Count = Annotated[int, POSITIVE]
_SOURCE = Source(
  "the topology",
  "write it with `Topology.to_json`, or measure with `measure_links`",
)
_NETWORK = "its line rate, a peak; latency from NCCL's tuning table"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology(checked_json.Document):
  """The links of a machine and the memory of its devices.

  Attributes:
    axes: Names of the levels, from the slowest link to the fastest.
    sizes: Devices along each.
    links: The link between any two devices along each.
    memory_bytes: Memory of a device; None if it is not known.
    name: Name of the machine.
    source: Origin of the figures: a publication, or a measurement.
    ports: Network cards of a host, which its devices share.

  Example:
    >>> import zenjax
    >>> pod = zenjax.planner.Topology.preset(
    ...   "h100", 8, hosts=4, network="400 Gbit/s", ports=8
    ... )
    >>> pod.axes, pod.sizes, pod.devices
    (('host', 'device'), (4, 8), 32)
    >>> pod.links[1].bandwidth
    450000000000.0
    >>> zenjax.planner.Topology.from_json(pod.to_json()) == pod
    True
  """

  axes: Annotated[tuple[str, ...], NOT_EMPTY]
  sizes: tuple[_Count, ...]
  links: tuple[Link, ...]
  memory_bytes: Annotated[float, POSITIVE] | None = None
  name: str = ""
  source: str = ""
  ports: _Count = 1

  _VERSION: ClassVar[tuple[str, int]] = "version", 2
  _SOURCE: ClassVar[Source] = _SOURCE

  def __post_init__(self):
    lengths = {len(self.axes), len(self.sizes), len(self.links)}
    if len(set(self.axes)) != len(self.axes) or len(lengths) > 1:
      raise ValueError(
        "`axes` of a Topology must be different names, with a size and a link"
        f" for each, got axes {self.axes}, sizes {self.sizes} and"
        f" {len(self.links)} links."
      )
    checked_json.check(self, _SOURCE)

  @property
  def devices(self) -> int:
    """Number of all devices."""
    return math.prod(self.sizes)

  def with_hosts(self, hosts: int) -> "Topology":
    """Returns the same with so many devices along the slowest links."""
    return dataclasses.replace(self, sizes=(hosts, *self.sizes[1:]))

  def with_rate(self, bits: float) -> "Topology":
    """Returns the same with network cards of so many bits a second.

    The cards of a host serve all devices within one of the slowest level.
    """
    link = _network_link(
      bits, self.ports / math.prod(self.sizes[1:]), self.links[0].work
    )
    return dataclasses.replace(self, links=(link, *self.links[1:]))

  @classmethod
  def preset(
    cls,
    machine: str,
    devices: int,
    *,
    hosts: int = 1,
    network: str | float | None = None,
    ports: int = 1,
  ) -> "Topology":
    """Returns a known machine, by its published figures.

    All of them are peaks and not measurements; `source` names the publication.
    The device's own work follows from the peak of its memory and is a floor.

    Args:
      machine: "a100", "h100", "h200", "l4", "tpu-v4", "tpu-v5e", "tpu-v5p",
        "tpu-v6e" or "v100".
      devices: Devices of a host, which the machine's own fabric joins.
      hosts: Number of hosts.
      network: Line rate of one network card between hosts, as "100 Gbit/s",
        "100gbit", "12.5 GB/s", or a number of bits a second.
      ports: Network cards of a host, which its devices share. One is assumed,
        and the topology's name says so.

    Raises:
      ValueError: `machine` is not known, `network` is no rate or may be read as
        two, `ports` is less than 1, or hosts have no network.
    """
    if (hosts > 1) != (network is not None):
      raise ValueError(
        "`network` must be given where `hosts` exceeds 1, and only there, got"
        f" {hosts=} and {network=}; say network='100gbit'."
      )
    known = known_machine(machine)
    link = Link(
      bandwidth=known.bandwidth, latency_s=known.latency_s, work=_floor(known)
    )
    found = cls(
      axes=("device",),
      sizes=(devices,),
      links=(link,),
      memory_bytes=known.memory_bytes,
      name=machine,
      source=f"{machine}: {known.source}",
      ports=ports,
    )
    if network is None:
      return found
    between = cls.network(network, hosts, machine, ports=ports)
    # A device has a share of its host's cards.
    slow = dataclasses.replace(
      between.links[0], bandwidth=between.links[0].bandwidth / devices
    )
    return dataclasses.replace(
      between,
      axes=(*between.axes, "device"),
      sizes=(hosts, devices),
      links=(slow, link),
    )

  @classmethod
  def network(
    cls,
    rate: str | float,
    hosts: int,
    machine: str | None = None,
    *,
    ports: int = 1,
  ) -> "Topology":
    """Returns hosts of one device each on a network at line rate.

    Args:
      rate: Line rate of a network card, as "25 Gbit/s", "25gbit", "25Gbps",
        "3.1 GB/s", or a number of bits a second.
      hosts: Number of hosts.
      machine: Machine of the devices, as for `preset`, whose memory bounds the
        device's own work from below. Without one it takes no time.
      ports: Network cards of a host. One is assumed, and the topology's name
        says so.

    Raises:
      ValueError: `rate` is no rate or may be read as two, `machine` is not
        known, or `ports` is less than 1.

    Example:
      >>> import zenjax
      >>> hosts = zenjax.planner.Topology.network("25 Gbit/s", 8, ports=2)
      >>> hosts.name, hosts.links[0].bandwidth
      ('25 Gbit/s, 2 network cards a host', 6250000000.0)
    """
    bits = rates.bits_a_second(rate)
    checked_json.parse(_Count, ports, _SOURCE, "ports")
    known = None if machine is None else known_machine(machine)
    words = rates.in_words(bits)
    name = f"{words}, {ports} network card{'s' if ports != 1 else ''} a host"
    source = f"{words}: {_NETWORK}"
    return cls(
      axes=("host",),
      sizes=(hosts,),
      links=(_network_link(bits, ports, _floor(known) if known else Work()),),
      memory_bytes=known.memory_bytes if known else None,
      name=f"{machine} on {name}" if known else name,
      source=f"{source}; {machine}: {known.source}" if known else source,
      ports=ports,
    )

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Topology":
    """Reads a file of `to_json`; raises `ValueError` as `from_json` does."""
    try:
      return cls.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
      raise ValueError(
        f"`path` must be a topology's file, but {os.fspath(path)!r} is none:"
        f" {error}"
      ) from error


def _floor(known: Machine) -> Work:
  """Returns the least that a device's own part can take, by its memory's peak.

  A table is read once to find its nonzero rows. What is received passes through
  memory twice, as it is packed or merged and as it is written, and is read and
  written each time. Starting kernels and looking up rows count as nothing here;
  `zenjax.planner.measure_work` measures them.
  """
  byte_s = 1 / known.memory_bandwidth
  return Work(mask_byte=byte_s, move_byte=4 * byte_s)


def _network_link(bits: float, cards: float, work: Work) -> Link:
  """Returns the link of a device that has so many cards, or a share of one."""
  return Link(bandwidth=bits / 8 * cards, latency_s=NCCL_NETWORK_S, work=work)
