"""Pictures of a run: time against hosts, against density, and speed-up bars."""

from collections.abc import Callable, Hashable, Iterable, Iterator
import pathlib
from typing import Any, TypeVar

import matplotlib
from matplotlib import pyplot
from matplotlib import ticker
import numpy as np

from benchmarks import record
from benchmarks import workloads
from benchmarks.campaigns.network import show
from benchmarks.campaigns.network.cells import Cell
from benchmarks.campaigns.network.cells import Findings
from benchmarks.campaigns.network.variants import VARIANTS

matplotlib.use("Agg")


_K = TypeVar("_K", bound=Hashable)

_PINNED = "-pinned"
# Zen's own forms in blues and greens, what it is compared with in other hues.
_COLORS = {
  "psum": "#222222",
  "ring": "#8a8a8a",
  "all_gather": "#d97b1b",
  "recursive_doubling": "#b3432b",
  "split_all_gather": "#8e5aa8",
  "split_dense_gather": "#c9579c",
  "block_sparse": "#9a7b4f",
  "zen": "#1f5fa8",
  "zen-hash": "#5fa3d9",
  "zen-columns": "#3c8d40",
  "zen-rows": "#17a398",
}
_OTHERS = "#c7b42c"
_MARKERS = "osv^D<>phdP"


def is_pinned(variant: str) -> bool:
  """Returns True if lines are dashed and bars hatched."""
  return variant.endswith(_PINNED)


def marker(variant: str) -> str:
  """The same for a variant and its pinned form."""
  base = variant.removesuffix(_PINNED)
  return _MARKERS[list(_COLORS).index(base)] if base in _COLORS else "*"


def grouped(
  cells: Iterable[Cell], key: Callable[[Cell], _K]
) -> dict[_K, list[Cell]]:
  """The cells of every key, in the order of the first of each."""
  groups: dict[_K, list[Cell]] = {}
  for cell in cells:
    groups.setdefault(key(cell), []).append(cell)
  return groups


def make_axes(
  rows: int, columns: int, *, width: float = 4.2, height: float = 3.4
) -> tuple[Any, Any]:
  """A figure with `[rows, columns]` panels of that many inches."""
  return pyplot.subplots(
    rows,
    columns,
    figsize=(max(6.4, width * columns), height * rows + 1.2),
    squeeze=False,
    layout="constrained",
  )


def log_y(axis: Any) -> None:
  """A logarithmic axis with ticks at 1, 2 and 5."""
  axis.set_yscale("log")
  axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
  plain_ticks(axis.yaxis)


def plain_ticks(axis: Any) -> None:
  """Numbers as they are read, and none between the ticks."""
  axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
  axis.set_minor_locator(ticker.NullLocator())


def color(variant: str) -> str:
  """The same for a variant and its pinned form."""
  return _COLORS.get(variant.removesuffix(_PINNED), _OTHERS)


