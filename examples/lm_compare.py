"""The same training with zen_sync and with pmean, side by side."""

import dataclasses

import numpy as np
import received
from train_loop import History


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
  """One run of the comparison.

  Attributes:
    history: losses, times and statistics of its steps.
    perplexity: on held-out text, after the last step.
  """

  history: History
  perplexity: float


def largest_difference(a: History, b: History) -> float:
  """Over all steps, the largest |difference| of two runs' losses."""
  return float(np.max(np.abs(np.subtract(a.losses, b.losses))))


def table(
  *, zen: Outcome, pmean: Outcome, grads: str, reordered: History | None
) -> str:
  """What the two runs cost, and how far what they learned is apart.

  Args:
    zen: The run with zen_sync.
    pmean: The run with pmean, on the same batches from the same parameters.
    grads: What gradients of tables zen_sync got: "dense" or "rows".
    reordered: pmean again, the devices' batches dealt in another order: equal
      but for rounding. Its distance from `pmean` is the yardstick of zen's.
      None where the optimizer did another thing to rows than to tables.
  """
  times = zen.history.step_time, pmean.history.step_time
  rows = [
    f"{'':30}{f'zen, {grads}':>12}{'pmean':>12}{'ratio':>8}",
    f"{'step time, median':30}{times[0]:>10.3f} s{times[1]:>10.3f} s"
    f"{times[1] / times[0]:>7.1f}x",
    f"{'steps a second':30}{1 / times[0]:>12.2f}{1 / times[1]:>12.2f}",
  ]
  rows += received.lines(zen.history)
  rows += [
    f"{'loss, last step':30}{zen.history.losses[-1]:>12.6f}"
    f"{pmean.history.losses[-1]:>12.6f}",
    f"{'held-out perplexity':30}{zen.perplexity:>12.3f}"
    f"{pmean.perplexity:>12.3f}",
    "",
    _verdict(zen.history, pmean.history, reordered)
    if reordered
    else _lazy_verdict(zen, pmean),
  ]
  return "\n".join(rows)


def _verdict(zen: History, dense: History, reordered: History) -> str:
  distance = largest_difference(zen, dense)
  yardstick = largest_difference(reordered, dense)
  word = "no more" if distance <= yardstick else "MORE"
  return (
    "Largest difference of losses over"
    f" {len(dense.losses)} steps\n"
    f"  zen_sync and pmean                        {distance:.2e}\n"
    f"  pmean and pmean, summed in another order  {yardstick:.2e}\n"
    f"zen_sync changes the losses {word} than another order of summation does."
  )


def _lazy_verdict(zen: Outcome, pmean: Outcome) -> str:
  return (
    "With row gradients the optimizer moves only rows that a step touches.\n"
    f"After {len(zen.history.losses)} steps the held-out perplexity differs by"
    f" {abs(zen.perplexity / pmean.perplexity - 1):.3%} from that with pmean."
  )
