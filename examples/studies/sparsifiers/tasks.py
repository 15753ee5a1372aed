"""The studies that sparsifiers are compared on, at sizes of their own."""

import argparse
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any

from examples.studies.cnn import flags as cnn_flags
from examples.studies.cnn.study import Pictures
from examples.studies.common.study import Study
from examples.studies.lm import flags as lm_flags
from examples.studies.lm.study import Language

# A selection delays gradients and keeps their sum. Of that SGD makes the same
# update; what divides by the size of a gradient, as Adagrad, does not.
_LM = ("--vocab=2000", "--width=32", "--batch-tokens=256", "--negatives=128")
_LM += ("--eval-tokens=16384", "--optimizer=sgd", "--steps=2000")
_CNN = ("--width=16", "--batch=64", "--steps=600")


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
  """Says what is trained.

  Attributes:
    study: Its class.
    read: Reads flags of its own program.
    sizes: Flags that come first.
    shared: Flags that all cells share.
    source: A flag that all share but for its directories: where a path lies is
      nobody's business.
    gap: Says how much worse a measure is than that of the dense mean.
  """

  study: type[Study]
  read: Callable[[str, Sequence[str]], argparse.Namespace]
  sizes: Sequence[str]
  shared: Sequence[str]
  source: str
  gap: Callable[[float, float], str]

  def parse(self, argv: Sequence[str]) -> argparse.Namespace:
    """Reads flags, the task's own sizes first."""
    return self.read("", [*self.sizes, *argv])

  def options(self, flags: argparse.Namespace) -> dict[str, Any]:
    """Returns what all cells share."""
    path = getattr(flags, self.source)
    found = {name: getattr(flags, name) for name in self.shared}
    return found | {self.source: path and Path(path).resolve().name}


TASKS: Mapping[str, Task] = {
  "lm": Task(
    Language,
    lm_flags.parse,
    _LM,
    ("vocab", "width", "batch_tokens", "negatives", "eval_tokens")
    + ("optimizer", "lr", "steps"),
    "corpus",
    lambda value, dense: f"{value / dense - 1:+.1%}",
  ),
  "cnn": Task(
    Pictures,
    cnn_flags.parse,
    _CNN,
    ("image_size", "width", "batch", "lr", "steps"),
    "data",
    lambda value, dense: f"{100 * (value - dense):+.2f} points",
  ),
}
