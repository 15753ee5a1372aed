"""A picture of training runs: losses, step times and densities."""

from collections.abc import Mapping

from train_loop import History


def save(runs: Mapping[str, History], path: str) -> None:
  """Saves losses, step times and densities over the steps of some runs.

  Args:
    runs: Label -> history.
    path: Where to; its ending picks the format.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (losses, times, density) = plt.subplots(
    1, 3, figsize=(13, 4), layout="constrained"
  )
  for number, (label, history) in enumerate(runs.items()):
    # Losses coincide: later lines are thinner, so that all can be seen.
    width = 2 * (len(runs) - number) - 1
    losses.plot(history.losses, label=label, linewidth=width)
    # The first step is left out: it compiles.
    times.plot(range(1, len(history.seconds)), history.seconds[1:], label=label)
    plot_density(density, history)
  losses.set(title="Training loss", ylabel="nats a word")
  times.set(title="Step time", ylabel="seconds", ylim=(0, None))
  density.set(title="What is sent of the gradients", ylabel="%", ylim=(0, None))
  for axes in (losses, times, density):
    axes.set_xlabel("step")
    if axes.get_legend_handles_labels()[0]:
      axes.legend()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def plot_density(axes, history: History) -> None:
  """Draws what is sent over steps, by leaf or of a sparsifier."""
  for name, last in history.stats[-1].items():
    if not 0 < last["density"] < 1:
      continue
    got = "got" if "density_wanted" in last else "a device"
    for key, style, what in (
      ("density", "-", got),
      ("union_density", "--", "all devices"),
      ("density_wanted", ":", "wanted"),
    ):
      if key not in last:  # Of a sparsifier, and of zen_sync.
        continue
      values = [100 * step[name][key] for step in history.stats]
      axes.plot(values, style, label=f"{name}, {what}")
