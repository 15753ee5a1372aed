"""What `whatif` found, drawn: times above, scaling factors below."""

from collections.abc import Mapping
import importlib.util
import io
from typing import Any

from zenjax._planner._whatif import Sweep

_PLAN, _PMEAN = "#0060a0", "#c04000"
_TURN: dict[str, Any] = dict(color="#808080", linestyle="--", linewidth=1)


def require() -> None:
  """Raises `ImportError` where nothing can be drawn."""
  if importlib.util.find_spec("matplotlib") is None:
    raise ImportError(
      '--plot needs matplotlib, which is not installed: pip install "zenjax'
      '[plan]", or leave it out; the table says the same.'
    )


def drawn(kind: str, sweeps: Mapping[Any, Sweep], title: str) -> bytes:
  """A picture, "png" say.

  One column for each of `sweeps`, which go by `_cli_whatif.Axis`.
  """
  from matplotlib.figure import Figure
  from matplotlib.lines import Line2D

  figure = Figure(figsize=(11, 6.5), layout="constrained")
  grid = figure.subplots(2, len(sweeps), sharex="col", squeeze=False)
  for column, (axis, sweep) in enumerate(sweeps.items()):
    times, factors = grid[0][column], grid[1][column]
    _draw(times, sweep, lambda p: (p.seconds * 1e3, p.dense_seconds * 1e3))
    _draw(factors, sweep, lambda p: (p.scaling, p.dense_scaling))
    compute = [p.compute_seconds * 1e3 for p in sweep.points]
    at = [p.at for p in sweep.points]
    times.plot(at, compute, ":", color="black", label="without any exchange")
    times.set_ylim(0, None)
    factors.set_ylim(0, 1.05)
    factors.set_xscale("log")
    factors.set_xticks(at, [axis.tick(x) for x in at])
    factors.minorticks_off()
    factors.set_xlabel(axis.drawn)
  grid[0][0].set_ylabel("ms a step")
  grid[1][0].set_ylabel("scaling factor")
  figure.suptitle(f"Predicted, varied from {title}")
  handles, _ = grid[0][0].get_legend_handles_labels()
  if any(map(_turns, sweeps.values())):
    label = "the better choice changes"
    handles.append(Line2D([], [], label=label, **_TURN))
  figure.legend(
    handles=handles,
    loc="outside lower center",
    ncols=4,
    frameon=False,
  )
  content = io.BytesIO()
  figure.savefig(content, format=kind, dpi=120)
  return content.getvalue()


def _turns(sweep: Sweep) -> list[float]:
  """Those between its points."""
  first, last = sweep.points[0].at, sweep.points[-1].at
  return [turn.at for turn in sweep.turns if first <= turn.at <= last]


def _draw(axes: Any, sweep: Sweep, values: Any) -> None:
  at = [p.at for p in sweep.points]
  planned, dense = zip(*map(values, sweep.points))
  axes.plot(at, planned, "o-", color=_PLAN, label="planned")
  axes.plot(at, dense, "s-", color=_PMEAN, label="plain pmean")
  for x in _turns(sweep):
    axes.axvline(x, **_TURN)
  axes.spines[["top", "right"]].set_visible(False)
