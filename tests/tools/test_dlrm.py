"""The click model's files, planted log and AUC; a run resumed is the same."""

import dataclasses
import os
import re
import signal

import jax
import numpy as np
import optax
import pytest

from examples.studies.common import trainer as training
from examples.studies.dlrm import __main__ as program
from examples.studies.dlrm import criteo
from examples.studies.dlrm import flags as dlrm_flags
from examples.studies.dlrm import rows as dlrm_rows
from examples.studies.dlrm.auc import auc
from examples.studies.dlrm.planted import Planted
import zenjax

# The examples promote as users' programs do.
pytestmark = pytest.mark.usefixtures("as_optax_computes")
_GOOD = "\t".join(["1", *map(str, range(12)), "-2", *["0a1B2c3d"] * 26])


def _assert_equal(one, other):
  for field in dataclasses.fields(one):
    a, b = getattr(one, field.name), getattr(other, field.name)
    np.testing.assert_array_equal(a, b, strict=True)


def _parse(path, text):
  path.write_text(text)
  log = criteo.ClickLog(path)
  return log.parse(list(log.lines()))


def test_reads_what_is_there_and_what_is_missing(tmp_path):
  empty = "0" + 39 * "\t"
  for end in "\n", "":
    rows = _parse(tmp_path / "clicks.tsv", f"{_GOOD}\n{empty}{end}")
    assert rows.labels.tolist() == [1, 0]
    assert rows.numbers[0].tolist() == [*range(12), -2]
    assert set(rows.numbers[1]) == {dlrm_rows.MISSING_NUMBER}
    assert set(rows.categories[0]) == {0x0A1B2C3D}
    assert set(rows.categories[1]) == {dlrm_rows.MISSING_CATEGORY}
    batch = dlrm_rows.as_batch(rows, dlrm_rows.table_rows(1.0))
    np.testing.assert_allclose(batch.numbers[0, :12], np.log1p(range(12)), 1e-6)
    assert batch.numbers[0, 12] == 0 and not batch.numbers[1].any()
    assert batch.ids[0, 0] == 0x0A1B2C3D % 1460 and not batch.ids[1].any()


@pytest.mark.parametrize(
  "column, value, match",
  [
    (0, "2", "the label must be 0 or 1, got '2'"),
    (0, "", "the label must be 0 or 1, got ''"),
    (3, "1.5", "column 4 must be empty or an integer .*, got '1.5'"),
    (3, "9" * 19, "column 4 must be empty or an integer of at most 18 digits"),
    (14, "0a1b2c3", "column 15 must be empty or 8 hexadecimal digits, got"),
    (39, "0a1b2c3g", "column 40 .* got '0a1b2c3g'"),
    (20, "0a\t1b", "must have 40 columns with tabs between, got 41"),
    (20, "\xe9", r"column 21 must be .*, got '\\\\x.*"),
  ],
)
def test_says_which_line_breaks_which_rule(tmp_path, column, value, match):
  fields = _GOOD.split("\t")
  fields[column] = value
  bad = "\t".join(fields)
  with pytest.raises(ValueError, match=rf"clicks\.tsv:2: .*{match}"):
    _parse(tmp_path / "clicks.tsv", f"{_GOOD}\n{bad}\n{_GOOD}\n")


def test_a_last_line_cut_short_is_left_out(tmp_path, capsys):
  text = f"{_GOOD}\n{_GOOD}"
  for cut in 1, 9, 200:
    rows = _parse(tmp_path / "clicks.tsv", text[:-cut])
    assert len(rows) == 1
    assert "clicks.tsv:2: cut short" in capsys.readouterr().err


def test_a_file_can_be_compressed_and_broken(tmp_path):
  planted = Planted(5)
  path = tmp_path / "clicks.tsv.gz"
  criteo.write(path, planted.blocks(1500))
  log = criteo.ClickLog(path)
  _assert_equal(log.parse(list(log.lines())), planted.rows(0, 1500))
  whole = path.read_bytes()
  for broken in whole[:-2000], b"no gzip", whole[:5000] + b"x" + whole[5001:]:
    path.write_bytes(broken)
    with pytest.raises(ValueError, match="must be a whole gzip file"):
      list(log.lines())


