"""Topologies: the links of a machine, level by level, and its memory.

A level is an axis of a mesh; its links are all alike. A topology comes from a
preset of published figures, from the line rate of a network, from
`measure_links`, or from a file.
"""

import dataclasses
import json
import math
import os
import pathlib
from typing import Annotated

from zenjax._src.core import checked_json
from zenjax._src.core.checked_json import NOT_EMPTY
from zenjax._src.core.checked_json import NOT_NEGATIVE
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Source
from zenjax._src.machine import rates
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work
from zenjax._src.machine.machines import known_machine
from zenjax._src.machine.machines import Machine
from zenjax._src.machine.machines import NCCL_NETWORK_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
  """A straight line through the measured times of one collective.

  Attributes:
    op: The collective.
    latency_s: Time of an empty one.
    bandwidth: Bytes a second that a device receives; infinite where larger
      ones took no longer.
    error: Largest distance of a measured time from the line, over that time.
  """

  op: str
  latency_s: float
  bandwidth: float
  error: float

  def seconds(self, received: float) -> float:
    """Returns the time in which a device receives so many bytes."""
    return self.latency_s + received / self.bandwidth


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
  """Devices along one axis of a mesh, and the links between them.

  Attributes:
    name: The axis.
    devices: Devices along it.
    link: The link between any two of them.
    fits: Lines through the collectives that were measured.

  Example:
    >>> import zenjax
    >>> link = zenjax.planner.Link(bandwidth=3e9, latency_s=2e-5)
    >>> rack = zenjax.planner.Level(name="data", devices=16, link=link)
    >>> zenjax.planner.Topology(levels=(rack,)).devices
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
  """The links of a machine and the memory of its devices.

  Attributes:
    levels: From the slowest link to the fastest, as the axes of `zen_sync`.
    memory_bytes: Memory of a device; None where it does not matter.
    name: Name of the machine.
    source: Origin of the figures: a publication, or a measurement.
    ports: Network cards of a host, which its devices share.

  Example:
    >>> import zenjax
    >>> pod = zenjax.planner.Topology.preset(
    ...   "h100", 8, hosts=4, network="400 Gbit/s", ports=8
    ... )
    >>> [(level.name, level.devices) for level in pod.levels]
    [('host', 4), ('device', 8)]
    >>> pod.devices, pod.levels[1].link.bandwidth
    (32, 450000000000.0)
    >>> zenjax.planner.Topology.from_json(pod.to_json()) == pod
    True
  """

  levels: tuple[Level, ...]
  memory_bytes: float | None = None
  name: str = ""
  source: str = ""
  ports: int = 1

  def __post_init__(self):
    _check_ports(self.ports)
    names = [level.name for level in self.levels]
    if not names or len(set(names)) != len(names):
      raise ValueError(
        "`levels` of a Topology must name at least one axis, each once, got"
        f" {names}."
      )
    if self.memory_bytes is not None and not self.memory_bytes > 0:
      raise ValueError(
        "`memory_bytes` of a Topology must be positive or None, got"
        f" {self.memory_bytes!r}."
      )

  @property
  def devices(self) -> int:
    """Number of all devices."""
    return math.prod(self.sizes)

  @property
  def sizes(self) -> tuple[int, ...]:
    """Devices along each level."""
    return tuple(level.devices for level in self.levels)

  @property
  def links(self) -> dict[str, Link]:
    """Link of each axis, as the cost model takes them."""
    return {level.name: level.link for level in self.levels}

  def level(self, name: str) -> Level:
    """Returns the level called `name`; raises `ValueError` if there is none."""
    for level in self.levels:
      if level.name == name:
        return level
    names = [level.name for level in self.levels]
    raise ValueError(f"`name` must be a level, one of {names}, got {name!r}.")

  def resized(self, **devices: int) -> "Topology":
    """Returns the same links with so many devices along the named levels.

    Measured curves hold for the number of devices they were measured with: for
    another one the link's bandwidth and latency stand.
    """
    for name in devices:
      self.level(name)
    levels = tuple(
      dataclasses.replace(x, devices=devices.get(x.name, x.devices))
      for x in self.levels
    )
    return dataclasses.replace(self, levels=levels)

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
    known = known_machine(machine)
    work = _floor(known)
    link = Link(bandwidth=known.bandwidth, latency_s=known.latency_s, work=work)
    levels = [Level(name="device", devices=devices, link=link)]
    name, source = machine, f"{machine}: {known.source}"
    if (hosts > 1) != (network is not None):
      raise ValueError(
        "`network` must be given where `hosts` exceeds 1, and only there, got"
        f" {hosts=} and {network=}; say network='100gbit'."
      )
    _check_ports(ports)
    if network is not None:
      bits = _bits("network", network)
      levels.insert(0, _network_level(hosts, bits, ports / devices, work))
      name = _on_network(machine, bits, ports)
      source += f"; {rates.in_words(bits)}: {NETWORK_SOURCE}"
    elif ports > 1:
      raise ValueError(
        "`ports` must be given where `network` is, whose cards they are, got"
        f" {ports=} of one host; leave it out."
      )
    return cls(
      levels=tuple(levels),
      memory_bytes=known.memory_bytes,
      name=name,
      source=source,
      ports=ports,
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
      >>> hosts.name, hosts.levels[0].link.bandwidth
      ('25 Gbit/s, 2 network cards a host', 6250000000.0)
    """
    bits = _bits("rate", rate)
    known = None if machine is None else known_machine(machine)
    _check_ports(ports)
    work = _floor(known) if known else Work()
    source = f"{rates.in_words(bits)}: {NETWORK_SOURCE}"
    return cls(
      levels=(_network_level(hosts, bits, ports, work),),
      memory_bytes=known.memory_bytes if known else None,
      name=_on_network(machine, bits, ports),
      source=f"{source}; {machine}: {known.source}" if known else source,
      ports=ports,
    )

  def to_json(self) -> str:
    """Returns all of it as text, for `from_json`."""
    document = {
      "version": _VERSION,
      "name": self.name,
      "source": self.source,
      "memory_bytes": self.memory_bytes,
      "ports": self.ports,
      "levels": [dataclasses.asdict(_level_record(x)) for x in self.levels],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"

  @classmethod
  def from_json(cls, text: str) -> "Topology":
    """Reads the text of `to_json`.

    Raises:
      ValueError: It is no JSON, of another version, or holds impossible values;
        the message names the entry.
    """
    return _parsed(text, Source("the topology", _REMEDY))

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Topology":
    """Reads a file of `to_json`; raises `ValueError` as `from_json` does."""
    try:
      text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
      raise ValueError(
        f"`path` must be a topology's file, but {os.fspath(path)!r} cannot be"
        f" read ({error.strerror}); {_REMEDY}."
      ) from error
    return _parsed(text, Source(f"the topology {os.fspath(path)!r}", _REMEDY))


# --- known machines and networks ----------------------------------------------

NETWORK_SOURCE = "its line rate, a peak; latency from NCCL's tuning table"


def _floor(known: Machine) -> Work:
  """Returns the least that a device's own part can take, by its memory's peak.

  A table is read once to find its nonzero rows. What is received passes through
  memory twice, as it is packed or merged and as it is written, and is read and
  written each time. Starting kernels and looking up rows count as nothing here;
  `zenjax.planner.measure_work` measures them.
  """
  byte_s = 1 / known.memory_bandwidth
  return Work(mask_byte=byte_s, move_byte=4 * byte_s)


def _network_level(hosts: int, bits: float, share: float, work: Work) -> Level:
  """Returns hosts on a network, of which a device has a share of a card."""
  link = Link(bandwidth=bits / 8 * share, latency_s=NCCL_NETWORK_S, work=work)
  return Level(name="host", devices=hosts, link=link)


def with_rate(topology: Topology, bits: float) -> Topology:
  """Returns a topology whose hosts have network cards of another rate.

  Args:
    topology: A machine, whose slowest level gets the rate.
    bits: Line rate of a card in bits a second; `topology.ports` of them serve
      all devices within one of that level.
  """
  slowest = topology.levels[0]
  share = topology.ports / math.prod(topology.sizes[1:])
  work = slowest.link.work
  level = _network_level(slowest.devices, bits, share, work)
  level = dataclasses.replace(level, name=slowest.name)
  return dataclasses.replace(topology, levels=(level, *topology.levels[1:]))


def _on_network(machine: str | None, bits: float, ports: int) -> str:
  on = f"{machine} on " if machine else ""
  return f"{on}{rates.in_words(bits)}, {rates.cards(ports)}"


def _bits(name: str, rate: str | float) -> float:
  try:
    return rates.bits_a_second(rate)
  except ValueError as error:
    raise ValueError(f"`{name}` {error}") from error


def _check_ports(ports: int) -> None:
  if isinstance(ports, bool) or not isinstance(ports, int) or ports < 1:
    raise ValueError(
      "`ports` must be the network cards of a host, a whole number of at least"
      f" 1, got {ports!r}."
    )


# --- JSON ---------------------------------------------------------------------

_VERSION = 1
_REMEDY = "write it with `Topology.to_json`, or measure with `measure_links`"
_Seconds = Annotated[float, NOT_NEGATIVE]
_Rate = Annotated[float, POSITIVE]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CurveRecord:
  op: str
  devices: int
  points: Annotated[tuple[tuple[_Seconds, _Seconds], ...], NOT_EMPTY]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FitRecord:
  op: str
  latency_s: _Seconds
  bandwidth: _Rate | None  # None if infinite, which JSON does not have
  error: _Seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LevelRecord:
  name: str
  devices: Annotated[int, POSITIVE]
  bandwidth: _Rate
  latency_s: _Seconds
  buffer_s: _Seconds = 0.0  # older files have none
  work: Work = Work()
  curves: tuple[_CurveRecord, ...]
  fits: tuple[_FitRecord, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TopologyRecord:
  name: str
  source: str
  memory_bytes: _Rate | None = None
  ports: Annotated[int, POSITIVE] = 1  # older files have none
  levels: tuple[_LevelRecord, ...]


def _level_record(level: Level) -> _LevelRecord:
  link = level.link
  return _LevelRecord(
    name=level.name,
    devices=level.devices,
    bandwidth=link.bandwidth,
    latency_s=link.latency_s,
    buffer_s=link.buffer_s,
    work=link.work,
    curves=tuple(
      _CurveRecord(op=op, devices=n, points=points)
      for (op, n), points in sorted(link.curves.items())
    ),
    fits=tuple(
      _FitRecord(
        op=fit.op,
        latency_s=fit.latency_s,
        bandwidth=fit.bandwidth if math.isfinite(fit.bandwidth) else None,
        error=fit.error,
      )
      for fit in level.fits
    ),
  )


def _parsed(text: str, source: Source) -> Topology:
  fields = checked_json.fields(text, ("version", _VERSION), source)
  record = checked_json.parse(_TopologyRecord, fields, source)
  try:
    return Topology(
      levels=tuple(map(_level, record.levels)),
      memory_bytes=record.memory_bytes,
      name=record.name,
      source=record.source,
      ports=record.ports,
    )
  except ValueError as error:
    raise source.broken(f"is refused: {str(error).rstrip('.')}") from error


def _level(record: _LevelRecord) -> Level:
  return Level(
    name=record.name,
    devices=record.devices,
    link=Link(
      bandwidth=record.bandwidth,
      latency_s=record.latency_s,
      buffer_s=record.buffer_s,
      curves={(x.op, x.devices): x.points for x in record.curves},
      work=record.work,
    ),
    fits=tuple(
      Fit(
        op=x.op,
        latency_s=x.latency_s,
        bandwidth=math.inf if x.bandwidth is None else x.bandwidth,
        error=x.error,
      )
      for x in record.fits
    ),
  )
