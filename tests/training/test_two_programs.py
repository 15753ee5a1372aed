"""Two processes that compile, compare and check; see `two_programs.py`."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

_SCRIPT = pathlib.Path(__file__).with_name("two_programs.py")

pytestmark = pytest.mark.multiprocess


def run(tmp_path, *arguments: str, seconds: float = 90):
  """What each wrote, and how it ended."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    coordinator = f"127.0.0.1:{s.getsockname()[1]}"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, str(_SCRIPT), coordinator]
  processes, logs = [], []
  try:
    for i, given in enumerate(arguments):
      logs.append(tmp_path / str(i))
      with open(logs[-1], "w") as log:
        processes.append(
          subprocess.Popen(
            [*command, str(i), *given.split()],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
          )
        )
    codes = [process.wait(seconds) for process in processes]
  except subprocess.TimeoutExpired:
    raise AssertionError([log.read_text() for log in logs]) from None
  finally:
    for process in processes:
      process.kill()
      process.wait()
  return [log.read_text() for log in logs], codes


@pytest.mark.parametrize(
  ("one", "other", "told"),
  [
    (
      "capacities=[4,8]",
      "capacities=[2,8]",
      r"capacities is .*push=4, pull=8.* on process 0 and .*push=2, pull=8.* on"
      " process 1",
    ),
    pytest.param(
      "hash_seed=1",
      "",
      "hash_seed is 1 on process 0 and 0 on process 1",
      marks=pytest.mark.more,
    ),
    pytest.param(
      'scheme="dense"',
      "",
      "scheme is dense on process 0 and all_gather on process 1",
      marks=pytest.mark.more,
    ),
  ],
)
def test_programs_that_differ_are_refused_by_all(tmp_path, one, other, told):
  """Where nothing was compared they hang, or add what is not alike."""
  texts, codes = run(tmp_path, f"train {one}", f"train {other}")
  assert codes == [3, 3], texts
  for text in texts:
    assert "refused: Processes must run the same program" in text
    assert re.search(told, text), text
    assert "(and" not in text


def test_plain_jit_over_processes_equals_the_plain_program(tmp_path):
  texts, codes = run(tmp_path, "jit", "jit")
  assert codes == [0, 0], texts
  for text in texts:
    (apart,), (moved,) = (
      re.findall(rf"{word} (\S+)", text) for word in ("differ", "moved")
    )
    assert float(apart) < 1e-6 < float(moved), text


@pytest.mark.more
def test_equal_programs_train(tmp_path):
  texts, codes = run(
    tmp_path, "train capacities=[4,8]", "train capacities=[4,8]"
  )
  assert codes == [0, 0], texts
  sums = [re.findall(r"trained (\S+)", text) for text in texts]
  assert sums[0] == sums[1] and len(sums[0]) == 1


@pytest.mark.more
def test_a_run_goes_on_in_other_processes(tmp_path):
  """What owners keep of rows is saved by each process, and restored."""
  half, rest, whole = (f'"{tmp_path}/{x}{{}}.npz"' for x in "abc")
  for more in (
    f"save={half}",
    f"restore={half} begin=2 save={rest}",
    f"steps=4 save={whole}",
  ):
    texts, codes = run(tmp_path, *[f"train owners=true {more}"] * 2)
    assert codes == [0, 0], texts
  for process in range(2):
    one, other = (np.load(tmp_path / f"{x}{process}.npz") for x in "bc")
    assert len(one.files) == len(other.files) > 3
    for name in one.files:
      np.testing.assert_array_equal(one[name], other[name])


def test_nobody_waits_for_ever(tmp_path):
  """A program that one process alone lowers, to look at it."""
  texts, codes = run(tmp_path, "lower", "idle")
  assert codes == [0, 0], texts
  (seconds,) = re.findall(r"lowered after ([\d.]+) s", texts[0])
  assert 4 < float(seconds) < 20


@pytest.mark.more
@pytest.mark.parametrize("what", ["check", "broken"])
def test_check_step_of_two_processes(tmp_path, what):
  texts, codes = run(tmp_path, what, what)
  assert codes == [0, 0], texts
  for text in texts:
    if what == "check":
      assert "verdict: ok" in text and "note" not in text, text
    else:
      assert re.search("WRONG: leaf: .*What is before `zen_sync`", text), text
