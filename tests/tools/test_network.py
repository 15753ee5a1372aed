"""`benchmarks.run network`: what is measured, kept, resumed and refused."""

import json
import math
import os

from network_cases import cell as _cell
from network_cases import FACTS as _FACTS
from network_cases import found as _found
import pytest

from benchmarks import campaign
from benchmarks import run
from benchmarks.campaigns.network import campaign as network_lib
from benchmarks.campaigns.network import cells as cells_lib
from benchmarks.testbed import testbed
from benchmarks.testbed.hosts import HostDied

# --- cells ------------------------------------------------------------------


def test_a_round_takes_as_long_as_its_last_host():
  cell = _cell(host_times_s=[[1.0, 3.0], [2.0, 1.0], [5.0, 6.0]])
  assert cell.times_s == [3.0, 2.0, 6.0]
  assert cell.median_s == 3.0
  assert cell.spread_s == pytest.approx((4.5 - 2.5) / 2)
  assert math.isnan(_cell(host_times_s=[]).median_s)


def test_less_time_than_the_bytes_need_is_an_error():
  # 1.25e6 bytes at 25e6 a second.
  _cell().require_limit(0.05)
  with pytest.raises(RuntimeError, match=r"zen on lm1b-lstm.*49\.00 ms.*lends"):
    _cell().require_limit(0.049)
  _cell(rate="unlimited").require_limit(1e-9)


# --- the file ---------------------------------------------------------------


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
  path, found = tmp_path / "out.json", _found(_cell())
  found.save(path)
  again = cells_lib.Findings.load(path, found.environment)
  assert again.cells == found.cells
  document = json.loads(path.read_text())
  document["environment"].update(changes)
  path.write_text(json.dumps(document))
  with pytest.raises(ValueError) as error:
    cells_lib.Findings.load(path, found.environment)
  for said in (str(path), words, "Delete it or name another"):
    assert said in str(error.value)
  path.write_text(path.read_text()[:99])
  with pytest.raises(ValueError, match="not a whole file"):
    cells_lib.Findings.load(path, found.environment)


# --- the command, with hosts that only say what they are told to ------------


class _Bed:
  """A testbed in name: `say` replies for every host."""

  def __init__(self, hosts, rate, loopback):
    del rate, loopback
    self.hosts, self.rate, self.said = hosts, "unlimited", []

  def __enter__(self):
    return self

  def __exit__(self, *raised):
    del raised

  def start(self, argv, env):
    del argv, env
    return []

  def set_rate(self, rate):
    self.rate = rate

  def counters(self):
    return None

  def ask(self, message, timeout):
    assert timeout > 0
    self.said.append(message)
    return [self.say(**message) for _ in range(self.hosts)]

  def say(self, do, **arguments):
    if do == "workload":
      return _FACTS
    if do == "build":
      return {
        "wrong": int(arguments["variant"] == "all_gather"),
        "compile_s": 1.0,
        "wire_bytes": 1e6,
        "least_wire_bytes": 1e6,
      }
    return {"time": 0.05, "repeat": None}[do]


class _Network:
  """Runs the command on testbeds in name, which it keeps in `beds`."""

  def __init__(self, monkeypatch, path):
    self._monkeypatch, self._path = monkeypatch, path
    self.beds = []

  def __call__(self, *variants, bed=_Bed, repeats="2"):
    """Returns the command's status and what it has saved."""

    def make(*arguments):
      self.beds.append(bed(*arguments))
      return self.beds[-1]

    self._monkeypatch.setattr(campaign, "Testbed", make)
    status = run.main(
      ["network", "--hosts", "2", "--rates", "200mbit"]
      + ["--workloads", "lm1b-lstm", "--variants", *variants]
      + ["--repeats", repeats, "--json", str(self._path)]
    )
    return status, json.loads(self._path.read_text())


