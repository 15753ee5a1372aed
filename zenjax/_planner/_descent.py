"""A first answer, quickly: one tensor's strategy after another is bettered.

From Espresso's greedy, by size, and from what is best where compute and link
are worth so much: of all changes the best, until none helps. It is not exact;
the search prunes by what it finds.
"""

from collections.abc import Sequence

import numpy as np

from zenjax._planner._groups import Edges
from zenjax._planner._groups import NEVER
from zenjax._planner._timeline import Tensor

_STARTS = np.linspace(0.0, 1.0, 17)
_BEST = 3  # Starts from which to go on.


def descend(edges: Edges, tensors: Sequence[Tensor]) -> np.ndarray:
  """`[N]`: which of `edges.names` for each tensor by itself."""
  ready = edges.ready[1:]
  alone = _alone(edges)
  work, link = alone[..., 0] + alone[..., 2], alone[..., 1]
  found = []
  for share in _STARTS:
    chosen = (share * work + (1 - share) * link).argmin(axis=0)
    found.append((*_changes(ready, alone, chosen), chosen))
  found.sort(key=lambda start: start[0])
  greedy = by_size(edges, tensors)
  starts = [(*_changes(ready, alone, greedy), greedy), *found[:_BEST]]
  ends = [_descend(ready, alone, *start) for start in starts]
  return min(ends, key=lambda end: end[0])[1]


def by_size(edges: Edges, tensors: Sequence[Tensor]) -> np.ndarray:
  """What `_baselines.espresso` finds, in less time."""
  ready, alone = edges.ready[1:], _alone(edges)
  names = [tensor.options[0].name for tensor in tensors]
  plain = np.array([edges.names.index(name) for name in names])
  sizes = np.array([tensor.bytes for tensor in tensors])
  chosen, removed = plain, np.zeros(len(plain), bool)
  seconds, changed = _changes(ready, alone, chosen)
  removed |= _before_bubble(ready, alone, chosen)
  for j in np.lexsort((-np.arange(len(sizes)), -sizes)):
    if removed[j] or not changed[:, j].min() < seconds:
      continue  # A look that changes nothing leaves all as it was.
    chosen = chosen.copy()
    chosen[j] = changed[:, j].argmin()
    seconds, changed = _changes(ready, alone, chosen)
    removed |= (chosen == plain) & _before_bubble(ready, alone, chosen)
  return chosen


def _alone(edges: Edges) -> np.ndarray:
  """`[names, N, 3]`: of each tensor by itself."""
  return np.stack([c[:, -1] for c in edges.costs[1:]], axis=1)


def _before_bubble(
  ready: np.ndarray, alone: np.ndarray, chosen: np.ndarray
) -> np.ndarray:
  """Which tensors are sent before the link's last gap."""
  before, link, _ = alone[chosen, np.arange(len(chosen))].T
  leave, busy = ready + before.cumsum(), link.cumsum()
  ends = busy + np.maximum.accumulate(leave - (busy - link))
  gaps = (leave[1:] > ends[:-1]).nonzero()[0]
  return np.arange(len(chosen)) <= (gaps[-1] if gaps.size else -1)


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
