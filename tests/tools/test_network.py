"""`benchmarks.run network`: what is measured, kept, resumed and refused."""

import json
import math
import os

from network_cases import cell as _cell
from network_cases import FACTS as _FACTS
from network_cases import found as _found
from network_cases import grid as _grid
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


def test_done_is_right_and_has_all_rounds_asked_for():
  assert _cell().is_done(repeats=2, batches=2)
  assert not _cell().is_done(repeats=3, batches=2)
  assert not _cell().is_done(repeats=2, batches=1)
  assert not _cell(wrong=1).is_done(repeats=2, batches=2)
  cut = _cell(host_times_s=[[1.0, 2.0]])
  assert not cut.is_done(repeats=2, batches=2)


def test_less_time_than_the_bytes_need_is_an_error():
  # 1.25e6 bytes at 25e6 a second.
  _cell().require_limit(0.05)
  with pytest.raises(RuntimeError, match=r"zen on lm1b-lstm.*49\.00 ms.*lends"):
    _cell().require_limit(0.049)
  _cell(rate="unlimited").require_limit(1e-9)


# --- the file ---------------------------------------------------------------


def _saved(tmp_path, *cells):
  path = tmp_path / "out.json"
  found = _found(*cells)
  found.links[2, "200mbit"] = {"hosts": 2, "rate": "200mbit", "bytes": 1}
  found.complete = True
  found.save(path)
  return path, found


def test_a_file_comes_back_as_it_was(tmp_path):
  loopback = _cell("psum", received_bytes=math.nan)
  path, found = _saved(tmp_path, _cell(), loopback)
  again = cells_lib.Findings.load(path, found.environment)
  assert again.links == found.links
  assert list(again.cells) == list(found.cells)
  assert again.cells[_cell().key] == _cell()
  assert math.isnan(again.cells[loopback.key].received_bytes)
  document = json.loads(path.read_text())
  assert document["complete"]
  assert document["cells"][0]["median_s"] == 0.1
  assert not list(tmp_path.glob(".*"))
  assert not cells_lib.Findings.load(
    tmp_path / "none.json", found.environment
  ).cells


@pytest.mark.parametrize(
  "break_",
  [
    lambda text: text[: len(text) // 2],
    lambda text: "",
    lambda text: "[]",
    lambda text: '{"environment": {}, "results": []}',
    lambda text: text.replace('"wire_bytes"', '"bytes"'),
  ],
)
def test_a_broken_file_is_refused(tmp_path, break_):
  path, found = _saved(tmp_path, _cell())
  path.write_text(break_(path.read_text()))
  with pytest.raises(ValueError) as error:
    cells_lib.Findings.load(path, found.environment)
  words = (str(path), "not a whole file", "Delete it or name another")
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"jax": "0.0.1"}, "jax 0.0.1, now"),
    ({"hosts": "loopback"}, "hosts loopback, now namespaces"),
    ({"code": "abc", "git": "1234567"}, "other code (commit 1234567, now"),
  ],
)
def test_what_something_else_measured_is_refused(tmp_path, changes, words):
  path, found = _saved(tmp_path, _cell())
  document = json.loads(path.read_text())
  document["environment"].update(changes)
  path.write_text(json.dumps(document))
  with pytest.raises(ValueError) as error:
    cells_lib.Findings.load(path, found.environment)
  words = (str(path), words, "Delete it or name another")
  assert all(word in str(error.value) for word in words), error.value


def test_what_is_there_is_not_measured_again():
  everything = _grid().left(_found())
  assert [key.variant for key in everything] == ["psum", "zen"]
  rest = _grid().left(_found(_cell()))
  assert [key.variant for key in rest] == ["psum"]
  assert len(_grid(repeats=3).left(_found(_cell()))) == 2


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
        "wrong": int(arguments["variant"] == "ring"),
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
  status, document = network("psum", "ring")
  assert (status, document["complete"]) == (1, False)
  assert _rounds(document) == {"psum": 2, "ring": 0}
  assert document["cells"][1]["wrong"] == 2, "of both hosts"
  assert "ring" in capsys.readouterr().out
  said = network.beds[0].said
  asked = [(m["do"], m.get("variant", m.get("program"))) for m in said]
  assert ("time", "ring") not in asked and ("repeat", "ring") not in asked
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
    (["--loopback", "--plot", "x.txt"], ["`--plot`", "x.txt", ".png"]),
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


# --- hosts, on loopback -----------------------------------------------------


@pytest.mark.more
@pytest.mark.multiprocess
def test_two_hosts_measure_and_keep_everything(tmp_path, capfd):
  path = tmp_path / "out.json"
  status = run.main(
    ["network", "--loopback", "--hosts", "2", "--json", str(path)]
    + ["--workloads", "sweep-0.1", "--variants", "psum", "zen"]
    + ["--repeats", "2", "--plot", str(tmp_path / "net")]
  )
  output = capfd.readouterr()
  assert status == 0, output.err
  assert "latency" in output.out and "sweep-0.1, 2 hosts" in output.out
  document = json.loads(path.read_text())
  assert document["complete"]
  assert document["environment"]["hosts"] == "loopback"
  assert len(document["links"]) == 1
  psum, zen = document["cells"]
  assert psum["wrong"] == zen["wrong"] == 0
  assert [len(x) for x in zen["host_times_s"]] == [2, 2]
  # Half of the table goes and comes; 50 rows of it do so in `zen`.
  assert psum["wire_bytes"] == 50_000 * 128 * 4
  assert zen["facts"]["density"] == pytest.approx(0.001)
  assert zen["facts"]["bound_bytes"] < zen["wire_bytes"] < 1e6
  assert zen["received_bytes"] is None
