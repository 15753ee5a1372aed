"""The best strategy of every tensor where nothing runs beside anything else.

Order does not matter then: all tensors that go one way share its exchange, and
what an exchange pays once is paid once for each way that any tensor takes. So
a way is to be opened, at that price, or not, and every tensor takes the best
that is open. No set of so many ways costs less than the cheapest so many and
every tensor's best: sets are tried by size until that bound is too high.
"""

from collections.abc import Iterator, Sequence
import itertools
import math

import numpy as np

from zenjax import _link
from zenjax._planner import _groups
from zenjax._planner._strategies import PMEAN
from zenjax._planner._strategies import raised_by
from zenjax._planner._strategies import Space
from zenjax._planner._timeline import each_by
from zenjax._planner._timeline import Option

# The exchanges of a step: a strategy's name, and the tensors that share it.
Named = Sequence[tuple[str, tuple[int, ...]]]


def shared(space: Space) -> Named:
  """The exchanges with the least seconds together: exact."""
  names, own, once = _tables(space)
  forced = [o for o in range(len(names)) if _is_forced(own, o)]
  rest = [o for o in _undominated(own, once) if o not in forced]
  best, best_s = forced, _seconds(own, once, forced)
  floor = own.min(axis=0).sum() + once[forced].sum()
  cheapest = np.sort(once[rest])
  for size in range(1, len(rest) + 1):
    if floor + cheapest[:size].sum() >= best_s:
      break
    for more in itertools.combinations(rest, size):
      seconds = _seconds(own, once, [*forced, *more])
      if seconds < best_s:
        best, best_s = [*forced, *more], seconds
  best = sorted(best)
  taken = np.array(best, int)[own[best].argmin(axis=0)]
  members = {o: np.flatnonzero(taken == o).tolist() for o in best}
  return [(names[o], tuple(at)) for o, at in members.items() if at]


def _tables(space: Space) -> tuple[list[str], np.ndarray, np.ndarray]:
  """Names, `[names, N]` of a tensor beside others, `[names]` of an exchange."""
  names = list(dict.fromkeys(o.name for t in space.tensors for o in t.options))
  once = np.array([space.once[name] for name in names])
  own = np.full((len(names), len(space.tensors)), _groups.NEVER)
  for i, tensor in enumerate(space.tensors):
    for option in tensor.options:
      o = names.index(option.name)
      own[o, i] = max(option.work_s + option.link_s - once[o], 0.0)
  return names, own, once


def _is_forced(own: np.ndarray, o: int) -> bool:
  """Whether some tensor has no other way."""
  others = np.delete(own, o, axis=0)
  return bool((others >= _groups.NEVER).all(axis=0).any())


def _undominated(own: np.ndarray, once: np.ndarray) -> list[int]:
  """Those that no other is as good as, for every tensor and to open."""
  costs = np.concatenate([own, once[:, None]], axis=1)
  kept: list[int] = []
  for o in np.lexsort((np.arange(len(costs)), costs.sum(axis=1))).tolist():
    if not any((costs[p] <= costs[o]).all() for p in kept):
      kept.append(o)
  return sorted(kept)


def _seconds(own: np.ndarray, once: np.ndarray, ways: Sequence[int]) -> float:
  if not ways:
    return math.inf
  return float(own[ways].min(axis=0).sum() + once[ways].sum())


def together(space: Space, name: str, members: Sequence[int]) -> Option:
  """What these tensors take in one exchange."""
  parts = [each_by([space.tensors[i]], [name])[0].option for i in members]
  return Option(
    name,
    before_s=sum(o.before_s for o in parts),
    link_s=_link_s(space, name, members),
    after_s=sum(o.after_s for o in parts),
    bytes=sum(o.bytes for o in parts),
  )


def _link_s(space: Space, name: str, members: Sequence[int]) -> float:
  """Of collectives that carry what all of them send."""
  found = [space.predictions[i][name] for i in members]
  received: dict[tuple[int, str, str, int], float] = {}
  for prediction in found:
    for k, (axis, op, n, more) in enumerate(prediction.phases):
      at = k, axis, op, n
      received[at] = received.get(at, 0.0) + more
  phases = [(*at[1:], total) for at, total in received.items()]
  seconds = _link.wire_s(phases, space.links) + sum(p.apart_s for p in found)
  return seconds * raised_by(found[0].scheme, space.margin)


def alike(space: Space, named: Named) -> Iterator[Named]:
  """What travels sparse all by one way, and all that can; for each way.

  The sums above are of every tensor by itself; the whole is known better.
  """
  sparse = {i for name, at in named if name != PMEAN for i in at}
  if not sparse:
    return
  for way in space.strategies:
    having = {i for i, found in enumerate(space.predictions) if way in found}
    if way == PMEAN or not sparse <= having:
      continue
    for members in (sparse,) if sparse == having else (sparse, having):
      rest = [
        (name, tuple(i for i in at if i not in members)) for name, at in named
      ]
      yield [*[x for x in rest if x[1]], (way, tuple(sorted(members)))]