def legend(figure: Any, axes: Any) -> None:
  """One for all panels, in the order of `VARIANTS`."""
  entries = {}
  for axis in axes.flat:
    for handle, label in zip(*axis.get_legend_handles_labels()):
      entries.setdefault(label, handle)
  order = [v for v in VARIANTS if v in entries]
  order += [label for label in entries if label not in VARIANTS]
  figure.legend(
    [entries[label] for label in order],
    order,
    loc="outside lower center",
    ncols=max(2, int(figure.get_figwidth() // 1.9)),
    fontsize=8,
  )


_SUFFIX = ".png"


def require_suffix(path: pathlib.Path) -> None:
  """Raises ValueError if `save_plots` could not write such files."""
  known = pyplot.figure().canvas.get_supported_filetypes()
  pyplot.close()
  if path.suffix and path.suffix[1:] not in known:
    raise ValueError(
      f"`--plot` must end in one of {', '.join('.' + k for k in known)} or in"
      f" no suffix at all, got {str(path)!r}; name such a file."
    )


def save_plots(path: pathlib.Path, found: Findings) -> Iterator[str]:
  """Draws what there are cells for.

  Args:
    path: Every figure adds a word of its own before the suffix.
    found: What to draw; cells without samples are left out.

  Yields:
    Which file was saved, or why there is none.
  """
  cells = [c for c in found.cells.values() if c.host_times_s]
  for word, draw, needs in (
    ("hosts", _draw_hosts, "several numbers of hosts"),
    ("density", _draw_density, "several workloads of the sweep"),
    ("speed", _draw_speed, f"{show.BASELINE} and another variant"),
  ):
    figure = draw(cells)
    if figure is None:
      yield f"No figure `{word}`: it needs {needs}."
      continue
    suffix = path.suffix or _SUFFIX
    target = path.with_name(f"{path.stem}-{word}{suffix}")
    with record.whole(target) as partial:
      figure.savefig(partial, dpi=110)
    pyplot.close(figure)
    yield f"Saved {target}"


# --- time against hosts -----------------------------------------------------


def _draw_hosts(cells):
  cells = [c for c in cells if c.workload not in workloads.SWEEP]
  panels = grouped(cells, lambda c: (c.workload, c.rate))
  panels = {k: p for k, p in panels.items() if len({c.hosts for c in p}) > 1}
  if not panels:
    return None
  rates = list(dict.fromkeys(rate for _, rate in panels))
  names = list(dict.fromkeys(name for name, _ in panels))
  figure, axes = make_axes(len(rates), len(names))
  for i, rate in enumerate(rates):
    for j, name in enumerate(names):
      axis, members = axes[i, j], panels.get((name, rate), [])
      _lines(axis, members, lambda c: c.hosts)
      axis.set_title(f"{name}, {rate}", fontsize=10)
      axis.set(xlabel="hosts", xscale="log")
      axis.set_xticks(sorted({c.hosts for c in members}))
      plain_ticks(axis.xaxis)
  legend(figure, axes)
  return figure


# --- time against density ---------------------------------------------------


def _draw_density(cells):
  cells = [c for c in cells if c.workload in workloads.SWEEP]
  panels = grouped(cells, lambda c: (c.hosts, c.rate))
  panels = {k: p for k, p in panels.items() if len({c.workload for c in p}) > 1}
  if not panels:
    return None
  hosts = sorted({n for n, _ in panels})
  rates = list(dict.fromkeys(rate for _, rate in panels))
  figure, axes = make_axes(len(rates), len(hosts), width=5.6, height=4.4)
  for i, rate in enumerate(rates):
    for j, n in enumerate(hosts):
      axis, members = axes[i, j], panels.get((n, rate), [])
      _lines(axis, members, show.percent)
      for variant, x, y in show.crossovers(members):
        _mark(axis, variant, x, y)
      axis.set_title(f"{n} hosts, {rate}", fontsize=10)
      axis.set(xlabel="rows that one host touches, %", xscale="log")
      axis.set_xticks(sorted({round(show.percent(c), 2) for c in members}))
      plain_ticks(axis.xaxis)
  legend(figure, axes)
  return figure


def _mark(axis, variant, x, y):
  cross = {"marker": "X", "markersize": 8, "markeredgecolor": "white"}
  axis.plot(x, y, color=color(variant), **cross, zorder=4)
  label = f"as fast as {show.BASELINE} at this density"
  axis.plot([], [], color="black", **cross, linestyle="none", label=label)


# --- speed-up over the plain sum --------------------------------------------


def _draw_speed(cells):
  cells = [c for c in cells if c.workload not in workloads.SWEEP]
  panels = grouped(cells, lambda c: (c.rate, c.hosts))
  panels = {key: _comparable(members) for key, members in panels.items()}
  panels = {key: members for key, members in panels.items() if members}
  if not panels:
    return None
  most = max(map(len, panels.values()))
  bars = max(len(peers) for p in panels.values() for peers in p.values())
  width = max(7.0, 1.5 + most * (0.4 + 0.14 * bars))
  figure, axes = make_axes(len(panels), 1, width=width, height=3.6)
  for axis, ((rate, hosts), compared) in zip(axes.flat, panels.items()):
    _bars(axis, compared)
    axis.set_title(f"{hosts} hosts, {rate}", fontsize=10)
  legend(figure, axes)
  return figure


def _comparable(cells) -> dict[str, show.Peers]:
  """Returns each workload's variants, if the plain sum is among them."""
  by_workload = {
    workload: {c.variant: c for c in members}
    for workload, members in grouped(cells, lambda c: c.workload).items()
  }
  return {
    workload: peers
    for workload, peers in by_workload.items()
    if show.BASELINE in peers and len(peers) > 1
  }


def _bars(axis, compared):
  drawn = set().union(*compared.values()) - {show.BASELINE}
  order = [v for v in VARIANTS if v in drawn]
  width = 0.84 / len(order)
  for place, variant in enumerate(order):
    at = [i for i, peers in enumerate(compared.values()) if variant in peers]
    speeds = [
      show.faster(peers[variant], peers)
      for peers in compared.values()
      if variant in peers
    ]
    axis.bar(
      np.array(at) + (place - (len(order) - 1) / 2) * width,
      # Bars stand on 1, or hang from it where they are slower.
      np.array(speeds) - 1,
      width,
      bottom=1,
      color=color(variant),
      hatch="////" if is_pinned(variant) else None,
      edgecolor="white",
      linewidth=0.3,
      label=variant,
    )
  axis.axhline(1, color="#222222", linewidth=0.8)
  names = [f"{w}\n{_narrow(show.best_peer(p))}" for w, p in compared.items()]
  axis.set_xticks(range(len(compared)), names, fontsize=8)
  log_y(axis)
  axis.set_ylabel(f"times as fast as {show.BASELINE}")
  axis.grid(axis="y", alpha=0.25)


def _narrow(said: str) -> str:
  """Breaks lines after a word or two, for groups that stand close."""
  return said.replace(": ", ":\n").replace(" x ", " x\n")


# --- lines ------------------------------------------------------------------


def _lines(axis, cells, x):
  for variant, members in grouped(cells, lambda c: c.variant).items():
    members = sorted(members, key=x)
    axis.plot(
      [x(c) for c in members],
      [c.median_s * 1e3 for c in members],
      color=color(variant),
      marker=marker(variant),
      markersize=4,
      linewidth=1.2,
      linestyle="--" if is_pinned(variant) else "-",
      label=variant,
    )
  log_y(axis)
  axis.set_ylabel("time of an exchange, ms")
  axis.grid(alpha=0.25)
