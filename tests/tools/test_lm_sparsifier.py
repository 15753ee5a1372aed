"""The language model by `--sparsifier`, and the study of densities."""

import json

import pytest
import runners

from examples.studies.common import cluster
from examples.studies.lm import __main__ as lm
from examples.studies.sparsifiers import densities

# The examples promote as users' programs do.
pytestmark = pytest.mark.usefixtures("as_optax_computes")


@pytest.fixture
def small(monkeypatch, tmp_path):
  """Runs a program of the examples on a text and a model of little size."""
  text = tmp_path / "text.txt"
  words = [f"w{i * i % 977}" for i in range(90_000)]
  text.write_text(" ".join(words), encoding="utf-8")
  monkeypatch.setattr(cluster, "make_mesh", lambda *count: runners.mesh(2))

  def run(program, *arguments):
    sizes = ["--batch-tokens", "64", "--negatives", "8", "--width", "40"]
    common = [*sizes, "--corpus", str(text), "--density", "0.02"]
    return program.main([*common, *arguments])

  return run


def test_trains_and_tells_what_was_sent(small, capsys, tmp_path):
  picture = tmp_path / "run.png"
  options = ["--sparsifier", "exdyna", "--plot", str(picture)]
  assert small(lm, "--steps", "8", *options) == 0
  out = capsys.readouterr().out
  assert "sparsifier after 8 steps on 2 devices" in out
  assert "mean of steps 0 to 8: density" in out and "of 2.0000% wanted" in out
  assert picture.stat().st_size > 10_000


@pytest.mark.more
def test_top_k_tells_its_build_up_and_logs_every_step(small, capsys, tmp_path):
  options = ["--sparsifier", "top_k", "--out", str(tmp_path / "run")]
  assert small(lm, "--steps", "6", *options) == 0
  lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
  steps = [json.loads(line) for line in lines]
  assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
  told = [step["sparsifier"] for step in steps]
  for key in "density", "build_up", "imbalance", "threshold", "wire_bytes":
    assert key in told[-1]
  for s in told:
    assert s["density"] == pytest.approx(s["density_wanted"])
  assert all(1 <= s["build_up"] <= 2 for s in told)
  mean = sum(s["build_up"] for s in told) / 6
  assert f"build-up {mean:.3f}, imbalance 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--sync", "pmean"], "--sync pmean"),
    (["--grads", "rows"], "--grads rows"),
    (["--density", "2"], "--density must be in (0, 1], got 2.0"),
    (["--sync", "compare", "--out", "x"], "--out goes with one way of"),
  ],
)
def test_flags_that_do_not_go_together(small, capsys, arguments, words):
  with pytest.raises(SystemExit):
    small(lm, "--sparsifier", "micro", *arguments)
  assert words in capsys.readouterr().err


def test_the_study_keeps_every_step(small, capsys, tmp_path):
  path = tmp_path / "study.json"
  options = ["--kinds", "micro", "--controllers", "damped", "--json", str(path)]
  assert small(densities, "--steps", "4", "--scales", "0.001", *options) == 0
  (run,) = json.loads(path.read_text())["runs"]
  assert run["scale"] == 1e-3 and len(run["density"]) == 4
  wanted = run["settled"]["density_wanted"]
  ratio = run["settled"]["density"] / wanted
  assert f"{ratio:.3f}" in capsys.readouterr().out
  assert wanted == pytest.approx(0.02) and ratio > 0.5
