"""The same training with zen_sync and with pmean, side by side."""

from dlrm_run import Run
import received


def table(*, zen: Run, pmean: Run, grads: str) -> str:
  """What the two runs cost, and what they learned.

  Args:
    zen: The run with zen_sync.
    pmean: The run with pmean, on the same batches from the same parameters.
    grads: What gradients of tables zen_sync got: "dense" or "rows".
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
    f"{'held-out AUC':30}{zen.auc:>12.4f}{pmean.auc:>12.4f}",
    "",
    f"After {zen.done} steps the AUC with zen_sync differs by"
    f" {abs(zen.auc / pmean.auc - 1):.3%} from that with pmean.",
  ]
  return "\n".join(rows)