@pytest.fixture
def network(monkeypatch, tmp_path):
  monkeypatch.setattr(testbed, "require", lambda *_: None)
  monkeypatch.setattr(network_lib._Network, "_probe", lambda *_: None)
  return _Network(monkeypatch, tmp_path / "out.json")


def _rounds(document):
  return {c["variant"]: len(c["times_s"]) for c in document["cells"]}


def test_what_is_wrong_is_shown_and_not_timed(network, capsys):
  status, document = network("psum", "all_gather")
  assert (status, document["complete"]) == (1, False)
  assert _rounds(document) == {"psum": 2, "all_gather": 0}
  assert document["cells"][1]["wrong"] == 2, "of both hosts"
  assert "all_gather" in capsys.readouterr().out
  said = network.beds[0].said
  asked = [(m["do"], m.get("variant", m.get("program"))) for m in said]
  assert ("time", "all_gather") not in asked and (
    "repeat",
    "all_gather",
  ) not in asked
  assert asked.count(("time", "psum")) == 3


def test_it_goes_on_where_it_stopped(network):
  assert network("psum")[0] == 0
  status, document = network("psum", "zen")
  assert (status, document["complete"]) == (0, True)
  assert _rounds(document) == {"psum": 2, "zen": 2}
  assert {m.get("variant") for m in network.beds[1].said} == {None, "zen"}
  assert network("zen")[0] == 0
  assert len(network.beds) == 2, "nothing was left to measure"
  assert _rounds(network("zen", repeats="3")[1]) == {"psum": 2, "zen": 3}


class _Fails(_Bed):
  """Fails at its fourth time, the second of the first round that counts."""

  how: Exception | KeyboardInterrupt | float = 0.0

  def say(self, do, **arguments):
    if do == "time" and sum(m["do"] == "time" for m in self.said) == 4:
      if isinstance(self.how, BaseException):
        raise self.how
      return self.how
    return super().say(do, **arguments)


@pytest.mark.parametrize(
  ("how", "wanted", "words"),
  [
    (KeyboardInterrupt(), 130, "Interrupted"),
    (HostDied(1, -9, "the reason why"), 1, "the reason why"),
    (TimeoutError("No reply within 1 s from hosts [1]."), 1, "`time` of"),
    (0.039, 1, "1,000,000 bytes need 40.00 ms at 200mbit"),
  ],
)
def test_what_was_measured_is_saved(network, capsys, how, wanted, words):
  bed = type("Fails", (_Fails,), {"how": how})
  status, document = network("psum", "zen", bed=bed)
  assert (status, document["complete"]) == (wanted, False)
  assert sum(_rounds(document).values()) == 1
  output = capsys.readouterr()
  assert words in output.err and "lm1b-lstm, 2 hosts" in output.out
  # It goes on from there.
  status, document = network("psum", "zen")
  assert (status, _rounds(document)) == (0, {"psum": 2, "zen": 2})


# --- bad input --------------------------------------------------------------


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--workloads", "lm1b"], ["--workloads", "'lm1b'", "lm1b-lstm"]),
    (["--variants", "zenn"], ["--variants", "'zenn'", "zen-columns"]),
    (["--rates", "3mbit"], ["--rates", "'3mbit'", "200mbit"]),
    (["--hosts", "9"], ["--hosts", "9", "8"]),
    (["--repeats", "0"], ["--repeats", "positive", "0"]),
    (["--loopback", "--rates", "1gbit"], ["`rate`", "'unlimited'", "'1gbit'"]),
    ([], ["run as root", "--loopback"]),
  ],
)
def test_bad_input_is_refused_before_anything_starts(
  arguments, words, capsys, monkeypatch
):
  monkeypatch.setattr(os, "geteuid", lambda: 1000)
  monkeypatch.setattr(campaign, "Testbed", None)
  with pytest.raises(SystemExit) as end:
    run.main(["network", *arguments])
  assert end.value.code == 2
  said = capsys.readouterr().err
  assert all(word in said for word in words), said
