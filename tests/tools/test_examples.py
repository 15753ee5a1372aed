"""The single-file examples run as a user would run them, and are right."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

_EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def _run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, "-W", "error", str(_EXAMPLES / name), *args]
  # Steps take longer than compiling: LLVM optimizes, as users have it.
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  return subprocess.run(
    command, env=environment, capture_output=True, text=True, timeout=240
  )


def _output(name: str, *args: str) -> str:
  done = _run(name, *args)
  assert done.returncode == 0, done.stderr
  return done.stdout


def _numbers(pattern: str, text: str) -> list[float]:
  return [float(x.replace(",", "")) for x in re.findall(pattern, text)]


def _losses(text: str) -> list[float]:
  return _numbers(r"loss +([\d.]+)", text)


@pytest.mark.more  # The README's quickstart trains, too.
@pytest.mark.parametrize(
  "name, args", [("quickstart.py", ()), ("pmap_linen.py", ("--steps", "41"))]
)
def test_trains_and_reports(name, args):
  out = _output(name, *args)
  losses = _losses(out)
  assert len(losses) >= 3
  assert losses[-1] < 0.8 * losses[0]
  # The one table of either model is in the report.
  assert re.search(r"(table|embedding).* [\d.]+x fewer", out), out


@pytest.mark.more
def test_row_gradients_learn_as_dense_ones_do():
  out = _output("row_gradients.py", "--steps", "20")
  first, dense, again, rows = _losses(out)
  assert first == again and dense == pytest.approx(rows, abs=1e-4)
  assert rows < 0.9 * first
  assert re.search(r"words.embedding.* rows +\d+ rows looked up", out)
  (apart,) = _numbers(r"losses are (\S+) apart", out)
  assert apart < 1e-5


@pytest.mark.more
def test_owners_keep_an_nth_and_learn_the_same():
  out = _output("sharded_optimizer.py", "--steps", "20")
  everywhere, owners, half = _numbers(r"([\d.]+) MB", out)
  assert everywhere / owners == pytest.approx(8, rel=0.05)
  assert half == pytest.approx(2 * owners, rel=0.05)
  first, last, *_ = _losses(out)
  assert last < 0.5 * first
  (apart,) = _numbers(r"losses are (\S+) apart", out)
  assert apart < 1e-6


_FEW = ("--devices", "2", "--steps", "4", "--rows", "1000", "--batch", "8")


def test_memory_of_ngrams_helps_on_text_that_no_step_saw():
  out = _output("ngram_memory.py", *_FEW)
  first, *_, without, again, _, _, last, held_out = _losses(out)
  assert first == again and last < 0.9 * first  # Rows are zero at first.
  assert held_out < without
  assert re.search(r"^\d+ rows of memory, sharded on 2 devices", out, re.M)


@pytest.mark.more
def test_forms_of_a_memory_learn_the_same():
  ways = {
    way: _output("ngram_memory.py", *_FEW, *way.split())
    for way in (
      "--tables sharded",
      "--tables replicated",
      "--tables dense",
      "--tables sharded --accumulate 2 --devices 4",
    )
  }
  want = _losses(ways["--tables dense"])
  assert len(want) == 10
  for way, out in ways.items():
    assert _losses(out) == pytest.approx(want, abs=1e-4), way
  size = {
    way: _numbers(r"([\d.]+) MB on a", out)[1] for way, out in ways.items()
  }
  (rows,) = {
    x for out in ways.values() for x in _numbers(r"([1-9]\d*) rows", out)
  }
  table = rows * (8 + 1) * 4 / 1e6  # and Adagrad's number for each row
  saved = size["--tables replicated"] - size["--tables sharded"]
  assert saved == pytest.approx(table / 2, abs=0.02)
  (fewer,) = _numbers(r"([\d.]+)x fewer", ways["--tables replicated"])
  assert fewer > 1


@pytest.mark.more
def test_sparsifiers_learn_for_fewer_bytes():
  out = _output("sparsify.py")
  losses = _losses(out)
  assert len(losses) == 6 and losses[0] == losses[2] == losses[4]
  for last in losses[1::2]:
    assert last < 0.7 * losses[0]
  _, exdyna, top_k = re.split(r"^\w+: step 0", out, flags=re.M)[1:]
  for report in exdyna, top_k:
    assert max(_numbers(r"([\d.]+)x fewer", report)) > 3
  assert "error_feedback after 200 steps" in top_k


@pytest.mark.more
def test_planning_predicts_what_is_sent():
  out = _output("planning.py")
  gains = _numbers(r"predicted to be ([\d.]+)x as fast", out)
  assert len(gains) == 2 and min(gains) > 3
  assert "densities assumed" in out.split("For 64 hosts")[0]
  assert "assumed" not in out.split("For 64 hosts")[1]
  losses = _losses(out)
  assert losses[-1] < 0.7 * losses[0]
  rows, megabytes = re.findall(r"^embed +\w\S* +(.*)$", out, re.M)[-1], []
  megabytes = [float(x) for x in rows.split()][2::3]
  assert 0.7 < megabytes[0] < 1.4 and 0.7 < megabytes[1] < 1.4, rows


def test_each_stands_alone_and_is_short():
  names = {path.stem for path in _EXAMPLES.glob("*.py")}
  assert len(names) <= 10
  for name in names:
    text = (_EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= (40 if name == "quickstart" else 150), name
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert not imported & (names | {"examples"}), name


def test_multi_host_asks_for_all_cluster_flags():
  done = _run("multi_host.py", "--coordinator", "127.0.0.1:1")
  assert done.returncode == 2
  assert "--process-id go together" in done.stderr
