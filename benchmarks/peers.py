"""Compares the planner with the procedures of papers, on their models.

Run `python -m benchmarks.peers`. Nothing is trained: a step of each model is
predicted by a timeline that this file computes by itself, on links of equal
hosts. Computation is assumed to run at 7.5 TFLOP/s, and compressors at 900
GB/s, as on the V100s of these papers.

    pmean      plain all-reduces in buckets, which overlap with backward
    Espresso   each gradient has its own exchange and the way that makes the
               step shortest, chosen from the largest to the smallest (Algorithm
               1 of Wang et al., EuroSys 2023)
    MergeComp  one compressor for all, and the best cut of the model into one to
               three parts (Wang et al., 2021)
    zenjax     `zenjax.planner.plan`

A second table is the question of the Utility paper (Agarwal et al., MLSys
2022), asked by `zenjax.planner.utility`: in how many set-ups a step gains.
"""

import argparse
from collections.abc import Sequence
import itertools
import math
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax

from benchmarks import paper_models
from benchmarks import record
from benchmarks.paper_models import Layer
import zenjax
from zenjax import compress

LATENCY_S, FLOPS, MEMORY, PASSES = 14e-6, 7.5e12, 900e9, 8
BUCKET, CONTENTION = 25 * 2**20, 1.07
BATCH = {"BERT-base": 8, "GPT-2": 4, "LSTM": 80}  # 32 otherwise
COMPRESSORS = (compress.LowBit(8), compress.LowBit(4), compress.Sign())
RATES = {"10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9, "100 Gbit/s": 12.5e9}
HOSTS = (8, 64)


class Leaf(NamedTuple):
  """A gradient."""

  size: int  # elements
  ready_s: float  # since the beginning of the step


# Leaves that are summed together, and their compressor; None for plain sums.
Exchange = tuple[tuple[int, ...], compress.Codec | None]


class Machine(NamedTuple):
  """Equal hosts, and a model on them."""

  hosts: int
  bandwidth: float
  leaves: tuple[Leaf, ...]  # as they are ready
  compute_s: float

  @classmethod
  def of(
    cls, layers: Sequence[Layer], batch: int, hosts: int, bandwidth: float
  ) -> "Machine":
    work = [2 * math.prod(s) * positions * batch for s, positions in layers]
    done, leaves = sum(work), []
    for i in reversed(range(len(layers))):
      # The gradient of a weight comes before the gradient of the layer's input.
      leaves.append(Leaf(math.prod(layers[i][0]), (done + work[i]) / FLOPS))
      done += 2 * work[i] if i else work[i]
    return cls(hosts, bandwidth, tuple(leaves), done / FLOPS)

  @property
  def large(self) -> list[int]:
    """The leaves that are compressed at all: zenjax sends small ones whole."""
    return [i for i, leaf in enumerate(self.leaves) if leaf.size >= 2**14]

  def step(self, exchanges: Sequence[Exchange]) -> float:
    """Returns when the sums of all exchanges are there."""
    n, plain = self.hosts, []
    tasks = []  # (ready, on the device before, on links, on the device after)
    for which, codec in exchanges:
      if codec is None:
        plain += which
        continue
      sizes = [self.leaves[i].size for i in which]
      blocks = sum(-(-size // codec.block) for size in sizes)
      blocks += -blocks % n
      part_s = blocks * codec.words * 4 * (n - 1) / n / self.bandwidth
      link_s = 2 * ((n - 1) * LATENCY_S + part_s)
      work_s = PASSES * 4 * sum(sizes) / MEMORY
      ready_s = max(self.leaves[i].ready_s for i in which)
      tasks.append((ready_s, work_s / 2, link_s, work_s / 2))
    ends = [*itertools.accumulate(4 * self.leaves[i].size for i in plain)]
    for start in range(0, ends[-1] if ends else 0, BUCKET):
      end = min(start + BUCKET, ends[-1])
      last = next(i for i, x in zip(sorted(plain), ends) if x >= end)
      link_s = 2 * (n - 1) * (LATENCY_S + (end - start) / n / self.bandwidth)
      tasks.append((self.leaves[last].ready_s, 0.0, link_s, 0.0))
    tasks.sort(key=lambda task: task[0])
    busy_s = links = beside_s = 0.0
    arrivals = []
    for ready_s, before, on_links, after in tasks:
      busy_s += before
      begin = max(links, ready_s + busy_s)
      links = begin + on_links
      if begin < self.compute_s:
        beside_s += min(links, self.compute_s) - begin
      arrivals.append((links, after))
    device = self.compute_s + busy_s + (CONTENTION - 1) * beside_s
    for at, after in arrivals:
      device = max(device, at) + after
    return device


def pmean(machine: Machine) -> list[Exchange]:
  return [(tuple(range(len(machine.leaves))), None)]


def espresso(machine: Machine) -> list[Exchange]:
  """Algorithm 1: the largest first, and of equal ones the last ready first."""
  chosen: list[compress.Codec | None] = [None] * len(machine.leaves)

  def exchanges(codecs):
    rest = tuple(i for i, codec in enumerate(codecs) if codec is None)
    own = [((i,), codec) for i, codec in enumerate(codecs) if codec]
    return [*own, (rest, None)]

  order = sorted(
    machine.large, key=lambda i: (machine.leaves[i].size, i), reverse=True
  )
  for i in order:
    options = [
      [*chosen[:i], codec, *chosen[i + 1 :]] for codec in (None, *COMPRESSORS)
    ]
    chosen = min(options, key=lambda codecs: machine.step(exchanges(codecs)))
  return exchanges(chosen)


def merge_comp(machine: Machine) -> list[Exchange]:
  """One compressor for all, in at most three parts."""
  large, found = machine.large, []
  small = tuple(i for i in range(len(machine.leaves)) if i not in large)
  for codec, cuts in itertools.product(COMPRESSORS, range(3)):
    for at in itertools.combinations(range(1, len(large)), cuts):
      ends = (0, *at, len(large))
      parts = [tuple(large[a:b]) for a, b in itertools.pairwise(ends)]
      found.append([*((part, codec) for part in parts), (small, None)])
  return min(found, key=machine.step)


def ours(
  machine: Machine, layers: Sequence[Layer], rate: str
) -> tuple[list[Exchange], zenjax.planner.Plan]:
  """Returns the exchanges that `zenjax.planner.plan` chooses, and the plan."""
  elements = paper_models.elements(layers)
  plan = zenjax.planner.plan(
    zenjax.value_and_grad(paper_models.loss(layers)),
    paper_models.parameters(layers),
    topology=zenjax.planner.Topology.network(rate, machine.hosts),
    compute_seconds=machine.compute_s,
    allow=COMPRESSORS,
    local_seconds={
      str(codec): PASSES * 4 * elements / MEMORY for codec in COMPRESSORS
    },
  )
  by_name = {str(codec): codec for codec in COMPRESSORS}
  exchanges: dict[tuple[str | None, int], list[int]] = {}
  for i, leaf in enumerate(reversed(plan.leaves)):
    key = leaf.compressor, leaf.group if leaf.compressor else 0
    exchanges.setdefault(key, []).append(i)
  return [
    (tuple(them), by_name[name] if name else None)
    for (name, _), them in exchanges.items()
  ], plan


def compared(name: str, rate: str, hosts: int) -> dict[str, Any]:
  """Returns predicted steps of one instance, and the times to decide."""
  layers = paper_models.MODELS[name]
  machine = Machine.of(layers, BATCH.get(name, 32), hosts, RATES[rate])
  instance = {"model": name, "rate": rate, "hosts": hosts}
  instance["compute_s"] = machine.compute_s
  for peer, choose in PEERS.items():
    start = time.perf_counter()
    exchanges = choose(machine)
    decided_s = time.perf_counter() - start
    found = {"step_s": machine.step(exchanges), "decided_s": decided_s}
    instance[peer] = found | {"exchanges": len(exchanges)}
  start = time.perf_counter()
  exchanges, plan = ours(machine, layers, rate)
  decided_s = time.perf_counter() - start
  found = {"step_s": machine.step(exchanges), "decided_s": decided_s}
  found |= {"predicted_s": plan.seconds, "exchanges": len(exchanges)}
  return instance | {"zenjax": found}


PEERS = {"pmean": pmean, "espresso": espresso, "mergecomp": merge_comp}

# Measured by the Utility paper on V100s: backward passes of 64 images, and
# seconds to encode and decode the gradient of ResNet-50.
BACKWARD_S = {"ResNet-50": 0.122, "ResNet-101": 0.232}
ENCODE_S = {
  compress.PowerSGD(4): 0.045,
  compress.PowerSGD(8): 0.064,
  compress.PowerSGD(16): 0.130,
  compress.TopK(0.2): 0.295,
  compress.TopK(0.1): 0.289,
  compress.TopK(0.01): 0.240,
  compress.Sign(): 0.016,
}


def gains(name: str, rate: str, hosts: int) -> dict[str, float]:
  """Returns how much shorter a step is by each compressor."""
  layers = paper_models.MODELS[name]
  times = paper_models.elements(layers) / 25.6e6
  found = zenjax.planner.utility(
    jax.value_and_grad(paper_models.loss(layers)),
    paper_models.parameters(layers),
    topology=zenjax.planner.Topology.network(rate, hosts),
    compute_seconds=1.5 * BACKWARD_S[name],
    backward_seconds=BACKWARD_S[name],
    compressors=[*ENCODE_S],
    local_seconds={str(x): s * times for x, s in ENCODE_S.items()},
  )
  return {way.name: way.gain for way in found.ways}


def main(argv: Sequence[str] | None = None) -> int:
  """Prints and saves; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="benchmarks.peers",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  options = parser.parse_args(argv)
  results = []
  for instance in itertools.product(paper_models.MODELS, RATES, HOSTS):
    results.append(compared(*instance))
    print(_line(results[-1]), flush=True)
  utility = []
  for name, hosts in itertools.product(BACKWARD_S, (8, 16, 32, 64, 96)):
    found = gains(name, "10 Gbit/s", hosts)
    utility.append({"model": name, "hosts": hosts, "gains": found})
  for name in utility[0]["gains"]:
    gain = [x["gains"][name] for x in utility]
    count = sum(x > 0.05 for x in gain)
    print(
      f"{name:18} gains in {count} of {len(gain)}, {max(gain):+.0%} at most"
    )
  command = ["python", "-m", "benchmarks.peers", *sys.argv[1:]]
  environment = record.environment() | {"command": command}
  told = {"environment": environment, "utility": utility, "results": results}
  record.save(options, told)
  return 0


def _line(x: dict[str, Any]) -> str:
  """Returns steps of an instance, and the times to decide, in ms."""
  names = [*PEERS, "zenjax"]
  steps = [f"{name} {1e3 * x[name]['step_s']:.1f}" for name in names]
  decided = [f"{1e3 * x[name]['decided_s']:.0f}" for name in names[1:]]
  place = f"{x['model']:10}  {x['rate']:10}  {x['hosts']:2} hosts"
  return f"{place}  {'  '.join(steps)} ms; decided in {', '.join(decided)} ms"


if __name__ == "__main__":
  sys.exit(main())
