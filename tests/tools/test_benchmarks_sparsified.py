"""`benchmarks.run sparsified`: what it says, and two hosts from end to end."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import run as command_line
from benchmarks.campaigns import sparsified
from benchmarks.harness import Result

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _result(name, seconds, **facts):
  return Result(
    group="g",
    name=name,
    wrong=0,
    compile_s=0.0,
    facts=facts,
    times_s=(seconds,),
  )


def test_columns_are_those_of_the_dense_step():
  peers = {
    "none": _result("none", 1.0),
    "pmean": _result("pmean", 11.0, wire_bytes=100.0),
    "exdyna": _result("exdyna", 2.2, wire_bytes=10.0, bound_bytes=4.0),
  }
  columns = {c.header: c for c in sparsified.COLUMNS}
  of = lambda header: columns[header].value(peers["exdyna"], peers)
  assert of("fewer\nbytes") == 10
  assert of("times\nas fast") == pytest.approx(5)
  # A tenth of the ten seconds that the exchange adds, beside the first.
  assert of("Amdahl's\nbound") == pytest.approx(11 / 2)
  assert of("wire/\nbound") == 2.5


def test_bad_input(capsys):
  for arguments, told in (
    (["--variants", "zen"], "`--variants` must be among none, pmean"),
    (["--density", "0"], "must be in (0, 1]"),
    (["--hosts", "1"], "invalid choice: 1"),
  ):
    with pytest.raises(SystemExit) as ended:
      command_line.main(["sparsified", "--loopback", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.multiprocess
def test_what_hosts_send_and_keep_is_all_there_was(tmp_path):
  path = tmp_path / "out.json"
  arguments = "sparsified --loopback --hosts 2 --width 128 --batch 4"
  arguments += " --repeats 2 --variants none pmean exdyna"
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.run", *arguments.split()]
    + ["--json", str(path)],
    cwd=_ROOT,
    # Hosts must not send each other what is read back from a cache.
    env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  found = {r["name"]: r for r in json.loads(path.read_text())["results"]}
  assert all(r["wrong"] == 0 and len(r["times_s"]) == 2 for r in found.values())
  sent, dense = found["exdyna"]["facts"], found["pmean"]["facts"]
  assert 0.005 < sent["density"] < 0.02
  assert sent["bound_bytes"] < sent["wire_bytes"] < dense["wire_bytes"] / 10
