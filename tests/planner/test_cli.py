"""`python -m zenjax`: what it prints, saves and refuses."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenjax
from zenjax import traces
from zenjax._src.machine import local_work
from zenjax._src.machine import measure
from zenjax._src.planner import choosing
from zenjax._src.planner import cli
from zenjax._src.planner import commands
from zenjax._src.planner import recorded_runs
from zenjax._src.planner import what_if

ROWS, WIDTH, DEVICES, STEPS = 20_000, 32, 4, 4
LEAVES = (
  traces.LeafInfo(name="bias", shape=(WIDTH,), dtype="float32"),
  traces.LeafInfo(name="table", shape=(ROWS, WIDTH), dtype="float32"),
  traces.LeafInfo(name="w", shape=(64, 64), dtype="float32"),
)
HEADER = traces.Header(
  tables=(
    traces.TableInfo(name="table", rows=ROWS, width=WIDTH, dtype="float32"),
  ),
  devices=DEVICES,
  steps=STEPS,
  leaves=LEAVES,
)


def write(directory, header=HEADER, rows=200):
  rng = np.random.default_rng(0)
  traces.create(directory, header)
  for step in range(header.steps):
    drawn = [rng.permutation(ROWS)[:rows] for _ in range(DEVICES)]
    sets = [np.sort(d) for d in drawn]
    traces.write_step(directory, header, step, [sets])
  return str(directory)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
  return write(tmp_path_factory.mktemp("cli") / "trace")


def run(*words):
  return cli.main([str(word) for word in words])


def refused(capsys, *words):
  with pytest.raises(SystemExit) as stopped:
    run(*words)
  assert stopped.value.code == 2
  return capsys.readouterr().err


NETWORK = ("--hosts", "8", "--link", "10gbit", "--machine", "h100")


# --- what a trace tells -----------------------------------------------------


def test_densities_are_those_of_the_pool(trace):
  found = recorded_runs.recorded(traces.read(trace))
  growth = found.growths["table"]
  profile = found.profiles(8)["table"]
  assert profile.rows == pytest.approx(200)
  assert profile.union == growth.union(8)
  # Twice the look-ups are two recorded devices.
  twice = found.profiles(4, batch=2)["table"]
  assert twice.rows == growth.union(2) and twice.union == growth.union(8)
  assert found.pooled == DEVICES * STEPS and found.whole
  beyond = found.profiles(64)["table"]
  assert growth.union(16) < beyond.union <= growth.union(16) * 4


def test_tables_are_complete_last(trace):
  found = recorded_runs.recorded(traces.read(trace)).gradients
  assert [g.name for g in found] == ["bias", "w", "table"]
  assert [g.ready for g in found] == pytest.approx([2 / 3, 1, 1])


def plan_of(trace, rows=ROWS, **options):
  shape = jax.ShapeDtypeStruct
  params = {"table": shape((rows, WIDTH), jnp.float32)}
  loss = lambda p, ids: jnp.sum(p["table"][ids])
  return zenjax.planner.plan(
    zenjax.value_and_grad(loss),
    params,
    shape((256,), jnp.int32),
    topology=zenjax.planner.Topology.network("10gbit", 8),
    trace=trace,
    **options,
  )


def test_a_model_is_planned_by_its_trace(trace):
  found = plan_of(trace).by_name["table"]
  growth = recorded_runs.recorded(traces.read(trace)).growths["table"]
  assert found.rows == pytest.approx(200)
  assert found.union == pytest.approx(growth.union(8))
  with pytest.raises(ValueError, match="`trace`.*'table' 20000 x 32 there"):
    plan_of(trace, rows=3_000)
  with pytest.raises(ValueError, match="`trace` must be left out"):
    plan_of(trace, profile={})


# --- plan -------------------------------------------------------------------


def test_plan_prints_and_saves(trace, tmp_path, capsys):
  path = tmp_path / "plan.json"
  options = ("--compute-seconds", "0.01", "--json", path)
  assert run("plan", "--trace", trace, *NETWORK, *options) == 0
  out = capsys.readouterr().out
  assert "plan for 8 devices (data 8) on h100 on 10 Gbit/s, 1 net" in out
  assert "2 leaves without another way" in out and "note" not in out
  assert "a step is predicted to be" in out
  plan = zenjax.planner.Plan.from_json(path.read_text())
  assert plan.compute_seconds == 0.01 and plan.pays
  assert {leaf.name for leaf in plan.leaves} == {"bias", "table", "w"}
  assert plan.by_name["table"].union == pytest.approx(1545, rel=0.02)
  # It is the model's: zen_sync takes it.
  params = {x.name: np.zeros(x.shape, np.float32) for x in LEAVES}
  zenjax.zen_sync("data", plan=plan).init(params)


def test_plan_of_a_pod(trace, capsys):
  pod = ("--machine", "h200", "--devices", "8", "--hosts", "2", "--link")
  assert run("plan", "--trace", trace, *pod, "100 Gbit/s", "--overlap") == 0
  out = capsys.readouterr().out
  assert (
    "16 devices (host 2 x device 8) on h200 on 100 Gbit/s, 1 network card a"
    " host" in out
  )
  assert "all exchanges: " in out  # Nothing was said of a step.
  assert "does not say when gradients are complete" in out


def test_ports_are_told(trace, tmp_path):
  pod = ("--machine", "h200", "--devices", "8", "--hosts", "2", "--link")
  seconds = {}
  for ports in ((), ("--ports", 1), ("--ports", 8)):
    path = tmp_path / "plan.json"
    run("plan", "--trace", trace, *pod, "12.5 GB/s", *ports, "--json", path)
    found = zenjax.planner.Plan.from_json(path.read_text())
    assert found.topology is not None
    seconds[ports] = found.dense_seconds, found.topology.ports
  one, told, eight = seconds.values()
  assert one == told and told[1] == 1 and eight[1] == 8
  # Hosts of one card are not 8 times as slow: sums begin inside of a host.
  assert eight[0] < one[0] < 8 * eight[0]


def test_plan_on_a_measured_machine(trace, tmp_path, capsys):
  path = tmp_path / "machine.json"
  path.write_text(zenjax.planner.Topology.network("1gbit", 4).to_json())
  assert run("plan", "--trace", trace, "--topology", path) == 0
  assert "plan for 4 devices" in capsys.readouterr().out
  run("plan", "--trace", trace, "--topology", path, "--hosts", "64")
  out = capsys.readouterr().out
  assert "plan for 64 devices" in out and "Record more steps" in out
  assert "own work is taken to cost nothing" in out


def test_tables_alone_are_told_to_be(tmp_path, capsys):
  header = dataclasses.replace(HEADER, leaves=(), steps=1)
  alone = write(tmp_path / "old", header)
  assert run("plan", "--trace", alone, *NETWORK) == 0
  out = capsys.readouterr().out
  assert "tells of tables only" in out
  assert "exchanges are predicted to be" in out


@pytest.mark.parametrize(
  "words, said",
  [
    (("--hosts", "8"), "--link and --hosts must be given together"),
    (("--link", "1gbit"), "--link and --hosts must be given together"),
    ((), "a machine must be described"),
    (("--machine", "h100"), "a machine must be described"),
    (("--hosts", "0", "--link", "1gbit"), "--hosts: must be at least 1, got 0"),
    (("--hosts", "x", "--link", "1gbit"), "must be a whole number, got 'x'"),
    (("--hosts", "8", "--link", "fast"), "--link: must be a line rate as"),
    (("--hosts", "8", "--link", "25gb/s"), "'gb/s' may be bits or bytes"),
    (("--machine", "a10", *NETWORK[:4]), "invalid choice: 'a10'"),
    ((*NETWORK, "--ports", "0"), "--ports: must be at least 1, got 0"),
    (
      ("--machine", "h100", "--devices", "8", "--ports", "2"),
      "--ports must come with --link",
    ),
    (
      ("--topology", "none", "--ports", "2"),
      "--ports must not be given beside",
    ),
    (("--devices", "8", *NETWORK[:4]), "--devices must come with --machine"),
    (
      ("--topology", "none", "--link", "1gbit"),
      "--link must not be given beside",
    ),
    (("--topology", "none"), "'none' cannot be read"),
    ((*NETWORK, "--compute-seconds", "-1"), "must be finite and not negative"),
    ((*NETWORK, "--compute-seconds", "nan"), "must be finite and not negative"),
    ((*NETWORK, "--memory-gb", "0"), "must be positive"),
    ((*NETWORK, "--memory-gb", "1e-8"), "`memory_bytes` must hold"),
    ((*NETWORK, "--wire-dtypes", "int8"), "invalid choice: 'int8'"),
    ((*NETWORK, "--json", "none/x.json"), "in a directory that is there"),
  ],
)
def test_bad_input_is_refused(trace, capsys, words, said):
  assert said in refused(capsys, "plan", "--trace", trace, *words)


def test_link_rates_of_a_measured_pod_are_those_of_a_card(
  trace, tmp_path, capsys
):
  path = tmp_path / "machine.json"
  pod = zenjax.planner.Topology.preset("h100", 8, hosts=4, network="1gbit")
  path.write_text(dataclasses.replace(pod, name="here").to_json())
  words = ("--topology", path, "--compute-seconds", "0.01", *SWEEPS)
  assert run("whatif", "--trace", trace, *words) == 0
  said = "a link's rate is that of each card: 1 network card a host"
  assert said in capsys.readouterr().out


def test_broken_traces_are_refused(tmp_path, capsys):
  none = refused(capsys, "plan", "--trace", tmp_path / "no", *NETWORK)
  assert "must hold a trace" in none and "no/trace.json" in none
  # What is wrong is no option: no usage stands before it.
  assert none.startswith("zenjax plan: error: ")
  cut = write(tmp_path / "cut")
  (tmp_path / "cut" / "step-000003.npz").unlink()
  said = refused(capsys, "plan", "--trace", cut, *NETWORK)
  assert "step-000003.npz is missing" in said
  (tmp_path / "cut" / "step-000002.npz").write_bytes(b"PK")
  assert "is cut short" in refused(capsys, "plan", "--trace", cut, *NETWORK)
  other = write(tmp_path / "other")
  path = tmp_path / "other" / "trace.json"
  path.write_text(path.read_text().replace(f'"rows": {ROWS}', '"rows": 100'))
  said = refused(capsys, "plan", "--trace", other, *NETWORK)
  assert "must hold table 'table', 100 x 32" in said


# --- links ------------------------------------------------------------------


def test_links_prints_and_saves(monkeypatch, tmp_path, capsys):
  ops = {"all_gather": measure.OPS["all_gather"]}
  monkeypatch.setattr(measure, "OPS", ops)
  work = zenjax.planner.Work(mask_byte=2e-9)
  monkeypatch.setattr(local_work, "measured", lambda *_: work)
  path = tmp_path / "machine.json"
  assert run("links", "--devices", 2, "--repeats", 1, "--json", path) == 0
  out = capsys.readouterr().out
  assert "2 x cpu" in out and "all_gather" in out and "mask_byte 2 ns" in out
  found = zenjax.planner.Topology.load(path)
  assert found.sizes == (2,) and found.levels[0].link.work == work


def test_links_wants_devices(capsys):
  assert "at least 2" in refused(capsys, "links", "--devices", "1")
  said = refused(capsys, "links", "--devices", "99")
  assert "those that JAX sees, 8 cpu, got 99" in said


# --- whatif -----------------------------------------------------------------

SWEEPS = ("--over-hosts", 2, 8, "--over-links", "1gbit", "--over-batch", 1, 2)


def whatif(trace, *words):
  options = ("--compute-seconds", "0.01", *SWEEPS)
  return run("whatif", "--trace", trace, *NETWORK, *options, *words)


def test_whatif_prints_and_saves(trace, tmp_path, capsys):
  path = tmp_path / "whatif.json"
  assert whatif(trace, "--json", path) == 0
  out = capsys.readouterr().out
  assert "8 devices on h100 on 10 Gbit/s, 1 network card a host" in out
  assert "\n1 Gbit/s" in out
  found = json.loads(path.read_text())
  assert [len(found[k]["points"]) for k in ("hosts", "links", "batch")] == [
    2,
    1,
    2,
  ]
  # Sixteen sets were recorded: 8 devices of twice the batch are the last.
  assert "*" not in out
  # The gain shrinks into the error of predictions before pmean is better.
  none, rate = found["links"]["turns"]
  assert none["better"] == "neither" and rate["better"] == "pmean"
  assert 1e3 < none["at"] < rate["at"] and rate["at"] > 1e4
  assert "on there is no difference" in out
  assert "on plain pmean is the better choice" in out


def test_points_are_plans(trace):
  recorded = recorded_runs.recorded(traces.read(trace))
  machine = zenjax.planner.Topology.network("10gbit", 8, "h100")
  base = what_if.Base(
    recorded=recorded,
    topology=machine,
    batch=1,
    compute_seconds=0.01,
    settings={},
  )
  point = base.larger_batch(2)
  question = recorded.question(machine, 2, compute_seconds=0.02)
  plan = choosing.answer(question)
  assert (point.seconds, point.dense_seconds) == (
    plan.seconds,
    plan.dense_seconds,
  )
  assert point.scaling == 0.02 / plan.seconds > point.dense_scaling
  assert base.hosts(4).devices == 4 and not base.hosts(16).bounded
  assert base.hosts(17).bounded
  assert base.link(100_000).seconds < base.link(1_000).seconds


def better_at(choice):
  """Returns points whose better choice is a function of the place."""
  return lambda at: what_if.Point(
    at=at,
    devices=1,
    compute_seconds=1.0,
    seconds=1.0,
    dense_seconds=2.0,
    better=choice(at),
    bounded=False,
  )


def test_turning_points_are_found():
  """Of a choice that is better from 5 to 18 only."""
  point = better_at(lambda at: "plan" if 5 <= at < 19 else "pmean")
  hosts = what_if._sweep(point, [3, 30], [2, 4, 8, 16], what_if._middle)
  turns = [(t.at, t.better) for t in hosts.turns]
  assert turns == [(5, "plan"), (19, "pmean")]
  assert [p.at for p in hosts.points] == [3, 30] and hosts.searched == (2, 30)
  rate = what_if._sweep(point, [1], [1.0, 10.0, 100.0], what_if._geometric)
  assert [t.at for t in rate.turns] == pytest.approx([5, 19], rel=0.02)


def test_two_turns_between_points_are_both_found():
  point = better_at(
    lambda at: "plan" if at < 11 else "neither" if at < 13 else "pmean"
  )
  hosts = what_if._sweep(point, [2, 32], [2, 32], what_if._middle)
  turns = [(t.at, t.better) for t in hosts.turns]
  assert turns == [(11, "neither"), (13, "pmean")]
  said = commands.turns(commands.HOSTS, hosts)
  assert said == [
    "from 11 on there is no difference",
    "from 13 on plain pmean is the better choice",
  ]
  table = commands.whatif_table(commands.HOSTS, hosts)
  assert "the plan" in table and "nine of ten" not in table
  between = what_if._sweep(point, [2, 12], [2, 12], what_if._middle)
  table = commands.whatif_table(commands.HOSTS, between)
  assert "nine of ten measured steps" in table and "20%" in table


def test_whatif_draws(trace, tmp_path, capsys):
  pytest.importorskip("matplotlib")
  path = tmp_path / "whatif.svg"
  assert whatif(trace, "--plot", path) == 0
  assert f"saved {path}" in capsys.readouterr().out
  assert path.read_text().count("<svg") == 1


def test_a_plot_has_a_known_ending(trace, tmp_path, capsys):
  with pytest.raises(SystemExit) as stopped:
    whatif(trace, "--plot", tmp_path / "x.jpg")
  assert stopped.value.code == 2
  said = capsys.readouterr().err
  assert "must end in one of .png, .pdf, .svg, got" in said


def test_a_plot_needs_matplotlib(trace, tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(SystemExit) as stopped:
    whatif(trace, "--plot", tmp_path / "x.png")
  assert stopped.value.code == 2
  assert 'pip install "zenjax[plan]"' in capsys.readouterr().err


def test_whatif_needs_the_time_of_a_step(trace, capsys):
  said = refused(capsys, "whatif", "--trace", trace, *NETWORK)
  assert "required: --compute-seconds" in said


# --- the command itself -----------------------------------------------------


def test_it_runs_as_a_module():
  found = subprocess.run(
    [sys.executable, "-m", "zenjax", "--help"], capture_output=True, text=True
  )
  assert found.returncode == 0, found.stderr
  assert found.stdout.startswith("usage: zenjax ")
  assert all(word in found.stdout for word in ("plan", "links", "whatif"))


def test_an_interrupt_says_so(trace, monkeypatch, capsys):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(recorded_runs, "recorded", interrupted)
  assert run("plan", "--trace", trace, *NETWORK) == 130
  assert "Interrupted" in capsys.readouterr().err
