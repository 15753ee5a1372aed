"""`sync`: a training step on one table, synchronized in different ways."""

import argparse
import functools
import os

import jax
from jax.sharding import Mesh
import numpy as np

from benchmarks import table
from benchmarks import variants
from benchmarks import workloads
from benchmarks.harness import Case
from benchmarks.training import Training
from benchmarks.variants import AXIS

MB = 1e6
COLUMNS = (
  table.fact("dense\nMB", "dense_bytes", unit=MB),
  table.fact("density\n%", "density", ".2f", unit=0.01),
  table.fact("union\n%", "union_density", ".2f", unit=0.01),
  table.fact("wire\nMB", "wire_bytes", ".2f", unit=MB),
  table.fact("wire/\nbound", "over_bound", ".2f"),
  table.fact("imbalance\npush", "push_imbalance", ".2f"),
  table.fact("\npull", "pull_imbalance", ".2f"),
  table.fact("rounds", "rounds", ".1f"),
  table.WRONG,
  table.COMPILE,
  table.TIME,
  table.SPREAD,
  table.time_over("pmean", "over\npmean"),
  table.added_over("pmean", "none", "added/\nadded"),
)
# Tables alive at once on a device: parameters, gradient, two of scratch.
_TABLES = 4


def cases(options: argparse.Namespace) -> list[Case]:
  """One case for each workload and variant asked for.

  Raises:
    ValueError: There are too few devices, or too little memory.
  """
  devices = jax.devices()
  if len(devices) < options.devices:
    raise ValueError(
      f"`--devices` must not exceed the devices of this machine, got"
      f" {options.devices} of {len(devices)}: ask for fewer."
    )
  mesh = Mesh(np.array(devices[: options.devices]), (AXIS,))
  return [
    case
    for name in options.workloads or workloads.NAMES
    for case in _cases_of(name, mesh, options)
  ]


def _cases_of(name, mesh, options):
  workload = workloads.get(name, full_size=options.full_size)
  _check_memory(workload, mesh)
  group = f"{name}  {workload.rows:,} x {workload.width}"
  training = Training(workload, mesh, options.batches)
  return [
    Case(
      group=group,
      name=variant.name,
      build=functools.partial(training.build, variant),
    )
    for variant in _variants(workload, options)
  ]


def _variants(workload, options):
  if workload.density == 1:
    candidates = (*variants.BASELINES, *variants.DENSE)
  elif options.pinned:
    candidates = (*variants.BASELINES, *variants.SPARSE, *variants.PINNED)
  else:
    candidates = (*variants.BASELINES, *variants.SPARSE)
  return variants.chosen(candidates, options.variants)


def _check_memory(workload, mesh):
  if mesh.devices.flat[0].platform != "cpu":
    return  # Each device has memory of its own, and says when it is full.
  need = mesh.size * _TABLES * workload.bytes
  have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  if need > have:
    raise ValueError(
      f"`--full-size` must fit in memory: {workload.name} on {mesh.size} CPU"
      f" devices needs about {need / 1e9:.0f} GB, got {have / 1e9:.0f} GB. Ask"
      " for fewer devices, other workloads or the scaled size."
    )
