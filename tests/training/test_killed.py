"""A process that is killed while it saves loses that checkpoint alone."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

_SCRIPT = pathlib.Path(__file__).with_name("killed.py")

pytestmark = pytest.mark.multiprocess


def _start(directory, *arguments):
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  return subprocess.Popen(
    [sys.executable, str(_SCRIPT), str(directory), *map(str, arguments)],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def test_a_run_goes_on_from_the_last_complete_checkpoint(tmp_path):
  directory, steps = tmp_path / "run", 6
  undisturbed = _start(tmp_path / "other", steps)
  try:
    # Each process finds what the one before it has left, and gets further.
    for doomed, moment in [(2, "begun"), (3, "written"), (4, "named")]:
      process = _start(directory, steps, doomed, moment)
      told, _ = process.communicate(timeout=90)
      assert process.returncode == -signal.SIGKILL, told
      whole = {int(p.name) for p in directory.iterdir() if p.name.isdigit()}
      assert max(whole) == doomed - 1
      assert [p.name.split(".")[0] for p in directory.glob("*.*")] == [
        str(doomed)
      ]
      assert not directory.with_suffix(".npz").exists()
    last = _start(directory, steps)
    told, _ = last.communicate(timeout=90)
    assert last.returncode == 0, told
    told, _ = undisturbed.communicate(timeout=90)
    assert undisturbed.returncode == 0, told
  finally:
    undisturbed.kill()
    undisturbed.wait()
  with np.load(tmp_path / "run.npz") as got:
    with np.load(tmp_path / "other.npz") as want:
      # Step 3 is the last complete one: only those after it were taken again.
      assert {*got} == {"table", "4", "5"}
      for name in got:
        np.testing.assert_array_equal(got[name], want[name])
