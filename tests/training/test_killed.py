"""A process that is killed while it saves loses that checkpoint alone."""

import signal

import forked
import killed
import numpy as np
import pytest

pytestmark = pytest.mark.multiprocess


def _code(tmp_path, *arguments):
  """How the program ended, and what it told."""
  log = tmp_path / "log"
  process = forked.start(log, killed.main, *arguments)
  process.join(90)
  process.kill()
  process.join()
  return process.exitcode, log.read_text()


def test_a_run_goes_on_from_the_last_complete_checkpoint(tmp_path):
  directory, steps = tmp_path / "run", 6
  # Each process finds what the one before it has left, and gets further.
  for doomed, moment in [(2, "begun"), (4, "named")]:
    code, told = _code(tmp_path, directory, steps, doomed, moment)
    assert code == -signal.SIGKILL, told
    whole = {int(p.name) for p in directory.iterdir() if p.name.isdigit()}
    assert max(whole) == doomed - 1
    assert [p.name.split(".")[0] for p in directory.glob("*.*")] == [
      str(doomed)
    ]
    assert not directory.with_suffix(".npz").exists()
  for place in (directory, tmp_path / "other"):
    code, told = _code(tmp_path, place, steps)
    assert code == 0, told
  with np.load(tmp_path / "run.npz") as got:
    with np.load(tmp_path / "other.npz") as want:
      # Step 3 is the last complete one: only those after it were taken again.
      assert {*got} == {"table", "4", "5"}
      for name in got:
        np.testing.assert_array_equal(got[name], want[name])
