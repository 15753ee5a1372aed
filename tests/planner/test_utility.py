"""`planner.utility`: the models of the Utility paper, computed by hand."""

import functools
import itertools
import json
import math
import pathlib
import statistics

import jax
import jax.numpy as jnp
from planned import ids
from planned import shape
import pytest

from benchmarks import paper_models
import zenjax
from zenjax import compress
from zenjax.planner import Link
from zenjax.planner import Topology
from zenjax.planner import utility

LATENCY, BANDWIDTH, BUCKET = 1e-5, 1.25e9, 25 * 2**20


def network(devices, bandwidth=BANDWIDTH):
  link = Link(bandwidth=bandwidth, latency_s=LATENCY)
  return Topology(axes=("host",), sizes=(devices,), links=(link,))


def dense(params):
  """Gradients of parameters that a loss uses whole."""
  return functools.partial(
    utility, jax.value_and_grad(lambda p: sum(jnp.sum(x) for x in p)), params
  )


def seconds(found):
  return {way.name: way.seconds for way in found.ways}


def ring(size, n, bandwidth=BANDWIDTH):
  return 2 * (n - 1) * LATENCY + 2 * (n - 1) / n * size / bandwidth


def overlapped(leaf, count, n, compute_s):
  """All-reduces of `count` leaves of so many bytes, by hand.

  Gradients become ready one after the other, and buckets of 25 MiB with the
  gradient that fills them. Backward takes 1.07 times as long beside a sum.
  """
  total, link_s, beside_s = leaf * count, 0.0, 0.0
  for first in range(0, total, BUCKET):
    last = min(first + BUCKET, total)
    ready = math.ceil(last / leaf) / count
    begin = max(link_s, compute_s / 3 + ready * compute_s * 2 / 3)
    link_s = begin + ring(last - first, n)
    beside_s += max(min(link_s, compute_s) - begin, 0)
  return max(link_s, compute_s + 0.07 * beside_s)


