"""A picture of a table's sparsity: overlap, densification, skew, imbalance."""

from collections.abc import Sequence
import pathlib

import matplotlib
from matplotlib import pyplot
from matplotlib import ticker
import numpy as np

from benchmarks.cases import row_sets
from benchmarks.cases.row_sets import BINS
from benchmarks.cases.row_sets import Sparsity

matplotlib.use("Agg")


_STYLES = {
  row_sets.CONTIGUOUS: "#b3432b",
  row_sets.INDEPENDENT: "#8a8a8a",
  row_sets.ROTATION: "#1f5fa8",
  row_sets.COLUMNS: "#3c8d40",
}


def save_plot(path: pathlib.Path, found: Sequence[Sparsity]) -> None:
  """Draws four panels a table; the kind of file follows the suffix."""
  shape = (2, 2) if len(found) == 1 else (len(found), 4)
  figure, axes = pyplot.subplots(
    *shape,
    figsize=(4.8 * shape[1], 3.9 * shape[0]),
    squeeze=False,
    layout="constrained",
  )
  for row, sparsity in zip(axes.reshape(-1, 4), found):
    for axis, draw in zip(row, (_overlap, _densification, _skew, _imbalance)):
      draw(axis, sparsity)
      axis.grid(alpha=0.25)
    row[0].set_title(
      f"{sparsity.name}\n{sparsity.rows:,} x {sparsity.width},"
      f" d = {100 * sparsity.density.mean:.2f} %",
      loc="left",
      fontsize=10,
    )
  figure.savefig(path, dpi=110)
  pyplot.close(figure)


def _overlap(axis, sparsity):
  edges = np.linspace(0, 100, BINS + 1)
  for label, overlap, color in (
    ("devices of a step", sparsity.overlap_devices, "#1f5fa8"),
    ("consecutive steps", sparsity.overlap_steps, "#d97b1b"),
  ):
    if overlap:
      shares = 100 * np.array(overlap.histogram) / overlap.count
      axis.stairs(
        shares,
        edges,
        fill=overlap is sparsity.overlap_devices,
        alpha=0.6 if overlap is sparsity.overlap_devices else 1.0,
        linewidth=1.5,
        color=color,
        label=f"{label}, {overlap.count} pairs",
      )
  axis.set(
    xlabel="overlap of two sets of rows, % of the smaller",
    ylabel="pairs, %",
    xlim=(0, 100),
  )
  _legend(axis)


def _densification(axis, sparsity):
  n = [scale.devices for scale in sparsity.scales]
  ratios = [scale.densification for scale in sparsity.scales]
  axis.plot(n, ratios, "o-", color="#1f5fa8", label="union / one device")
  axis.plot(n, n, ":", color="#8a8a8a", label="no overlap at all")
  pooled = [i for i, scale in enumerate(sparsity.scales) if scale.pooled]
  if pooled:
    axis.plot(
      [n[i] for i in pooled],
      [ratios[i] for i in pooled],
      linestyle="none",
      marker="o",
      color="white",
      markeredgecolor="#1f5fa8",
      zorder=3,
      label="pooled from several steps",
    )
  _powers_of_two(axis, n)
  axis.set_yscale("log", base=2)
  axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
  axis.set(xlabel="devices", ylabel="densification, dn / d")
  _legend(axis)


def _skew(axis, sparsity):
  parts = [skew.parts for skew in sparsity.skew]
  axis.plot(
    parts,
    [skew.ratio for skew in sparsity.skew],
    marker="o",
    color="#1f5fa8",
    label="density of the densest part / d",
  )
  axis.plot(parts, parts, ":", color="#8a8a8a", label="all in one part")
  _powers_of_two(axis, parts)
  axis.set_yscale("log", base=2)
  axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
  axis.set(xlabel="equal parts of the table", ylabel="skew")
  _legend(axis)


def _imbalance(axis, sparsity):
  n = [scale.devices for scale in sparsity.scales]
  for name, color in _STYLES.items():
    balance = [scale.balance[name] for scale in sparsity.scales]
    axis.plot(n, [b.push for b in balance], "o-", color=color, label=name)
    axis.plot(n, [b.pull for b in balance], "s--", color=color, markersize=4)
  # One entry for all colours says which line is which.
  axis.plot([], [], "ko-", label="push")
  axis.plot([], [], "ks--", markersize=4, label="pull")
  _powers_of_two(axis, n)
  axis.set_yscale("log", base=2)
  axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
  axis.set(xlabel="devices", ylabel="fullest buffer / mean")
  _legend(axis)


def _powers_of_two(axis, places):
  axis.set_xscale("log", base=2)
  axis.set_xticks(places, [str(place) for place in places])
  axis.minorticks_off()


def _legend(axis):
  if axis.get_legend_handles_labels()[0]:
    axis.legend(fontsize=8, framealpha=0.9)
