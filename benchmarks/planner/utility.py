"""`utility`: set-ups in which compressed gradients pay, by formula alone.

The models of the Utility paper (`utility_model`) over a grid of dense models,
and over models with tables as the Zen paper has them, with zen beside. Nothing
here is measured.

Of a table there is advice: replicate it and send rows, or shard it?
AutoDDL's question, answered by bytes. A sharded table sends ids and gets rows
in the forward pass, and sends their gradients in the backward pass: twice a
device's rows. A replicated one receives a device's rows once and the union of
all devices once (zen), or itself about twice (dense). A union is never smaller
than what one device holds, so sharding that asks for distinct rows never
receives more than zen, padding and latency apart: for the Zen paper's LSTM a
seventh at 64 devices. Where every look-up is asked for, text that repeats its
words makes it dearer. What else speaks for replicas: no change to the model,
tied or swept tables, and no exchange that the forward pass waits for.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

from benchmarks import library
from benchmarks import record
from benchmarks import table as tables
from benchmarks import workloads
from benchmarks.planner import utility_model
import zenjax

NETWORKS = ("1gbit", "10gbit", "25gbit", "100gbit")
# NVLink joins 8 devices: there is no more of it.
NVLINK = "NVLink 4"
LINKS = (*NETWORKS, NVLINK)
DEVICES = (8, 16, 32, 64, 96)
SHOWN = (8, 64)
BATCHES = (0.25, 0.5, 1.0)

# Models without tables: parameters, and seconds of backward at the full batch.
# ResNet-50 at 64 images on a V100 is the Utility paper's. ResNet-101 is taken
# to need 1.9 times as long, as its multiplications say, and BERT-base 0.27 s
# for 12 sequences of 512 at 10 TFLOP/s: assumed, as no figure is at hand.
DENSE = {
  "ResNet-50": (25.6e6, 0.122),
  "ResNet-101": (44.5e6, 0.232),
  "BERT-base": (110e6, 0.270),
}
# Models with a table, of a workload's name: parameters of the rest, and
# backward. Parameters are those of the Zen paper. Its LSTM takes 114 ms a step
# on a V100; for the others 100 ms are assumed.
TABLED = {
  "lm1b-lstm": (20e6, 0.114),
  "criteo-deepfm": (68e6, 0.1),
  "iwslt-nmt": (31e6, 0.1),
  "squad-bert": (86e6, 0.1),
}
# The Zen paper: 6 ms to hash a gradient of 214 million elements on a V100.
_PACK_S = 0.006 / 214e6
# Steps of 4 devices to pool: as many sets as devices at most.
_STEPS = 32


# Sharding changes a model: it must save more of the time than this.
_WORTH = 0.1
# Arrays of a table's size beside it in the optimizer's state: Adam's.
_STATE = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
  """One way to keep a table, of a device and step."""

  name: str  # "replicate, dense", "replicate, zen" or "shard".
  received: float  # Bytes.
  seconds: float  # On the link and to find and pack rows; nothing overlaps.
  memory_bytes: float  # Of table and optimizer state.


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
  """Advice on one table."""

  table: str
  choice: Way
  ways: tuple[Way, ...]  # The fastest first.
  reason: str

  def __str__(self) -> str:
    lines = [f"{self.table}: {self.choice.name}, for {self.reason}"]
    for way in self.ways:
      lines.append(
        f"  {way.name:<16} {way.received / 1e6:9.3f} MB received"
        f" {way.seconds * 1e3:9.3f} ms {way.memory_bytes / 1e9:9.3f} GB held"
      )
    return "\n".join(lines)


def replicate_or_shard(
  table: library.Table,
  profile: zenjax.planner.Profile,
  devices: int,
  link: zenjax.planner.Link,
  *,
  look_ups: float | None = None,
) -> Advice:
  """Returns advice for a table: a shard where it saves more than a tenth.

  `look_ups` are of a device and step, where sharding would ask for each of
  them; None where it asks for distinct rows. Of two devices at least.
  """
  whole = table.num_rows * table.width * table.dtype.itemsize * (1 + _STATE)
  ways = []
  for scheme in ("dense", "zen"):
    best = _best(scheme, table, profile, devices, link)
    name = f"replicate, {scheme}"
    ways.append(Way(name, best.received, best.seconds, whole))
  replica = min(ways, key=lambda way: way.seconds)
  # Ids there, rows back, their gradients there: three exchanges. Owners by a
  # hash, as zen's; buffers as large as the fullest pair.
  asked = profile.fullest if look_ups is None else look_ups
  pair = library.buffer_sizes.fullest(asked, devices, devices * devices)
  row = table.width * table.wire_dtype.itemsize
  messages = [(devices - 1) * pair * size for size in (4, row, row)]
  seconds = sum(link.seconds("all_to_all", devices, m) for m in messages)
  shard = Way("shard", sum(messages), seconds, whole / devices)
  saved = 1 - shard.seconds / replica.seconds
  if saved > _WORTH:
    reason = f"it takes {saved:.0%} less time than replicas"
  elif saved > 0:
    reason = f"a shard would save no more than {saved:.0%} of its time"
  else:
    reason = f"a shard would take {-saved:.0%} more time"
  choice = shard if saved > _WORTH else replica
  ways = tuple(sorted([*ways, shard], key=lambda way: way.seconds))
  return Advice(table.name, choice, ways, reason)


def _best(scheme: str, *of: Any) -> library.Prediction:
  """Returns the fastest form of a scheme."""
  return next(p for p in library.choices(*of) if p.scheme == scheme)


class Found(NamedTuple):
  """A set-up on a named link, and what every method makes of it."""

  link: str
  batch: float
  setup: utility_model.Setup
  outcomes: list[utility_model.Outcome]

  @property
  def best(self) -> utility_model.Outcome:
    return self.outcomes[0]

  def gain(self, method: str) -> float:
    return next(o.gain for o in self.outcomes if o.method == method)


def links(devices: int) -> dict[str, zenjax.planner.Link]:
  """Returns those that join so many devices."""
  of = zenjax.planner.Topology
  found = {r: of.network(r, devices).links[0] for r in NETWORKS}
  if devices == 8:
    found[NVLINK] = of.preset("h100", 8).links[0]
  return found


def dense() -> Iterator[Found]:
  """Yields models without tables."""
  grid = itertools.product(DENSE.items(), BATCHES, DEVICES)
  for (name, (parameters, backward_s)), batch, devices in grid:
    for rate, link in links(devices).items():
      setup = utility_model.Setup(
        model=name,
        gradient_bytes=4 * parameters,
        backward_s=backward_s * batch,
        devices=devices,
        link=link,
      )
      yield Found(rate, batch, setup, utility_model.outcomes(setup))


def tabled() -> Iterator[tuple[Found, Advice]]:
  """Yields models with one, and where it should be."""
  for name in TABLED:
    table, profiles = table_of(name)
    for devices, profile in profiles.items():
      for rate, link in links(devices).items():
        setup = with_table(name, table, profile, devices, link)
        found = Found(rate, 1.0, setup, utility_model.outcomes(setup))
        yield found, replicate_or_shard(table, profile, devices, link)


def with_table(
  name: str,
  table: library.Table,
  profile: zenjax.planner.Profile,
  devices: int,
  link: zenjax.planner.Link,
) -> utility_model.Setup:
  """Returns one of `TABLED` where zen takes what its formula says and packs."""
  (rest, backward_s), size = TABLED[name], table.num_rows * table.width * 4
  exchange = _best("zen", table, profile, devices, link)
  return utility_model.Setup(
    model=name,
    gradient_bytes=4 * rest + size,
    backward_s=backward_s,
    devices=devices,
    link=link,
    table_bytes=size,
    zen_s=exchange.seconds + size / 4 * _PACK_S,
  )


@functools.cache
def pooled(name: str) -> library.recorded_runs.Growth:
  """Returns that of a workload for two cores, from steps of 4 devices."""
  scaled = workloads.SCALED[name]
  recorded = [workloads.sets(scaled, 4, seed) for seed in range(_STEPS)]
  return library.recorded_runs.growth(recorded, scaled.rows)


def table_of(
  name: str,
) -> tuple[library.Table, dict[int, zenjax.planner.Profile]]:
  """Returns the published table, with the densities of the smaller one."""
  full, growth = workloads.FULL[name], pooled(name)
  larger = full.rows / growth.rows
  rows = growth.union(1) * larger
  of = functools.partial(zenjax.planner.Profile, rows=rows, fullest=rows)
  profiles = {n: of(union=growth.union(n) * larger, devices=n) for n in DEVICES}
  return library.table(name, full.rows, full.width), profiles


def run(options: argparse.Namespace) -> int:
  """Computes, prints and saves; returns the exit code."""
  without, advised = list(dense()), list(tabled())
  with_tables = [found for found, _ in advised]
  counts = {m.name: (m.name, 0.0) for m in utility_model.METHODS}
  counts |= {"any": (None, 0.0), "any, over 10 %": (None, 0.1)}
  title = "Dense models: in how many set-ups a method gains, of how many"
  every = {
    x: {r: _count(without, r, *of) for r in LINKS} for x, of in counts.items()
  }
  _show(title, "", every)
  print(
    "zenjax is lossless and has nothing to leave out of these: it takes pmean."
  )
  shown = {}
  for f in without:
    if f.setup.devices in SHOWN:
      gain = "" if f.best.method == "syncSGD" else f" {f.best.gain:+.0%}"
      name = f"{f.setup.model}, {f.batch:g}, {f.setup.devices}"
      shown.setdefault(name, {})[f.link] = f.best.method + gain
  title = "Dense models: the fastest, and its gain over syncSGD"
  _show(title, "model, batch, devices", shown)
  shown = {}
  for f in with_tables:
    if f.setup.devices in SHOWN:
      lossy = max(f.gain(m.name) for m in utility_model.METHODS)
      name = f"{f.setup.model}, {f.setup.devices}"
      shown.setdefault(name, {})[f.link] = f"{f.gain('zen'):+.0%}, {lossy:+.0%}"
  title = "Models with a table: gain of zen over syncSGD, and of the best lossy"
  _show(title, "model, devices", shown)
  for found, advice in advised:
    if found.setup.devices == 64 and found.link == "25gbit":
      print(advice)
  names = ("model", "devices", "gradient_bytes", "table_bytes")
  setups = [
    {name: getattr(f.setup, name) for name in names}
    | {"link": f.link, "batch": f.batch}
    | {"outcomes": list(map(dataclasses.asdict, f.outcomes))}
    for f in [*without, *with_tables]
  ]
  record.save(options, {"setups": setups})
  return 0


def _show(title: str, first: str, rows: dict[str, dict[str, str]]) -> None:
  """Prints a column for each link."""
  cells = ([x, *(of.get(r, "-") for r in LINKS)] for x, of in rows.items())
  tables.show_rows(title, (first, *LINKS), cells)


def _count(found, rate, method, least) -> str:
  """Without a method the best of each set-up."""
  of_rate = [f for f in found if f.link == rate]
  gains = [f.gain(method) if method else f.best.gain for f in of_rate]
  return f"{sum(g > least for g in gains)}/{len(gains)}"
