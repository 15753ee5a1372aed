"""Processes joined by `jax.distributed` train as one process does.

They run `examples/multi_host.py`, which a user would copy, over loopback.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import re
import runpy
import signal
import socket
import subprocess
import sys
import time

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

_EXAMPLE = str(
  pathlib.Path(__file__).resolve().parents[2] / "examples" / "multi_host.py"
)
_ENDLESS = ("--steps", "1000000")

pytestmark = pytest.mark.multiprocess


@contextlib.contextmanager
def _launched(log: pathlib.Path, *args: str) -> Iterator[subprocess.Popen]:
  """The running example; its output goes to a file, so that nothing blocks."""
  command = [sys.executable, _EXAMPLE, *args]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  with open(log, "w") as f:
    process = subprocess.Popen(
      command, env=environment, stdout=f, stderr=subprocess.STDOUT
    )
  try:
    yield process
  finally:
    process.terminate()  # the launcher ends its children itself
    _code(process, 10)
    process.kill()
    process.wait()


def _code(process: subprocess.Popen, seconds: float) -> int | None:
  """How the process ended, or None if it still runs."""
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(seconds)
  return process.poll()


def _wait_for(pattern: str, log: pathlib.Path, process: subprocess.Popen):
  deadline = time.monotonic() + 240
  while not re.search(pattern, log.read_text()):
    assert process.poll() is None, log.read_text()
    assert time.monotonic() < deadline, log.read_text()
    time.sleep(0.1)


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
  log, save = tmp_path / "log", f"--save={tmp_path}/{{}}.npz"
  shape = "--processes=2", "--devices=2", "--steps=1"
  with _launched(log, *shape, save) as process:
    assert _code(process, 300) == 0, log.read_text()
  example = runpy.run_path(_EXAMPLE)
  mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
  one_process, _ = example["train"](mesh, steps=1)
  start = example["make_params"]()
  for i in range(2):
    with np.load(tmp_path / f"{i}.npz") as saved:
      table, scale = saved["table"], saved["scale"]
    assert np.any(table != start["table"])
    np.testing.assert_array_equal(table, one_process["table"])
    np.testing.assert_allclose(scale, one_process["scale"], rtol=1e-6)


def test_killed_process_ends_the_others(tmp_path):
  """With no launcher to end them, as on a cluster."""
  shared = "--devices=1", "--num-processes=2", *_ENDLESS
  shared += (f"--coordinator=127.0.0.1:{_free_port()}",)
  zero, one = tmp_path / "0", tmp_path / "1"
  with (
    _launched(zero, *shared, "--process-id=0") as first,
    _launched(one, *shared, "--process-id=1") as second,
  ):
    _wait_for(r"step +5 ", zero, first)
    first.kill()
    assert _code(second, 90), one.read_text()


def test_launcher_leaves_nothing_behind(tmp_path):
  log = tmp_path / "log"
  with _launched(log, "--devices=1", *_ENDLESS) as process:
    _wait_for(r"process 1 has pid \d+\n", log, process)
    pids = [int(x) for x in re.findall(r"has pid (\d+)", log.read_text())]
    assert len(pids) == 2 and all(map(_is_running, pids))
    process.send_signal(signal.SIGINT)
    assert _code(process, 30) == 130, log.read_text()
    assert not any(map(_is_running, pids))


def test_cluster_flags_go_together(capsys):
  with pytest.raises(SystemExit) as ended:
    runpy.run_path(_EXAMPLE)["main"](["--coordinator", "127.0.0.1:1"])
  assert ended.value.code == 2
  assert "--process-id go together" in capsys.readouterr().err
