"""What a run with sparsifiers has shown: numbers, and lines of a report."""

from typing import Any

import numpy as np

from zenjax import _state
from zenjax._sparsify._state import SparsifierState

# Of recent steps whose fullest selection a capacity should hold: what does not
# fit costs a whole round more.
_PERCENTILE = 90

_HEADINGS = (
  "",
  "wanted",
  "density",
  "threshold",
  "build-up",
  "imbalance",
  "residual",
  "rounds",
  "MB sent",
  "MB dense",
  "bytes",
  "pin",
)

LEGEND = (
  "of the last step. density: elements that all devices selected over those of"
  " the model; build-up: these over",
  "the number wanted; imbalance: the largest selection over the mean; residual:"
  " norm of what waits, all devices;",
  "rounds: exchanges it took; MB: received by a device; bytes: beside a dense"
  " all-reduce; pin: `capacity=` that",
  "held the largest selection of 90 % of the last 64 steps.",
)


def find(state: Any) -> list[SparsifierState]:
  """Every `SparsifierState` inside an optimizer state, in order."""
  return _state.nodes(state, SparsifierState)


def numbers(state: Any) -> dict[str, dict[str, float]]:
  """By name, of sparsifiers that have taken a step."""
  found: dict[str, dict[str, float]] = {}
  for i, node in enumerate(find(state)):
    steps = int(np.asarray(node.step))
    if steps:
      name = f"sparsifier {i + 1}" if i else "sparsifier"
      found[name] = {
        "devices": float(np.shape(node.parts)[-1]),
        "steps": float(steps),
        "capacity": _capacity(node, steps),
        **{
          field: float(np.asarray(value))
          for field, value in node.stats._asdict().items()
        },
      }
  return found


def _capacity(node: SparsifierState, steps: int) -> float:
  recent = np.asarray(node.fullest)
  recent = recent[: min(steps, len(recent))]
  needed = np.percentile(recent, _PERCENTILE, method="higher")
  return float(max(1, needed))


def rows(known: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
  """Cells of a table, headings first."""
  return [_HEADINGS, *(_row(name, s) for name, s in known.items())]


def _row(name: str, s: dict[str, float]) -> tuple[str, ...]:
  gain = s["dense_bytes"] / s["wire_bytes"] if s["wire_bytes"] else 1.0
  less = f"{gain:.1f}x fewer" if gain > 1 else f"{1 / gain:.2f}x as many"
  return (
    name,
    f"{s['density_wanted']:.3%}",
    f"{s['density']:.3%}",
    f"{s['threshold']:.3g}",
    f"{s['build_up']:.2f}",
    f"{s['imbalance']:.2f}",
    f"{s['residual_norm']:.3g}",
    f"{s['rounds']:.0f}",
    f"{s['wire_bytes'] / 1e6:.3f}",
    f"{s['dense_bytes'] / 1e6:.3f}",
    less,
    f"{s['capacity']:.0f}",
  )
