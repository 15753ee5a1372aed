"""Greedy search for the exchanges of a step that overlaps.

The problem is NP-hard: where each tensor is either work or link, behind one
long exchange and ahead of a last gradient that takes as long, it is to split
numbers evenly. So this is a local search, and not exact. It starts with every
tensor in an exchange of its own, by the strategy that is best at some exchange
rate of compute for link, and again with runs of one strategy joined. Then it
makes the one change that shortens the step most, until none does: another
strategy for one exchange, or else two neighbours merged into one, or else more.
The times of all changes of a kind are computed at once, in linear time.
"""

import numpy as np

from zenjax._src.planner.timeline import Assignment
from zenjax._src.planner.timeline import GroupCosts
from zenjax._src.planner.timeline import NEVER

# Weights of compute, the rest being the link's, by which starts are drawn.
_WEIGHTS = np.linspace(0.0, 1.0, 17)
# Starts that are followed: those with the shortest steps.
_STARTS = 6
# Neighbours that one change may merge, at most.
_WIDEST = 4
# Times that differ by less are equal, as sums in another order are.
_ROUNDING = 1e-12


def search(groups: GroupCosts) -> Assignment:
  """Returns exchanges that no single change makes shorter."""
  n = len(groups.tensors)
  if not n:
    return ()
  # ready[j]: when the backward pass alone would complete tensor j.
  ready = np.cumsum([tensor.backward_s for tensor in groups.tensors])
  ends = [
    _descend(groups, ready, *start)
    for chosen in _starts(groups, ready)
    for start in (
      (np.arange(1, n + 1), chosen),
      _joined_runs(groups, chosen),
    )
  ]
  _, stops, chosen = min(ends, key=lambda end: end[0])
  firsts = [0, *stops[:-1].tolist()]
  found = []
  for first, stop, name in zip(firsts, stops.tolist(), chosen):
    exchange = groups.exchange(first, stop, groups.names[name])
    assert exchange is not None, (first, stop, groups.names[name])
    found.append(exchange)
  return tuple(found)


def _starts(groups: GroupCosts, ready: np.ndarray) -> list[np.ndarray]:
  """Returns strategies `[N]` of tensors by themselves, the shortest first."""
  tensors = np.arange(len(groups.tensors))
  alone = groups.seconds(tensors, tensors + 1)
  work, link = alone[..., 0] + alone[..., 2], alone[..., 1]
  drawn = [(w * work + (1 - w) * link).argmin(axis=0) for w in _WEIGHTS]
  different = list({chosen.tobytes(): chosen for chosen in drawn}.values())
  seconds = lambda chosen: _Step(ready, alone[chosen, tensors]).seconds
  return sorted(different, key=seconds)[:_STARTS]


def _joined_runs(
  groups: GroupCosts, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Joins neighbours of one strategy that can share an exchange."""
  stops: list[int] = []
  for j, name in enumerate(chosen.tolist()):
    first = stops[-2] if len(stops) > 1 else 0
    same = stops and chosen[j - 1] == name
    if same and groups.exchange(first, j + 1, groups.names[name]):
      stops[-1] = j + 1
    else:
      stops.append(j + 1)
  at = np.array(stops)
  return at, chosen[at - 1]


def _descend(
  groups: GroupCosts, ready: np.ndarray, stops: np.ndarray, chosen: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
  """Makes the best change until none helps.

  Args:
    groups: Costs.
    ready: `[N]`.
    stops: `[K]`, the tensor after the last of each exchange.
    chosen: `[K]`, the strategy of each.

  Returns:
    The iteration time, and `stops` and `chosen` with which it is reached.
  """
  while True:
    firsts = np.append(0, stops[:-1])
    costs = groups.seconds(firsts, stops)
    step = _Step(ready[stops - 1], costs[chosen, np.arange(len(stops))])
    for width in range(1, min(_WIDEST, len(stops)) + 1):
      last = stops[width - 1 :]
      seconds = step.with_one(groups.seconds(firsts[: len(last)], last))
      if seconds.min() < step.seconds * (1 - _ROUNDING):
        break
    else:
      return step.seconds, stops, chosen
    name, k = np.unravel_index(seconds.argmin(), seconds.shape)
    gone = np.arange(k, k + width - 1)
    stops, chosen = np.delete(stops, gone), np.delete(chosen, gone)
    chosen[k] = name


class _Step:
  """The longest paths of a step, up to each exchange and from each on.

  A step ends with the longest of its paths: compute until the end and all work;
  or compute until some exchange leaves, the link from there to some exchange,
  and the work after it from there to the end.

  Attributes:
    seconds: The iteration.
  """

  def __init__(self, ready: np.ndarray, parts: np.ndarray):
    """Takes `ready: [K]` of the exchanges, and their times `parts: [K, 3]`."""
    before, link, after = parts.T
    since = lambda x: np.append(0.0, x.cumsum())
    compute, busy, work = since(before), since(link), since(after)
    leave = ready + compute[1:]
    # `[K + 1]` each: ends before exchange k, and paths from exchange k on.
    link_end = busy[1:] + np.maximum.accumulate(leave - busy[:-1])
    after_end = work[1:] + np.maximum.accumulate(link_end - work[:-1])
    left = work[-1] - work
    from_link = _longest_from(busy[1:] + left[:-1]) - busy
    leave += link + np.maximum(from_link[1:], left[:-1])
    self._ready, self._compute, self._work = ready, compute, work
    self._link_end = np.append(0.0, link_end)
    self._after_end = np.append(0.0, after_end)
    self._from_compute = _longest_from(leave) - compute
    self._from_link, self._left = from_link, left
    self._local_end = ready[-1] + compute[-1] + work[-1]
    self.seconds = float(max(self._local_end, after_end[-1]))

  def with_one(self, costs: np.ndarray) -> np.ndarray:
    """Returns the iteration with one exchange in place of `W` neighbours.

    Args:
      costs: `[S, K + 1 - W, 3]`, times of that exchange.

    Returns:
      `[S, K + 1 - W]`.
    """
    width = len(self._ready) + 1 - costs.shape[1]
    to, rest = slice(0, -width), slice(width, None)
    before, link, after = np.moveaxis(costs, -1, 0)
    compute = self._compute[to] + before
    leave = self._ready[width - 1 :] + compute
    link_end = np.maximum(self._link_end[to], leave) + link
    after_end = np.maximum(self._after_end[to], link_end) + after
    saved = self._compute[rest] - self._compute[to]
    saved += self._work[rest] - self._work[to]
    paths = (
      self._local_end - saved + before + after,
      compute + self._from_compute[rest],
      link_end + self._from_link[rest],
      after_end + self._left[rest],
    )
    return np.maximum.reduce(paths)


def _longest_from(x: np.ndarray) -> np.ndarray:
  """Returns the maximum from each element on, and of none after the last."""
  return np.append(np.maximum.accumulate(x[::-1])[::-1], -NEVER)
