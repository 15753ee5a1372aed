"""`predict`: what the formulas say beside what a network run has measured."""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np
import rich.box
import rich.table

from benchmarks import netns
from benchmarks import table as tables
from benchmarks import workloads
from benchmarks.network import profiles
from benchmarks.network.calibration import Point
from benchmarks.network.variants import VARIANTS
import zenjax
from zenjax import _auto
from zenjax import _cost
from zenjax import _plan
from zenjax._schemes import SPARSE
from zenjax._schemes.base import Context

# Hosts to which the formula is carried on, beyond those that were run.
_BEYOND = (16, 64, 256, 1024)
# What `auto` chooses among, by the variants that were timed.
_AUTO = {
  ("dense", 1): ("psum",),
  ("all_gather", 1): ("all_gather-pinned",),
  ("recursive_doubling", 1): ("recursive_doubling-pinned",),
  ("zen", 1): ("zen-hash-pinned",),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
  """A measured cell and what was predicted for it."""

  hosts: int
  rate: str
  workload: str
  variant: str
  measured_s: float
  psum_s: float
  predicted: _cost.Prediction

  @property
  def error(self) -> float:
    return self.predicted.seconds / self.measured_s - 1

  @property
  def by_cores(self) -> bool:
    """Whether the hosts' shared cores limit it, and not the link."""
    return self.predicted.local_s > self.predicted.wire_s


def link(document: dict[str, Any], hosts: int, rate: str) -> zenjax.Link:
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
  limit = netns.RATES[rate]
  return zenjax.Link(
    bandwidth=limit.bytes_per_s if limit else 1e10,
    latency_s=min(y for curve in points.values() for _, y in curve) / hosts,
    curves={(op, hosts): tuple(sorted(c)) for op, c in points.items()},
    work=zenjax.Work(**work),
  )


def predicted(
  name: str,
  workload: workloads.Workload,
  hosts: int,
  batches: int,
  on: zenjax.Link,
) -> _cost.Prediction | None:
  """For a variant whose sizes fit; None for the others."""
  variant = VARIANTS[name]
  options = variant.options
  scheme = options["scheme"]
  if scheme in SPARSE and not variant.pinned or variant.rows_out:
    return None
  unit = SPARSE[scheme].unit if scheme in SPARSE else None
  table = profiles.table(workload, unit)
  profile = profiles.profile(workload, hosts, unit, batches)
  groups = _plan.choose_column_groups(
    table, hosts, options.get("partition", "auto")
  )
  context = Context(axes=("data",), sizes=(hosts,), mean=True)
  groups = groups if scheme == "zen" else 1
  return _cost.predict(scheme, table, profile, context, on, groups)


def cells(document: dict[str, Any]) -> list[Cell]:
  """Every cell of a run for which there is a prediction."""
  found = []
  by_section = lambda c: (c["workload"], c["hosts"], c["rate"])
  ordered = sorted(document["cells"], key=by_section)
  for (name, hosts, rate), members in itertools.groupby(ordered, by_section):
    timed = {
      c["variant"]: float(np.median([max(t) for t in c["host_times_s"]]))
      for c in members
      if c["host_times_s"] and not c["wrong"]
    }
    on = link(document, hosts, rate)
    workload, batches = workloads.get(name), document["options"]["batches"]
    for variant, seconds in timed.items():
      prediction = predicted(variant, workload, hosts, batches, on)
      if prediction is not None:
        found.append(
          Cell(
            hosts=hosts,
            rate=rate,
            workload=name,
            variant=variant,
            measured_s=seconds,
            psum_s=timed.get("psum", math.nan),
            predicted=prediction,
          )
        )
  return found
