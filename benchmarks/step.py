"""`step`: whole training steps, dense against rows, tables of any size.

Gradient, synchronization, optimizer and parameters, everything donated. The
same look-ups go to every table: of equally many distinct rows, spread over it.
"""

import argparse
from collections.abc import Sequence
import functools
import itertools
import os

import jax
from jax.sharding import Mesh
import numpy as np

from benchmarks import table
from benchmarks import whole_step
from benchmarks.harness import Case
from benchmarks.variants import AXIS

MB = 1e6
COLUMNS = (
  table.fact("state\nMB", "state_bytes", unit=MB),
  table.fact("temporary\nMB", "temporary", unit=MB),
  table.fact("wire\nMB", "wire_bytes", ".2f", unit=MB),
  table.WRONG,
  table.COMPILE,
  table.TIME,
  table.SPREAD,
  table.Column("dense\nover", lambda r, p: _over(r, p, "dense"), ".1f"),
  table.Column("over\nsmallest", lambda r, p: _over_smallest(r, p), ".2f"),
)


def _over(result, peers, name):
  """How much longer the dense step of the same table takes."""
  rows = result.name.split(" ", 1)[1]
  other = peers.get(f"{name} {rows}")
  return other.median_s / result.median_s if other else float("nan")


def _over_smallest(result, peers):
  """Time over that of the same variant on the smallest table."""
  variant = result.name.split(" ", 1)[0]
  same = [p for name, p in peers.items() if name.split(" ", 1)[0] == variant]
  first = min(same, key=lambda p: p.facts["state_bytes"])
  return result.median_s / first.median_s


def cases(options: argparse.Namespace) -> list[Case]:
  """Every variant on every number of rows, all in one group: they take turns.

  Raises:
    ValueError: There are too few devices, too little memory, or no such
      variant.
  """
  devices = jax.devices()
  if len(devices) < options.devices:
    raise ValueError(
      f"`--devices` must not exceed the devices of this machine, got"
      f" {options.devices} of {len(devices)}: ask for fewer."
    )
  mesh = Mesh(np.array(devices[: options.devices]), (AXIS,))
  names = options.variants or list(whole_step.VARIANTS)
  if devices[0].platform == "cpu":
    # Others have memory of their own, and say when it is full.
    check_memory(names, options, mesh.size)
  return [
    Case(
      group=title(options),
      name=f"{name} {rows:,}",
      build=functools.partial(
        whole_step.build, name, whole_step.Setting.of(options, rows), mesh
      ),
    )
    for rows, name in itertools.product(options.rows, names)
  ]


def title(options: argparse.Namespace) -> str:
  """What all cases have in common."""
  return (
    f"{options.look_ups:,} look-ups a device, D = {options.width},"
    f" {options.optimizer}"
  )


def check_memory(
  names: Sequence[str], options: argparse.Namespace, devices: int
) -> None:
  """Raises ValueError where this machine cannot hold all cases at once."""
  have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  need = 0
  for rows, name in itertools.product(options.rows, names):
    tables = whole_step.tables_alive(name, options.optimizer, devices)
    need += tables * devices * rows * options.width * 4
  if need > have:
    raise ValueError(
      "`--rows` must fit in memory together, for steps on all of them take"
      f" turns: they need about {need / 1e9:.0f} GB, got {have / 1e9:.0f} GB."
      " Ask for fewer or smaller tables, fewer `--devices` or `--variants`."
    )
