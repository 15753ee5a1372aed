"""Recorded runs as planning questions: leaves, and densities at any scale.

A trace has no program, so the times at which gradients are complete are
assumed. A table's is complete at the end of the backward pass, as its look-ups
come first in the forward pass; the others follow each other evenly over the
backward pass, which takes two thirds of a step.
"""

from collections.abc import Sequence
import dataclasses
import os
from typing import Any

import jax
import numpy as np

from zenjax import traces
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import union_growth
from zenjax._src.planner.choosing import Question
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.planner.union_growth import Growth
from zenjax._src.rows import leaf_util

# The part of a step before any gradient: the forward pass.
_FORWARD = 1 / 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
  """A run as the planner sees it.

  Attributes:
    gradients: Tables last. Only tables, where the trace tells of no others.
    growths: Growth of the union of each table.
    pooled: Row sets of a table: the unions of more devices are bounds only.
    whole: True if the trace has all leaves of the model.
  """

  gradients: tuple[Gradient, ...]
  growths: dict[str, Growth]
  pooled: int
  whole: bool

  def profiles(self, devices: int, batch: int = 1) -> dict[str, Profile]:
    """Returns densities for `batch` times the recorded look-ups of a device.

    A device with twice the look-ups touches what two recorded ones did.
    """
    return {
      name: _profile(growth, devices, batch)
      for name, growth in self.growths.items()
    }

  def question(
    self, topology: Topology, batch: int = 1, **options: Any
  ) -> Question:
    """Returns the question for a machine; `options` as `Question` has them."""
    larger = tuple(
      dataclasses.replace(g, look_ups=g.look_ups and g.look_ups * batch)
      for g in self.gradients
    )
    return Question(
      gradients=larger,
      topology=topology,
      axes=axes_of(topology),
      profiles=self.profiles(topology.devices, batch),
      **options,
    )


def axes_of(topology: Topology) -> tuple[str, ...]:
  """Names the mesh axes: `"data"` for one level, the levels' for several."""
  names = tuple(level.name for level in topology.levels)
  return ("data",) if len(names) == 1 else names


def recorded(trace: traces.Trace) -> Recorded:
  """Reads a run off its trace."""
  header = trace.header
  growths = {
    table.name: union_growth.growth(trace.sets[table.name], table.rows)
    for table in header.tables
  }
  leaves = header.leaves or tuple(
    traces.LeafInfo(name=t.name, shape=(t.rows, t.width), dtype=t.dtype)
    for t in header.tables
  )
  rest = [leaf for leaf in leaves if leaf.name not in growths]
  tables = [leaf for leaf in leaves if leaf.name in growths]
  backward = np.linspace(_FORWARD, 1, len(rest) + 1)[1:]
  return Recorded(
    gradients=(
      *_gradients(rest, [float(x) for x in backward]),
      *_gradients(tables, [1.0] * len(tables)),
    ),
    growths=growths,
    pooled=header.devices * header.steps,
    whole=bool(header.leaves),
  )


def profiles(
  directory: str | os.PathLike, gradients: Sequence[Gradient], devices: int
) -> dict[str, Profile]:
  """Reads the densities of a model's tables, for so many devices.

  Raises:
    ValueError: The trace is broken, or of another model.
  """
  trace = traces.read(directory)
  shapes = {
    g.name: leaf_util.table_shape(jax.ShapeDtypeStruct(g.shape, g.dtype), "row")
    for g in gradients
  }
  wrong = [
    f"{t.name!r} {t.rows} x {t.width} there, {shapes.get(t.name, 'none')} here"
    for t in trace.header.tables
    if shapes.get(t.name) != (t.rows, t.width)
  ]
  if wrong:
    raise ValueError(
      f"`trace` must be of the model that is planned, but of {wrong[0]}"
      f" ({len(wrong)} such tables); record steps of this model."
    )
  return recorded(trace).profiles(devices)


def _gradients(
  leaves: Sequence[traces.LeafInfo], ready: Sequence[float]
) -> list[Gradient]:
  return [
    Gradient(
      name=leaf.name,
      shape=leaf.shape,
      dtype=np.dtype(leaf.dtype),
      look_ups=leaf.look_ups,
      ready=at,
    )
    for leaf, at in zip(leaves, ready)
  ]


def _profile(growth: Growth, devices: int, batch: int) -> Profile:
  """Returns densities; beyond the pool the largest possible union."""
  rows = growth.bounds(batch)[1]
  # Larger batches are more alike than these: at most as uneven.
  mean = float(growth.sizes.mean())
  uneven = growth.fullest(devices) / mean if mean else 1.0
  return Profile(
    rows=rows,
    fullest=min(rows * uneven, float(growth.rows)),
    union=growth.bounds(devices * batch)[1],
    devices=devices,
  )
