"""`zenjax plan`, of a recorded trace."""

import subprocess
import sys

import numpy as np
import pytest

from zenjax import planner
from zenjax._src.planner.cli import main
from zenjax.planner import traces

TABLE = traces.LeafInfo(name="t", shape=(50_000, 32), look_ups=300)
OTHER = traces.LeafInfo(name="w", shape=(32, 32), is_table=False)


def write(directory, leaves=(TABLE, OTHER)):
  header = traces.Header(leaves=leaves, devices=4)
  traces.create(directory, header)
  rng = np.random.default_rng(0)
  for step in range(4):
    ids = [rng.zipf(1.2, 300) % TABLE.rows for _ in range(4)]
    traces.write_step(directory, header, step, [ids])
  return str(directory)


@pytest.fixture(scope="module", name="trace")
def _trace(tmp_path_factory):
  return write(tmp_path_factory.mktemp("traces") / "trace")


NETWORK = "--hosts 8 --link 1gbit --machine h100"
POD = f"{NETWORK} --devices 8 --ports 2"


def planned(folder, trace, words=""):
  """The plan for a trace on a network, as the command saves it."""
  path = folder / "plan.json"
  words = [*NETWORK.split(), *words.split(), "--json", str(path)]
  assert main(["plan", "--trace", trace, *words]) == 0
  return planner.Plan.from_json(path.read_text())


def test_plan_prints_and_saves(trace, tmp_path, capsys):
  found = planned(tmp_path, trace, "--compute-seconds 0.01")
  said = capsys.readouterr().out
  assert str(found) in said and "rows on a device" in said
  assert found.mesh == (("data", 8),) and found.better == "plan"
  assert found.by_name["t"].scheme != "dense"
  assert "note:" not in said
  again = planned(tmp_path, trace, "--compute-seconds 0.01 --batch 2")
  seen, larger = [plan.by_name["t"].rows for plan in (found, again)]
  assert seen and larger and seen < larger < 2 * seen


def test_parts_of_a_trace_begin_with_its_last_leaf(tmp_path, capsys):
  layers = [
    traces.LeafInfo(name=f"layer{i}", shape=(1024, 1024), is_table=False)
    for i in range(4)
  ]
  trace = write(tmp_path / "trace", (TABLE, *layers))
  found = planned(tmp_path, trace, "--compute-seconds 0.012 --allow int8")
  parts = [leaf.group for leaf in found.leaves if leaf.compressor]
  assert parts == sorted(parts, reverse=True) and len(set(parts)) > 1
  assert "does not know in which order" in capsys.readouterr().out


def test_a_tall_layer_that_is_no_table_is_all_reduced(tmp_path, capsys):
  tall = traces.LeafInfo(name="tall", shape=(3072, 512), is_table=False)
  found = planned(tmp_path, write(tmp_path / "trace", (TABLE, tall))).by_name
  assert found["tall"].scheme == "dense" != found["t"].scheme
  assert "densities assumed" not in capsys.readouterr().out


def test_tables_alone_are_told_to_be(tmp_path, capsys):
  planned(tmp_path, write(tmp_path / "trace", (TABLE,)))
  assert "the plan contain tables only" in capsys.readouterr().out


def test_a_pod_and_a_measured_machine(trace, tmp_path, capsys):
  assert main(["plan", "--trace", trace, *POD.split()]) == 0
  said = capsys.readouterr().out
  assert "64 devices (host 8 x device 8)" in said and "2 network cards" in said
  assert "the trace has 16 row sets per table, but 64 are needed" in said
  path = tmp_path / "machine.json"
  path.write_text(planner.Topology.network("1gbit", 4).to_json())
  words = ["--trace", trace, "--topology", str(path), "--hosts", "2"]
  assert main(["plan", *words]) == 0
  said = capsys.readouterr().out
  assert "plan for 2 devices" in said and "assumed to take no time" in said


def test_several_values_make_a_table(trace, capsys):
  words = ["plan", "--trace", trace, "--machine", "h100"]
  words += ["--compute-seconds", "0.02", "--batch", "1", "2"]
  words += ["--hosts", "2", "64", "--link", "1gbit", "400 Gbit/s"]
  assert main(words) == 0
  heading, *lines = capsys.readouterr().out.splitlines()
  assert heading.split()[:3] == ["hosts", "link", "batch"]
  plans, note = lines[:8], lines[8]
  assert plans[0].split()[:3] == ["2", "1gbit", "1"]
  assert plans[0].endswith("plan") and plans[2].endswith("neither")
  assert "the trace has 16 row sets per table, but 128 are needed" in note
  with pytest.raises(SystemExit):
    main([*words, "--json", "plan.json"])
  assert "--json needs one plan" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("words", "said"),
  [
    ("plan", "--trace"),
    (f"plan {NETWORK} --trace nowhere", "nowhere/trace.json"),
    ("plan --trace TRACE", "a machine must be described"),
    ("plan --trace TRACE --link 1gbit", "--link needs --hosts"),
    ("plan --trace TRACE --devices 2", "--devices needs --machine"),
    ("plan --trace TRACE --hosts 2", "--hosts needs --link"),
    (
      f"plan --trace TRACE {POD} --hosts 1",
      "--devices with --link needs several --hosts",
    ),
    (f"plan --trace TRACE {NETWORK} --link fast", "'fast'"),
    (f"plan --trace TRACE {NETWORK} --hosts 0", "at least 1"),
    (f"plan --trace TRACE {NETWORK} --topology x", "--topology says"),
    ("plan --trace TRACE --topology x", "No such file"),
    (
      f"plan --trace TRACE {NETWORK} --compute-seconds -1",
      "must be positive",
    ),
    ("sing", "invalid choice"),
  ],
)
def test_bad_input_exits_with_2(trace, capsys, words, said):
  with pytest.raises(SystemExit) as ended:
    main([trace if word == "TRACE" else word for word in words.split()])
  assert ended.value.code == 2
  assert said in capsys.readouterr().err


def test_help_runs_as_a_module():
  done = subprocess.run(
    [sys.executable, "-m", "zenjax", "plan", "--help"],
    capture_output=True,
    text=True,
    check=True,
  )
  assert "--trace DIR" in done.stdout
