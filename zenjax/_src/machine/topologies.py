"""Describes machines: the links along each axis, and the memory of a device.

A topology comes from published figures (`preset`), from the line rate of a
network (`network`), from `measure_links`, or from a file (`load`).
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
from zenjax._src.machine.machines import NCCL_NETWORK_S

_Count = Annotated[int, POSITIVE]
_SOURCE = Source(
  "the topology",
  "write it with `Topology.to_json`, or measure it with `measure_links`",
)
_NETWORK = "its line rate, a peak; latency from NCCL's tuning table"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology(checked_json.Document):
  """The links of a machine, and the memory of its devices.

  The planner needs it. Make it with `Topology.preset` or `Topology.network` for
  a machine that you do not have, and with `zenjax.planner.measure_links` for
  one that you have.

  Attributes:
    axes: Names of the levels, from the slowest link to the fastest.
    sizes: Number of devices along each level.
    links: The link between two devices along each level.
    memory_bytes: Memory of a device; None if it is not known.
    name: Name of the machine.
    source: Where the figures come from: a publication or a measurement.
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
        "`axes` of a Topology must be different names, with one size and one"
        f" link for each, got axes {self.axes}, sizes {self.sizes} and"
        f" {len(self.links)} links."
      )
    checked_json.check(self, _SOURCE)

  @property
  def devices(self) -> int:
    """The number of all devices."""
    return math.prod(self.sizes)

  def with_hosts(self, hosts: int) -> "Topology":
    """Returns the same machine with another number of hosts.

    Args:
      hosts: Number of devices along the slowest level.
    """
    return dataclasses.replace(self, sizes=(hosts, *self.sizes[1:]))

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
    """Returns a known machine with its published figures.

    Published figures are peaks, not measurements; `source` names the
    publication. The work of the device is a lower bound, from the peak of its
    memory.

    Args:
      machine: "a100", "h100", "h200", "l4", "tpu-v4", "tpu-v5e", "tpu-v5p",
        "tpu-v6e" or "v100".
      devices: Number of devices of a host, connected by the machine's fabric.
      hosts: Number of hosts.
      network: Line rate of one network card, for example "100 Gbit/s",
        "100gbit", "12.5 GB/s", or a number of bits per second. Give it if there
        is more than one host.
      ports: Number of network cards of a host, which its devices share.

    Raises:
      ValueError: `machine` is not known, `network` cannot be read or is
        ambiguous, `ports` is less than 1, or several hosts have no network.
    """
    if (hosts > 1) != (network is not None):
      raise ValueError(
        "`network` must be given if `hosts` is more than 1, and only then, got"
        f" {hosts=} and {network=}. Give both, such as 4 and '100gbit'."
      )
    known = known_machine(machine)
    host = cls(
      axes=("device",),
      sizes=(devices,),
      links=(known.link,),
      memory_bytes=known.memory_bytes,
      name=machine,
      source=f"{machine}: {known.source}",
      ports=ports,
    )
    if network is None:
      return host
    between = cls.network(network, hosts, machine, ports=ports)
    bits, work = rates.bits_a_second(network), between.links[0].work
    return dataclasses.replace(
      between,
      axes=(*between.axes, *host.axes),
      sizes=(*between.sizes, *host.sizes),
      links=(_network_link(bits, ports / devices, work), *host.links),
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
    """Returns hosts with one device each on a network.

    Args:
      rate: Line rate of a network card, for example "25 Gbit/s", "25gbit",
        "25Gbps", "3.1 GB/s", or a number of bits per second.
      hosts: Number of hosts.
      machine: The type of the devices, such as "h100". Its memory gives a lower
        bound for the work of a device, which otherwise takes no time.
      ports: Number of network cards of a host.

    Raises:
      ValueError: `rate` cannot be read or is ambiguous, `machine` is not known,
        or `ports` is less than 1.

    Example:
      >>> import zenjax
      >>> hosts = zenjax.planner.Topology.network("25 Gbit/s", 8, ports=2)
      >>> hosts.name, hosts.links[0].bandwidth
      ('25 Gbit/s, 2 network cards a host', 6250000000.0)
    """
    bits = rates.bits_a_second(rate)
    checked_json.parse(_Count, ports, _SOURCE, "ports")
    words = rates.in_words(bits)
    name = f"{words}, {ports} network card{'s' if ports != 1 else ''} a host"
    source = f"{words}: {_NETWORK}"
    memory_bytes, work = None, Work()
    if machine is not None:
      known = known_machine(machine)
      memory_bytes, work = known.memory_bytes, known.link.work
      name = f"{machine} on {name}"
      source = f"{source}; {machine}: {known.source}"
    return cls(
      axes=("host",),
      sizes=(hosts,),
      links=(_network_link(bits, ports, work),),
      memory_bytes=memory_bytes,
      name=name,
      source=source,
      ports=ports,
    )

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Topology":
    """Reads a topology from a file with the text of `to_json`.

    Args:
      path: Path of the file.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is not a topology.
    """
    return cls.from_json(pathlib.Path(path).read_text(encoding="utf-8"))


def _network_link(bits: float, cards: float, work: Work) -> Link:
  """Returns the link of a device with `cards` cards, possibly a fraction."""
  return Link(bandwidth=bits / 8 * cards, latency_s=NCCL_NETWORK_S, work=work)
