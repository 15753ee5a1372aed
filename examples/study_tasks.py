"""What a study of sparsifiers trains: the language model, or the images."""

import argparse
from collections.abc import Callable, Iterator, Sequence
import dataclasses
from pathlib import Path
from typing import Any, Protocol

import cnn_flags
import cnn_images
import cnn_trainer
import jax
from jax.sharding import Mesh
import lm_data
import lm_flags
from lm_text import load
import lm_trainer
from measured_run import Measure
from sparsified import LOCAL
from sparsified import Sparsifier
from study_cells import Cell
from train_loop import Trainer

import zenjax

_LM = ["--vocab=2000", "--width=32", "--batch-tokens=256", "--negatives=128"]
# A selection delays gradients and keeps their sum. Of that SGD makes the same
# update; what divides by the size of a gradient, as Adagrad, does not.
_LM += ["--eval-tokens=16384", "--optimizer=sgd", "--steps=2000"]
_PROBE = 8  # Steps before a run, whose sizes it pins.
_CNN = ["--width=16", "--batch=64", "--steps=600"]


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
  """A run about to begin."""

  trainer: Trainer[Any]
  batches: Iterator[Any]
  measure: Measure
  elements: int


class Task(Protocol):
  """What is trained; its data are read when it is made.

  Attributes:
    measure: The name of what is taken on held-out data.
    unit: Of what a batch is made.
  """

  measure: str
  unit: str

  def __init__(self, flags: argparse.Namespace, devices: int): ...

  @staticmethod
  def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the program of its own, with sizes for a study."""
    ...

  @staticmethod
  def options(flags: argparse.Namespace) -> dict[str, Any]:
    """Those that all cells share, without anybody's paths."""
    ...

  def start(self, cell: Cell, mesh: Mesh) -> Start:
    """A step is of the same examples on any number of devices."""
    ...

  @staticmethod
  def gap(value: float, dense: float) -> str:
    """How much worse a measure is than that of the dense mean."""
    ...


class Language:
  """`train_lm.py`: perplexity of held-out text."""

  measure, unit = "perplexity", "tokens"

  def __init__(self, flags: argparse.Namespace, devices: int):
    self._flags, self._devices = flags, devices
    self._windows, self._held_out, self._vocab = load(flags, devices)

  @staticmethod
  def parse(argv: Sequence[str]) -> argparse.Namespace:
    return lm_flags.parse("", [*_LM, *argv])

  @staticmethod
  def options(flags: argparse.Namespace) -> dict[str, Any]:
    names = ("vocab", "width", "batch_tokens", "negatives", "eval_tokens")
    names += ("optimizer", "lr", "steps")
    return _options(flags, names, "corpus")

  def start(self, cell: Cell, mesh: Mesh) -> Start:
    flags = self._flags

    def batches() -> Iterator[lm_data.Batch]:
      return lm_data.batches(
        self._windows,
        devices=cell.devices,
        batch_tokens=flags.batch_tokens * self._devices // cell.devices,
        negatives=flags.negatives,
        vocab=self._vocab,
        seed=cell.seed,
      )

    def make(sparsifier: Sparsifier | None) -> lm_trainer.Trainer:
      return lm_trainer.Trainer(
        vocab=self._vocab,
        width=flags.width,
        seed=cell.seed,
        sync="pmean",
        grads="dense",
        optimizer=flags.optimizer,
        learning_rate=flags.lr,
        mesh=mesh,
        sparsifier=sparsifier,
      )

    trainer = make(_pinned(cell.sparsifier, make, batches()))
    measure = Measure(
      self.measure, ",.2f", lambda: trainer.perplexity(self._held_out)
    )
    return Start(trainer, batches(), measure, _elements(trainer))

  @staticmethod
  def gap(value: float, dense: float) -> str:
    return f"{value / dense - 1:+.1%}"


class Pictures:
  """`train_cnn.py`: accuracy on held-out images."""

  measure, unit = "accuracy", "images"

  def __init__(self, flags: argparse.Namespace, devices: int):
    del devices
    self._flags = flags
    try:
      self._images = cnn_images.load(flags.data, flags.image_size)
    except (OSError, ValueError) as error:
      raise SystemExit(f"--data {error}") from error

  @staticmethod
  def parse(argv: Sequence[str]) -> argparse.Namespace:
    return cnn_flags.parse("", [*_CNN, *argv])

  @staticmethod
  def options(flags: argparse.Namespace) -> dict[str, Any]:
    names = ("image_size", "width", "batch", "lr", "steps")
    return _options(flags, names, "data")

  def start(self, cell: Cell, mesh: Mesh) -> Start:
    flags, images = self._flags, self._images

    def batches() -> Iterator[cnn_images.Batch]:
      return cnn_images.batches(images.train, flags.batch, cell.seed, 0)

    def make(sparsifier: Sparsifier | None) -> cnn_trainer.Trainer:
      return cnn_trainer.Trainer(
        shape=images.train.images.shape[1:],
        classes=images.classes,
        width=flags.width,
        seed=cell.seed,
        learning_rate=flags.lr,
        mesh=mesh,
        sparsifier=sparsifier,
      )

    trainer = make(_pinned(cell.sparsifier, make, batches()))
    measure = Measure(
      self.measure, ".2%", lambda: trainer.accuracy(images.held_out)
    )
    return Start(trainer, batches(), measure, _elements(trainer))

  @staticmethod
  def gap(value: float, dense: float) -> str:
    return f"{100 * (value - dense):+.2f} points"


TASKS: dict[str, type[Task]] = {"lm": Language, "cnn": Pictures}


def _options(
  flags: argparse.Namespace, names: Sequence[str], source: str
) -> dict[str, Any]:
  found = {name: getattr(flags, name) for name in names}
  path = getattr(flags, source)
  # Its name alone: where it lies is nobody's business.
  return found | {source: path and Path(path).resolve().name}


def _pinned(
  sparsifier: Sparsifier | None,
  make: Callable[[Sparsifier | None], Any],
  batches: Iterator[Any],
) -> Sparsifier | None:
  """With zen_sync's sizes as `zenjax.advise` has them after some steps.

  Others than `LOCAL` have no such sizes, and are as they were.
  """
  if sparsifier is None or sparsifier.kind not in LOCAL:
    return sparsifier
  trainer = make(sparsifier)
  for _, batch in zip(range(_PROBE), batches):
    trainer.step(batch)
  sizes = zenjax.advise(trainer.opt_state)
  return dataclasses.replace(sparsifier, capacities=sizes or None)


def _elements(trainer: Any) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(trainer.params))
