"""The same network where exchanges run beside the backward pass: simulated.

Nothing here is measured. Links and memory are those of presets, a step's
computation is the least that the memory's peak lets it take.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from benchmarks.groups import model as models
from benchmarks.groups import ways
from benchmarks.groups.ways import Stops
from benchmarks.planned.models import Model
from benchmarks.planner import baselines
from benchmarks.planner import exhaustive
import zenjax
from zenjax._src.machine import topologies
from zenjax._src.machine.cost import Profile
from zenjax._src.planner.plan_search import search
from zenjax._src.planner.timeline import GroupCosts

_DEVICE, _DEVICES = "h100", 8
_NETWORK = "10gbit"
_IMAGES = (32, 1024)
# Sums in another order.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
  """Iteration times on a machine, in seconds.

  Attributes:
    machine: Its name.
    images: Of a device and step.
    compute_s: Of a step without any exchange.
    each_s: With an exchange for each leaf.
    cuts_s: With two exchanges, by how many leaves are in the first.
    one_s: With one.
    mergecomp: Where halving ends; one stop where it is no cut.
    mergecomp_s: How long that takes.
    search: What the exact search takes.
    search_s: How long that takes.
  """

  machine: str
  images: int
  compute_s: float
  each_s: float
  cuts_s: tuple[float, ...]
  one_s: float
  mergecomp: Stops
  mergecomp_s: float
  search: Stops
  search_s: float

  @property
  def unimodal(self) -> bool:
    """Whether time never falls again behind the best cut."""
    return is_unimodal(self.cuts_s)


def is_unimodal(seconds: tuple[float, ...]) -> bool:
  """Falling, or equal up to rounding, and from some place on rising."""
  steps = [
    math.copysign(1, after - before)
    for before, after in zip(seconds, seconds[1:])
    if abs(after - before) > _ROUNDING * before
  ]
  return steps == sorted(steps)


def machines() -> dict[str, zenjax.planner.Topology]:
  """By name: devices that one fabric joins, and hosts of one on a network."""
  return {
    f"{_DEVICES} x {_DEVICE}, NVLink": zenjax.planner.Topology.preset(
      _DEVICE, _DEVICES
    ),
    f"{_DEVICES} x {_DEVICE}, {_NETWORK}": zenjax.planner.Topology.network(
      _NETWORK, _DEVICES, _DEVICE
    ),
  }


def simulate(
  model: Model, profiles: Mapping[str, Profile], least: int
) -> list[dict[str, Any]]:
  """On every machine, of few and many images; what is compressed by zen."""
  found = []
  memory = topologies.known_machine(_DEVICE).memory_bandwidth
  for name, topology in machines().items():
    for images in _IMAGES:
      gradients = models.compressed(model, images, least)
      compute_s = models.moved_bytes(model, images) / memory
      costs = ways.priced(gradients, profiles, topology, compute_s)
      found.append(dataclasses.asdict(_on(costs, name, images, compute_s)))
  return found


def _on(
  costs: ways.Priced,
  machine: str,
  images: int,
  compute_s: float,
) -> Simulated:
  n = len(costs.tensors)
  cut = [
    ways.seconds_of(costs, baselines.cut_at(costs.groups, k))
    for k in range(1, n + 1)
  ]
  halved = baselines.mergecomp(costs.groups)
  best, best_s = exhaustive.exhaustive(costs.groups)
  return Simulated(
    machine=machine,
    images=images,
    compute_s=compute_s,
    each_s=ways.seconds_of(costs, search(GroupCosts(costs.tensors))),
    cuts_s=tuple(cut[:-1]),
    one_s=cut[-1],
    mergecomp=ways.stops_of(halved),
    mergecomp_s=ways.seconds_of(costs, halved),
    search=ways.stops_of(best),
    search_s=best_s,
  )
