"""The study of sparsifiers: its grid, file and tables, a run stopped."""

import json
import os
import signal

import numpy as np
from PIL import Image
import pytest

from examples.studies.cnn.study import Pictures
from examples.studies.sparsifiers import __main__ as program
from examples.studies.sparsifiers import table
from examples.studies.sparsifiers.cells import grid
from examples.studies.sparsifiers.cells import StudyFile
from examples.studies.sparsifiers.tasks import TASKS

# The examples promote as users' programs do.
pytestmark = pytest.mark.usefixtures("as_optax_computes")


@pytest.fixture
def small(tmp_path):
  """Flags of a study of two cells."""
  rng = np.random.default_rng(0)
  for name in "ab":
    (tmp_path / "images" / name).mkdir(parents=True)
    for i in range(10):
      pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
      Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
  flags = ["cnn", "--image-size=8", "--width=8", "--batch=8", "--steps=10"]
  flags += [f"--data={tmp_path / 'images'}", "--kinds", "micro"]
  flags += ["--devices", "2", "--densities", "0.05", "--main", "0.05"]
  return [*flags, "--seeds", "0", "--json", str(tmp_path / "study.json")]


def test_the_main_line_comes_first_and_nothing_twice():
  cells = grid(["exdyna", "top_k"], [0.01, 0.1], [1, 4], [5, 6], 0.01)
  assert [(c.kind, c.devices, c.seed) for c in cells[:4]] == [
    ("dense", 4, 5),
    ("exdyna", 4, 5),
    ("dense", 4, 6),
    ("exdyna", 4, 6),
  ]
  assert len(cells) == len(set(cells)) == 4 + 3 + 5
  assert all(c.seed == 5 for c in cells[4:])


def _fail(*_):
  raise AssertionError("a cell was run again")


@pytest.mark.more
def test_cells_are_kept_and_not_run_again(small, monkeypatch, tmp_path, capsys):
  made, make = [], Pictures.trainer

  def stopped(study, mesh, seed, *, sparsifier):
    found = make(study, mesh, seed, sparsifier=sparsifier)
    made.append(sparsifier.kind if sparsifier else "dense")
    if len(made) == 2:
      os.kill(os.getpid(), signal.SIGINT)
    return found

  monkeypatch.setattr(Pictures, "trainer", stopped)
  assert program.main(small) == 130
  out = capsys.readouterr().out
  assert "1 of 2 cells were done" in out and "| dense |" in out
  file = tmp_path / "study.json"
  assert [x["kind"] for x in json.loads(file.read_text())["cells"]] == ["dense"]

  assert program.main(small) == 0
  assert made == ["dense", "micro", "micro"]
  text = file.read_text()
  assert str(tmp_path) not in text
  dense, micro = json.loads(text)["cells"]
  size = micro["elements"]
  curves = micro["curves"]
  assert len(curves["loss"]) == len(curves["imbalance"]) == 10
  sent = dense["curves"]["megabytes"]
  every_step = [i * 4e-6 * size for i in range(1, 11)]
  assert sent == pytest.approx(every_step, rel=1e-4)
  assert micro["measured"]["step"] == [*range(11)]
  assert curves["megabytes"][-1] == micro["measured"]["megabytes"][-1]
  assert 0 < curves["megabytes"][-1] < sent[-1]

  monkeypatch.setattr(Pictures, "trainer", _fail)
  capsys.readouterr()
  assert program.main([*small, "--plot", str(tmp_path / "study.png")]) == 0
  assert "| 2 | micro 5 % |" in capsys.readouterr().out
  for name in "loss", "accuracy", "selection":
    assert (tmp_path / f"study-{name}.png").stat().st_size > 10_000
  assert file.read_text() == text
  with pytest.raises(SystemExit, match="--json .* made with steps 10, got 20"):
    program.main([*small, "--steps=20"])


def test_a_file_of_something_else_is_refused(small, tmp_path):
  file = tmp_path / "study.json"
  for text in "{", "[]", '{"task": "cnn"}':
    file.write_text(text)
    with pytest.raises(SystemExit, match="--json must name a study's file or"):
      program.main(small)
    assert file.read_text() == text


@pytest.mark.parametrize(
  "flags, words",
  [
    ("cnn --densities 0", "must be in (0, 1], got 0.0"),
    ("lm --devices 3 8", "divide the largest of them, so that"),
    ("lm --seeds -1", "--seeds must not be negative, got -1"),
    ("lm --sync compare", "--sync does not go with a study, got compare"),
    ("cnn --seed 3", "--seed does not go with a study, got 3"),
    ("cnn --width 12", "--width must be a multiple of 8, got 12"),
  ],
)
def test_flags_are_checked(capsys, flags, words):
  with pytest.raises(SystemExit) as caught:
    program.parse(flags.split())
  assert caught.value.code == 2
  assert words in capsys.readouterr().err


def _record(kind, density, seed, value, **more):
  return {
    "kind": kind,
    "density": density,
    "devices": 2,
    "seed": seed,
    "settled": {},
    "measured": {"step": [0, 10], "megabytes": [0, 5.0], "value": [9, value]},
    **more,
  }


def test_tables_compare_means_over_the_same_seeds():
  cells = grid(["exdyna"], [0.01], [2], [0, 1], 0.01)
  file = StudyFile(None, "lm", {})
  settled = {"density": 0.011, "density_wanted": 0.01, "build_up": 1.1}
  settled |= {"imbalance": 1.5, "rounds": 1.0}
  cheap = {"step": [0, 10], "megabytes": [0, 0.5], "value": [9, 42.0]}
  file.add(_record("dense", 1.0, 0, 40.0))
  file.add(_record("exdyna", 0.01, 0, 42.0) | {"settled": settled})
  file.cells[-1]["measured"] = cheap
  task = TASKS["lm"]
  assert table.seeds(cells, file, "perplexity", task.gap) == ""
  whole = table.table(cells, file, "perplexity", task.gap)
  assert "| 2 | dense |  |  |  |  | 0.5 | 1.0x | 40 |  |" in whole
  line = "| 2 | exdyna 1 % | 1.100 | 1.10 | 1.50 | 1.00 | 0.05 | 10.0x | 42 |"
  assert f"{line} +5.0% |" in whole
  file.add(_record("dense", 1.0, 1, 60.0))
  file.add(_record("exdyna", 0.01, 1, 63.0))
  seeds = table.seeds(cells, file, "perplexity", task.gap)
  assert "| exdyna 1 % | 2 | 42, 63 | 52.5 | +5.0% |" in seeds
