"""The language model as a study: perplexity of held-out text."""

import argparse
from collections.abc import Iterator, Mapping
import functools

from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
import numpy as np
import optax

from examples.studies.common import flags as common
from examples.studies.common import plots
from examples.studies.common.cluster import AXIS
from examples.studies.common.loop import Run
from examples.studies.common.sparsifier import Sparsifier
from examples.studies.common.study import Study
from examples.studies.common.trainer import Trainer
from examples.studies.lm import data
from examples.studies.lm import model
from examples.studies.lm.flags import OPTIMIZERS

LOSS = functools.partial(model.sampled_loss, axis_name=AXIS)


def make_trainer(
  vocab: int,
  width: int,
  optimizer: str,
  learning_rate: float,
  mesh: Mesh,
  seed: int,
  *,
  sync: str | optax.GradientTransformation = "pmean",
  grads: str = "dense",
  sparsifier: Sparsifier | None = None,
) -> Trainer:
  """Makes a trainer of a model of so many words and so wide tables."""
  make, _ = OPTIMIZERS[optimizer]
  return Trainer(
    lambda: model.LanguageModel(vocab, width, rngs=nnx.Rngs(seed)),
    LOSS,
    mean_exact_loss,
    make(learning_rate),
    mesh,
    sync=sync,
    grads=grads,
    sparsifier=sparsifier,
  )


def perplexity(trainer: Trainer, windows: np.ndarray) -> float:
  """Returns the exact one of [m, L + 1] words; devices divide m."""
  return float(np.exp(trainer.evaluate(windows)))


def mean_exact_loss(
  words: model.LanguageModel, windows: jax.Array
) -> jax.Array:
  return lax.pmean(model.exact_loss(words, windows, AXIS), AXIS)


class Language(Study):
  """A text, cut into windows, and what is predicted of it."""

  unit, measure, form, table_form = "tokens", "perplexity", ",.2f", ".3f"
  panels = (plots.losses("word"), plots.step_times, plots.densities)

  def __init__(self, flags: argparse.Namespace, devices: int):
    super().__init__(flags, devices)
    self._windows, self._held_out, self.vocab = data.load(flags, devices)
    # Adagrad leaves rows alone that a step does not touch, whatever gradients
    # are; Adam does not. Where the optimizers differ, more than rounding parts
    # two runs.
    if flags.grads != "rows" or flags.optimizer != "adam":
      self.reordered = lambda batch: batch.rotated(devices)

  def trainer(self, mesh: Mesh, seed: int, **how) -> Trainer:
    flags = self._flags
    return make_trainer(
      self.vocab, flags.width, flags.optimizer, flags.lr, mesh, seed, **how
    )

  def batches(
    self, devices: int, seed: int, first_step: int = 0
  ) -> Iterator[data.Batch]:
    return data.batches(
      self._windows,
      devices=devices,
      batch_tokens=self._flags.batch_tokens * self._devices // devices,
      negatives=self._flags.negatives,
      vocab=self.vocab,
      seed=seed,
      first_step=first_step,
    )

  def measured(self, trainer: Trainer) -> float:
    return perplexity(trainer, self._held_out)

  def settings(self) -> dict[str, object]:
    names = ("sync", "grads", "optimizer", "width", "lr", "batch_tokens")
    names += ("negatives", "seed", "sparsifier", "density")
    return common.settings(self._flags, names) | {"--vocab": self.vocab}

  def print_start(self, run: Run) -> None:
    print(
      f"held-out perplexity after {run.done} steps: {run.last:,.1f}", flush=True
    )

  def print_end(self, run: Run) -> None:
    self.print_start(run)
    seconds = run.step_time
    print(f"median step {seconds:.3f} s, {1 / seconds:.2f} steps a second")

  def verdict(self, runs: Mapping[str, Run]) -> str:
    zen, pmean = runs["zen"], runs["pmean"]
    if not self.reordered:
      return (
        "With row gradients the optimizer moves only rows that a step touches."
        f"\nAfter {zen.done} steps the held-out perplexity differs by"
        f" {abs(zen.last / pmean.last - 1):.3%} from that with pmean."
      )
    distance = _largest_difference(zen, pmean)
    rounding = _largest_difference(runs["pmean reordered"], pmean)
    word = "no more" if distance <= rounding else "MORE"
    return (
      f"Largest difference of losses over {pmean.done} steps\n"
      f"  zen_sync and pmean                        {distance:.2e}\n"
      f"  pmean and pmean, summed in another order  {rounding:.2e}\n"
      f"zen_sync changes the losses {word} than another order of summation"
      " does."
    )


def _largest_difference(a: Run, b: Run) -> float:
  return float(np.max(np.abs(np.subtract(a.losses, b.losses))))
