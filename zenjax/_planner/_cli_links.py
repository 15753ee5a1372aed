"""`python -m zenjax links`."""

import argparse
import dataclasses
import math
from typing import Any
import warnings

import jax
from jax.sharding import Mesh
import numpy as np

from zenjax._columns import columns
from zenjax._planner import _links
from zenjax._planner._topology import Topology


def run(options: argparse.Namespace) -> None:
  """Measures the links between devices of this process, prints and saves."""
  devices = _devices(options.devices)
  mesh = Mesh(np.array(devices), ("data",))
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    found = _links.measure_links(mesh, repeats=options.repeats)
  print(table(found))
  for warning in caught:
    print(f"note: {warning.message}")
  if options.json:
    options.json.write_text(found.to_json(), encoding="utf-8")
    print(f"saved {options.json}")


def table(found: Topology) -> str:
  """Fits of each level, and local work."""
  lines = [f"{found.devices} x {found.name}, {found.source}"]
  for level in found.levels:
    rows = [(level.name, "latency us", "GB/s", "line misses by")]
    for fit in level.fits:
      rate = (
        f"{fit.bandwidth / 1e9:.3g}" if math.isfinite(fit.bandwidth) else "-"
      )
      rows.append(
        (fit.op, f"{fit.latency_s * 1e6:.4g}", rate, f"{fit.error:.0%}")
      )
    lines += columns(rows)
    link = level.link
    lines.append(
      f"for other numbers of devices: {link.latency_s * 1e6:.4g} us a message,"
      f" {link.bandwidth / 1e9:.3g} GB/s"
    )
  work = dataclasses.asdict(found.levels[-1].link.work)
  told = [f"{name} {s * 1e9:.3g} ns" for name, s in work.items()]
  return "\n".join([*lines, f"a device's own work: {', '.join(told)}"])


def _devices(wanted: int | None) -> list[Any]:
  if wanted:
    try:  # Only the CPU's are made; others are there.
      jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
      pass  # JAX runs already, with those it has.
  devices = jax.devices()
  if len(devices) < (wanted or 2):
    raise ValueError(
      f"--devices must be at most those that JAX sees, {len(devices)}"
      f" {devices[0].platform}, got {wanted}; on CPU --devices 8 makes 8 of"
      " them."
    )
  return devices[:wanted]
