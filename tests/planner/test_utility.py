"""The Utility paper's models, and advice on where tables should be."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from benchmarks.library import Table
from benchmarks.planner import utility
from benchmarks.planner import utility_model
from benchmarks.planner.utility_model import Setup
import zenjax

LATENCY, BANDWIDTH = 1e-5, 1.25e9
LINK = zenjax.planner.Link(bandwidth=BANDWIDTH, latency_s=LATENCY)
MIB = 2**20


def setup(**fields) -> Setup:
  given = {
    "model": "m",
    "gradient_bytes": 60.0 * MIB,
    "backward_s": 0.05,
    "devices": 8,
    "link": LINK,
  }
  return Setup(**given | fields)


def ring(size: float, n: int = 8) -> float:
  return 2 * (n - 1) * LATENCY + 2 * (n - 1) / n * size / BANDWIDTH


def gather(size: float, n: int = 8) -> float:
  return (n - 1) * (LATENCY + size / BANDWIDTH)


def method(name: str) -> utility_model.Method:
  return next(m for m in utility_model.METHODS if m.name == name)


# --- formulas ---------------------------------------------------------------


@pytest.mark.parametrize("backward_s", [1e-3, 1.0])
def test_buckets_but_the_last_are_hidden(backward_s):
  before = max(utility_model.CONTENTION * backward_s, 2 * ring(25 * MIB))
  want = before + ring(10 * MIB)
  assert utility_model.sync_s(setup(backward_s=backward_s)) == pytest.approx(
    want
  )


def test_a_table_is_the_last_bucket():
  tabled = setup(table_bytes=40.0 * MIB, zen_s=0.002)
  rest = max(utility_model.CONTENTION * 0.05, ring(20 * MIB))
  assert utility_model.sync_s(tabled) == pytest.approx(rest + ring(40 * MIB))
  assert utility_model.zen_s(tabled) == pytest.approx(rest + 0.002)
  only = setup(table_bytes=60.0 * MIB, zen_s=0.0)
  assert utility_model.zen_s(only) == pytest.approx(
    utility_model.CONTENTION * 0.05
  )


@pytest.mark.parametrize(
  ("name", "sent"),
  [
    ("PowerSGD, rank 4", lambda g: 2 * ring(g / 144)),
    ("top-10 %", lambda g: 2 * gather(g / 10)),
    ("signSGD", lambda g: gather(g / 32)),
  ],
)
def test_what_is_encoded_leaves_after_backward(name, sent):
  size = 2 * utility_model.RESNET50_BYTES
  found = utility_model.compressed_s(setup(gradient_bytes=size), method(name))
  encode = 2 * method(name).encode_s
  assert found == pytest.approx(0.05 + encode + sent(size))


def test_gathers_grow_with_the_devices_and_sums_do_not():
  few, many = setup(devices=8), setup(devices=96)
  grown = {
    m.name: utility_model.compressed_s(many, m)
    - utility_model.compressed_s(few, m)
    for m in utility_model.METHODS
  }
  assert grown["PowerSGD, rank 4"] < 0.01
  assert grown["signSGD"] > 0.1 and grown["top-10 %"] > 0.5


# --- what the papers found --------------------------------------------------


def _needed_ratio(setup: Setup) -> float:
  """Returns the ratio at which backward hides all bytes of the gradients."""
  size, n = setup.gradient_bytes, setup.devices
  return (ring(size, n) - ring(0, n)) / setup.backward_s


def test_four_to_seven_times_are_enough_at_10_gbit():
  """At the small batch; a large one hides nearly all of it by itself."""
  resnet = setup(gradient_bytes=utility_model.RESNET50_BYTES, devices=64)
  small = dataclasses.replace(resnet, backward_s=0.122 / 4)
  assert 4 <= _needed_ratio(small) <= 7
  large = dataclasses.replace(resnet, backward_s=0.122)
  assert _needed_ratio(large) < 1.5


def test_dense_models_gain_nothing_on_fast_links():
  found = list(utility.dense())
  share = {
    rate: [f.best.method != "syncSGD" for f in found if f.link == rate]
    for rate in (*utility.NETWORKS, utility.NVLINK)
  }
  assert len(found) > 180
  assert not any(share["100gbit"]) and not any(share[utility.NVLINK])
  assert sum(share["25gbit"]) < 0.3 * len(share["25gbit"])
  # The paper's own links, at the batches that a GPU is filled by.
  full = [f for f in found if f.link == "10gbit" and f.batch == 1]
  pairs = [f.gain(m.name) > 0.05 for f in full for m in utility_model.METHODS]
  assert sum(pairs) < 0.15 * len(pairs)
  # What there is to gain is on slow links.
  assert all(share["1gbit"])


def test_tables_gain_by_zen_where_links_are_slow():
  found = [f for f, _ in utility.tabled()]
  for f in found:
    lossy = max(f.gain(m.name) for m in utility_model.METHODS)
    if f.link in ("10gbit", "25gbit") and f.setup.model == "lm1b-lstm":
      assert f.gain("zen") > max(lossy, 0.5)
    if f.link == utility.NVLINK:
      assert lossy < 0


def test_lstm_of_the_zen_paper():
  """16 machines, 25 Gbit/s: 3.1 times the throughput of all-reduce.

  A machine's 8 GPUs are summed densely first, so what it sends is their union.
  """
  table, _ = utility.table_of("lm1b-lstm")
  found = utility.pooled("lm1b-lstm")
  larger = table.num_rows / found.rows
  machine = zenjax.planner.Profile(
    rows=found.union(8) * larger,
    fullest=found.union(8) * larger,
    union=found.union(128) * larger,
    devices=16,
  )
  link = zenjax.planner.Topology.network("25gbit", 16).links[0]
  lstm = utility.with_table("lm1b-lstm", table, machine, 16, link)
  gain = utility_model.sync_s(lstm) / utility_model.zen_s(lstm)
  assert gain == pytest.approx(3.1, rel=0.15)


@pytest.mark.parametrize(
  ("index_words", "crossing"), [(1.0, 40), (1 / 512, 81)]
)
def test_all_gather_of_nmt_against_all_reduce(index_words, crossing):
  """The paper's crossing near 40 GPUs, with an index for every number; with
  one for every row of 512, as here, it is at twice as many."""
  density = 0.0247
  gathered = lambda n: (n - 1) * density * (1 + index_words)
  dense = lambda n: 2 * (n - 1) / n
  first = next(n for n in range(2, 200) if gathered(n) > dense(n))
  assert first == pytest.approx(crossing, abs=1)


def test_balanced_parallelism_of_nmt_is_36_percent_lower():
  """128 GPUs, an index for every number; half of that without one."""
  density, growth = 0.0247, 24.9
  assert density * 2 * (1 + growth) / 2 == pytest.approx(0.64, abs=0.005)
  found = utility.pooled("iwslt-nmt")
  assert found.union(1) / found.rows == pytest.approx(density, rel=0.01)
  assert found.union(128) / found.union(1) == pytest.approx(growth, rel=0.05)


# --- replicate or shard -----------------------------------------------------


def advise(
  rows: float, union: float, *, look_ups: float | None = None
) -> utility.Advice:
  f32 = jnp.dtype(jnp.float32)
  table = Table(name="t", num_rows=100_000, width=64, dtype=f32, wire_dtype=f32)
  profile = zenjax.planner.Profile(
    rows=rows, fullest=rows, union=union, devices=8
  )
  return utility.replicate_or_shard(table, profile, 8, LINK, look_ups=look_ups)


def way(advice: utility.Advice, name: str) -> utility.Way:
  return next(w for w in advice.ways if w.name == name)


def test_distinct_rows_of_a_shard_are_never_more_bytes():
  """2 K against K and the union, which holds K at least."""
  for union in (2000, 6000, 14_000):
    advice = advise(2000, union)
    shard, zen = way(advice, "shard"), way(advice, "replicate, zen")
    assert shard.received < zen.received * 1.15  # padding of the pairs
  assert advice.choice.name == "shard"
  assert shard.received == pytest.approx(2 * 7 / 8 * 2000 * 256, rel=0.35)
  assert "less time" in advice.reason


def test_look_ups_that_repeat_are_better_replicated():
  advice = advise(2000, 6000, look_ups=20_000)
  assert advice.choice.name == "replicate, zen"
  assert "more time" in advice.reason


def test_nothing_to_save_stays_as_it_is():
  """Every row of everyone: a dense sum carries as much as a shard."""
  advice = advise(100_000, 100_000)
  assert advice.choice.name == "replicate, dense"


def test_advice_is_shown_with_all_ways():
  advice = advise(2000, 6000, look_ups=20_000)
  shown = str(advice)
  for name in ("replicate, dense", "replicate, zen", "shard"):
    assert name in shown
  assert shown.startswith("t: replicate, zen, for a shard would take")
  assert math.isfinite(advice.choice.seconds)
