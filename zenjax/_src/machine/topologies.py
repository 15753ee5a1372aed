"""A machine as the planner sees it: its links, level by level, and its memory.

A mesh axis is a level; the links of a level are all alike, as
`zenjax.planner.Link`.
"""

from collections.abc import Callable
import dataclasses
import json
import math
import os
import pathlib
import re
from typing import Any

from zenjax._src.machine import link_models
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work

# One level of a machine: devices along a mesh axis and what connects them.


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


# Levels as JSON: written, and read with every entry checked.


REMEDY = "write it with `Topology.to_json`, or measure with `measure_links`"


def level_document(level: Level) -> dict[str, Any]:
  """A level as JSON holds it."""
  link = level.link
  finite = lambda x: x if math.isfinite(x) else None
  return {
    "name": level.name,
    "devices": level.devices,
    "bandwidth": link.bandwidth,
    "latency_s": link.latency_s,
    "buffer_s": link.buffer_s,
    "work": dataclasses.asdict(link.work),
    "curves": [
      {"op": op, "devices": n, "points": [list(p) for p in points]}
      for (op, n), points in sorted(link.curves.items())
    ],
    "fits": [
      {**dataclasses.asdict(fit), "bandwidth": finite(fit.bandwidth)}
      for fit in level.fits
    ],
  }


def parse(entry: Any, index: int) -> Level:
  """A level from its document; raises `ValueError` by what is wrong in it."""
  where = f"level {index}"
  fields = object(entry, where)
  work = object(fields.get("work", {}), f"work of {where}")
  known = {f.name for f in dataclasses.fields(link_models.Work)}
  if unknown := set(work) - known:
    raise broken(f"work of {where}", f"hold only {sorted(known)}", unknown)
  curves = dict(
    _parse_curve(curve, f"curve {i} of {where}")
    for i, curve in enumerate(get(fields, "curves", list, where))
  )
  fits = get(fields, "fits", list, where)
  numbers = {k: number(work, k, f"work of {where}") for k in work}
  return Level(
    name=get(fields, "name", str, where),
    devices=get(fields, "devices", int, where),
    link=Link(
      bandwidth=number(fields, "bandwidth", where, positive=True),
      latency_s=number(fields, "latency_s", where),
      # Files of before it was known have none.
      buffer_s=number({"buffer_s": 0.0, **fields}, "buffer_s", where),
      curves=curves,
      work=link_models.Work(**numbers),
    ),
    fits=tuple(
      _parse_fit(fit, f"fit {i} of {where}") for i, fit in enumerate(fits)
    ),
  )


def _parse_curve(entry: Any, where: str):
  fields = object(entry, where)
  points = []
  for point in get(fields, "points", list, where):
    pair = dict(enumerate(point)) if isinstance(point, list) else {}
    if len(pair) != 2:
      raise broken(where, "hold pairs of bytes and seconds", point)
    points.append(tuple(number(pair, i, where) for i in (0, 1)))
  sizes = [x for x, _ in points]
  if not points or sizes != sorted(set(sizes)):
    raise broken(where, "hold points of ascending bytes", points)
  op = get(fields, "op", str, where)
  if op not in link_models.COLLECTIVES:
    raise broken(where, f"be of one of {list(link_models.COLLECTIVES)}", op)
  return (op, get(fields, "devices", int, where)), tuple(points)


def _parse_fit(entry: Any, where: str) -> Fit:
  fields = object(entry, where)
  infinite = fields.get("bandwidth", 0) is None
  return Fit(
    op=get(fields, "op", str, where),
    latency_s=number(fields, "latency_s", where),
    bandwidth=math.inf
    if infinite
    else number(fields, "bandwidth", where, positive=True),
    error=number(fields, "error", where),
  )


def object(value: Any, where: str) -> dict[str, Any]:
  """The value; raises `ValueError` where it is no object."""
  if not isinstance(value, dict):
    raise broken(where, "be an object", value)
  return value


def get(fields: dict[str, Any], name: str, kind: Callable, where: str) -> Any:
  """A field of exactly that kind; raises `ValueError` where it is another."""
  value = fields.get(name)
  if type(value) is not kind:  # True is no number here.
    raise broken(f"{name!r} of {where}", f"be a {kind.__name__}", value)
  return value


def number(
  fields: dict[Any, Any], name: Any, where: str, positive: bool = False
) -> float:
  """A finite field, not negative; raises `ValueError` where it is none."""
  value = fields.get(name)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise broken(f"{name!r} of {where}", "be a number, not negative", value)
  if not math.isfinite(value) or value < 0:
    raise broken(f"{name!r} of {where}", "be a number, not negative", value)
  if positive and not value:
    raise broken(f"{name!r} of {where}", "be positive", value)
  return float(value)


def broken(what: str, must: str, value: Any) -> ValueError:
  """The error that names the field, its rule, its value and the remedy."""
  return ValueError(f"{what} must {must}, got {value!r}; {REMEDY}.")