def test_the_planted_log_is_a_function_of_its_seed(tmp_path):
  rows = Planted(3).rows(0, 3000)
  _assert_equal(rows[1000:2500], Planted(3).rows(1000, 2500))
  assert np.any(rows.categories != Planted(4).rows(0, 3000).categories)
  # A file holds the same rows, so training from it is the same training.
  path = tmp_path / "clicks.tsv"
  criteo.write(path, Planted(3).blocks(3000))
  made, read = Planted(3), criteo.ClickLog(path)
  _assert_equal(made.held_out(700), read.held_out(700))
  batches = made.batches(700, 500, 2), read.batches(700, 500, 2)
  for _, one, other in zip(range(2), *batches):
    _assert_equal(one, other)
  # Four batches an epoch, so the fifth of a file is its first once more.
  _assert_equal(next(batches[1]), rows[700:1200])


def test_ids_are_skewed_and_clicks_can_be_predicted():
  planted = Planted(0)
  rows = planted.rows(0, 20_000)
  assert 0.75 < auc(rows.labels, planted.logits(0, 20_000)) < 0.9
  assert 0.15 < rows.labels.mean() < 0.4
  _, counts = np.unique(rows.categories[:, 2], return_counts=True)
  assert counts.max() > 0.1 * len(rows) and np.sum(counts == 1) > 1000
  missing = rows.categories == dlrm_rows.MISSING_CATEGORY
  assert missing[:, 21].mean() > 0.5 and not missing[:, 0].any()


def test_short_files_are_refused(tmp_path):
  path = tmp_path / "clicks.tsv"
  path.write_text(f"{_GOOD}\n" * 10)
  source = criteo.ClickLog(path)
  with pytest.raises(ValueError, match="must hold 11 rows .*, got 10"):
    source.held_out(11)
  with pytest.raises(ValueError, match="a batch of 5 rows .*, got 10 rows"):
    next(source.batches(6, 5, 0))


def test_auc_is_the_share_of_pairs_in_order():
  rng = np.random.default_rng(0)
  for distinct in 2, 10, 10_000:
    labels = rng.integers(0, 2, 300)
    scores = rng.integers(0, distinct, 300) / 7 - 1
    click, other = scores[labels == 1][:, None], scores[labels == 0]
    pairs = np.mean((click > other) + 0.5 * (click == other))
    np.testing.assert_allclose(auc(labels, scores), pairs, rtol=1e-12)
  assert auc(np.array([0, 1, 1]), np.array([-1.0, 0.0, np.inf])) == 1
  assert np.isnan(auc(np.array([0, 1]), np.array([0.0, np.nan])))
  with pytest.raises(ValueError, match="2 clicks and 0 others"):
    auc(np.ones(2), np.ones(2))


@pytest.mark.parametrize(
  "flags, match",
  [
    ("--batch 0", "--batch must be positive, got 0"),
    ("--lr -1", "--lr must be positive, got -1.0"),
    ("--scale 2", "--scale must be over 0 and at most 1, got 2.0"),
    ("--sync pmean --grads rows", "--grads rows goes with --sync zen"),
    ("--sync compare --checkpoint x", "--checkpoint goes with one way of"),
    ("--resume", "--resume needs --checkpoint DIR"),
    ("--rows 5", "--rows goes with --generate FILE, got --rows 5 alone"),
    ("--generate x --data y", "it does not go with --data, got --data y"),
    (f"--generate {__file__}", "--generate must name a new file, but"),
  ],
)
def test_flags_are_checked(capsys, flags, match):
  with pytest.raises(SystemExit) as caught:
    dlrm_flags.parse("", flags.split())
  assert caught.value.code == 2
  assert match in capsys.readouterr().err


# One table is large enough to travel sparse.
_SMALL = ["--scale=0.00012", "--batch=64", "--eval-rows=4096", "--steps=30"]
_SMALL += ["--lr=0.05", "--eval-every=10"]


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch, tmp_path):
  """Runs of the same step compile it once, to save time."""
  monkeypatch.chdir(tmp_path)  # Plots are written where it runs.
  for name in "_compiled_step", "_compiled_evaluation":
    monkeypatch.setattr(training, name, _kept(getattr(training, name)))


def _kept(make):
  made = {}

  def make_once(graph, *args):
    # Optimizers are functions, new each time; states tell them apart.
    parts = [x for x in args if not isinstance(x, optax.GradientTransformation)]
    return made.setdefault(str(parts), make(graph, *args))

  return make_once


def _recorded(monkeypatch):
  """The trainers that the program makes."""
  made, init = [], training.Trainer.__init__

  def record(trainer, *args, **kwargs):
    init(trainer, *args, **kwargs)
    made.append(trainer)

  monkeypatch.setattr(training.Trainer, "__init__", record)
  return made


