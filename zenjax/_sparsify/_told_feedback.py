"""What a run with `error_feedback` has shown: lines of a report."""

from typing import Any

import jax
import numpy as np

from zenjax._columns import columns
from zenjax._sparsify import _stats

_HEADINGS = (
  "",
  "wanted",
  "density",
  "threshold",
  "build-up",
  "imbalance",
  "residual",
)

_LEGEND = (
  "of the last step. density: elements that a device selected over those of the"
  " leaf, mean; threshold: mean; build-up:",
  "the union of all selections over the number wanted; imbalance: the largest"
  " selection over the mean; residual: norm of",
  "what waits, all devices; -: not known.",
)


def lines(state: Any) -> list[str]:
  """None where there is no state of `error_feedback`.

  A report may be of one process, and numbers of other processes' devices need
  them all: then it says so.
  """
  nodes = _stats.find_feedback(state)
  if not nodes:
    return []
  steps = max(int(np.asarray(node.step)) for node in nodes)
  if not steps:
    return ["error_feedback: no step was taken yet."]
  leaves = [leaf for node in nodes for leaf in node.leaves.values()]
  counts = [leaf.selected for leaf in leaves if leaf.residual is not None]
  if not counts:
    return ["error_feedback: it selects from no leaf."]
  title = f"error_feedback after {steps} steps on {len(counts[0])} devices"
  if not all(_is_here(count) for count in counts):
    return [
      f"{title} of several processes: zenjax.sparsifier_stats has its numbers,"
      " where all of them call it."
    ]
  known = _stats.of_feedback(state)
  rows = [_HEADINGS, *(_row(name, s) for name, s in known.items())]
  return [title, *columns(rows), *_LEGEND]


def _is_here(x: Any) -> bool:
  return not isinstance(x, jax.Array) or x.is_fully_addressable


def _row(name: str, s: dict[str, float]) -> tuple[str, ...]:
  return (
    name,
    _cell(s["density_wanted"], ".3%"),
    _cell(s["density"], ".3%"),
    _cell(s["threshold"], ".3g"),
    _cell(s["build_up"], ".2f"),
    _cell(s["imbalance"], ".2f"),
    _cell(s["residual_norm"], ".3g"),
  )


def _cell(x: float, form: str) -> str:
  return format(x, form) if np.isfinite(x) else "-"
