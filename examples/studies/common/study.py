"""A study: a model, its data, and what is said of its runs."""

import abc
import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from jax.sharding import Mesh

from examples.studies.common import loop
from examples.studies.common.loop import Run
from examples.studies.common.plots import Panel
from examples.studies.common.sparsifier import Sparsifier
from examples.studies.common.trainer import Trainer


class Study(abc.ABC):
  """Holds a model and its data, which are read when it is made.

  Args:
    flags: The program's.
    devices: How many devices share a batch; `batches` takes divisors of it.

  Attributes:
    unit: What a batch's size counts: "tokens".
    measure: The number taken on held-out data: "accuracy".
    measured_on: The same as a phrase: "accuracy on held-out images".
    form: Its format in a line: ".2%".
    table_form: Its format in a table.
    panels: What is drawn of runs.
    steps: How many steps a run has.
    reordered: Deals a batch to the devices in another order: training is then
      equal but for rounding, and says how far apart rounding leads. None where
      zen_sync and pmean differ by more.
  """

  unit: ClassVar[str]
  measure: ClassVar[str]
  measured_on: ClassVar[str]
  form: ClassVar[str]
  table_form: ClassVar[str]
  panels: ClassVar[Sequence[Panel]]

  def __init__(self, flags: argparse.Namespace, devices: int):
    self._flags = flags
    self._devices = devices
    self.steps: int = flags.steps
    self.reordered: Callable[[Any], Any] | None = None

  @abc.abstractmethod
  def trainer(
    self,
    mesh: Mesh,
    seed: int,
    *,
    sync: str = "pmean",
    grads: str = "dense",
    sparsifier: Sparsifier | None = None,
  ) -> Trainer:
    """Makes a trainer, with first parameters from `seed`."""

  @abc.abstractmethod
  def batches(
    self, devices: int, seed: int, first_step: int = 0
  ) -> Iterator[Any]:
    """Yields endless batches, of the same examples on any number of devices."""

  @abc.abstractmethod
  def measured(self, trainer: Trainer) -> float:
    """Takes the measure on held-out data."""

  @abc.abstractmethod
  def settings(self) -> dict[str, object]:
    """Returns the flags that a run shares with the one that it resumes."""

  def taken(self, trainer: Trainer, every: int | None) -> loop.Measure:
    """Returns the measure of a trainer, as `loop.fit` takes it."""
    return loop.Measure(
      lambda: self.measured(trainer), self.measure, self.form, every
    )

  def print_start(self, run: Run) -> None:
    """Prints what was measured before the first step; nothing by default."""
    del run

  def print_end(self, run: Run) -> None:
    """Prints what was learned, and how fast."""
    print(
      f"{self.measured_on}: {run.measured[run.start]:{self.form}} after"
      f" {run.start} steps, {run.last:{self.form}} after {run.done}; median"
      f" step {run.step_time:.3f} s, {1 / run.step_time:.2f} steps a second"
    )

  def verdict(self, runs: Mapping[str, Run]) -> str:
    """Says how far "zen" and "pmean" are apart in what they learned."""
    zen, pmean = runs["zen"], runs["pmean"]
    return (
      f"After {zen.done} steps the {self.measure} with zen_sync differs by"
      f" {abs(zen.last / pmean.last - 1):.3%} from that with pmean."
    )
