"""One run: steps of training, and a measure on held-out data now and then."""

from collections.abc import Callable, Iterator
import dataclasses
from typing import TypeVar

from interrupts import Interrupt
from train_loop import Batch
from train_loop import fit
from train_loop import History
from train_loop import Trainer

_Batch = TypeVar("_Batch", bound=Batch)


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
  """What is taken on held-out data.

  Attributes:
    name: As "accuracy".
    form: How a person reads it: ".2%".
    take: Takes it of what is trained, as it is.
  """

  name: str
  form: str
  take: Callable[[], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
  """What one run gave, or gives so far.

  Attributes:
    start: Steps done before it.
    history: Of its steps.
    measured: Step -> the measure after it, in order.
  """

  start: int
  history: History
  measured: dict[int, float]

  @property
  def done(self) -> int:
    """Steps done after it."""
    return self.start + len(self.history.losses)

  @property
  def last(self) -> float:
    """The newest measure."""
    return list(self.measured.values())[-1]


def run(
  trainer: Trainer[_Batch],
  batches: Iterator[_Batch],
  steps: range,
  measure: Measure,
  *,
  label: str,
  unit: str,
  eval_every: int,
  interrupt: Interrupt,
  after_step: Callable[[Run], object] = lambda run: None,
) -> Run:
  """Trains, and measures before, every so many steps, and at the end.

  Args:
    trainer: What is trained.
    batches: One batch a step.
    steps: As for `fit`.
    measure: What is taken.
    label: As for `fit`.
    unit: As for `fit`.
    eval_every: Steps between two measures.
    interrupt: As for `fit`.
    after_step: Called with the run so far.

  Returns:
    What it gave. On Ctrl-C the measure at the end is missing.
  """
  found = Run(steps.start, History(), {steps.start: measure.take()})

  def after(step: int) -> None:
    if step % eval_every == 0 or step == steps.stop:
      found.measured[step] = measure.take()
    after_step(found)

  fit(
    trainer,
    batches,
    steps,
    label=label,
    unit=unit,
    interrupt=interrupt,
    after_step=after,
    note=lambda: f", {measure.name} {found.last:{measure.form}}",
    history=found.history,
  )
  return found
