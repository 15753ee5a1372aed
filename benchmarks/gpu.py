"""`gpu`: everything that one GPU can show, and nothing that it cannot.

Operations by XLA and by Pallas beside the floor, all the local work of zen_sync
for 8 devices beside reads of their gradients, the report, and what both would
make of links. Without a GPU the same runs on a small table, with the kernels
interpreted: that shows answers, and says that it shows no times of kernels.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax

from benchmarks import harness
from benchmarks import kernels
from benchmarks import link_times
from benchmarks import local_sync
from benchmarks import record
from benchmarks import table
from benchmarks.harness import Case
from benchmarks.harness import Result
from benchmarks.link_times import Predicted
from benchmarks.table import Peers
import zenjax

_PLATFORM = "cuda"
_PARTITIONS = "hash", "columns"
_INTERPRETED = " interpreted"
# Rows, width and density: of the issue, and what an interpreter can do.
_ON_GPU = 4_194_304, 128, 0.01
_ON_CPU = 4000, 128, 0.02
# Of the tables of 8 devices: temporaries and the rows that travel.
_BESIDE = 1.5

NO_GPU = (
  "No GPU here: the kernels were interpreted on a small table, which shows"
  " their answers. Nothing was measured on a GPU, and no time is of a kernel."
)


def _over_read(result: Result, peers: Peers) -> float:
  """Time over one read of the gradient, or of the 8, as fast as a copy."""
  copy = peers.get("copy")
  if copy is None or result is copy:
    return math.nan
  reads = _gradients(result) * copy.median_s / 2
  return result.median_s / reads


def _gradients(result: Result) -> int:
  return local_sync.DEVICES if result.name.startswith("zen") else 1


COLUMNS = (
  *kernels.COLUMNS[:-2],
  table.fact("temporary\nMB", "temporary_bytes", unit=1e6),
  kernels.OVER_FLOOR,
  table.Column("over one\nread", _over_read, ".2f"),
)


def run(options: argparse.Namespace) -> int:
  """Measures and prints; returns 1 if an answer was wrong, 130 on Ctrl-C.

  Raises:
    ValueError: The accelerator is no GPU, or has too little memory.
  """
  on_gpu = jax.default_backend() == "gpu"
  _take_sizes(options, on_gpu)
  shape = options.rows, options.width, options.density
  _check_device(shape)
  sync = local_sync.Sync(*shape)
  cases = _cases(options, sync, on_gpu)
  results, complete = harness.measure(cases, repeats=options.repeats)
  found = _predictions(sync, results, on_gpu)
  ratios = _ratios(results) if on_gpu else {}
  _show(results, found, ratios, sync, on_gpu)
  if not complete:
    print("Interrupted: this is what was measured until then.")
  if options.json:
    _save(options, results, complete, on_gpu, ratios, found, sync)
    print(f"Saved {options.json}")
  if not complete:
    return 130
  return int(any(result.wrong for result in results))


def _show(results, found, ratios, sync, on_gpu):
  device = jax.devices()[0].device_kind
  title = f"gpu: {device if on_gpu else 'no GPU, ' + device}"
  table.show(f"{title}, JAX {jax.__version__}", results, COLUMNS)
  if found:
    link_times.show(found)
  for name, state in list(sync.states.items())[-1:]:
    print(f"{name}:\n{zenjax.report(state)}\n")
  for name, ratio in ratios.items():
    print(f"{name}: {ratio:.2f} times one read of the gradient, {device}")
  if not on_gpu:
    print(NO_GPU)


def _take_sizes(options, on_gpu):
  sizes = _ON_GPU if on_gpu else _ON_CPU
  for name, size in zip(("rows", "width", "density"), sizes):
    if getattr(options, name) is None:
      setattr(options, name, size)


def _check_device(shape):
  """Raises ValueError where the tables cannot be."""
  device = jax.devices()[0]
  if device.platform not in ("gpu", "cpu"):
    raise ValueError(
      f"`gpu` must run on a GPU, or on a CPU to try it, got {device.platform};"
      " set JAX_PLATFORMS=cuda or JAX_PLATFORMS=cpu."
    )
  rows, width, _ = shape
  need = _BESIDE * local_sync.DEVICES * rows * width * 4
  have = (device.memory_stats() or {}).get("bytes_limit", math.inf)
  if need > have:
    raise ValueError(
      f"`--rows` x `--width` must fit {local_sync.DEVICES} times in memory, got"
      f" {rows} x {width}, which needs about {need / 1e9:.0f} GB of"
      f" {have / 1e9:.0f} GB: ask for fewer rows."
    )


def _cases(options, sync: local_sync.Sync, on_gpu: bool) -> list[Case]:
  # The other platform's kernels are seen by `kernels`.
  found = [c for c in kernels.cases(options) if not c.name.endswith(" tpu")]
  rows, width, density = sync.shape
  group = (
    f"{local_sync.DEVICES} x {rows:,} x {width}  {density:.1%}, all of zen_sync"
  )
  copy = next(case for case in found if case.name == "copy")
  found.append(dataclasses.replace(copy, group=group))
  for partition in _PARTITIONS:
    for way, platform in (("xla", None), ("pallas", _PLATFORM)):
      interpreted = platform is not None and not on_gpu
      name = f"zen {partition} {way}{_INTERPRETED if interpreted else ''}"
      build = functools.partial(
        sync.build, name, partition, platform, interpreted
      )
      found.append(Case(group=group, name=name, build=build))
  return found


def _ratios(results: Sequence[Result]) -> dict[str, float]:
  """Times over one read: of `mask_pack`, and of everything."""
  found = {}
  groups = dict.fromkeys(result.group for result in results)
  for group in groups:
    peers = {r.name: r for r in results if r.group == group}
    for name, result in peers.items():
      ratio = _over_read(result, peers)
      if name.startswith(("mask_pack", "zen")) and math.isfinite(ratio):
        found[name] = ratio
  return found


def _predictions(
  sync: local_sync.Sync, results: Sequence[Result], on_gpu: bool
) -> list[Predicted]:
  """From what a GPU took; the time of a CPU's local work says nothing."""
  rows, width, _ = sync.shape
  ways, profile = [], None
  for result in results:
    if result.name not in sync.states or result.wrong:
      continue
    if result.name.endswith(_INTERPRETED):
      continue  # The formula knows no implementation.
    state = sync.states[result.name]
    profile = zenjax.planner.profile(state)[local_sync.LEAF]
    local = result.median_s / local_sync.DEVICES if on_gpu else math.nan
    groups = int(zenjax.stats(state)[local_sync.LEAF]["column_groups"])
    way = link_times.Way(name=result.name, column_groups=groups, local_s=local)
    ways.append(way)
  if profile is None:
    return []
  return link_times.predictions(rows, width, profile, ways)


def _save(
  options: argparse.Namespace,
  results: Sequence[Result],
  complete: bool,
  on_gpu: bool,
  ratios: dict[str, float],
  found: Sequence[Predicted],
  sync: local_sync.Sync,
) -> None:
  told: dict[str, Any] = {
    "measured_on_gpu": on_gpu,
    "note": None if on_gpu else NO_GPU,
    "times_over_one_read": ratios,
    "predicted_not_measured": [
      dataclasses.asdict(p) | {"seconds": p.seconds} for p in found
    ],
    "reports": {name: zenjax.report(s) for name, s in sync.states.items()},
  }
  settings = {
    name: str(value) if name == "json" else value
    for name, value in vars(options).items()
  }
  record.save_json(
    options.json, results, options=settings, complete=complete, told=told
  )
