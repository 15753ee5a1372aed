"""What all pictures of variants share: colours, axes, one legend."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import matplotlib

from benchmarks.network.cells import Cell
from benchmarks.network.variants import VARIANTS

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib import ticker  # noqa: E402

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
  """Whether lines are dashed and bars hatched."""
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


def axes(
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
