"""What the formulas say beside what a network run has measured."""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from benchmarks import netns
from benchmarks import workloads
from benchmarks.network import profiles
from benchmarks.network.calibration import Point
from benchmarks.network.variants import VARIANTS
import zenjax
from zenjax._src.machine import cost
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.registry import SPARSE

# Hosts to which the formula is carried on, beyond those that were run.
_BEYOND = (16, 64, 256, 1024)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
  """A measured cell and what was predicted for it."""

  hosts: int
  rate: str
  workload: str
  variant: str
  measured_s: float
  predicted: cost.Prediction
  line_s: float  # that the link needs for its bytes

  @property
  def error(self) -> float:
    return self.predicted.seconds / self.measured_s - 1

  @property
  def by_cores(self) -> bool:
    """Whether the link is busy for less than half of the time predicted.

    The rest are the hosts' shared cores: local work, and what Gloo and the
    kernel take to move the bytes.
    """
    return self.line_s < self.predicted.seconds / 2


def link(
  document: dict[str, Any], hosts: int, rate: str
) -> zenjax.planner.Link:
  """The links of one testbed as the run itself measured them.

  Raises:
    ValueError: The run has no calibration for them.
  """
  points: dict[str, list[tuple[float, float]]] = {}
  for c in document["calibration"]:
    if (c["hosts"], c["rate"]) == (hosts, rate):
      point = Point(hosts, rate, c["op"], c["words"])
      seconds = float(np.median(c["times_s"]))
      points.setdefault(c["op"], []).append((point.received_bytes, seconds))
  work = document.get("work", {}).get(str(hosts))
  if not points or work is None:
    raise ValueError(
      f"FILE must hold a calibration of {hosts} hosts at {rate}, and has none:"
      " run `network` without --no-calibration."
    )
  # Older files have a price of a collective beside its curve as well. Two runs
  # on one machine found it ten times apart, and times fit no better with it.
  work = {name: s for name, s in work.items() if name != "collective"}
  limit = netns.RATES[rate]
  return zenjax.planner.Link(
    bandwidth=limit.bytes_per_s if limit else 1e10,
    latency_s=min(y for curve in points.values() for _, y in curve) / hosts,
    curves={(op, hosts): tuple(sorted(c)) for op, c in points.items()},
    work=zenjax.planner.Work(**work),
  )


def predicted(
  name: str,
  workload: workloads.Workload,
  hosts: int,
  batches: int,
  on: zenjax.planner.Link,
) -> cost.Prediction | None:
  """For a variant whose sizes fit; None for the others."""
  variant = VARIANTS[name]
  options = variant.options
  scheme = options["scheme"]
  if scheme in SPARSE and not variant.pinned or variant.rows_out:
    return None
  unit = SPARSE[scheme].unit if scheme in SPARSE else None
  table = profiles.table(workload, unit)
  profile = profiles.profile(workload, hosts, unit, batches)
  groups = buffer_sizes.choose_column_groups(
    table, hosts, options.get("partition", "auto")
  )
  context = Context(axes=("data",), sizes=(hosts,), mean=True)
  groups = groups if scheme == "zen" else 1
  return cost.predict(scheme, table, profile, context, on, groups)


def cells(document: dict[str, Any]) -> list[Cell]:
  """Every cell of a run for which there is a prediction."""
  found = []
  for (name, hosts, rate), members in sections(document):
    dense = _went_dense(members)
    on = link(document, hosts, rate)
    workload, batches = workloads.get(name), document["options"]["batches"]
    for variant, seconds in times(members).items():
      # Past break-even every scheme takes the dense path.
      taken = "psum" if variant in dense else variant
      prediction = predicted(taken, workload, hosts, batches, on)
      if prediction is not None:
        found.append(
          Cell(
            hosts=hosts,
            rate=rate,
            workload=name,
            variant=variant,
            measured_s=float(np.median(seconds)),
            predicted=prediction,
            line_s=prediction.received / on.bandwidth,
          )
        )
  return found


def beyond(
  name: str, rate: str, batches: int, latency_s: float
) -> dict[int, list[cost.Prediction]]:
  """By formula alone, for more hosts than were run: the fastest first.

  The union grows by the power law through what 8 hosts touch, links are at line
  rate, local work is left out.
  """
  workload = workloads.get(name)
  profile = profiles.profile(workload, 8, None, batches)
  limit = netns.RATES[rate]
  bandwidth = limit.bytes_per_s if limit else 1e10
  on = zenjax.planner.Link(bandwidth=bandwidth, latency_s=latency_s)
  return {
    n: cost.choices(
      profiles.table(workload, None),
      profile,
      Context(axes=("data",), sizes=(n,), mean=True),
      on,
    )
    for n in _BEYOND
  }


def sections(
  document: dict[str, Any],
) -> Iterator[tuple[tuple[str, int, str], list[dict[str, Any]]]]:
  """The file's cells of every (workload, hosts, rate)."""
  by_section = lambda c: (c["workload"], c["hosts"], c["rate"])
  cells = sorted(document["cells"], key=by_section)
  for section, members in itertools.groupby(cells, by_section):
    yield section, list(members)


def times(members: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
  """By variant, of every round the seconds until the last host was through."""
  return {
    c["variant"]: [max(of_hosts) for of_hosts in c["host_times_s"]]
    for c in members
    if c["host_times_s"] and not c["wrong"]
  }


def _went_dense(members: Sequence[dict[str, Any]]) -> set[str]:
  """Variants that sent at least what a dense exchange does."""
  return {
    c["variant"]
    for c in members
    if c["wire_bytes"] >= c["facts"]["dense_bytes"] and c["variant"] != "ring"
  }
