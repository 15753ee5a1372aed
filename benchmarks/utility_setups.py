"""The set-ups of `utility`, and what every method makes of them.

The models of the Utility paper (`utility_model`) over a grid of
dense models, and over models with tables as the Zen paper has them, with zen
beside. Nothing here is measured.
"""

from collections.abc import Iterator
import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from benchmarks.planner import placing
from benchmarks.planner import utility_model
from benchmarks.planner.utility_model import Outcome
from benchmarks.planner.utility_model import Setup
import zenjax
from zenjax._src.machine import cost
from zenjax._src.planner import union_growth
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table

NETWORKS = ("1gbit", "10gbit", "25gbit", "100gbit")
# NVLink joins 8 devices: there is no more of it.
NVLINK = "NVLink 4"
DEVICES = (8, 16, 32, 64, 96)
BATCHES = (0.25, 0.5, 1.0)


class Dense(NamedTuple):
  """A model without tables: parameters, and backward at the full batch."""

  parameters: float
  backward_s: float


# ResNet-50 at 64 images on a V100 is the Utility paper's. ResNet-101 is taken
# to need 1.9 times as long, as its multiplications say, and BERT-base 0.27 s
# for 12 sequences of 512 at 10 TFLOP/s: assumed, as no figure is at hand.
DENSE = {
  "ResNet-50": Dense(25.6e6, 0.122),
  "ResNet-101": Dense(44.5e6, 0.232),
  "BERT-base": Dense(110e6, 0.270),
}


class Tabled(NamedTuple):
  """A model with a table, of a workload's name: the rest, and backward."""

  rest: float
  backward_s: float


# Parameters are those of the Zen paper. Its LSTM takes 114 ms a step on a V100;
# for the others 100 ms are assumed.
TABLED = {
  "lm1b-lstm": Tabled(20e6, 0.114),
  "criteo-deepfm": Tabled(68e6, 0.1),
  "iwslt-nmt": Tabled(31e6, 0.1),
  "squad-bert": Tabled(86e6, 0.1),
}
# The Zen paper: 6 ms to hash a gradient of 214 million elements on a V100.
_PACK_S = 0.006 / 214e6
# Steps of 4 devices to pool: as many sets as devices at most.
_STEPS = 32


class Found(NamedTuple):
  """A set-up on a named link, and what every method makes of it."""

  link: str
  batch: float
  setup: Setup
  outcomes: list[Outcome]

  @property
  def best(self) -> Outcome:
    return self.outcomes[0]

  def gain(self, method: str) -> float:
    return next(o.gain for o in self.outcomes if o.method == method)


def links(devices: int) -> dict[str, zenjax.planner.Link]:
  """Those that join so many devices."""
  found = {
    rate: zenjax.planner.Topology.network(rate, devices).levels[0].link
    for rate in NETWORKS
  }
  if devices == 8:
    found[NVLINK] = zenjax.planner.Topology.preset("h100", 8).levels[0].link
  return found


def dense() -> Iterator[Found]:
  """Models without tables."""
  grid = itertools.product(DENSE.items(), BATCHES, DEVICES)
  for (name, model), batch, devices in grid:
    for rate, link in links(devices).items():
      setup = Setup(
        model=name,
        gradient_bytes=4 * model.parameters,
        backward_s=model.backward_s * batch,
        devices=devices,
        link=link,
      )
      yield Found(rate, batch, setup, utility_model.outcomes(setup))


def tabled() -> Iterator[tuple[Found, placing.Use]]:
  """Models with one, and how it is used."""
  for name in TABLED:
    table, profiles = table_of(name)
    for devices, profile in profiles.items():
      for rate, link in links(devices).items():
        setup = with_table(name, table, profile, devices, link)
        found = Found(rate, 1.0, setup, utility_model.outcomes(setup))
        yield found, placing.Use(table=table, profile=profile)


def with_table(
  name: str,
  table: Table,
  profile: zenjax.planner.Profile,
  devices: int,
  link: zenjax.planner.Link,
) -> Setup:
  """One of `TABLED` where zen takes what its formula says, and packs rows."""
  model, size = TABLED[name], table.num_rows * table.width * 4
  context = Context(axes=("data",), sizes=(devices,), mean=True)
  ways = cost.choices(table, profile, context, link)
  exchange = next(p for p in ways if p.scheme == "zen")
  return Setup(
    model=name,
    gradient_bytes=4 * model.rest + size,
    backward_s=model.backward_s,
    devices=devices,
    link=link,
    table_bytes=size,
    zen_s=exchange.seconds + size / 4 * _PACK_S,
  )


@functools.cache
def pooled(name: str) -> union_growth.Growth:
  """Of a workload at the size for two cores, from steps of 4 devices."""
  scaled = workloads.SCALED[name]
  recorded = [
    [np.unique(ids) for ids in workloads.ids(scaled, 4, seed)]
    for seed in range(_STEPS)
  ]
  return union_growth.growth(recorded, scaled.rows)


def table_of(name: str) -> tuple[Table, dict[int, zenjax.planner.Profile]]:
  """The published table, with the densities of the smaller one."""
  full, growth = workloads.FULL[name], pooled(name)
  larger = full.rows / growth.rows
  f32 = jnp.dtype(jnp.float32)
  table = Table(
    name=name, num_rows=full.rows, width=full.width, dtype=f32, wire_dtype=f32
  )
  return table, {
    n: zenjax.planner.Profile(
      rows=growth.union(1) * larger,
      fullest=growth.union(1) * larger,
      union=growth.union(n) * larger,
      devices=n,
    )
    for n in DEVICES
  }
