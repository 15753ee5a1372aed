"""`utility`: set-ups in which compressed gradients pay, by formula alone.

The models of the Utility paper (`zenjax._planner._utility`) over a grid of
dense models, and over models with tables as the Zen paper has them, with zen
beside. Nothing here is measured.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import rich.box
import rich.table

from benchmarks import record
from benchmarks import table as tables
from benchmarks import workloads
import zenjax
from zenjax import _cost
from zenjax._plan import Table
from zenjax._planner import _growth
from zenjax._planner import _placing
from zenjax._planner import _utility
from zenjax._planner._utility import Outcome
from zenjax._planner._utility import Setup
from zenjax._schemes.base import Context

NETWORKS = ("1gbit", "10gbit", "25gbit", "100gbit")
# NVLink joins 8 devices: there is no more of it.
NVLINK = "NVLink 4"
DEVICES = (8, 16, 32, 64, 96)
BATCHES = (0.25, 0.5, 1.0)
SHOWN = (8, 64)


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


def links(devices: int) -> dict[str, zenjax.Link]:
  """Those that join so many devices."""
  found = {
    rate: zenjax.Topology.network(rate, devices).levels[0].link
    for rate in NETWORKS
  }
  if devices == 8:
    found[NVLINK] = zenjax.Topology.preset("h100", 8).levels[0].link
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
      yield Found(rate, batch, setup, _utility.outcomes(setup))


def tabled() -> Iterator[tuple[Found, _placing.Use]]:
  """Models with one, and how it is used."""
  for name in TABLED:
    table, profiles = table_of(name)
    for devices, profile in profiles.items():
      for rate, link in links(devices).items():
        setup = with_table(name, table, profile, devices, link)
        found = Found(rate, 1.0, setup, _utility.outcomes(setup))
        yield found, _placing.Use(table=table, profile=profile)


def with_table(
  name: str,
  table: Table,
  profile: zenjax.Profile,
  devices: int,
  link: zenjax.Link,
) -> Setup:
  """One of `TABLED` where zen takes what its formula says, and packs rows."""
  model, size = TABLED[name], table.num_rows * table.width * 4
  context = Context(axes=("data",), sizes=(devices,), mean=True)
  ways = _cost.choices(table, profile, context, link)
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
def pooled(name: str) -> _growth.Growth:
  """Of a workload at the size for two cores, from steps of 4 devices."""
  scaled = workloads.SCALED[name]
  recorded = [
    [np.unique(ids) for ids in workloads.ids(scaled, 4, seed)]
    for seed in range(_STEPS)
  ]
  return _growth.growth(recorded, scaled.rows)


def table_of(name: str) -> tuple[Table, dict[int, zenjax.Profile]]:
  """The published table, with the densities of the smaller one."""
  full, growth = workloads.FULL[name], pooled(name)
  larger = full.rows / growth.rows
  f32 = jnp.dtype(jnp.float32)
  table = Table(
    name=name, num_rows=full.rows, width=full.width, dtype=f32, wire_dtype=f32
  )
  return table, {
    n: zenjax.Profile(
      rows=growth.union(1) * larger,
      fullest=growth.union(1) * larger,
      union=growth.union(n) * larger,
      devices=n,
    )
    for n in DEVICES
  }


def run(options: argparse.Namespace) -> int:
  """Computes, prints and saves; returns the exit code."""
  without = list(dense())
  with_tables = list(tabled())
  _show_counts(without)
  _show_winners(without)
  _show_tables([found for found, _ in with_tables])
  for found, use in with_tables:
    if found.setup.devices == 64 and found.link == "25gbit":
      print(_placing.replicate_or_shard([use], 64, found.setup.link)[0])
  if options.json:
    every = [*without, *(found for found, _ in with_tables)]
    record.write_json(
      options.json,
      {
        "environment": record.software(),
        "setups": [_document(found) for found in every],
      },
    )
    print(f"Saved {options.json}")
  return 0


def _document(found: Found):
  setup = found.setup
  return {
    "model": setup.model,
    "link": found.link,
    "batch": found.batch,
    "devices": setup.devices,
    "gradient_bytes": setup.gradient_bytes,
    "table_bytes": setup.table_bytes,
    "outcomes": [dataclasses.asdict(o) for o in found.outcomes],
  }


def _made(title: str, *headers: str) -> rich.table.Table:
  made = rich.table.Table(
    title=title, box=rich.box.SIMPLE_HEAD, title_justify="left"
  )
  for number, header in enumerate(headers):
    made.add_column(header, justify="right" if number else "left", no_wrap=True)
  return made


def _show_counts(found: list[Found]) -> None:
  made = _made(
    "Dense models: in how many set-ups a method gains, of how many",
    "",
    *NETWORKS,
    NVLINK,
  )
  names = (method.name for method in _utility.METHODS)
  for name in names:
    made.add_row(name, *(_count(found, rate, name, 0) for rate in _links()))
  made.add_row("any", *(_count(found, rate, None, 0) for rate in _links()))
  made.add_row(
    "any, over 10 %", *(_count(found, rate, None, 0.1) for rate in _links())
  )
  tables.console().print(made)
  print(
    "zenjax is lossless and has nothing to leave out of these: it takes pmean."
  )


def _links():
  return (*NETWORKS, NVLINK)


def _count(found, rate, method, least) -> str:
  """Without a method the best of each set-up."""
  of_rate = [f for f in found if f.link == rate]
  gains = [f.gain(method) if method else f.best.gain for f in of_rate]
  return f"{sum(g > least for g in gains)}/{len(gains)}"


def _show_winners(found: list[Found]) -> None:
  made = _made(
    "Dense models: the fastest, and its gain over syncSGD",
    "model, batch, devices",
    *_links(),
  )
  for model, batch, n in itertools.product(DENSE, BATCHES, SHOWN):
    cells = {
      f.link: f
      for f in found
      if (f.setup.model, f.batch, f.setup.devices) == (model, batch, n)
    }
    made.add_row(f"{model}, {batch:g}, {n}", *_winners(cells))
  tables.console().print(made)


def _winners(cells: dict[str, Found]) -> Iterator[str]:
  for rate in _links():
    if rate not in cells:
      yield "-"
    elif cells[rate].best.method == "syncSGD":
      yield "syncSGD"
    else:
      best = cells[rate].best
      yield f"{best.method} {best.gain:+.0%}"


def _show_tables(found: list[Found]) -> None:
  made = _made(
    "Models with a table: gain over syncSGD of zen, and of the best lossy one",
    "model, devices",
    *_links(),
  )
  for model, n in itertools.product(TABLED, SHOWN):
    cells = {
      f.link: f for f in found if (f.setup.model, f.setup.devices) == (model, n)
    }
    made.add_row(
      f"{model}, {n}",
      *(_both(cells[rate]) if rate in cells else "-" for rate in _links()),
    )
  tables.console().print(made)


def _both(found: Found) -> str:
  lossy = max(found.gain(m.name) for m in _utility.METHODS)
  return f"{found.gain('zen'):+.0%}, {lossy:+.0%}"
