"""One run: steps of training, and the AUC on held-out rows now and then."""

from collections.abc import Callable, Iterator
import dataclasses

from dlrm_rows import Batch
from dlrm_trainer import Trainer
from interrupts import Interrupt
from train_loop import fit
from train_loop import History


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
  """What one run gave.

  Attributes:
    start: steps done before it.
    history: of its steps.
    aucs: step -> AUC on held-out rows after it, in order.
  """

  start: int
  history: History
  aucs: dict[int, float]

  @property
  def done(self) -> int:
    """Steps done after it."""
    return self.start + len(self.history.losses)

  @property
  def auc(self) -> float:
    """The last one."""
    return list(self.aucs.values())[-1]


def run(
  trainer: Trainer,
  batches: Iterator[Batch],
  steps: range,
  held_out: Batch,
  *,
  label: str,
  eval_every: int,
  interrupt: Interrupt,
  after_step: Callable[[int], object] = lambda step: None,
) -> Run:
  """Trains, and takes the AUC before, every so many steps, and at the end.

  Args:
    trainer: What is trained.
    batches: One batch a step.
    steps: As for `fit`.
    held_out: Rows that are not trained on; devices divide their number.
    label: As for `fit`.
    eval_every: Steps between two AUCs.
    interrupt: As for `fit`.
    after_step: As for `fit`.

  Returns:
    What it gave. On Ctrl-C the AUC at the end is missing.
  """
  aucs = {steps.start: trainer.auc(held_out)}

  def evaluate(step: int) -> None:
    if step % eval_every == 0 or step == steps.stop:
      aucs[step] = trainer.auc(held_out)
    after_step(step)

  history = fit(
    trainer,
    batches,
    steps,
    label=label,
    unit="rows",
    interrupt=interrupt,
    after_step=evaluate,
    note=lambda: f", AUC {list(aucs.values())[-1]:.4f}",
  )
  return Run(steps.start, history, aucs)
