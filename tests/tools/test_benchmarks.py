"""Benchmarks: answers before times, and each command runs."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import campaign
from benchmarks import harness
from benchmarks import workloads
from benchmarks.cases import kernels
from zenjax.kernels.operations import OPERATIONS

ROOT = pathlib.Path(__file__).resolve().parents[2]

LOOPBACK = "--loopback --hosts 2"
COMMANDS = [
  pytest.param(
    "sync --workloads sweep-0.1 --variants pmean zen --devices 2",
    marks=pytest.mark.more,
  ),
  f"network {LOOPBACK} --workloads sweep-0.1 --variants psum zen",
  f"tables {LOOPBACK} --rows 4000 --width 8 --tokens 100 --variants rows",
  f"step {LOOPBACK} --rows 4000 --width 4 --look-ups 64 --variants dense rows",
  f"sparsified {LOOPBACK} --width 130 --batch 8 --variants pmean int8",
]


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path):
  """Every answer is right: the exit status says it."""
  path = tmp_path / "out.json"
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.run", *command.split()]
    + ["--repeats", "2", "--json", str(path)],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=500,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  document = json.loads(path.read_text())
  assert document["complete"]
  found = document.get("results") or document["cells"]
  assert found and not any(result["wrong"] for result in found)


@pytest.mark.parametrize("name", [*workloads.SCALED, "sweep-5", "sweep-100"])
def test_ids_have_the_density_and_union_that_are_stated(name):
  workload = workloads.get(name)
  ids = workloads.ids(workload, n=8, seed=0)
  assert all(0 <= i.min() and i.max() < workload.rows for i in ids)
  local = np.mean([len(np.unique(i)) for i in ids]) / workload.rows
  assert local == pytest.approx(workload.density, rel=0.06)
  union = len(np.unique(np.concatenate(ids))) / workload.rows
  assert union / local == pytest.approx(workload.union_growth, rel=0.1)


@pytest.mark.parametrize("name", kernels.WORK)
def test_answers_of_kernels_are_checked(name):
  """The reference is right, and each leaf of it is looked at."""
  checked = {"mask_pack": (0, 1), "compact": (0, 1), "merge": (0, 1, 2)}
  work = kernels.WORK[name](kernels.draw(500, 4, 0.1))
  reference = OPERATIONS[name].reference
  run = jax.jit(lambda *arrays: reference(*arrays, *work.static))
  right = run(*work.arrays)
  assert work.wrong(right) == 0
  for field in checked.get(name, (0,)):
    leaves, tree = jax.tree.flatten(right)
    flat = np.array(leaves[field]).reshape(-1)
    flat[0] = flat[0] == 0  # Another value, whatever the dtype.
    leaves[field] = jax.numpy.asarray(flat.reshape(leaves[field].shape))
    assert work.wrong(tree.unflatten(leaves)) > 0


def _case(name, calls, wrong=0):
  built = harness.Built(
    run=lambda: calls.append(name), wrong=wrong, compile_s=0.0, facts={}
  )
  return harness.Case(group="group", name=name, build=lambda: built)


def test_wrong_answers_are_not_timed():
  calls = []
  cases = [_case("right", calls), _case("wrong", calls, wrong=3)]
  results, complete = harness.measure(cases, repeats=4, warmup=1)
  assert complete
  assert calls == ["right"] * 5
  assert [len(r.times_s) for r in results] == [4, 0]
  assert [r.wrong for r in results] == [0, 3]


def test_interval_holds_the_ratio_of_medians():
  rng = np.random.default_rng(0)
  base = rng.normal(1.0, 0.05, 15)
  found = campaign.ratio((2 * base).tolist(), base.tolist())
  assert found.median == pytest.approx(2)
  assert found.interval is not None
  assert found.interval.low <= 2 <= found.interval.high
  assert campaign.ratio([1.0], [1.0]).interval is None
