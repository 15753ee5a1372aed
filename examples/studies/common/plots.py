"""Pictures of training runs, a panel for each thing that is looked at."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from examples.studies.common.loop import Run

Panel = Callable[[Any, str, Run, float], None]
"""Draws a run on axes, under a label and with a width of the line."""


def save(runs: Mapping[str, Run], panels: Sequence[Panel], path: str) -> None:
  """Saves a picture; the ending of `path` picks the format."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, row = plt.subplots(
    1, len(panels), figsize=(13, 4), layout="constrained"
  )
  for axes, panel in zip(row, panels):
    axes.set_xlabel("step")
    for number, (label, run) in enumerate(runs.items()):
      # Curves coincide: later lines are thinner, so that all can be seen.
      panel(axes, label, run, 2 * (len(runs) - number) - 1)
    if axes.get_legend_handles_labels()[0]:
      axes.legend()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def losses(unit: str) -> Panel:
  """Makes a panel of losses, in nats a `unit`."""

  def draw(axes, label: str, run: Run, width: float) -> None:
    steps = range(run.start + 1, run.done + 1)
    axes.plot(steps, run.losses, label=label, linewidth=width)
    axes.set(title="Training loss", ylabel=f"nats a {unit}")

  return draw


def step_times(axes, label: str, run: Run, width: float) -> None:
  """Draws seconds; the first step is left out: it compiles."""
  del width
  steps = range(run.start + 2, run.done + 1)
  axes.plot(steps, run.seconds[1:], label=label)
  axes.set(title="Step time", ylabel="seconds", ylim=(0, None))


def measures(title: str, ylabel: str, *, factor=1, by_time=False) -> Panel:
  """Makes a panel of what was taken on held-out data, over steps or seconds."""

  def draw(axes, label: str, run: Run, width: float) -> None:
    x = np.array(list(run.measured))
    y = [factor * value for value in run.measured.values()]
    if by_time:
      seconds = np.array(run.seconds)
      seconds[:1] = 0.0  # It compiles.
      x = np.concatenate([[0.0], np.cumsum(seconds)])[x - run.start]
      axes.set_xlabel("seconds in steps after the first")
    axes.plot(x, y, "o-", label=label, linewidth=None if by_time else width)
    axes.set(title=title, ylabel=ylabel)

  return draw


def densities(axes, label: str, run: Run, width: float) -> None:
  """Draws what is sent of the gradients, by leaf or by a sparsifier."""
  del label, width
  axes.set(title="What is sent of the gradients", ylabel="%", ylim=(0, None))
  for name, last in run.stats[-1].items():
    if not 0 < last["density"] < 1:
      continue
    got = "got" if "density_wanted" in last else "a device"
    for key, style, what in (
      ("density", "-", got),
      ("union_density", "--", "all devices"),
      ("density_wanted", ":", "wanted"),
    ):
      if key in last:  # One is zen_sync's alone, one a sparsifier's.
        values = [100 * step[name][key] for step in run.stats]
        steps = range(run.start + 1, run.done + 1)
        axes.plot(steps, values, style, label=f"{name}, {what}")
