"""Times schemes between hosts of two devices, and compares predictions.

  python -m benchmarks.testbed --hosts 2 --rate 1gbit -- \\
    python -m benchmarks.levels --json levels.json

Each host is a process with two devices. Links between hosts are slow, and links
within a host cost only the time of its cores. A step adds the rows of a batch
into an array, the gradient, and averages it over all devices. Links are
measured, and counts of the warm-up steps tell the planner how dense gradients
are. The table shows what it would choose, and what each scheme took.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import os
from pathlib import Path
import statistics
import sys
import time
from typing import Any

import jax
from jax import lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks import record
import zenjax
from zenjax import planner

AXES = ("host", "device")
_DEVICES = 2  # Of a host.
NONE, PMEAN = "none", "pmean"
WAYS: Any = (NONE, PMEAN, "zen", "dense_inside", "flat", "all_gather")
_WARM_UP = 8


def _transformation(way: Any) -> optax.GradientTransformation:
  if way == NONE:
    return optax.identity()
  if way == PMEAN:
    return optax.stateless(
      lambda grads, _: jax.tree.map(lambda x: lax.pmean(x, AXES), grads)
    )
  return zenjax.zen_sync(AXES, sparse=True, scheme=way)


class _Step:
  """A step in one way, on batches of one density."""

  def __init__(self, way: str, mesh: jax.sharding.Mesh, shape: tuple[int, int]):
    self._tx, self._mesh, self._shape = _transformation(way), mesh, shape
    zeros = jax.ShapeDtypeStruct(shape, jnp.float32)
    self.state: Any = zenjax.init_state(self._tx, zeros, mesh, AXES)
    self._step = self._compiled()

  def _compiled(self) -> Any:
    def step(state, ids, values):
      grad = jnp.zeros(self._shape).at[ids[0]].add(values[0])
      mean, state = self._tx.update(grad, state)
      assert isinstance(mean, jax.Array)
      return state, mean[None]

    specs = zenjax.state_specs(self.state, AXES)
    mapped = jax.shard_map(
      step,
      mesh=self._mesh,
      in_specs=(specs, P(AXES), P(AXES)),
      out_specs=(specs, P(AXES)),
      check_vma=False,
    )
    return jax.jit(mapped)

  def __call__(self, batch: Any) -> tuple[jax.Array, float]:
    """Returns the means of all devices, `[n, R, D]`, and the seconds."""
    multihost_utils.sync_global_devices("start")
    start = time.perf_counter()
    self.state, mean = jax.block_until_ready(self._step(self.state, *batch))
    return mean, time.perf_counter() - start

  def tune(self) -> None:
    """Gives buffers the sizes that the steps so far needed."""
    if jax.tree.leaves(self.state):
      self.state = zenjax.tune(self.state)


def _batch(
  mesh: jax.sharding.Mesh, shape: tuple[int, int], density: float, seed: int
) -> tuple[Any, np.ndarray]:
  """Returns ids and values of all devices, and their mean in float64."""
  rng, n = np.random.default_rng(seed), mesh.devices.size
  count = max(1, round(density * shape[0]))
  ids = np.stack([rng.choice(shape[0], count, replace=False) for _ in range(n)])
  values = rng.standard_normal((n, count, shape[1]), np.float32)
  want = np.zeros(shape)
  for i in range(n):
    want[ids[i]] += values[i] / n
  split = NamedSharding(mesh, P(AXES))
  place = lambda x: jax.make_array_from_callback(x.shape, split, lambda i: x[i])
  return (place(ids.astype(np.int32)), place(values)), want


def measured(
  density: float,
  mesh: jax.sharding.Mesh,
  topology: planner.Topology,
  shape: tuple[int, int],
  repeats: int,
) -> dict[str, Any]:
  """Times all ways in turns, and asks the planner."""
  batches = [_batch(mesh, shape, density, seed) for seed in range(_WARM_UP)]
  steps = {way: _Step(way, mesh, shape) for way in WAYS}
  known: Any = None
  for way, step in steps.items():
    for batch, want in batches:
      mean, _ = step(batch)
      got = np.asarray(mean.addressable_shards[0].data[0])
      if way != NONE and not np.allclose(got, want, atol=1e-5, rtol=1e-5):
        raise RuntimeError(f"{way} at density {density} is wrong.")
    if way == "zen":
      known = planner.profile(step.state)
    step.tune()
    step(batches[0][0])  # Compiles.
  times: dict[str, list[float]] = {way: [] for way in WAYS}
  for turn in range(repeats):
    for way, step in steps.items():
      times[way].append(step(batches[turn % _WARM_UP][0])[1])
  compute_s = statistics.median(times[NONE])
  predicted, chosen = predictions(topology, shape, known, compute_s)
  return {
    "density": density,
    "times_s": times,
    "predicted_s": predicted,
    "chosen": chosen,
  }


def predictions(
  topology: planner.Topology,
  shape: tuple[int, int],
  known: Any,
  compute_s: float,
) -> tuple[dict[str, float], str]:
  """Returns the predicted step by way, and what the plan takes."""
  grads = lambda x: (jnp.float32(0), x)
  plan = planner.plan(
    grads,
    jax.ShapeDtypeStruct(shape, jnp.float32),
    topology=topology,
    axis_name=AXES,
    profile=known,
    compute_seconds=compute_s,
  )
  (leaf,) = plan.leaves
  ways = {way.choice: way.seconds for way in (leaf, *leaf.others)}
  found = {}
  for way in WAYS[1:]:
    mine = [s for name, s in ways.items() if name.split("/")[0] == way]
    found[way] = compute_s + min(mine)
  return found, leaf.choice


def table(results: Sequence[dict[str, Any]]) -> str:
  """Returns times and predictions in Markdown, ms."""
  lines = [
    "| rows of a device | | " + " | ".join(WAYS) + " | chosen |",
    "|---" * (len(WAYS) + 3) + "|",
  ]
  for found in results:
    seen = [statistics.median(found["times_s"][way]) for way in WAYS]
    told = [found["predicted_s"].get(way) for way in WAYS]
    first = f"| {found['density']:.1%} | measured | "
    lines.append(
      first
      + " | ".join(f"{1e3 * s:.0f}" for s in seen)
      + f" | {found['chosen']} |"
    )
    lines.append(
      "| | predicted | "
      + " | ".join("" if s is None else f"{1e3 * s:.0f}" for s in told)
      + " | |"
    )
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Measures, prints and saves; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="benchmarks.levels",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--rows", type=int, default=100_000)
  add("--width", type=int, default=64)
  densities = (0.001, 0.01, 0.05, 0.2, 0.5)
  add("--densities", type=float, nargs="+", default=densities)
  add("--repeats", type=int, default=9)
  add("--json", type=Path, metavar="FILE")
  options = parser.parse_args(argv)
  jax.config.update("jax_num_cpu_devices", _DEVICES)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  told = os.environ
  if "ZENJAX_COORDINATOR" not in told:
    parser.error("run it by `python -m benchmarks.testbed`, as --help says")
  jax.distributed.initialize(
    told["ZENJAX_COORDINATOR"],
    int(told["ZENJAX_HOST_COUNT"]),
    int(told["ZENJAX_HOST_INDEX"]),
  )
  first = jax.process_index() == 0
  devices = np.array(jax.devices()).reshape(-1, _DEVICES)
  mesh = jax.sharding.Mesh(devices, AXES)
  topology = planner.measure_links(mesh)
  if first:
    print(topology.source)
  shape, results = (options.rows, options.width), []
  for density in options.densities:
    results.append(measured(density, mesh, topology, shape, options.repeats))
    if first:
      print(f"\n{table(results)}", flush=True)
  if first:
    command = ["python", "-m", "benchmarks.levels", *sys.argv[1:]]
    document = {
      "environment": record.environment() | {"command": command},
      "topology": dataclasses.asdict(topology),
      "results": results,
    }
    record.save(options, document)
  return 0


if __name__ == "__main__":
  sys.exit(main())
