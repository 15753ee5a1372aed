"""A picture of training runs: losses and AUCs, over steps and over time."""

from collections.abc import Mapping

from dlrm_run import Run
import numpy as np


def save(runs: Mapping[str, Run], path: str) -> None:
  """Saves losses and AUCs of some runs.

  Args:
    runs: Label -> run.
    path: Where to; its ending picks the format.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (losses, by_step, by_time) = plt.subplots(
    1, 3, figsize=(13, 4), layout="constrained"
  )
  for number, (label, run) in enumerate(runs.items()):
    # Curves coincide: later lines are thinner, so that all can be seen.
    width = 2 * (len(runs) - number) - 1
    steps = range(run.start + 1, run.done + 1)
    losses.plot(steps, run.history.losses, label=label, linewidth=width)
    by_step.plot(*_points(run), "o-", label=label, linewidth=width)
    by_time.plot(_seconds(run), _points(run)[1], "o-", label=label)
  losses.set(title="Training loss", xlabel="step", ylabel="nats a row")
  by_step.set(title="Held-out rows", xlabel="step", ylabel="AUC")
  by_time.set(
    title="Held-out rows",
    xlabel="seconds in steps after the first",
    ylabel="AUC",
  )
  for axes in (losses, by_step, by_time):
    axes.legend()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _points(run: Run) -> tuple[list[int], list[float]]:
  return list(run.aucs), list(run.aucs.values())


def _seconds(run: Run) -> np.ndarray:
  """Of each AUC, the time in steps before it."""
  seconds = np.array(run.history.seconds)
  seconds[:1] = 0.0  # It compiles.
  passed = np.concatenate([[0.0], np.cumsum(seconds)])
  return passed[np.array(list(run.aucs)) - run.start]
