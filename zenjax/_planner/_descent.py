"""A first answer, quickly: one tensor's strategy after another is bettered.

Unlike Espresso's greedy it takes of all changes the best, until none helps, and
starts from several answers. It is not exact: the search prunes by what it
finds."""

import numpy as np

from zenjax._planner._groups import Edges
from zenjax._planner._groups import NEVER

_STARTS = np.linspace(0.0, 1.0, 17)
_BEST = 3  # Starts from which to go on.


def descend(edges: Edges) -> np.ndarray:
  """`[N]`: which of `edges.names` for each tensor by itself."""
  alone = np.stack([c[:, -1] for c in edges.costs[1:]], axis=1)
  work, link = alone[..., 0] + alone[..., 2], alone[..., 1]
  found = []
  for share in _STARTS:
    # The best where compute and link are worth so much.
    chosen = (share * work + (1 - share) * link).argmin(axis=0)
    found.append((*_changes(edges.ready[1:], alone, chosen), chosen))
  found.sort(key=lambda start: start[0])
  ends = [_descend(edges.ready[1:], alone, *start) for start in found[:_BEST]]
  return min(ends, key=lambda end: end[0])[1]


def _descend(
  ready: np.ndarray,
  alone: np.ndarray,
  seconds: float,
  changed: np.ndarray,
  chosen: np.ndarray,
) -> tuple[float, np.ndarray]:
  """The best change, again and again: the iteration and the choices."""
  while True:
    name, tensor = np.unravel_index(changed.argmin(), changed.shape)
    following = chosen.copy()
    following[tensor] = name
    shorter, changed = _changes(ready, alone, following)
    if not shorter < seconds:
      return seconds, chosen
    seconds, chosen = shorter, following


def _changes(
  ready: np.ndarray, alone: np.ndarray, chosen: np.ndarray
) -> tuple[float, np.ndarray]:
  """The iteration, and what it were with one other choice: `[names, N]`."""
  before, link, after = alone[chosen, np.arange(len(chosen))].T
  compute, busy, work = (x.cumsum() for x in (before, link, after))
  left = work[-1] - work
  link_end = busy + np.maximum.accumulate(ready + compute - (busy - link))
  after_end = work + np.maximum.accumulate(link_end - (work - after))
  local_end = ready[-1] + compute[-1] + work[-1]
  # From each tensor's end on, the longest path that is then on the link, and
  # the longest that is then on compute.
  from_link = _longest_after(busy + left + after) - busy
  leave = ready + compute + link + np.maximum(from_link, left + after)
  from_compute = _longest_after(leave) - compute

  b, l, a = np.moveaxis(alone, -1, 0)
  c = compute - before + b
  l = np.maximum(np.append(0.0, link_end[:-1]), ready + c) + l
  d = np.maximum(np.append(0.0, after_end[:-1]), l) + a
  changed = np.maximum(local_end - before - after + b + a, c + from_compute)
  changed = np.maximum(changed, np.maximum(l + from_link, d + left))
  return max(local_end, after_end[-1]), changed


def _longest_after(x: np.ndarray) -> np.ndarray:
  """The maximum of all that follow."""
  return np.append(np.maximum.accumulate(x[:0:-1])[::-1], -NEVER)
