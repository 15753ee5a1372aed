"""How hosts of `benchmarks.run network` compile, start and time their work."""

import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from benchmarks import run as command_line
from benchmarks.testbed.served import CommonStart
from benchmarks.testbed.served import SharedCompiler

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_one_host_compiles_for_all(tmp_path):
  # Of all devices, as on the hosts, each of which has one.
  mesh = Mesh(np.array(jax.devices()), ("data",))
  x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
  lowered = jax.jit(lambda x: {"twice": x * 2}).lower(x)
  first, others = SharedCompiler(tmp_path, 0), SharedCompiler(tmp_path, 1)
  compiled, seconds = first.compile(lowered)
  assert seconds > 0
  loaded, no_seconds = others.compile(lowered)
  assert no_seconds == 0
  for run in (compiled, loaded):
    assert run(x)["twice"].tolist() == [2 * i for i in range(8)]


def test_no_host_waits_for_what_cannot_be_compiled(tmp_path):
  class Broken:
    def compile(self):
      raise ValueError("no such thing")

  broken: Any = Broken()
  with pytest.raises(ValueError, match="no such thing"):
    SharedCompiler(tmp_path, 0).compile(broken)
  with pytest.raises(RuntimeError, match="Host 0 has failed to compile"):
    SharedCompiler(tmp_path, 1).compile(broken)


def test_a_common_start_is_an_instant_to_come():
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  start = CommonStart(mesh, time.monotonic() - 3.0)
  before = time.monotonic()
  instant = start()
  assert before < instant <= time.monotonic()


@pytest.mark.more
@pytest.mark.multiprocess
def test_whole_steps_on_hosts_are_checked_and_timed(tmp_path):
  """Over loopback, which needs no root; float64 says what must come out."""
  arguments = "step --hosts 2 --loopback --rows 2000 --width 4 --look-ups 64"
  arguments += " --variants dense rows --optimizer sgd --repeats 2"
  path = tmp_path / "out.json"
  # A process of its own: this one's JAX has eight devices.
  command = [sys.executable, "-m", "benchmarks.run", *arguments.split()]
  done = subprocess.run(
    [*command, "--json", str(path)],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  dense, rows = json.loads(path.read_text())["results"]
  for found in (dense, rows):
    assert found["wrong"] == 0 and len(found["times_s"]) == 2
  assert rows["facts"]["wire_bytes"] < dense["facts"]["wire_bytes"] / 4


def test_links_of_loopback_have_no_rate():
  arguments = ["step", "--hosts", "2", "--loopback", "--rate", "1gbit"]
  with pytest.raises(SystemExit) as end:
    command_line.main([*arguments, "--rows", "2000"])
  assert end.value.code == 2
