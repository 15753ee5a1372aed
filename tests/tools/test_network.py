"""`benchmarks.run network`: what is kept, resumed and refused."""

import json
import math

import pytest

from benchmarks import campaign
from benchmarks import run
from benchmarks.campaigns.network.cells import Cell
from benchmarks.campaigns.network.cells import CODE
from benchmarks.campaigns.network.cells import Findings


def cell(**changes):
  """A cell as the command keeps it."""
  values = {
    "hosts": 2,
    "rate": "200mbit",
    "workload": "lm1b-lstm",
    "variant": "zen",
    "repeats": 2,
    "batches": 2,
    "wrong": 0,
    "compile_s": 1.5,
    "wire_bytes": 1.5e6,
    "least_wire_bytes": 1.25e6,
    "received_bytes": 1.6e6,
    "facts": {"density": 0.01, "union_density": 0.03, "dense_bytes": 8e6},
    "host_times_s": [[0.1, 0.05], [0.05, 0.1]],
  }
  return Cell(**(values | changes))


def test_a_round_takes_as_long_as_its_last_host():
  found = cell(host_times_s=[[1.0, 3.0], [2.0, 1.0], [5.0, 6.0]])
  assert found.times_s == [3.0, 2.0, 6.0]
  assert found.median_s == 3.0
  assert found.spread_s == pytest.approx((4.5 - 2.5) / 2)
  assert math.isnan(cell(host_times_s=[]).median_s)


def test_less_time_than_the_bytes_need_is_an_error():
  # 1.25e6 bytes at 25e6 a second.
  cell().require_limit(0.05)
  with pytest.raises(RuntimeError, match=r"zen on lm1b-lstm.*49\.00 ms.*lends"):
    cell().require_limit(0.049)
  cell(rate="unlimited").require_limit(1e-9)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"jax": "0.0.1"}, "jax 0.0.1, now"),
    ({"hosts": "loopback"}, "hosts loopback, now namespaces"),
    ({"code": "abc", "git": "1234567"}, "other code (commit 1234567, now"),
  ],
)
def test_files_that_something_else_measured_are_refused(
  tmp_path, changes, words
):
  path = tmp_path / "out.json"
  found = Findings(campaign.software(CODE, loopback=False))
  found.add(cell())
  found.save(path)
  again = Findings.load(path, found.environment)
  assert again.cells == found.cells
  document = json.loads(path.read_text())
  document["environment"].update(changes)
  path.write_text(json.dumps(document))
  with pytest.raises(ValueError) as error:
    Findings.load(path, found.environment)
  for said in (str(path), words, "Delete it or name another"):
    assert said in str(error.value)
  path.write_text(path.read_text()[:99])
  with pytest.raises(ValueError, match="not a whole file"):
    Findings.load(path, found.environment)


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--workloads", "lm1b"], ["--workloads", "'lm1b'", "lm1b-lstm"]),
    (["--variants", "zenn"], ["--variants", "'zenn'", "zen-columns"]),
    (["--rates", "3mbit"], ["--rates", "'3mbit'", "200mbit"]),
    (["--hosts", "17"], ["--hosts", "17", "16"]),
    (["--repeats", "0"], ["--repeats", "positive", "0"]),
    (["--loopback", "--rates", "1gbit"], ["`rate`", "'unlimited'", "'1gbit'"]),
  ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, words, capsys):
  with pytest.raises(SystemExit) as end:
    run.main(["network", *arguments])
  assert end.value.code == 2
  said = capsys.readouterr().err
  assert all(word in said for word in words), said
