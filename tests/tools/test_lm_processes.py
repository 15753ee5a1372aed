"""The language model in several processes, over loopback."""

from collections.abc import Sequence
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from examples.studies.common import cluster
from examples.studies.common import interrupts
from examples.studies.lm import flags as lm_flags

_ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def text(tmp_path):
  rng = np.random.default_rng(0)
  words = np.append(np.arange(2000), rng.zipf(1.3, 90_000) % 2000)
  path = tmp_path / "text"
  path.write_text(" ".join(f"w{word}" for word in words))
  return path


class _Runs:
  """Processes of one run, each with a log of its own."""

  def __init__(
    self,
    folder: pathlib.Path,
    processes: int,
    *flags: str,
    own: Sequence[str] = ("", ""),
  ):
    self._logs = [folder / f"log{i}" for i in range(processes)]
    command = [sys.executable, "-m", "examples.studies.lm", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["JAX_NUM_CPU_DEVICES"] = str(2 // processes)
    self.processes = []
    if processes > 1:
      with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
      command += [f"--coordinator=127.0.0.1:{port}", "--num-processes=2"]
    for i, log in enumerate(self._logs):
      more = [own[i]] if own[i] else []
      if processes > 1:
        more.append(f"--process-id={i}")
      with open(log, "w") as f:
        self.processes.append(
          subprocess.Popen(
            [*command, *more],
            cwd=_ROOT,
            env=environment,
            stdout=f,
            stderr=subprocess.STDOUT,
          )
        )

  def output(self, index: int = 0) -> str:
    return self._logs[index].read_text()

  def wait_for(self, pattern: str) -> None:
    deadline = time.monotonic() + 240
    while not re.search(pattern, self.output()):
      assert self.processes[0].poll() is None, self.output()
      assert time.monotonic() < deadline, self.output()
      time.sleep(0.05)

  def codes(self) -> list[int]:
    return [p.wait(240) for p in self.processes]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()
      process.wait()


@pytest.mark.more
def test_ctrl_c_of_one_stops_all_and_the_run_goes_on(tmp_path, text):
  """What two processes hold after a stop and more steps, as one without."""
  flags = (
    f"--corpus={text}",
    "--batch-tokens=64",
    "--negatives=8",
    "--width=16",
    "--eval-tokens=128",
    "--grads=rows",
  )
  saved = ("--checkpoint", str(tmp_path / "saved"))
  with _Runs(tmp_path, 2, *flags, *saved, "--steps=1000000") as runs:
    runs.wait_for(r"zen: .* [1-9]\d*/1000000")
    runs.processes[1].send_signal(signal.SIGINT)
    assert runs.codes() == [130, 130], runs.output() + runs.output(1)
    done = re.search(r"after (\d+) steps, saved in", runs.output())
    assert done, runs.output()
    assert "steps" not in runs.output(1)
  steps = f"--steps={int(done[1]) + 5}"
  last = []
  for processes, more in ((2, (*saved, "--resume")), (1, ())):
    with _Runs(tmp_path, processes, *flags, *more, steps) as runs:
      assert runs.codes() == [0] * processes, runs.output()
      last += re.findall(r"perplexity after \d+ steps: (.*)", runs.output())[
        -1:
      ]
  assert last[0] == last[1]


def test_ctrl_c_while_the_hosts_agree_is_not_lost(monkeypatch):
  def pressed_meanwhile(mine):
    signal.raise_signal(signal.SIGINT)
    return mine

  monkeypatch.setattr(cluster, "any_process", pressed_meanwhile)
  with interrupts.Interrupt() as interrupt:
    assert not interrupt.agreed()
    monkeypatch.setattr(cluster, "any_process", lambda mine: mine)
    assert interrupt.agreed()


def test_hosts_with_other_texts_are_refused(tmp_path, text):
  other = tmp_path / "other"
  other.write_text(text.read_text().replace("w1 ", "w2 "))
  own = (f"--corpus={text}", f"--corpus={other}")
  with _Runs(tmp_path, 2, "--batch-tokens=64", own=own) as runs:
    assert runs.codes() == [1, 1]
    for i in range(2):
      assert "must be the same on every host" in runs.output(i)


@pytest.mark.parametrize(
  "flags, message",
  [
    (("--process-id=0",), "--process-id go together"),
    (
      ("--coordinator=h:1", "--num-processes=0", "--process-id=0"),
      "--num-processes must be at least 1, got 0",
    ),
    (
      ("--coordinator=h:1", "--num-processes=2", "--process-id=2"),
      "--process-id must be 0 to 1, one below --num-processes at most, got 2",
    ),
  ],
)
def test_flags_that_no_run_has(flags, message, capsys):
  with pytest.raises(SystemExit) as end:
    lm_flags.parse("", flags)
  assert end.value.code == 2
  assert message in capsys.readouterr().err
