"""Labelled images: scikit-learn's digits, CIFAR-10's files, or a folder.

Letters: m images of height H and width W, with C channels.
"""

from collections.abc import Iterator
import dataclasses
import importlib
from pathlib import Path

import numpy as np

# Of CIFAR-10's binary version: a label, and then red, green and blue planes.
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + 3 * 32 * 32
_CIFAR_CLASSES = 10

_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp"}
_HELD_OUT_EVERY = 5  # One image in so many, where nobody else split them.


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
  """Holds images and their labels, split over devices along the first axis.

  Attributes:
    images: [m, H, W, C] float32, in [-1, 1].
    labels: [m] int32.
  """

  images: np.ndarray
  labels: np.ndarray

  @property
  def arrays(self) -> tuple[np.ndarray, ...]:
    """The arrays that a step takes."""
    return self.images, self.labels

  @property
  def size(self) -> int:
    """Images."""
    return len(self.labels)

  def take(self, rows: np.ndarray) -> "Batch":
    return Batch(self.images[rows], self.labels[rows])


@dataclasses.dataclass(frozen=True, slots=True)
class Images:
  """Holds a data set: what is trained on, what is not, the number of labels."""

  train: Batch
  held_out: Batch
  classes: int


def load(data: str | None, size: int) -> Images:
  """Reads images.

  Args:
    data: Nothing for digits, or a directory: of CIFAR-10's binary files, or
      with a subdirectory of images for each class.
    size: Height and width that images of subdirectories get.

  Raises:
    ValueError: `data` holds no such thing, or a damaged file.
  """
  if data is None:
    return _digits()
  root = Path(data)
  if not root.is_dir():
    raise ValueError(f"must name a directory, got {data}")
  if list(root.glob("*.bin")):
    return _cifar(root)
  return _folder(root, size)


def batches(images: Batch, size: int, seed: int, first: int) -> Iterator[Batch]:
  """Yields endless batches of `size` from step `first` on.

  A pure function of seed and step; every epoch has its own order.
  """
  steps = images.size // size
  step, epoch, order = first, -1, np.empty(0, np.int64)
  while True:
    if step // steps != epoch:
      epoch = step // steps
      order = np.random.default_rng([seed, epoch]).permutation(images.size)
    at = step % steps * size
    yield images.take(order[at : at + size])
    step += 1


def _digits() -> Images:
  try:
    # By name: it comes with no types.
    datasets = importlib.import_module("sklearn.datasets")
  except ImportError as error:
    raise ValueError(
      "must name a directory where scikit-learn, which brings the digits, is"
      " not installed: pip install scikit-learn"
    ) from error
  images, labels = datasets.load_digits(return_X_y=True)
  images = images.reshape(-1, 8, 8, 1) / 8 - 1
  return _split(_batch(images, labels), 10)


def _batch(images: np.ndarray, labels: np.ndarray) -> Batch:
  return Batch(images.astype(np.float32), labels.astype(np.int32))


def _split(images: Batch, classes: int) -> Images:
  order = np.random.default_rng(0).permutation(images.size)
  held = np.arange(images.size) % _HELD_OUT_EVERY == 0
  return Images(images.take(order[~held]), images.take(order[held]), classes)


def _cifar(root: Path) -> Images:
  test = root / "test_batch.bin"
  train = sorted(root.glob("data_batch_*.bin"))
  if not train or not test.is_file():
    raise ValueError(
      "with CIFAR-10's files must hold data_batch_1.bin (to 5) and"
      f" test_batch.bin, got {sorted(x.name for x in root.glob('*.bin'))}"
    )
  parts = [_cifar_file(path) for path in train]
  images = np.concatenate([part.images for part in parts])
  labels = np.concatenate([part.labels for part in parts])
  return Images(Batch(images, labels), _cifar_file(test), _CIFAR_CLASSES)


def _cifar_file(path: Path) -> Batch:
  data = np.fromfile(path, np.uint8)
  if not data.size or data.size % _CIFAR_RECORD:
    raise ValueError(
      f"{path} must hold records of {_CIFAR_RECORD} bytes, got {data.size:,}"
      " bytes: it is cut short, or no binary CIFAR-10"
    )
  records = data.reshape(-1, _CIFAR_RECORD)
  labels = records[:, 0]
  if labels.max() >= _CIFAR_CLASSES:
    at = int(np.argmax(labels >= _CIFAR_CLASSES))
    raise ValueError(
      f"{path} must have labels 0 to 9, got {labels[at]} in record {at}"
    )
  planes = records[:, 1:].reshape(-1, *_CIFAR_SHAPE)
  return _batch(_scaled(planes.transpose(0, 2, 3, 1)), labels)


def _scaled(pixels: np.ndarray) -> np.ndarray:
  return pixels.astype(np.float32) / 127.5 - 1


def _folder(root: Path, size: int) -> Images:
  classes = sorted(path for path in root.iterdir() if path.is_dir())
  if len(classes) < 2:
    raise ValueError(
      "must hold CIFAR-10's *.bin files or a subdirectory of images for each"
      f" of at least 2 classes, got {len(classes)} subdirectories"
    )
  images, labels = [], []
  for label, directory in enumerate(classes):
    paths = sorted(
      path for path in directory.iterdir() if path.suffix.lower() in _ENDINGS
    )
    if not paths:
      raise ValueError(
        f"{directory} must hold images, got none that ends in"
        f" {', '.join(sorted(_ENDINGS))}"
      )
    images += [_read(path, size) for path in paths]
    labels += [label] * len(paths)
  found = _batch(_scaled(np.stack(images)), np.array(labels))
  return _split(found, len(classes))


def _read(path: Path, size: int) -> np.ndarray:
  try:
    from PIL import Image
  except ImportError as error:
    raise ValueError(
      "with folders of images needs Pillow: pip install pillow"
    ) from error
  try:
    with Image.open(path) as image:
      return np.asarray(image.convert("RGB").resize((size, size)))
  except (OSError, SyntaxError) as error:
    raise ValueError(f"{path} must be an image: {error}") from error
