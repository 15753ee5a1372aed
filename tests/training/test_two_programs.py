"""Two processes that compile, compare and check: `two_programs` of helpers."""

import re
import socket

import forked
import pytest
import two_programs

pytestmark = pytest.mark.multiprocess


def run(tmp_path, *arguments: str, seconds: float = 90):
  """What each wrote, and how it ended."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    coordinator = f"127.0.0.1:{s.getsockname()[1]}"
  logs = [tmp_path / str(i) for i in range(len(arguments))]
  processes = [
    forked.start(log, two_programs.main, coordinator, i, *given.split())
    for i, (log, given) in enumerate(zip(logs, arguments))
  ]
  for process in processes:
    process.join(seconds)
  for process in processes:
    process.kill()
    process.join()
  codes = [process.exitcode for process in processes]
  return [log.read_text() for log in logs], codes


def test_programs_that_differ_are_refused_by_all(tmp_path):
  """Where nothing was compared they hang, or add what is not alike."""
  texts, codes = run(
    tmp_path, "train capacities=[4,8]", "train capacities=[2,8]"
  )
  told = r"capacities is \[4, 8\] on process 0 and \[2, 8\] on process 1"
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
def test_nobody_waits_for_ever(tmp_path):
  """A program that one process alone lowers, to look at it, waits a minute."""
  texts, codes = run(tmp_path, "lower", "idle", seconds=150)
  assert codes == [0, 0], texts
  (seconds,) = re.findall(r"lowered after ([\d.]+) s", texts[0])
  assert 59 < float(seconds) < 90
