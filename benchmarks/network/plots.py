"""Pictures of a run: time against hosts, against density, and speed-up bars."""

from collections.abc import Iterator
import pathlib

import numpy as np

from benchmarks import record
from benchmarks import workloads
from benchmarks.network import crossing
from benchmarks.network import show
from benchmarks.network import style
from benchmarks.network.cells import Findings
from benchmarks.network.variants import VARIANTS

_SUFFIX = ".png"


def require_suffix(path: pathlib.Path) -> None:
  """Raises ValueError if `save_plots` could not write such files."""
  known = style.pyplot.figure().canvas.get_supported_filetypes()
  style.pyplot.close()
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
    style.pyplot.close(figure)
    yield f"Saved {target}"


# --- time against hosts -----------------------------------------------------


def _draw_hosts(cells):
  cells = [c for c in cells if c.workload not in workloads.SWEEP]
  panels = style.grouped(cells, lambda c: (c.workload, c.rate))
  panels = {k: p for k, p in panels.items() if len({c.hosts for c in p}) > 1}
  if not panels:
    return None
  rates = list(dict.fromkeys(rate for _, rate in panels))
  names = list(dict.fromkeys(name for name, _ in panels))
  figure, axes = style.axes(len(rates), len(names))
  for i, rate in enumerate(rates):
    for j, name in enumerate(names):
      axis, members = axes[i, j], panels.get((name, rate), [])
      _lines(axis, members, lambda c: c.hosts)
      axis.set_title(f"{name}, {rate}", fontsize=10)
      axis.set(xlabel="hosts", xscale="log")
      axis.set_xticks(sorted({c.hosts for c in members}))
      style.plain_ticks(axis.xaxis)
  style.legend(figure, axes)
  return figure


# --- time against density ---------------------------------------------------


def _draw_density(cells):
  cells = [c for c in cells if c.workload in workloads.SWEEP]
  panels = style.grouped(cells, lambda c: (c.hosts, c.rate))
  panels = {k: p for k, p in panels.items() if len({c.workload for c in p}) > 1}
  if not panels:
    return None
  hosts = sorted({n for n, _ in panels})
  rates = list(dict.fromkeys(rate for _, rate in panels))
  figure, axes = style.axes(len(rates), len(hosts), width=5.6, height=4.4)
  for i, rate in enumerate(rates):
    for j, n in enumerate(hosts):
      axis, members = axes[i, j], panels.get((n, rate), [])
      _lines(axis, members, crossing.percent)
      for variant, x, y in crossing.crossovers(members):
        _mark(axis, variant, x, y)
      axis.set_title(f"{n} hosts, {rate}", fontsize=10)
      axis.set(xlabel="rows that one host touches, %", xscale="log")
      axis.set_xticks(sorted({round(crossing.percent(c), 2) for c in members}))
      style.plain_ticks(axis.xaxis)
  style.legend(figure, axes)
  return figure


def _mark(axis, variant, x, y):
  cross = {"marker": "X", "markersize": 8, "markeredgecolor": "white"}
  axis.plot(x, y, color=style.color(variant), **cross, zorder=4)
  label = f"as fast as {show.BASELINE} at this density"
  axis.plot([], [], color="black", **cross, linestyle="none", label=label)


# --- speed-up over the plain sum --------------------------------------------


def _draw_speed(cells):
  cells = [c for c in cells if c.workload not in workloads.SWEEP]
  panels = style.grouped(cells, lambda c: (c.rate, c.hosts))
  panels = {key: _comparable(members) for key, members in panels.items()}
  panels = {key: members for key, members in panels.items() if members}
  if not panels:
    return None
  most = max(map(len, panels.values()))
  bars = max(len(peers) for p in panels.values() for peers in p.values())
  width = max(7.0, 1.5 + most * (0.4 + 0.14 * bars))
  figure, axes = style.axes(len(panels), 1, width=width, height=3.6)
  for axis, ((rate, hosts), compared) in zip(axes.flat, panels.items()):
    _bars(axis, compared)
    axis.set_title(f"{hosts} hosts, {rate}", fontsize=10)
  style.legend(figure, axes)
  return figure


def _comparable(cells) -> dict[str, show.Peers]:
  """Of each workload its variants, if the plain sum is among them."""
  by_workload = {
    workload: {c.variant: c for c in members}
    for workload, members in style.grouped(cells, lambda c: c.workload).items()
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
      color=style.color(variant),
      hatch="////" if style.is_pinned(variant) else None,
      edgecolor="white",
      linewidth=0.3,
      label=variant,
    )
  axis.axhline(1, color="#222222", linewidth=0.8)
  names = [f"{w}\n{_narrow(show.best_peer(p))}" for w, p in compared.items()]
  axis.set_xticks(range(len(compared)), names, fontsize=8)
  style.log_y(axis)
  axis.set_ylabel(f"times as fast as {show.BASELINE}")
  axis.grid(axis="y", alpha=0.25)


def _narrow(said: str) -> str:
  """Of a word or two a line, for groups that stand close."""
  return said.replace(": ", ":\n").replace(" x ", " x\n")


# --- lines ------------------------------------------------------------------


def _lines(axis, cells, x):
  for variant, members in style.grouped(cells, lambda c: c.variant).items():
    members = sorted(members, key=x)
    axis.plot(
      [x(c) for c in members],
      [c.median_s * 1e3 for c in members],
      color=style.color(variant),
      marker=style.marker(variant),
      markersize=4,
      linewidth=1.2,
      linestyle="--" if style.is_pinned(variant) else "-",
      label=variant,
    )
  style.log_y(axis)
  axis.set_ylabel("time of an exchange, ms")
  axis.grid(alpha=0.25)
