"""A machine as the planner sees it: its links, level by level, and its memory.

A mesh axis is a level; the links of a level are all alike, as `zenjax.Link`.
"""

import dataclasses
import json
import math
import os
import pathlib

from zenjax._link import Link
from zenjax._link import Work
from zenjax._planner import _level_json
from zenjax._planner import _machines
from zenjax._planner._levels import Level

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
    >>> pod = zenjax.Topology.preset("h100", 8, hosts=4, network="400gbit")
    >>> [(level.name, level.devices) for level in pod.levels]
    [('host', 4), ('device', 8)]
    >>> pod.devices, pod.levels[1].link.bandwidth
    (32, 450000000000.0)
    >>> zenjax.Topology.from_json(pod.to_json()) == pod
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
    known = _machines.machine(machine)
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
      source += f"; {network}: {_machines.NETWORK_SOURCE}"
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
    known = None if machine is None else _machines.machine(machine)
    work = known.work if known else Work()
    source = f"{rate}: {_machines.NETWORK_SOURCE}"
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
      "levels": [_level_json.document(level) for level in self.levels],
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
        f"`text` must be a topology in JSON: {error}; {_level_json.REMEDY}."
      ) from error
    fields = _level_json.object(document, "the topology")
    if fields.get("version") != _VERSION:
      raise _level_json.broken(
        "the topology", f"be of version {_VERSION}", fields.get("version")
      )
    levels = _level_json.get(fields, "levels", list, "the topology")
    memory = fields.get("memory_bytes")
    return cls(
      levels=tuple(_level_json.parse(x, i) for i, x in enumerate(levels)),
      memory_bytes=None
      if memory is None
      else _level_json.number(fields, "memory_bytes", "the topology"),
      name=_level_json.get(fields, "name", str, "the topology"),
      source=_level_json.get(fields, "source", str, "the topology"),
    )

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Topology":
    """Reads a file of `to_json`; raises `ValueError` as `from_json` does."""
    try:
      text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
      raise ValueError(
        f"`path` must be a topology's file, but {os.fspath(path)!r} cannot be"
        f" read ({error.strerror}); {_level_json.REMEDY}."
      ) from error
    return cls.from_json(text)


def _network_level(
  name: str, hosts: int, rate: str, share: float, work: Work
) -> Level:
  bandwidth, latency_s = _machines.network(rate)
  link = Link(bandwidth=bandwidth * share, latency_s=latency_s, work=work)
  return Level(name=name, devices=hosts, link=link)
