"""What `benchmarks.run planned` says of predictions and of the planner."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks import campaign
from benchmarks import run as command_line
from benchmarks.campaigns.planned import cells as findings
from benchmarks.campaigns.planned.cells import Found
from benchmarks.campaigns.planned.cells import Section
from benchmarks.campaigns.planned.cells import Way
from benchmarks.campaigns.planned.programs import MODELS


def _section(**times: float) -> Section:
  """Of ways that took so many seconds, all predicted at 1.0."""
  known = {"pmean": 1.0, "planned": 1.0} | times
  return Section(
    hosts=4,
    rate="200mbit",
    model="lm",
    repeats=5,
    compute_s=0.1,
    # 200 Mbit/s bring 20 MB of payload in 0.84 s: the link decides.
    ways={
      name: Way(program=name, predicted_s=1.0, received_bytes=20e6)
      for name in known
    },
    host_times_s={
      name: [[s * 0.9, s * (1 + 0.001 * i)] for i in range(5)]
      for name, s in known.items()
    },
  )


def test_errors_are_of_the_last_host_and_of_what_the_link_limits():
  section = _section(pmean=2.0)
  section.ways["planned"].received_bytes = 1.0
  cells = {cell.way: cell for cell in findings.cells(section)}
  assert cells["pmean"].error == pytest.approx(-0.5, abs=0.01)
  assert cells["pmean"].by_link and not cells["planned"].by_link
  assert list(findings.lines([section]))[:2] == [
    "1 steps that the links limit: predicted with a median error of 50%, 90 %"
    " of them within 50%",
    "1 steps that the cores limit: predicted with a median error of 0%, 90 % of"
    " them within 0%",
  ]


def test_no_rate_is_limited_by_a_link_that_has_no_limit():
  section = dataclasses.replace(_section(), rate="unlimited")
  assert not any(cell.by_link for cell in findings.cells(section))


@pytest.mark.parametrize(
  "times, good, harmful",
  [
    ({"zen/1": 1.2}, True, False),
    ({"zen/1": 0.97}, True, False),
    ({"zen/1": 0.5}, False, False),
    ({"planned": 1.02}, True, False),
    ({"planned": 1.2}, False, True),
  ],
)
def test_picks_are_judged_by_the_best_way_and_by_pmean(times, good, harmful):
  found = findings.pick(_section(**times))
  assert found is not None
  assert (found.good, found.harmful) == (good, harmful)
  told = list(findings.lines([_section(**times)]))
  assert any(f"{int(good)} of 1 cells" in line for line in told)
  assert len(told) == 2 + (not good)


def test_slower_by_chance_is_no_harm():
  section = _section()
  times = [1.5, 0.6, 1.4, 0.7, 1.1]
  section.host_times_s["planned"] = [[t] for t in times]
  found = findings.pick(section)
  assert found is not None
  assert found.over_pmean[0] > findings.NO_SLOWER and not found.harmful
  assert not found.good and not found.far
  section.host_times_s["planned"] = [[1.5]] * 5
  found = findings.pick(section)
  assert found is not None and found.far and found.harmful


def test_a_file_is_gone_on_with(tmp_path):
  path = tmp_path / "planned.json"
  now = campaign.software(findings.CODE, loopback=True)
  found = Found(now, topologies={(4, "200mbit"): "{}"})
  section = _section()
  found.sections[section.key] = section
  found.save(path)
  loaded = Found.load(path, now)
  assert loaded.sections == found.sections
  assert loaded.topologies == found.topologies
  assert section.is_done(5) and not section.is_done(6)
  section.ways["pmean"].wrong = 1
  assert not section.is_done(5)


def test_the_table_tells_every_way(capsys):
  section = _section()
  section.ways["zen/1"] = Way(program="zen/1", predicted_s=1.0, wrong=3)
  found = Found({}, sections={section.key: section})
  findings.show("title", found)
  printed = capsys.readouterr().out
  assert "lm, 4 hosts, 200mbit: 100.0 ms to compute" in printed
  (line,) = [x for x in printed.splitlines() if "zen/1" in x]
  assert line.split()[-1] == "3" and line.split()[1] == "-"
  assert "of 1 cells" in printed


@pytest.mark.parametrize("name", ("dlrm", "small"))
def test_models_take_their_batches(name):
  model = MODELS[name](2, 2)
  batch = [jnp.asarray(x[: len(x) // 2]) for x in model.batches[1]]
  shape = jax.eval_shape(model.loss, model.params, *batch)
  assert shape.shape == () and len(model.batches) == 2


def test_bad_input(tmp_path, capsys):
  broken = tmp_path / "broken.json"
  broken.write_text("[")
  for arguments, told in (
    (["--hosts", "17"], "invalid choice: 17"),
    (["--models", "bert"], "invalid choice: 'bert'"),
    (["--show", str(broken)], "not a whole file of this command"),
    (["--loopback", "--json", str(broken)], "Delete it or name another"),
  ):
    with pytest.raises(SystemExit) as ended:
      command_line.main(["planned", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
