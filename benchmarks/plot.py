"""A picture of a run: medians as bars, every sample as a dot."""

from collections.abc import Sequence
import itertools
import pathlib

from matplotlib import figure as figure_lib
import numpy as np

from benchmarks.harness import Result


def save_plot(path: pathlib.Path, results: Sequence[Result]) -> None:
  """Draws one panel a group; the kind of file follows the suffix."""
  timed = [result for result in results if result.times_s]
  groups = [list(m) for _, m in itertools.groupby(timed, lambda r: r.group)]
  columns = max(1, min(3, len(groups)))
  rows = max(1, -(-len(groups) // columns))
  size = 5 * columns, 3.2 * rows
  figure = figure_lib.Figure(figsize=size, layout="tight")
  axes = figure.subplots(rows, columns, squeeze=False)
  for axis in axes.flat[len(groups) :]:
    axis.set_axis_off()
  for axis, members in zip(axes.flat, groups):
    places = np.arange(len(members))[::-1]
    medians = [result.median_s * 1e3 for result in members]
    axis.barh(places, medians, color="#9db8d9")
    for place, result in zip(places, members):
      samples = np.array(result.times_s) * 1e3
      at = np.full(len(samples), place)
      axis.plot(samples, at, ".", markersize=3, color="#1f3b63")
    axis.set_yticks(places, [result.name for result in members])
    axis.set_xlabel("time of a call, ms")
    axis.set_title(members[0].group)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
