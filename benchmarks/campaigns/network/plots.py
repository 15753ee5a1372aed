"""Pictures of a run: time against hosts, against density, and speed-up bars."""

from collections.abc import Iterator
import pathlib
from typing import Any

from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from benchmarks import record
from benchmarks import workloads
from benchmarks.campaigns.network import show
from benchmarks.campaigns.network.cells import Findings
from benchmarks.campaigns.network.cells import grouped
from benchmarks.campaigns.network.variants import VARIANTS

_PINNED = "-pinned"  # Lines are dashed and bars hatched.
# Zen's own forms in blues and greens, what it is compared with in other hues.
_STYLES = {
  "psum": ("#222222", "o"),
  "ring": ("#8a8a8a", "s"),
  "all_gather": ("#d97b1b", "v"),
  "recursive_doubling": ("#b3432b", "^"),
  "split_all_gather": ("#8e5aa8", "D"),
  "split_dense_gather": ("#c9579c", "<"),
  "block_sparse": ("#9a7b4f", ">"),
  "zen": ("#1f5fa8", "p"),
  "zen-hash": ("#5fa3d9", "h"),
  "zen-columns": ("#3c8d40", "d"),
  "zen-rows": ("#17a398", "P"),
}


def _style(variant: str) -> tuple[str, str]:
  """Returns color and marker, the same for a variant and its pinned form."""
  return _STYLES.get(variant.removesuffix(_PINNED), ("#c7b42c", "*"))


def require_suffix(path: pathlib.Path) -> None:
  """Raises ValueError if `save_plots` could not write such files."""
  known = figure_lib.Figure().canvas.get_supported_filetypes()
  if path.suffix and path.suffix[1:] not in known:
    raise ValueError(
      f"`--plot` must end in one of {', '.join('.' + k for k in known)} or in"
      f" no suffix at all, got {str(path)!r}; name such a file."
    )


def save_plots(path: pathlib.Path, found: Findings) -> Iterator[str]:
  """Draws what there are timed cells for; yields what was saved, or why not.

  Every figure adds a word of its own before the suffix of `path`.
  """
  cells = [c for c in found.cells.values() if c.host_times_s]
  plain = [c for c in cells if c.workload not in workloads.SWEEP]
  sweep = [c for c in cells if c.workload in workloads.SWEEP]
  for word, figure, needs in (
    ("hosts", _draw_lines(plain, False), "several numbers of hosts"),
    ("density", _draw_lines(sweep, True), "several workloads of the sweep"),
    ("speed", _draw_speed(plain), f"{show.BASELINE} and another variant"),
  ):
    if figure is None:
      yield f"No figure `{word}`: it needs {needs}."
      continue
    target = path.with_name(f"{path.stem}-{word}{path.suffix or '.png'}")
    with record.whole(target) as partial:
      figure.savefig(partial, dpi=110)
    yield f"Saved {target}"


def _make_axes(rows: int, columns: int, width: float, height: float):
  """A figure with `[rows, columns]` panels of that many inches."""
  size = max(6.4, width * columns), height * rows + 1.2
  figure = figure_lib.Figure(figsize=size, layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False)


def _log_y(axis: Any, label: str) -> None:
  """A logarithmic axis with ticks at 1, 2 and 5."""
  axis.set_yscale("log")
  axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
  _plain_ticks(axis.yaxis)
  axis.set_ylabel(label)


def _plain_ticks(axis: Any) -> None:
  """Numbers as they are read, and none between the ticks."""
  axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
  axis.set_minor_locator(ticker.NullLocator())


