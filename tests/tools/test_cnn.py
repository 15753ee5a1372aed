"""The image model's data; its program stopped, resumed and logged."""

import os
import signal

import jax
import numpy as np
import optax
from PIL import Image
import pytest
import runners

from examples.studies.cnn import __main__ as program
from examples.studies.cnn import flags as cnn_flags
from examples.studies.cnn import images as sources
from examples.studies.common import cluster
from examples.studies.common import files
from examples.studies.common import trainer as training

# The examples promote as users' programs do.
pytestmark = pytest.mark.usefixtures("as_optax_computes")

_SMALL = ["--image-size=8", "--width=8", "--batch=8", "--steps=12"]
_SMALL += ["--eval-every=6", "--lr=0.02", "--sparsifier=top_k"]
_SMALL += ["--density=0.05"]
_made = {}


@pytest.fixture
def photos(tmp_path):
  """A directory of dark and of light images, of two sizes."""
  rng = np.random.default_rng(0)
  for name, light in ("dark", 40), ("light", 200):
    (tmp_path / "photos" / name).mkdir(parents=True)
    for i in range(20):
      size = (6 + i % 2, 9, 3)
      pixels = np.clip(rng.normal(light, 30, size), 0, 255).astype(np.uint8)
      Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
  return tmp_path / "photos"


def _write_cifar(directory, name, labels, cut=0):
  rng = np.random.default_rng(len(labels))
  records = rng.integers(0, 256, (len(labels), 3073), dtype=np.uint8)
  records[:, 0] = labels
  directory.mkdir(exist_ok=True)
  data = records.tobytes()
  (directory / name).write_bytes(data[: len(data) - cut])
  return records


def test_reads_a_folder_of_images(photos):
  images = sources.load(str(photos), 8)
  assert images.classes == 2
  assert images.train.images.shape == (32, 8, 8, 3)
  assert images.held_out.size == 8
  for part in images.train, images.held_out:
    assert set(part.labels) == {0, 1}
    light = part.images.mean(axis=(1, 2, 3)) > 0
    np.testing.assert_array_equal(light, part.labels == 1)
    assert abs(part.images).max() <= 1


def test_reads_cifar_10(tmp_path):
  root = tmp_path / "cifar"
  first = _write_cifar(root, "data_batch_1.bin", [3, 9])
  _write_cifar(root, "data_batch_2.bin", [0])
  _write_cifar(root, "test_batch.bin", [7])
  images = sources.load(str(root), 8)
  assert images.classes == 10 and images.held_out.labels.tolist() == [7]
  assert images.train.labels.tolist() == [3, 9, 0]
  # The green of row 1, column 2 of the second image.
  pixel = first[1, 1 + 1024 + 32 + 2] / 127.5 - 1
  np.testing.assert_allclose(images.train.images[1, 1, 2, 1], pixel, 1e-6)


def test_reads_digits_where_scikit_learn_is():
  pytest.importorskip("sklearn")
  images = sources.load(None, 32)
  assert images.classes == 10 and images.train.images.shape == (1437, 8, 8, 1)
  assert images.held_out.size == 360
  assert images.train.images.min() == -1 and images.train.images.max() == 1


def test_batches_are_a_function_of_seed_and_step(photos):
  images = sources.load(str(photos), 8).train
  first = [b for _, b in zip(range(7), sources.batches(images, 10, 1, 0))]
  later = [b for _, b in zip(range(5), sources.batches(images, 10, 1, 2))]
  for one, other in zip(first[2:], later):
    np.testing.assert_array_equal(one.images, other.images)
    np.testing.assert_array_equal(one.labels, other.labels)
  seen = np.concatenate([b.images for b in first[:3]])
  assert len(np.unique(seen, axis=0)) == 30  # Nothing twice in an epoch.


def _unreadable(photos):
  (photos / "dark" / "broken.png").write_bytes(b"no image")


def _cut_short(photos):
  _write_cifar(photos, "data_batch_1.bin", [1, 2], cut=1)
  _write_cifar(photos, "test_batch.bin", [1])


def _mislabelled(photos):
  _write_cifar(photos, "data_batch_1.bin", [1, 10])
  _write_cifar(photos, "test_batch.bin", [1])


@pytest.mark.parametrize(
  "spoil, match",
  [
    (_unreadable, r"--data .*broken\.png must be an image"),
    (lambda root: (root / "none").mkdir(), "none must hold images, got none"),
    (lambda root: _write_cifar(root, "x.bin", [1]), r"data_batch_1\.bin .*x\."),
    (_cut_short, "records of 3073 bytes, got 6,145 bytes: it is cut short"),
    (_mislabelled, "must have labels 0 to 9, got 10 in record 1"),
  ],
)
def test_says_what_is_wrong_with_data(photos, spoil, match):
  spoil(photos)
  with pytest.raises(SystemExit, match=match):
    program.main(["--devices=2", f"--data={photos}"])


