"""The loop over steps, and what a run leaves: losses, times and numbers."""

from collections.abc import Callable, Iterator
import dataclasses
import statistics
import time
from typing import Protocol

import jax
import numpy as np
from tqdm import tqdm

from examples.studies.common.interrupts import Interrupt

# Steps whose time says nothing: the first one compiles, memory is still cold.
_WARM_UP = 3


class Batch(Protocol):
  """Holds what all devices train on in one step."""

  @property
  def arrays(self) -> tuple[np.ndarray, ...]:
    """The arrays that a step takes, split over devices along first axes."""
    ...

  @property
  def size(self) -> int:
    """The number of units: of tokens, of images."""
    ...


class Steps(Protocol):
  """Takes steps of training."""

  def step(self, batch: Batch) -> float:
    """Trains on one batch, waits for it, and returns its loss."""
    ...

  def stats(self) -> dict[str, dict[str, float]]:
    """Returns numbers of the last step, by leaf; none of a dense mean."""
    ...


@dataclasses.dataclass(slots=True)
class Run:
  """Holds what the steps of one run gave, in order.

  Attributes:
    start: Steps done before it.
    losses: The mean over devices of each step.
    seconds: The time of each step.
    stats: The numbers after each step: leaf name -> numbers.
    measured: Step -> the number taken on held-out data after it.
  """

  start: int = 0
  losses: list[float] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)
  stats: list[dict[str, dict[str, float]]] = dataclasses.field(
    default_factory=list
  )
  measured: dict[int, float] = dataclasses.field(default_factory=dict)

  @property
  def done(self) -> int:
    """Steps done after it."""
    return self.start + len(self.losses)

  @property
  def step_time(self) -> float:
    """Median seconds of the steps after the warm up."""
    return statistics.median(self.seconds[_WARM_UP:] or self.seconds)

  @property
  def last(self) -> float:
    """The newest measure."""
    return list(self.measured.values())[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
  """Says what is taken on held-out data, and when.

  Attributes:
    take: Takes it, before the first step and after the last.
    name: As "accuracy".
    form: Its format for a person: ".2%".
    every: Steps between two more. None: these two only, and the progress bar
      does not show them.
  """

  take: Callable[[], float]
  name: str
  form: str
  every: int | None


def fit(
  trainer: Steps,
  batches: Iterator[Batch],
  steps: range,
  *,
  label: str,
  unit: str,
  interrupt: Interrupt,
  measure: Measure | None = None,
  at_start: Callable[[Run], object] = lambda run: None,
  after_step: Callable[[Run], object] = lambda run: None,
) -> Run:
  """Runs `steps`, or fewer on Ctrl-C, under a progress bar.

  Args:
    trainer: Takes the steps.
    batches: One batch a step.
    steps: Numbers of the steps to run.
    label: Name of the run.
    unit: What a batch's size counts: "tokens".
    interrupt: Looked at after every step.
    measure: What is taken on held-out data, if anything.
    at_start: Called with the run after its first measure.
    after_step: Called with the run so far.

  Returns:
    The run. On Ctrl-C the measure at its end is missing.
  """
  run = Run(steps.start)
  if measure:
    run.measured[steps.start] = measure.take()
    at_start(run)
  bar = tqdm(
    steps,
    desc=label,
    initial=steps.start,
    total=steps.stop,
    mininterval=1,
    disable=jax.process_index() > 0,
  )
  for _, batch in zip(bar, batches):
    if interrupt.agreed():
      break
    start = time.perf_counter()
    run.losses.append(trainer.step(batch))
    run.seconds.append(time.perf_counter() - start)
    run.stats.append(trainer.stats())
    shown = f"loss {run.losses[-1]:.3f}"
    shown += f", {batch.size / run.seconds[-1]:,.0f} {unit}/s"
    if measure:
      every = measure.every or steps.stop
      if run.done % every == 0 or run.done == steps.stop:
        run.measured[run.done] = measure.take()
      if measure.every:
        shown += f", {measure.name} {run.last:{measure.form}}"
    after_step(run)
    bar.set_postfix_str(shown, refresh=False)
  bar.close()
  return run
