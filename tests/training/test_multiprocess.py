"""Processes joined by `jax.distributed` train as one process does.

They run `examples/multi_host.py`, which a user would copy, over loopback.
"""

import importlib.util
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

_EXAMPLE = (
  pathlib.Path(__file__).resolve().parents[2] / "examples" / "multi_host.py"
)
_ENDLESS = ("--steps", "1000000")

pytestmark = pytest.mark.multiprocess


def _example_module():
  spec = importlib.util.spec_from_file_location("multi_host", _EXAMPLE)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class _Launched:
  """A running example whose output goes to a file, so that nothing blocks."""

  def __init__(self, log: pathlib.Path, *args: str):
    command = [sys.executable, str(_EXAMPLE), *args]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    self._log = log
    with open(log, "w") as f:
      self.process = subprocess.Popen(
        command, env=environment, stdout=f, stderr=subprocess.STDOUT
      )

  def output(self) -> str:
    return self._log.read_text()

  def wait_for(self, pattern: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not re.search(pattern, self.output()):
      assert self.process.poll() is None, self.output()
      assert time.monotonic() < deadline, self.output()
      time.sleep(0.1)

  def wait(self, seconds: float) -> int:
    try:
      return self.process.wait(seconds)
    except subprocess.TimeoutExpired:
      raise AssertionError(f"still running:\n{self.output()}") from None

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if self.process.poll() is None:
      self.process.terminate()  # the launcher ends its children itself
      try:
        self.process.wait(10)
      except subprocess.TimeoutExpired:
        self.process.kill()
        self.process.wait()


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def _is_running(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def test_equals_one_process(tmp_path):
  """Table bit-equal (zen adds rank by rank), dense leaf within rounding (gloo's
  psum adds in an order of its own)."""
  args = (
    "--processes=2",
    "--devices=2",
    "--steps=1",
    f"--save={tmp_path}/{{}}.npz",
  )
  with _Launched(tmp_path / "log", *args) as launched:
    assert launched.wait(300) == 0, launched.output()
  one_process, _ = _example_module().train(
    Mesh(np.array(jax.devices()[:4]), ("data",)), steps=1
  )
  start = _example_module().make_params()
  for i in range(2):
    with np.load(tmp_path / f"{i}.npz") as saved:
      table, scale = saved["table"], saved["scale"]
    assert np.any(table != start["table"])
    np.testing.assert_array_equal(table, one_process["table"])
    np.testing.assert_allclose(scale, one_process["scale"], rtol=1e-6)


def test_killed_process_ends_the_others(tmp_path):
  """With no launcher to end them, as on a cluster."""
  port = _free_port()
  shared = (
    "--devices=1",
    "--num-processes=2",
    f"--coordinator=127.0.0.1:{port}",
  )
  with (
    _Launched(tmp_path / "0", *shared, *_ENDLESS, "--process-id=0") as first,
    _Launched(tmp_path / "1", *shared, *_ENDLESS, "--process-id=1") as second,
  ):
    first.wait_for(r"step +5 ")
    first.process.kill()
    assert second.wait(90) != 0


def test_launcher_leaves_nothing_behind(tmp_path):
  with _Launched(tmp_path / "log", "--devices=1", *_ENDLESS) as launched:
    launched.wait_for(r"process 1 has pid \d+\n")
    pids = [int(x) for x in re.findall(r"has pid (\d+)", launched.output())]
    assert len(pids) == 2 and all(map(_is_running, pids))
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait(30) == 130, launched.output()
    assert not any(map(_is_running, pids))


def test_cluster_flags_go_together(capsys):
  with pytest.raises(SystemExit) as ended:
    _example_module().main(["--coordinator", "127.0.0.1:1"])
  assert ended.value.code == 2
  assert "--process-id go together" in capsys.readouterr().err
