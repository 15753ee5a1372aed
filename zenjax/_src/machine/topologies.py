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
import re
from typing import Annotated

from zenjax._src.core import checked_json
from zenjax._src.core.checked_json import NOT_EMPTY
from zenjax._src.core.checked_json import NOT_NEGATIVE
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Source
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work


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

  Example:
    >>> import zenjax
    >>> pod = zenjax.planner.Topology.preset(
    ...   "h100", 8, hosts=4, network="400gbit"
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

  def __post_init__(self):
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
    network: str | None = None,
    ports: int | None = None,
  ) -> "Topology":
    """Returns a known machine, by its published figures.

    All of them are peaks and not measurements; `source` names the publication.
    The device's own work follows from the peak of its memory and is a floor.

    Args:
      machine: "h100", "h200", "tpu-v4", "tpu-v5e", "tpu-v5p" or "tpu-v6e".
      devices: Devices of a host, which the machine's own fabric joins.
      hosts: Number of hosts.
      network: Line rate of one port between hosts, say "100gbit".
      ports: Ports of a host, which its devices share; by default one a device.

    Raises:
      ValueError: `machine` or `network` is not known, or hosts have no network.
    """
    known = known_machine(machine)
    link = Link(
      bandwidth=known.bandwidth, latency_s=known.latency_s, work=known.work
    )
    levels = [Level(name="device", devices=devices, link=link)]
    source = f"{machine}: {known.source}"
    if (hosts > 1) != (network is not None):
      raise ValueError(
        "`network` must be given where `hosts` exceeds 1, and only there, got"
        f" {hosts=} and {network=}; say network='100gbit'."
      )
    if network is not None:
      share = (devices if ports is None else ports) / devices
      levels.insert(0, _network_level(hosts, network, share, known.work))
      source += f"; {network}: {NETWORK_SOURCE}"
    return cls(
      levels=tuple(levels),
      memory_bytes=known.memory_bytes,
      name=machine,
      source=source,
    )

  @classmethod
  def network(
    cls, rate: str, hosts: int, machine: str | None = None
  ) -> "Topology":
    """Returns hosts of one device each on a network at line rate.

    Args:
      rate: Line rate, say "100gbit".
      hosts: Number of hosts.
      machine: Machine of the devices, as for `preset`, whose memory bounds the
        device's own work from below. Without one it takes no time.

    Raises:
      ValueError: `rate` or `machine` is not known.
    """
    known = None if machine is None else known_machine(machine)
    work = known.work if known else Work()
    source = f"{rate}: {NETWORK_SOURCE}"
    return cls(
      levels=(_network_level(hosts, rate, 1.0, work),),
      memory_bytes=known.memory_bytes if known else None,
      name=f"{machine} on {rate}" if known else rate,
      source=f"{source}; {machine}: {known.source}" if known else source,
    )

  def to_json(self) -> str:
    """Returns all of it as text, for `from_json`."""
    document = {
      "version": _VERSION,
      "name": self.name,
      "source": self.source,
      "memory_bytes": self.memory_bytes,
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


# --- known machines -----------------------------------------------------------
#
# Vendors publish peaks; the part of it that collectives reach has to be
# measured. A bandwidth here is what one device receives while it sends as many
# bytes; vendors state the sum of both directions. Latencies are those of one
# message between two devices.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
  """Devices that one fast fabric joins.

  Attributes:
    bandwidth: Bytes a second that a device receives.
    latency_s: Latency of a message.
    memory_bytes: Memory of a device.
    memory_bandwidth: Bytes a second that a device reads or writes there.
    source: Publication of these figures, and their kind.
  """

  bandwidth: float
  latency_s: float
  memory_bytes: float
  memory_bandwidth: float
  source: str

  @property
  def work(self) -> Work:
    """The least that a device's own part can take, by its memory's peak.

    A table is read once to find its nonzero rows. What is received passes
    through memory twice, as it is packed or merged and as it is written, and is
    read and written each time. Starting kernels and looking up rows count as
    nothing here; `zenjax.planner.measure_work` measures them.
    """
    byte_s = 1 / self.memory_bandwidth
    return Work(mask_byte=byte_s, move_byte=4 * byte_s)


# A hop of the ring protocol "Simple", in microseconds, from the table `hwLat`
# by which NCCL chooses its algorithms (NVIDIA/nccl, src/graph/tuning.cc).
_NCCL_NVLINK_S = 3.4e-6
_NCCL_NETWORK_S = 14e-6
# No figure is published; neighbouring chips are about a microsecond apart.
_ICI_S = 1e-6

_GB, _GIB = 1e9, 2.0**30
_FLOOR = "the device's own work is a floor, its memory's peak"


def _nvlink(memory_gb: float, memory_tb_s: float, device: str) -> Machine:
  return Machine(
    bandwidth=450 * _GB,
    latency_s=_NCCL_NVLINK_S,
    memory_bytes=memory_gb * _GB,
    memory_bandwidth=memory_tb_s * 1e12,
    source=(
      f"NVIDIA {device} data sheet: NVLink 900 GB/s both ways, {memory_gb} GB"
      f" at {memory_tb_s} TB/s, a peak; latency from NCCL's tuning table;"
      f" {_FLOOR}"
    ),
  )


def _ici(
  bandwidth: float, memory: float, memory_gb_s: float, page: str, figure: str
) -> Machine:
  return Machine(
    bandwidth=bandwidth,
    latency_s=_ICI_S,
    memory_bytes=memory,
    memory_bandwidth=memory_gb_s * _GB,
    source=(
      f"docs.cloud.google.com/tpu/docs/{page}: {figure}, a peak over all ports"
      " of a chip, which a mesh axis along one side of the torus does not have;"
      f" HBM {memory_gb_s:g} GB/s; latency assumed; {_FLOOR}"
    ),
  )


MACHINES: dict[str, Machine] = {
  "h100": _nvlink(80, 3.35, "H100 SXM"),
  "h200": _nvlink(141, 4.8, "H200 SXM"),
  # 4,096 chips reduce 1.1 PB/s together; six ports.
  "tpu-v4": _ici(
    1.1e15 / 4096, 32 * _GIB, 1200, "v4", "all-reduce 1.1 PB/s of 4,096 chips"
  ),
  "tpu-v5e": _ici(200 * _GB, 16 * _GB, 819, "v5e", "ICI 400 GB/s both ways"),
  "tpu-v5p": _ici(
    600 * _GB, 95 * _GIB, 2765, "v5p", "ICI 1,200 GB/s both ways"
  ),
  "tpu-v6e": _ici(400 * _GB, 32 * _GB, 1638, "v6e", "ICI 800 GB/s both ways"),
}

_RATE = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit)")
NETWORK_SOURCE = "its line rate, a peak; latency from NCCL's tuning table"


def known_machine(name: str) -> Machine:
  """Returns an entry of `MACHINES`; raises `ValueError` if there is none."""
  if name not in MACHINES:
    raise ValueError(
      f"`machine` must be one of {', '.join(MACHINES)}, got {name!r}; measure"
      " any other with `zenjax.planner.measure_links`."
    )
  return MACHINES[name]


def network(rate: str) -> tuple[float, float]:
  """Returns bytes a second and seconds a message of a port, say "100gbit".

  Raises:
    ValueError: `rate` is no number with "gbit" or "mbit" after it.
  """
  match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
  if match is None or not 0 < float(match[1]) < math.inf:
    raise ValueError(
      "`network` must be a positive number and gbit or mbit, say '100gbit',"
      f" got {rate!r}."
    )
  bits = float(match[1]) * {"mbit": 1e6, "gbit": 1e9}[match[2]]
  return bits / 8, _NCCL_NETWORK_S


def _network_level(hosts: int, rate: str, share: float, work: Work) -> Level:
  bandwidth, latency_s = network(rate)
  link = Link(bandwidth=bandwidth * share, latency_s=latency_s, work=work)
  return Level(name="host", devices=hosts, link=link)


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
