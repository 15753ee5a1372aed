"""`benchmarks.run history`: what results were at earlier commits."""

import argparse
import json
import subprocess

import pytest

from benchmarks import history


def document(**times: list[float]) -> dict:
  """A result of one group of forms."""
  results = [
    {"group": "g", "name": name.replace("_", " "), "times_s": x}
    for name, x in times.items()
  ]
  return {"environment": {"git": "0" * 40}, "results": results}


@pytest.fixture
def keep(tmp_path):
  """Commits a version of a result, and returns the file."""
  identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
  subprocess.run(["git", "init", "-q", tmp_path], check=True)
  file = tmp_path / "a.json"

  def kept(found: dict, commit: bool = True):
    file.write_text(json.dumps(found), encoding="utf-8")
    if commit:
      for command in (["add", "a.json"], ["commit", "-qm", "a result"]):
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    return file

  return kept


def run(file, capsys) -> tuple[int, str]:
  status = history.run(argparse.Namespace(files=[file]))
  return status, capsys.readouterr().out


@pytest.mark.parametrize(
  ("times", "status"),
  [
    ([0.6, 0.61, 0.62], 1),  # a fifth slower
    ([0.51, 0.52, 0.51], 0),  # by less than 5 %
    ([0.4, 0.5, 1.2], 0),  # a third as fast as ever
    ([0.3, 0.31, 0.32], 0),
  ],
)
@pytest.mark.parametrize("commit", [True, False])
def test_a_regression_is_found(times, status, commit, keep, capsys):
  keep(document(pmean=[1, 1, 1], zen=[0.49, 0.5, 0.51]))
  # A slower machine is no regression.
  keep(document(pmean=[2, 2, 2], zen=[1, 1, 1]))
  file = keep(document(pmean=[1, 1, 1], zen=times), commit)
  got, said = run(file, capsys)
  assert got == status
  assert ("WORSE a.json, g, zen" in said) == bool(status)
  assert said.count("0.500") >= 2  # Both earlier versions are shown.


def test_ratios_are_of_one_round():
  found = history.read(document(psum=[1, 2, 4], zen=[2, 4, 8], rows=[1, 1, 1]))
  assert found is not None
  assert found.ratios["g", "zen"] == (2, 2, 2)
  assert found.ratios["g", "rows"].median == 0.5


def test_all_results_have_a_history(capsys):
  """Those of this repository are read, whatever their form."""
  status = history.run(argparse.Namespace(files=None))
  said = capsys.readouterr().out
  assert status == ("WORSE" in said)
  assert "26 x 16: rows" in said and "lm1b-lstm, 4 hosts, 1gbit: zen" in said
  with pytest.raises(ValueError, match="must be a result that --json wrote"):
    history.run(argparse.Namespace(files=[history.RESULTS / "none.json"]))
