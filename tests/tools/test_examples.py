"""Each example runs as a user would run it, and is right."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from examples.studies.dlrm import criteo
from examples.studies.dlrm.auc import auc

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_EXAMPLES = _ROOT / "examples"
_STUDY = [sys.executable, "-m"]


def _start(
  command, folder, devices: int | None = None, optimized: bool = False
):
  """Starts a program in a folder of its own, where it writes its plots.

  Where it runs longer than it compiles, LLVM optimizes, as it does for users.
  """
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}
  if devices:
    env["JAX_NUM_CPU_DEVICES"] = str(devices)
  if optimized:
    env["XLA_FLAGS"] = ""
  return subprocess.Popen(
    command,
    cwd=folder,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def _output(command, folder, **how) -> str:
  process = _start(command, folder, **how)
  out, error = process.communicate(timeout=400)
  assert process.returncode == 0, out + error
  return out


def _example(folder, name: str, *args: str, **how) -> str:
  command = [sys.executable, "-W", "error", str(_EXAMPLES / name), *args]
  return _output(command, folder, **how)


def _study(folder, name: str, *args: str, **how) -> str:
  command = [*_STUDY, f"examples.studies.{name}", *args]
  return _output(command, folder, **how)


def _numbers(pattern: str, text: str) -> list[float]:
  return [float(x.replace(",", "")) for x in re.findall(pattern, text)]


def _losses(text: str) -> list[float]:
  return _numbers(r"loss +([\d.]+)", text)


# Programs of one file.


@pytest.mark.parametrize(
  "name, args", [("quickstart.py", ()), ("pmap_linen.py", ("--steps", "31"))]
)
def test_trains_and_reports(name, args, tmp_path):
  out = _example(tmp_path, name, *args, optimized=name == "quickstart.py")
  losses = _losses(out)
  assert len(losses) >= 3 and losses[-1] < 0.8 * losses[0]
  assert re.search(r"(table|embedding).* [\d.]+x fewer", out), out


@pytest.mark.parametrize("name", ["row_gradients.py", "sharded_optimizer.py"])
def test_learns_as_the_plain_program_does(name, tmp_path):
  out = _example(tmp_path, name, "--steps", "6")
  first, *_, last = _losses(out)
  assert last < first
  (apart,) = _numbers(r"losses are (\S+) apart", out)
  assert apart < 1e-5


def test_memory_of_ngrams_helps(tmp_path):
  few = ("--devices", "2", "--steps", "4", "--rows", "1000", "--batch", "8")
  out = _example(tmp_path, "ngram_memory.py", *few)
  first, *_, without, again, _, _, last, held_out = _losses(out)
  assert first == again and last < 0.9 * first  # Rows are zero at first.
  assert held_out < without


def test_sparsifiers_learn_for_fewer_bytes(tmp_path):
  out = _example(tmp_path, "sparsify.py", "--steps", "40")
  losses = _losses(out)
  assert len(losses) == 8 and len(set(losses[::2])) == 1
  assert all(last < 0.7 * losses[0] for last in losses[1::2])


def test_planning_predicts(tmp_path):
  out = _example(tmp_path, "planning.py", "--steps", "2")
  first, last, again, after = _losses(out)
  assert first == again and last < 0.8 * first
  assert after < again


def test_each_stands_alone():
  names = {path.stem for path in _EXAMPLES.glob("*.py")}
  for name in names:
    text = (_EXAMPLES / f"{name}.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert not imported & (names | {"examples"}), name


# Studies.


@pytest.fixture
def text(tmp_path):
  rng = np.random.default_rng(0)
  words = np.append(np.arange(2000), rng.zipf(1.3, 90_000) % 2000)
  path = tmp_path / "text"
  path.write_text(" ".join(f"w{word}" for word in words))
  return f"--corpus={path}"


_LM = ("--batch-tokens=64", "--negatives=8", "--width=16", "--eval-tokens=640")


def _same(out: str) -> tuple[float, float]:
  """Perplexities of zen_sync and of pmean, as a comparison prints them."""
  ((one, other),) = re.findall(
    r"^held-out perplexity +(\d\S+) +(\S+)$", out, re.M
  )
  return float(one.replace(",", "")), float(other.replace(",", ""))


@pytest.mark.parametrize(
  "grads", ["dense", pytest.param("rows", marks=pytest.mark.more)]
)
def test_lm_compares(grads, text, tmp_path):
  """The first command of the README, on a small text and model."""
  how = ("--sync=compare", "--steps=3", f"--grads={grads}")
  out = _study(tmp_path, "lm", *_LM, *how, text, devices=2)
  zen, pmean = _same(out)
  assert zen == pytest.approx(pmean, rel=1e-5)
  assert (tmp_path / "train_lm.png").stat().st_size > 10_000


@pytest.mark.multiprocess
def test_lm_of_two_processes_is_stopped_and_resumed(text, tmp_path):
  saved = f"--checkpoint={tmp_path / 'saved'}"
  log = tmp_path / "log" / "steps.jsonl"
  how = ("--grads=rows", saved, f"--out={log.parent}", text)
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  command = [*_STUDY, "examples.studies.lm", *_LM, *how, "--steps=400"]
  command += [f"--coordinator=127.0.0.1:{port}", "--num-processes=2"]
  both = [
    _start([*command, f"--process-id={i}"], tmp_path, devices=1)
    for i in range(2)
  ]
  while not (log.exists() and log.read_text()):
    assert both[0].poll() is None, "ended too early"
    time.sleep(0.05)
  both[1].send_signal(signal.SIGINT)  # One of them stops both.
  assert [p.wait(200) for p in both] == [130, 130]
  out, *_ = [process.communicate()[0] for process in both]
  (done,) = map(int, re.findall(r"Ctrl-C after (\d+) steps, saved", out))
  more = ("--resume", f"--steps={done + 10}")
  out = _study(tmp_path, "lm", *_LM, *how, *more, devices=2)
  assert _numbers(r"perplexity after (\d+) steps", out) == [done, done + 10]
  steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
  assert done > 0 and steps == [*range(1, done + 11)]


_DLRM = ("--scale=0.00012", "--batch=64", "--eval-rows=2048", "--lr=0.05")


@pytest.mark.parametrize(
  "how",
  [pytest.param("--grads=rows", marks=pytest.mark.more), "--sync=sharded"],
)
def test_dlrm_learns(how, tmp_path):
  run = ("--steps=30", "--eval-every=30")
  out = _study(tmp_path, "dlrm", *_DLRM, *run, how, devices=2)
  (found,) = re.findall(r"(0\.\d{4}) after 30", out)
  assert float(found) > 0.6


@pytest.mark.more
def test_sparsifiers_are_compared(tmp_path):
  how = ("cnn", "--width=8", "--batch=16", "--steps=6", "--kinds", "micro")
  how += ("--devices", "2", "--densities", "0.05", "--main", "0.05")
  file = tmp_path / "study.json"
  _study(tmp_path, "sparsifiers", *how, "--seeds", "0", "--json", str(file))
  assert file.exists()


_SMALL = ("--vocab=2000", *_LM, "--steps=4", "--devices=2", "--seeds", "0")


def test_compressors_are_compared(text, tmp_path):
  how = ("--optimizers", "sgd", "--ways", "dense", "int8", "SignVote")
  file = tmp_path / "study.json"
  how += ("--rates", "2", text, "--json", str(file))
  out = _study(tmp_path, "compressors", *_SMALL, *how)
  (fewer,) = _numbers(r"int8 \| [\d.]+ \| ([\d.]+)x", out)
  assert 3.8 < fewer < 4
  found = json.loads(file.read_text())
  assert found["complete"] and len(found["cells"]) == 1 + 2 + 1


def test_local_steps_are_compared(text, tmp_path):
  file = tmp_path / "study.json"
  how = ("--every", "2", "--rates", "2", text, "--json", str(file))
  out = _study(tmp_path, "local_steps", *_SMALL, *how)
  assert _numbers(r"(?m)2 steps in int4 .* ([\d.]+) \|$", out) == [15]
  found = json.loads(file.read_text())
  assert found["complete"] and len(found["cells"]) == 2 + 2 + 1


def test_auc_is_the_share_of_pairs_in_order():
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 2, 300)
  scores = np.round(rng.random(300), 1)
  pairs = scores[labels == 1][:, None] - scores[labels == 0][None]
  want = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
  assert auc(labels, scores) == pytest.approx(want)


_CLICK = "\t".join(["1", *map(str, range(12)), "-2", *["0a1B2c3d"] * 26])


@pytest.mark.parametrize(
  "column, value, words",
  [
    (0, "2", "the label must be 0 or 1, got '2'"),
    (3, "1.5", "column 4 must be empty or an integer .*, got '1.5'"),
    (14, "0a1b2c3", "column 15 must be empty or 8 hexadecimal digits, got"),
    (20, "0a\t1b", "must have 40 columns with tabs between, got 41"),
  ],
)
def test_criteo_says_which_line_breaks_which_rule(
  column, value, words, tmp_path
):
  fields = _CLICK.split("\t")
  fields[column] = value
  path = tmp_path / "clicks.tsv"
  path.write_text("\n".join([_CLICK, "\t".join(fields), _CLICK, ""]))
  log = criteo.ClickLog(path)
  with pytest.raises(ValueError, match=rf"clicks\.tsv:2: .*{words}"):
    log.parse(list(log.lines()))
