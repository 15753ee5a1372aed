"""`benchmarks.run groups`: ways to group, what they cost, two hosts."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
from planning import Gradient
import pytest

from benchmarks import run as command_line
from benchmarks.campaigns.groups import cells as findings
from benchmarks.campaigns.groups import ways
from benchmarks.campaigns.groups.cells import Found
from benchmarks.campaigns.groups.cells import Section
from benchmarks.campaigns.groups.cells import Way
import zenjax
from zenjax.planner import Profile

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _costs(compute_s: float) -> ways.Priced:
  """Of eight equal leaves, the last of which is complete at the end."""
  gradients = [
    Gradient(
      name=f"w{i}",
      shape=(1 << 16,),
      dtype=np.dtype(np.float32),
      look_ups=None,
      ready=(i + 1) / 8,
    )
    for i in range(8)
  ]
  seen = Profile(rows=600.0, fullest=600.0, union=2200.0, devices=4)
  return ways.priced(
    gradients,
    {g.name: seen for g in gradients},
    zenjax.planner.Topology.network("1gbit", 4),
    compute_s,
  )


def test_ways_by_hand_hold_every_leaf():
  found = ways.by_hand(8)
  assert found == {
    "one exchange": (8,),
    "2, cut after 2": (2, 8),
    "2, cut after 4": (4, 8),
    "2, cut after 6": (6, 8),
    "4": (2, 4, 6, 8),
    "each leaf": tuple(range(1, 9)),
  }
  assert all(stops[-1] == 2 for stops in ways.by_hand(2).values())


def test_an_exchange_pays_its_latency_once():
  costs = _costs(0.0)
  together = costs.together
  saved = together((4, 8)) - together((8,))
  assert saved == pytest.approx(costs.once.link_s) and saved > 0
  assert together(tuple(range(1, 9))) == pytest.approx(
    together((8,)) + 7 * saved
  )


def test_groups_pay_only_where_something_runs_beside_them():
  found = ways.chosen(_costs(0.02))
  for name in ("MergeComp", "exact search"):
    assert found[name] == (8,)
    assert len(found[f"{name}, if they overlapped"]) > 1


def test_times_that_fall_again_are_not_unimodal():
  assert ways.is_unimodal((3.0, 2.0, 2.0, 1.0, 4.0))
  assert ways.is_unimodal((1.0, 1.0 + 1e-15, 1.0))
  assert not ways.is_unimodal((3.0, 1.0, 2.0, 1.5))


def test_ratios_are_of_paired_rounds(tmp_path, capsys):
  section = Section(
    rate="1gbit",
    topology="{}",
    ways={
      "one exchange": Way(stops=[2], exchanges_s=0.1),
      "each leaf": Way(stops=[1, 2], exchanges_s=0.2),
      "MergeComp": Way(stops=[2], exchanges_s=0.1),
    },
    host_times_s={
      "none": [[1.0, 0.5]] * 5,
      "2": [[1.0, 2.0]] * 5,
      "1,2": [[3.0, 1.0]] * 5,
    },
  )
  assert section.best() == "2"
  ratio, interval = section.over("1,2", "2")
  assert ratio == 1.5 and interval == (1.5, 1.5)
  path = tmp_path / "groups.json"
  found = Found(
    environment={"cores": 2, "jax": "0"},
    options={"hosts": 2, "loopback": True},
    sections=[section],
  )
  found.save(path)
  assert Found.read(path) == found
  findings.show(found)
  printed = capsys.readouterr().out
  assert "1.50x (1.50 to 1.50)" in printed
  assert "takes 0.67x (0.67 to 0.67) of each leaf" in printed


def test_bad_input(tmp_path, capsys):
  broken = tmp_path / "broken.json"
  broken.write_text("{}")
  for arguments, told in (
    (["--hosts", "1"], "invalid choice: 1"),
    (["--width", "12"], "`--width` must be a multiple of 8, got 12"),
    (["--width", "8", "--least", "9000"], "one leaf needs no groups"),
    (["--rates", "1gbit"], "unlimited"),
    (["--show", str(broken)], "not a whole file of this command"),
  ):
    with pytest.raises(SystemExit) as ended:
      command_line.main(["groups", "--loopback", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.more  # Of such hosts `planned` and `sparsified` have tests.
@pytest.mark.multiprocess
def test_two_hosts_from_end_to_end(tmp_path):
  path = tmp_path / "groups.json"
  arguments = "groups --loopback --hosts 2 --repeats 2 --width 8"
  arguments += " --image-size 8 --batch 4 --least 4000"
  command = [sys.executable, "-m", "benchmarks.run"]
  done = subprocess.run(
    [*command, *arguments.split(), "--json", str(path)],
    cwd=_ROOT,
    # Hosts compile five programs; what LLVM makes of them is of no interest.
    env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert "SIMULATED, nothing measured" in done.stdout
  found = Found.read(path)
  assert json.loads(path.read_text())["complete"]
  assert len(found.leaves) == 2 and found.wrong == 0
  (section,) = found.sections
  assert {"one exchange", "each leaf", "MergeComp"} <= set(section.ways)
  assert set(section.host_times_s) == {"none", "2", "1,2"}
  for times in section.host_times_s.values():
    assert np.shape(times) == (2, 2)
  told = [way.told for way in section.ways.values()]
  assert all(x["rounds"] == 1 and not x["went_dense"] for x in told)
