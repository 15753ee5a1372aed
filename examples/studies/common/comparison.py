"""The same training with zen_sync and with pmean, side by side."""

from collections.abc import Sequence

import numpy as np

from examples.studies.common.loop import Run


def table(
  zen: Run, pmean: Run, grads: str, measure: str, form: str
) -> list[str]:
  """Says what the two runs cost, and what they learned.

  Args:
    zen: The run with zen_sync.
    pmean: The run with pmean, on the same batches from the same parameters.
    grads: What gradients of tables zen_sync got: "dense" or "rows".
    measure: What was taken on held-out data.
    form: Its format.
  """
  times = zen.step_time, pmean.step_time
  return [
    f"{'':30}{f'zen, {grads}':>12}{'pmean':>12}{'ratio':>8}",
    f"{'step time, median':30}{times[0]:>10.3f} s{times[1]:>10.3f} s"
    f"{times[1] / times[0]:>7.1f}x",
    f"{'steps a second':30}{1 / times[0]:>12.2f}{1 / times[1]:>12.2f}",
    *_received(zen),
    f"{'loss, last step':30}{zen.losses[-1]:>12.6f}{pmean.losses[-1]:>12.6f}",
    f"{f'held-out {measure}':30}{zen.last:>12{form}}{pmean.last:>12{form}}",
  ]


def _received(run: Run) -> Sequence[str]:
  """Says what a device receives in a step by table, the largest first.

  Returns:
    MB of zen_sync, MB of a dense mean and their ratio. Nothing where nothing
    was received, on one device.
  """
  tables = {
    name: np.mean(
      [(s[name]["wire_bytes"], s[name]["dense_bytes"]) for s in run.stats], 0
    )
    for name in run.stats[-1]
  }
  if not tables:
    return []
  lines = ["MB received by a device in a step:"]
  largest_first = sorted(tables.items(), key=lambda item: -item[1][1])
  for name, (wire, dense) in [
    *largest_first,
    ("together", np.sum(list(tables.values()), axis=0)),
  ]:
    ratio = f"{dense / wire:>7.1f}x" if wire else f"{'-':>8}"
    lines.append(f"  {name:28}{wire / 1e6:>12.3f}{dense / 1e6:>12.3f}{ratio}")
  return lines
