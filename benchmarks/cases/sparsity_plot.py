"""A picture of a table's sparsity: overlap, densification, skew, imbalance."""

from collections.abc import Sequence
import pathlib

from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from benchmarks.cases import row_sets

_BLUE, _GREY = "#1f5fa8", "#8a8a8a"
_STYLES = {
  row_sets.CONTIGUOUS: "#b3432b",
  row_sets.INDEPENDENT: _GREY,
  row_sets.ROTATION: _BLUE,
  row_sets.COLUMNS: "#3c8d40",
}


def save_plot(path: pathlib.Path, found: Sequence[row_sets.Sparsity]) -> None:
  """Draws four panels a table; the kind of file follows the suffix."""
  shape = (2, 2) if len(found) == 1 else (len(found), 4)
  size = 4.8 * shape[1], 3.9 * shape[0]
  figure = figure_lib.Figure(figsize=size, layout="constrained")
  axes = figure.subplots(*shape, squeeze=False)
  for row, sparsity in zip(axes.reshape(-1, 4), found):
    for axis, draw in zip(row, (_overlap, _densification, _skew, _imbalance)):
      draw(axis, sparsity)
      axis.grid(alpha=0.25)
      if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, framealpha=0.9)
    row[0].set_title(
      f"{sparsity.name}\n{sparsity.rows:,} x {sparsity.width},"
      f" d = {100 * sparsity.density.mean:.2f} %",
      loc="left",
      fontsize=10,
    )
  figure.savefig(path, dpi=110)


def _overlap(axis, sparsity):
  edges = np.linspace(0, 100, row_sets.BINS + 1)
  for label, overlap, color, filled in (
    ("devices of a step", sparsity.overlap_devices, _BLUE, True),
    ("consecutive steps", sparsity.overlap_steps, "#d97b1b", False),
  ):
    if overlap:
      axis.stairs(
        100 * np.array(overlap.histogram) / overlap.count,
        edges,
        fill=filled,
        alpha=0.6 if filled else 1.0,
        linewidth=1.5,
        color=color,
        label=f"{label}, {overlap.count} pairs",
      )
  words = "overlap of two sets of rows, % of the smaller"
  axis.set(xlabel=words, ylabel="pairs, %", xlim=(0, 100))


def _densification(axis, sparsity):
  n = [scale.devices for scale in sparsity.scales]
  ratios = [scale.densification for scale in sparsity.scales]
  axis.plot(n, ratios, "o-", color=_BLUE, label="union / one device")
  axis.plot(n, n, ":", color=_GREY, label="no overlap at all")
  pooled = [i for i, scale in enumerate(sparsity.scales) if scale.pooled]
  if pooled:
    hollow = {"color": "white", "markeredgecolor": _BLUE, "zorder": 3}
    places = np.array([n, ratios])[:, pooled]
    axis.plot(*places, "o", **hollow, label="pooled from several steps")
  _logarithmic(axis, n, "devices", "densification, dn / d")


def _skew(axis, sparsity):
  parts = [skew.parts for skew in sparsity.skew]
  ratios = [skew.ratio for skew in sparsity.skew]
  label = "density of the densest part / d"
  axis.plot(parts, ratios, "o-", color=_BLUE, label=label)
  axis.plot(parts, parts, ":", color=_GREY, label="all in one part")
  _logarithmic(axis, parts, "equal parts of the table", "skew")


def _imbalance(axis, sparsity):
  n = [scale.devices for scale in sparsity.scales]
  for name, color in _STYLES.items():
    balance = [scale.balance[name] for scale in sparsity.scales]
    axis.plot(n, [b.push for b in balance], "o-", color=color, label=name)
    axis.plot(n, [b.pull for b in balance], "s--", color=color, markersize=4)
  # One entry for all colours says which line is which.
  axis.plot([], [], "ko-", label="push")
  axis.plot([], [], "ks--", markersize=4, label="pull")
  _logarithmic(axis, n, "devices", "fullest buffer / mean")


def _logarithmic(axis, places, xlabel, ylabel):
  """Has both axes go by powers of two, with a tick at each place."""
  axis.set_xscale("log", base=2)
  axis.set_xticks(places, map(str, places))
  axis.minorticks_off()
  axis.set_yscale("log", base=2)
  axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
  axis.set(xlabel=xlabel, ylabel=ylabel)