@pytest.mark.parametrize("compute_s", [3e-3, 3.0])
@pytest.mark.parametrize("n", [2, 8])
def test_buckets_are_summed_while_others_are_computed(n, compute_s):
  params = [shape(4096, 1024)] * 4
  found = seconds(dense(params)(topology=network(n), compute_seconds=compute_s))
  size = 4096 * 1024 * 4
  for name, leaf in (("pmean", size), ("pmean in bfloat16", size // 2)):
    want = overlapped(leaf, 4, n, compute_s)
    assert found[name] == pytest.approx(want, rel=1e-5)


def test_compressors_wait_for_backward():
  n, params = 8, [shape(1024, 512), shape(512)]
  found = dense(params)(
    topology=network(n),
    compute_seconds=0.05,
    compressors=[compress.PowerSGD(4), compress.LowBit(8)],
    local_seconds={"PowerSGD(4)": 0.045, "LowBit(8)": 0.002},
  )
  low_rank = ring(4 * 1024 * 4, n) + ring(4 * 512 * 4, n)
  blocks = 1024 * 512 // 256
  words = blocks * (256 / 4 + 1)
  part = (n - 1) * LATENCY + (n - 1) / n * words * 4 / BANDWIDTH
  times = seconds(found)
  # It is summed while a device encodes.
  assert times["PowerSGD(4)"] == pytest.approx(0.095 + low_rank)
  assert times["LowBit(8)"] == pytest.approx(0.052 + 2 * part)


def test_tables_are_the_last_bucket_or_rows():
  def loss(params, ids):
    return jnp.sum(params["table"][ids] @ params["w"])

  def ask(width):
    return utility(
      zenjax.value_and_grad(loss),
      *({"table": shape(500_000, 64), "w": shape(64, width)}, ids(2048)),
      topology=network(8),
      compute_seconds=0.03,
    )

  found = ask(1024)
  times = seconds(found)
  # The gradient of `w` is summed before the table's is there.
  backward = 0.03 + 0.07 * ring(64 * 1024 * 4, 8)
  whole = ring(500_000 * 64 * 4, 8)
  assert times["pmean"] == pytest.approx(backward + whole)
  assert found.best.name != "pmean"
  assert len(ask(8).ways) == 3  # No leaf is large enough.
  assert times["zen_sync"] < backward + whole / 5
  rows = times["zen_sync"] - backward
  small = 2 * 63 * 1024  # Each compressor sends the rows as `zen_sync` does.
  assert times["LowBit(8)"] >= 0.03 + rows
  assert found.ways[2].wire_bytes > small


def test_one_device_and_fast_links_need_no_compressor():
  params = [shape(2048, 2048)]
  alone = dense(params)(topology=network(1), compute_seconds=0.1)
  assert alone.best.name == "pmean"
  assert alone.ways[0].seconds == 0.1 and alone.ways[0].wire_bytes == 0
  assert alone.needed_ratio == 0
  fast = dense(params * 2)(
    topology=Topology.preset("h100", 8), compute_seconds=0.01
  )
  assert fast.best.name == "pmean" and fast.needed_ratio < 1


def test_a_single_all_reduce_is_never_hidden():
  found = dense([shape(512, 512)] * 4)(topology=network(4), compute_seconds=1.0)
  plain, bfloat16 = found.ways[:2]
  assert plain.seconds > bfloat16.seconds > found.compute_seconds
  assert math.isinf(found.needed_ratio) and "one all-reduce" in str(found)


# Seconds on V100s, from the paper: the backward pass for 64 images, and the
# time to encode and decode the gradient of ResNet-50.
BACKWARD = {"ResNet-50": 0.122, "ResNet-101": 0.232}
ENCODE = {4: 0.045, 8: 0.064, 16: 0.130}


def test_as_the_paper_found():
  """At 10 Gbit/s few set-ups gain, and 4 to 7 times fewer bytes suffice."""
  gains = []
  for (name, backward_s), n in itertools.product(
    BACKWARD.items(), (8, 16, 32, 64, 96)
  ):
    layers = paper_models.MODELS[name]
    size = paper_models.elements(layers)
    found = utility(
      jax.value_and_grad(paper_models.loss(layers)),
      paper_models.parameters(layers),
      topology=Topology.network("10 Gbit/s", n),
      compute_seconds=1.5 * backward_s,
      backward_seconds=backward_s,
      compressors=[compress.PowerSGD(rank) for rank in ENCODE],
      local_seconds={
        f"PowerSGD({rank})": s * size / 25.6e6 for rank, s in ENCODE.items()
      },
    )
    gains += [way.gain for way in found.ways[2:]]
    if n == 64:
      assert found.needed_ratio < 1.5
      small = 4 * found.needed_ratio  # A quarter of the batch.
      assert 4 <= small <= 7
  assert sum(gain > 0.05 for gain in gains) <= 0.1 * len(gains)


def test_a_plan_has_the_same_timeline():
  """A compressor that saves time by itself, but not during backward."""
  params = [shape(4096, 4096)] * 6 + [shape(4096)]
  grads = jax.value_and_grad(lambda p: sum(jnp.sum(x) for x in p))
  topology = Topology.network("25 Gbit/s", 16, machine="h100")
  ask = lambda **more: zenjax.planner.plan(
    grads, params, allow="int8", topology=topology, **more
  )
  assert ask().leaves[0].choice == "LowBit(8)"
  found = ask(compute_seconds=1.0)
  assert not found.pays and found.seconds == found.dense_seconds
  assert "the whole step would gain too little" in found.leaves[0].reason
  want = utility(grads, params, topology=topology, compute_seconds=1.0)
  assert found.dense_seconds == pytest.approx(want.ways[0].seconds)
  short = ask(compute_seconds=0.01)
  assert short.leaves[0].choice == "LowBit(8)"
  assert short.leaves[-1].choice == "pmean"
  want = utility(grads, params, topology=topology, compute_seconds=0.01)
  # In parts it is faster than in one exchange.
  assert short.seconds < 0.95 * seconds(want)["LowBit(8)"]
  assert len({x.group for x in short.leaves[:-1]}) > 1
  half = [shape(4096, 4096, dtype=jnp.bfloat16)] * 2
  plan = zenjax.planner.plan(
    grads, half, topology=topology, compute_seconds=0.01
  )
  want = utility(grads, half, topology=topology, compute_seconds=0.01)
  assert plan.dense_seconds == pytest.approx(want.ways[0].seconds)


@pytest.mark.parametrize(
  ("options", "error", "words"),
  [
    ({"compute_seconds": 0.0}, ValueError, "`compute_seconds` must be a pos"),
    ({"backward_seconds": 2.0}, ValueError, "must not exceed `compute_sec"),
    (
      {"local_seconds": {"x": 1.0}},
      ValueError,
      "must name compressors.*leave their times out",
    ),
    ({"compressors": ["int8"]}, TypeError, "`compressors` must be"),
    ({"topology": 8}, TypeError, "`topology` must be"),
  ],
)
def test_arguments_are_checked(options, error, words):
  given = {"topology": network(2), "compute_seconds": 1.0} | options
  with pytest.raises(error, match=words):
    dense([shape(8, 8)])(**given)


def test_prints_a_table():
  found = dense([shape(2048, 2048)] * 2)(
    topology=Topology.network("1 Gbit/s", 4), compute_seconds=0.01
  )
  lines = str(found).splitlines()
  assert lines[0].startswith("a step on 1 Gbit/s")
  assert lines[2].split()[:3] == ["pmean", "413", "+0%"]
  assert "times fewer bytes" in lines[-1]


def results_of(name):
  """Results by name, and the median seconds of each."""
  path = pathlib.Path(__file__).parents[2] / "benchmarks/results"
  found = json.loads((path / f"{name}.json").read_text("utf-8"))["results"]
  results = {x["name"]: x for x in found}
  return results, {
    k: statistics.median(x["times_s"]) for k, x in results.items()
  }


@pytest.mark.parametrize("rate", ["200mbit", "1gbit"])
def test_plans_were_near_what_was_measured(rate):
  """Four processes on two cores, with times of compressors measured there."""
  results, measured = results_of(f"compressed-4-{rate}")
  none = measured.pop("none")
  errors = [
    abs((none + results[name]["facts"]["planned_s"]) / seconds - 1)
    for name, seconds in measured.items()
  ]
  assert statistics.median(errors) < 0.17 and max(errors) < 1 / 3


def test_predictions_are_near_what_was_measured():
  """Four processes on one H200, joined by links of 1 Gbit/s."""
  _, measured = results_of("gpu-compressed-4-1gbit")
  found = dense([shape(2048, 2048)] * 6)(
    topology=Topology.network("1 Gbit/s", 4, machine="h200"),
    compute_seconds=measured["none"],
    compressors=[compress.LowBit(8), compress.LowBit(4), compress.Sign()],
  )
  names = ["pmean", "bfloat16 pmean", "int8", "int4", "sign"]
  errors = [
    abs(way.seconds / measured[name] - 1)
    for name, way in zip(names, found.ways, strict=True)
  ]
  assert statistics.median(errors) < 0.1 and max(errors) < 0.3
