"""A picture of one training run: losses, accuracy, and what is sent."""

from lm_plot import plot_density
from measured_run import Run


def save(run: Run, label: str, path: str) -> None:
  """Saves losses, accuracies and densities over the steps of a run.

  Args:
    run: The run.
    label: Its name.
    path: Where to; its ending picks the format.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (losses, accuracy, density) = plt.subplots(
    1, 3, figsize=(13, 4), layout="constrained"
  )
  steps = range(run.start + 1, run.done + 1)
  losses.plot(steps, run.history.losses, label=label)
  percent = [100 * x for x in run.measured.values()]
  accuracy.plot(list(run.measured), percent, "o-", label=label)
  plot_density(density, run.history)
  losses.set(title="Training loss", ylabel="nats an image")
  accuracy.set(title="Accuracy on held-out images", ylabel="%")
  density.set(title="What is sent of the gradients", ylabel="%", ylim=(0, None))
  for axes in (losses, accuracy, density):
    axes.set_xlabel("step")
    if axes.get_legend_handles_labels()[0]:
      axes.legend()
  figure.savefig(path, dpi=120)
  plt.close(figure)