# Known machines: figures that others publish, each with its source.
#
# What a vendor publishes is a peak: what collectives reach of it has to be
# measured (`zenjax.planner.measure_links`). A bandwidth here is what one device
# receives while it sends as many bytes; vendors state both directions added up.
# Latencies are of one message between two devices.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
  """Devices that one fast fabric joins.

  Attributes:
    bandwidth: Bytes a second that a device receives.
    latency_s: Of a message.
    memory_bytes: Of a device.
    memory_bandwidth: Bytes a second that a device reads or writes there.
    source: Where these are from, and of what kind they are.
  """

  bandwidth: float
  latency_s: float
  memory_bytes: float
  memory_bandwidth: float
  source: str

  @property
  def work(self) -> Work:
    """The least that a device's own part can take: its memory's peak.

    To find nonzero rows a table is read once. What is received passes through
    memory twice, as it is packed or merged and as it is written, and is read
    and written each time. No kernel starts and no row is looked up in no time,
    as it says here: `zenjax.planner.measure_work` knows more.
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
  """Raises `ValueError` where `name` is not in `MACHINES`."""
  if name not in MACHINES:
    raise ValueError(
      f"`machine` must be one of {', '.join(MACHINES)}, got {name!r}; measure"
      " any other with `zenjax.planner.measure_links`."
    )
  return MACHINES[name]


def network(rate: str) -> tuple[float, float]:
  """Bytes a second and seconds a message of a port, from say "100gbit".

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


_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
  """The links of a machine and the memory of its devices.

  Attributes:
    levels: From the slowest link to the fastest, as the axes of `zen_sync`.
    memory_bytes: Of a device; None where it does not matter.
    name: Of the machine.
    source: Where the figures are from, and whether they were measured.

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
    """All of them."""
    return math.prod(self.sizes)

  @property
  def sizes(self) -> tuple[int, ...]:
    """Devices along each level."""
    return tuple(level.devices for level in self.levels)

  @property
  def links(self) -> dict[str, Link]:
    """That of each axis, as the cost model takes them."""
    return {level.name: level.link for level in self.levels}

  def level(self, name: str) -> Level:
    """The level called `name`; raises `ValueError` where there is none."""
    for level in self.levels:
      if level.name == name:
        return level
    names = [level.name for level in self.levels]
    raise ValueError(f"`name` must be a level, one of {names}, got {name!r}.")

  def resized(self, **devices: int) -> "Topology":
    """The same links with so many devices along the named levels.

    Curves that were measured hold for the number they were measured with: for
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
    """A known machine, by the figures that are published of it.

    Peaks all of them, and not measurements; `source` says whose. So the
    device's own work, by its memory's peak, is a floor.

    Args:
      machine: "h100", "h200", "tpu-v4", "tpu-v5e", "tpu-v5p" or "tpu-v6e".
      devices: That its own fabric joins.
      hosts: How many such groups there are.
      network: Between them, say "100gbit" or "25gbit": of one port.
      ports: Of such a group; by default one a device. A device has its share.

    Raises:
      ValueError: `machine` or `network` is not known, or hosts are joined by
        nothing.
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
      outer = _network_level("host", hosts, network, share, known.work)
      levels.insert(0, outer)
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
    """Hosts of one device each on a network at line rate.

    Args:
      rate: Say "100gbit".
      hosts: How many.
      machine: Whose devices these are, as for `preset`: its memory tells how
        long a device's own work takes at least. Without one it takes no time.

    Raises:
      ValueError: `rate` or `machine` is not known.
    """
    known = None if machine is None else known_machine(machine)
    work = known.work if known else Work()
    source = f"{rate}: {NETWORK_SOURCE}"
    return cls(
      levels=(_network_level("host", hosts, rate, 1.0, work),),
      memory_bytes=known.memory_bytes if known else None,
      name=f"{machine} on {rate}" if known else rate,
      source=f"{source}; {machine}: {known.source}" if known else source,
    )

  def to_json(self) -> str:
    """All of it, as text that `from_json` reads."""
    document = {
      "version": _VERSION,
      "name": self.name,
      "source": self.source,
      "memory_bytes": self.memory_bytes,
      "levels": [level_document(level) for level in self.levels],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"

  @classmethod
  def from_json(cls, text: str) -> "Topology":
    """Reads what `to_json` wrote.

    Raises:
      ValueError: It is no JSON, of another version, or holds what cannot be;
        the message names the entry.
    """
    try:
      document = json.loads(text)
    except ValueError as error:
      raise ValueError(
        f"`text` must be a topology in JSON: {error}; {REMEDY}."
      ) from error
    fields = object(document, "the topology")
    if fields.get("version") != _VERSION:
      raise broken(
        "the topology", f"be of version {_VERSION}", fields.get("version")
      )
    levels = get(fields, "levels", list, "the topology")
    memory = fields.get("memory_bytes")
    return cls(
      levels=tuple(parse(x, i) for i, x in enumerate(levels)),
      memory_bytes=None
      if memory is None
      else number(fields, "memory_bytes", "the topology"),
      name=get(fields, "name", str, "the topology"),
      source=get(fields, "source", str, "the topology"),
    )

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Topology":
    """Reads a file of `to_json`; raises `ValueError` as `from_json` does."""
    try:
      text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
      raise ValueError(
        f"`path` must be a topology's file, but {os.fspath(path)!r} cannot be"
        f" read ({error.strerror}); {REMEDY}."
      ) from error
    return cls.from_json(text)


def _network_level(
  name: str, hosts: int, rate: str, share: float, work: Work
) -> Level:
  bandwidth, latency_s = network(rate)
  link = Link(bandwidth=bandwidth * share, latency_s=latency_s, work=work)
  return Level(name=name, devices=hosts, link=link)