def _aucs(out):
  """Of zen_sync and of pmean, as the comparison prints them."""
  found = re.findall(r"^held-out AUC +(\S+) +(\S+)", out, re.MULTILINE)
  return tuple(map(float, found[0]))


def test_learns_and_resumes_as_if_never_stopped(monkeypatch, tmp_path, capfd):
  trainers = _recorded(monkeypatch)
  plot = tmp_path / "runs.png"
  assert program.main([*_SMALL, "--sync=compare", f"--plot={plot}"]) == 0
  assert plot.stat().st_size > 10_000
  out = capfd.readouterr().out
  zen, pmean = map(
    float, re.findall(r"^held-out AUC +(\S+) +(\S+)", out, re.M)[0]
  )
  assert zen > 0.65 and abs(zen - pmean) < 0.002
  assert "tables.c03.embedding" in out and "steps a second" in out

  file, saved = tmp_path / "clicks.tsv", tmp_path / "saved"
  assert program.main([f"--generate={file}", "--rows=20000"]) == 0
  again = [*_SMALL, f"--data={file}", f"--checkpoint={saved}"]
  step = training.Trainer.step

  def interrupted_step(trainer, batch):
    trainer.steps_done = getattr(trainer, "steps_done", 0) + 1
    if trainer.steps_done == 13:
      os.kill(os.getpid(), signal.SIGINT)
    return step(trainer, batch)

  with monkeypatch.context() as patch:
    patch.setattr(training.Trainer, "step", interrupted_step)
    assert program.main(again) == 130
  assert f"after 13 steps, saved in {saved}" in capfd.readouterr().out
  for other, match in (
    (
      ["--resume", "--optimizer=sgd"],
      "--optimizer must be what the checkpoint",
    ),
    ([], "--checkpoint must name a new directory"),
  ):
    with pytest.raises(SystemExit, match=match):
      program.main([*again, *other])
  assert program.main([*again, "--resume"]) == 0
  assert f"{zen:.4f} after 30; median step" in capfd.readouterr().out
  whole, resumed = trainers[0], trainers[-1]
  for one, other in zip(
    jax.tree.leaves((whole.params, whole.opt_state)),
    jax.tree.leaves((resumed.params, resumed.opt_state)),
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)


@pytest.mark.more
def test_row_gradients_learn_the_same(capfd):
  assert program.main([*_SMALL, "--sync=compare", "--grads=rows"]) == 0
  zen, pmean = _aucs(capfd.readouterr().out)
  assert zen > 0.65 and abs(zen / pmean - 1) < 0.02


@pytest.mark.more
def test_sharded_tables_learn_the_same_and_resume(monkeypatch, tmp_path, capfd):
  trainers = _recorded(monkeypatch)
  rows, sharded = [*_SMALL, "--grads=rows"], [*_SMALL, "--sync=sharded"]
  assert program.main(rows) == 0
  (whole,) = re.findall(r"([\d.]+) after 30;", capfd.readouterr().out)
  saved = f"--checkpoint={tmp_path / 'saved'}"
  assert program.main([*sharded, saved, "--steps=10"]) == 0
  assert program.main([*sharded, saved, "--resume"]) == 0
  out = capfd.readouterr().out
  assert f"{whole} after 30; median step" in out
  want, _, got = trainers
  table = got.params["tables"]["c03"]["embedding"][...]
  assert isinstance(table, zenjax.tables.ShardedTable)
  part = table.value.addressable_shards[0].data
  assert 8 * part.shape[0] == table.value.shape[0] >= table.num_rows
  got = jax.tree.leaves(zenjax.tables.unshard(got.params))
  for one, other in zip(got, jax.tree.leaves(want.params), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_breaks_the_format_ends_training_with_its_place(tmp_path, capfd):
  file = tmp_path / "clicks.tsv"
  assert program.main([f"--generate={file}", "--rows=4300"]) == 0
  # The second batch beside the rows held out meets it.
  good = file.read_text()
  file.write_text(f"{good}7\n{good}")
  small = [*_SMALL, "--sync=pmean", "--batch=25", f"--data={file}"]
  with pytest.raises(SystemExit, match=r"--data: .*clicks\.tsv:4301: a line"):
    program.main(small)
  with pytest.raises(SystemExit, match="--data: .*clicks.tsv must hold 9,600"):
    program.main([*small, "--eval-rows=9600"])
  with pytest.raises(SystemExit, match="--data: .*No such file"):
    program.main([*small, f"--data={tmp_path / 'none'}"])
  with pytest.raises(SystemExit, match="--eval-rows must be at least 1 for"):
    program.main([*small, "--eval-rows=7"])