def _legend(figure: Any, axes: Any) -> None:
  """One for all panels, in the order of `VARIANTS`."""
  entries = {}
  for axis in axes.flat:
    for handle, label in zip(*axis.get_legend_handles_labels()):
      entries.setdefault(label, handle)
  order = list(VARIANTS)
  rank = lambda label: order.index(label) if label in VARIANTS else len(order)
  labels = sorted(entries, key=rank)
  figure.legend(
    [entries[label] for label in labels],
    labels,
    loc="outside lower center",
    ncols=max(2, int(figure.get_figwidth() // 1.9)),
    fontsize=8,
  )


def _draw_lines(cells, sweep):
  """Draws times against hosts, or of a sweep against density.

  Panels are by rate, and by workload, or by hosts.
  """
  column_of = lambda c: f"{c.hosts} hosts" if sweep else c.workload
  x = show.percent if sweep else lambda c: c.hosts
  panels = grouped(cells, lambda c: (c.rate, column_of(c)))
  panels = {k: p for k, p in panels.items() if len({x(c) for c in p}) > 1}
  if not panels:
    return None
  rates, columns = (list(dict.fromkeys(keys)) for keys in zip(*panels))
  size = (5.6, 4.4) if sweep else (4.2, 3.4)
  figure, axes = _make_axes(len(rates), len(columns), *size)
  for i, rate in enumerate(rates):
    for j, column in enumerate(columns):
      axis, members = axes[i, j], panels.get((rate, column), [])
      for variant, ones in grouped(members, lambda c: c.variant).items():
        ones = sorted(ones, key=x)
        color, marker = _style(variant)
        axis.plot(
          [x(c) for c in ones],
          [c.median_s * 1e3 for c in ones],
          color=color,
          marker=marker,
          markersize=4,
          linewidth=1.2,
          linestyle="--" if variant.endswith(_PINNED) else "-",
          label=variant,
        )
      if sweep:
        _mark(axis, show.crossovers(members))
      _log_y(axis, "time of an exchange, ms")
      axis.grid(alpha=0.25)
      axis.set_title(f"{column}, {rate}", fontsize=10)
      label = "rows that one host touches, %" if sweep else "hosts"
      axis.set(xlabel=label, xscale="log")
      axis.set_xticks(sorted({round(x(c), 2) for c in members}))
      _plain_ticks(axis.xaxis)
  _legend(figure, axes)
  return figure


def _mark(axis, crossovers):
  cross = {"marker": "X", "markersize": 8, "markeredgecolor": "white"}
  label = f"as fast as {show.BASELINE} at this density"
  for variant, x, y in crossovers:
    axis.plot(x, y, color=_style(variant)[0], **cross, zorder=4)
    axis.plot([], [], color="black", **cross, linestyle="none", label=label)


def _draw_speed(cells):
  panels: dict[tuple[str, int], dict[str, show.Peers]] = {}
  by_section = grouped(cells, lambda c: (c.rate, c.hosts, c.workload))
  for (rate, hosts, workload), members in by_section.items():
    peers = {c.variant: c for c in members}
    if show.BASELINE in peers and len(peers) > 1:
      panels.setdefault((rate, hosts), {})[workload] = peers
  if not panels:
    return None
  most = max(map(len, panels.values()))
  bars = max(len(peers) for p in panels.values() for peers in p.values())
  width = max(7.0, 1.5 + most * (0.4 + 0.14 * bars))
  figure, axes = _make_axes(len(panels), 1, width, 3.6)
  for axis, ((rate, hosts), compared) in zip(axes.flat, panels.items()):
    _bars(axis, compared)
    axis.set_title(f"{hosts} hosts, {rate}", fontsize=10)
  _legend(figure, axes)
  return figure


def _bars(axis, compared):
  every = set().union(*compared.values()) - {show.BASELINE}
  order = [v for v in VARIANTS if v in every]
  width = 0.84 / len(order)
  for place, variant in enumerate(order):
    drawn = enumerate(compared.values())
    drawn = [(i, show.faster(p[variant], p)) for i, p in drawn if variant in p]
    places, speeds = np.array(drawn).T
    axis.bar(
      places + (place - (len(order) - 1) / 2) * width,
      # Bars stand on 1, or hang from it where they are slower.
      speeds - 1,
      width,
      bottom=1,
      color=_style(variant)[0],
      hatch="////" if variant.endswith(_PINNED) else None,
      edgecolor="white",
      linewidth=0.3,
      label=variant,
    )
  axis.axhline(1, color="#222222", linewidth=0.8)
  # Lines break after a word or two: groups stand close.
  said = [show.best_peer(peers) for peers in compared.values()]
  said = [s.replace(": ", ":\n").replace(" x ", " x\n") for s in said]
  names = [f"{name}\n{s}" for name, s in zip(compared, said)]
  axis.set_xticks(range(len(compared)), names, fontsize=8)
  _log_y(axis, f"times as fast as {show.BASELINE}")
  axis.grid(axis="y", alpha=0.25)