@pytest.mark.parametrize(
  "flags, match",
  [
    ("--data {0}/dark", "must hold CIFAR-10's .* got 0 subdirectories"),
    ("--data {0}/nowhere", "--data must name a directory, got .*nowhere"),
    ("--data {0} --batch 9", "--batch must be a multiple of the 2 devices"),
    ("--data {0} --batch 64", "at most the 32 images to train on, got 64"),
    ("--devices 99", "--devices must be at most 8, got 99"),
  ],
)
def test_says_what_does_not_fit(photos, flags, match):
  flags = flags.format(photos).split()
  with pytest.raises(SystemExit, match=match):
    program.main(["--devices=2", *flags])


@pytest.mark.parametrize(
  "flags, words",
  [
    ("--density 0", "--density must be in (0, 1], got 0.0"),
    ("--width 12", "--width must be a multiple of 8, got 12"),
    ("--steps 3 --epochs 2", "--steps and --epochs do not go together"),
    ("--devices 0", "--devices must be positive, got 0"),
    ("--resume", "--resume needs --checkpoint DIR"),
  ],
)
def test_flags_are_checked(capsys, flags, words):
  with pytest.raises(SystemExit) as caught:
    cnn_flags.parse("", flags.split())
  assert caught.value.code == 2
  assert words in capsys.readouterr().err


def _kept(name, make):
  """Runs of the same step compile it once, to save time."""

  def make_once(graph, *args):
    # Optimizers are functions, new each time; states tell them apart.
    parts = [x for x in args if not isinstance(x, optax.GradientTransformation)]
    return _made.setdefault((name, str(parts)), make(graph, *args))

  return make_once


@pytest.fixture
def trainers(monkeypatch):
  """The trainers that the program makes, on two devices."""
  for name in "_compiled_step", "_compiled_evaluation":
    monkeypatch.setattr(training, name, _kept(name, getattr(training, name)))
  made, init = [], training.Trainer.__init__

  def record(trainer, *args, **kwargs):
    init(trainer, *args, **kwargs)
    trainer.steps_done = 0
    made.append(trainer)

  monkeypatch.setattr(training.Trainer, "__init__", record)
  monkeypatch.setattr(cluster, "make_mesh", lambda count: runners.mesh(2))
  return made


def _stop_after(monkeypatch, steps):
  step = training.Trainer.step

  def stopped(trainer, batch):
    trainer.steps_done += 1
    if trainer.steps_done == steps:
      os.kill(os.getpid(), signal.SIGINT)
    return step(trainer, batch)

  monkeypatch.setattr(training.Trainer, "step", stopped)


@pytest.mark.more
def test_resumed_as_if_never_stopped(
  trainers, photos, monkeypatch, tmp_path, capsys
):
  flags = [*_SMALL, f"--data={photos}"]
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert program.main([*flags, f"--out={whole}"]) == 0
  out = capsys.readouterr().out
  assert "100.00% after 12" in out
  assert "build-up" in out and "of 4.99" in out and "threshold" in out
  assert (whole / "train_cnn.png").stat().st_size > 10_000
  again = [*flags, f"--out={parts}", f"--checkpoint={tmp_path / 'saved'}"]
  with monkeypatch.context() as patch:
    _stop_after(patch, 5)
    assert program.main(again) == 130
  assert f"after 5 steps, saved in {tmp_path / 'saved'}" in (
    capsys.readouterr().out
  )
  with pytest.raises(SystemExit, match="--density must be what the checkpoint"):
    program.main([*again, "--resume", "--density=0.1"])
  assert program.main([*again, "--resume"]) == 0
  one, *_, other = trainers
  for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params)):
    np.testing.assert_array_equal(a, b)
  logs = [files.read_log(path) for path in (whole, parts)]
  assert [line["step"] for line in logs[1]] == [*range(1, 13)]
  for line in (*logs[0], *logs[1]):
    del line["seconds"]
  assert logs[0] == logs[1]
  last = logs[0][-1]
  assert last["accuracy"] == 1 and "accuracy" not in logs[0][4]
  assert 1 <= last["sparsifier"]["build_up"] <= 2


@pytest.mark.more
def test_ctrl_c_without_a_checkpoint_leaves_nothing(
  trainers, photos, monkeypatch, tmp_path, capsys
):
  out = tmp_path / "run"
  _stop_after(monkeypatch, 2)
  assert program.main([*_SMALL, f"--data={photos}", f"--out={out}"]) == 130
  assert "after 2 steps, nothing saved" in capsys.readouterr().out
  assert not out.exists()
  out.mkdir()
  (out / "steps.jsonl").touch()
  with pytest.raises(SystemExit, match="--out must name a new directory, but"):
    program.main([*_SMALL, f"--data={photos}", f"--out={out}"])
