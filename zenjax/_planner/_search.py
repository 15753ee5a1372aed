"""The best strategy of every tensor and grouping of consecutive ones.

Dynamic programming over how many tensors are decided. After `j` of them all
that the rest of a step can see is

    before  work before exchanges so far, which delays the backward pass
    work    all work so far, before and after exchanges
    link    when the link is free
    after   when work after exchanges would end on a compute of its own

and an exchange `(b, l, a)` of tensors up to `j` leads to

    before' = before + b
    work'   = work + b + a
    link'   = max(link, ready[j] + before') + l
    after'  = max(after, link') + a

with `ready` the backward pass by itself. The step ends at
`max(ready[N] + work, after)`, which is what `simulate` finds: the link takes
exchanges in order, work before them is done in order, and work after them when
the backward pass is over. (Compute has no gap until then, so that no other
order of its pieces is shorter; exchanges that overtake each other are not
considered.)

Dominance. Each of the four maps and the end are monotone in every figure. If
one state is nowhere greater than another of as many tensors, any completion of
the other completes it too, and ends no later: the other need not be kept. By
induction over `j`, some best assignment survives. Two more states see the same
future: no exchange starts before `ready[j + 1] + before`, so a link that is
free earlier is as good as one that is free then. A state is also dropped if
even its lower bound (`_bounds`) ends no sooner than what is already found.

The problem is NP-hard: where each tensor is either work or link, behind one
long exchange and ahead of a last gradient that takes as long, it is to split
numbers evenly. Fronts are small where few tensors have a choice to make, and
can be large where hundreds do. `width` limits them; the answer then comes with
a bound under which no assignment can be.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from zenjax._planner import _bounds
from zenjax._planner import _descent
from zenjax._planner import _groups
from zenjax._planner._bounds import Bounds
from zenjax._planner._groups import Cost
from zenjax._planner._groups import Edges
from zenjax._planner._timeline import Assignment
from zenjax._planner._timeline import each_by
from zenjax._planner._timeline import Overlap
from zenjax._planner._timeline import simulate
from zenjax._planner._timeline import Tensor
from zenjax._planner._timeline import Timeline

# Times that differ by less are equal: sums in another order do.
ROUNDING = 1e-12
_FIRST_WIDTH = 16
_SPARE = 4  # States to look at for one to keep.
_PAIRS = 128  # States up to which all pairs are compared at once.


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
  """What a search found.

  Attributes:
    assignment: The exchanges.
    timeline: What a step then does when.
    bound_s: No assignment has a shorter iteration.
    states: How many were kept.
  """

  assignment: Assignment
  timeline: Timeline
  bound_s: float
  states: int

  @property
  def exact(self) -> bool:
    """Whether nothing is better, up to rounding."""
    return self.bound_s >= self.timeline.iteration_s * (1 - ROUNDING)


def search(
  tensors: Sequence[Tensor],
  cost: Cost | None = None,
  *,
  overlap: Overlap = "overlap",
  width: int | None = 16,
) -> Found:
  """The assignment with the shortest iteration.

  Args:
    tensors: In the order in which the backward pass completes them.
    cost: Of groups; without it each tensor goes by itself.
    overlap: What runs beside what.
    width: How many states to keep after each tensor, the most promising; with
      None all that may lead to the best, which is exact and can take long.

  Raises:
    ValueError: `width` is not positive, or `overlap` is unknown.
  """
  if width is not None and width < 1:
    raise ValueError(
      f"`width` must be positive, or None for an exact search, got {width}."
    )
  simulate((), (), overlap)
  if not tensors:
    return Found((), simulate((), (), overlap), bound_s=0.0, states=0)
  edges = _groups.edges(tensors, cost)
  if overlap == "none":
    edges = edges.serial()
  names = [edges.names[o] for o in _descent.descend(edges, tensors)]
  best = each_by(tensors, names)
  best_s = simulate(tensors, best, overlap).iteration_s
  limits = _bounds.bounds(edges)
  bound_s, states = float(limits.under(0, np.zeros(4))), 0
  for limit in [_FIRST_WIDTH, width] if width is None else [width]:
    if bound_s >= best_s * (1 - ROUNDING):
      break
    swept = _Sweep(edges, limits, best_s, limit)
    states += len(swept.came)
    bound_s = max(bound_s, swept.bound_s)
    if swept.path:
      found = _assignment(tensors, cost, edges, swept.path)
      seconds = simulate(tensors, found, overlap).iteration_s
      if seconds < best_s:
        best, best_s = found, seconds
    if not swept.cut:
      break
  timeline = simulate(tensors, best, overlap)
  return Found(best, timeline, min(bound_s, best_s), states)


def _assignment(tensors, cost, edges, path) -> Assignment:
  exchanges = []
  for i, j, o in path:
    exchange = _groups.exchange(tensors, cost, i, j, edges.names[o])
    assert exchange is not None, (i, j, edges.names[o])
    exchanges.append(exchange)
  return tuple(exchanges)


class _Sweep:
  """One pass over all tensors.

  Attributes:
    path: Exchanges `(i, j, name)` shorter than what was known; else empty.
    bound_s: No assignment has a shorter iteration.
    cut: Whether a state was dropped for being one too many.
    came: Of each state, `(tensors decided, state before, name)`.
  """

  def __init__(
    self, edges: Edges, limits: Bounds, known_s: float, width: int | None
  ):
    self._edges, self._limits = edges, limits
    self._width = width
    self.bound_s, self.cut = known_s, False
    self._enough = known_s * (1 - ROUNDING)
    self._states = self._ideal = np.zeros((4, 1))
    self.came = np.array([[0, -1, -1]])
    self._starts = [0, 1]
    for j in range(1, edges.size + 1):
      if self._starts[j - edges.costs[j].shape[1]] == len(self.came):
        self.path = []  # Nothing leads on.
        return
      self._step(j)
    self.path = self._trace()

  def _step(self, j: int) -> None:
    edges, n = self._edges, self._edges.size
    low = j - edges.costs[j].shape[1]
    possible = edges.costs[j][..., 0].T < _groups.NEVER
    if low < j - 1:
      # Most groups lead nowhere, whichever state they are added to.
      ideal = self._ideal[:, low:j, None]
      _, bound = self._reach(j, ideal, edges.costs[j].swapaxes(0, 1))
      possible &= bound < self._enough
    nodes, names = possible.nonzero()
    counts = np.diff(self._starts)[low:j][nodes]
    parents = _ranges(np.array(self._starts)[low:j][nodes], counts)
    names = names.repeat(counts)
    parts = edges.costs[j][names, nodes.repeat(counts)]
    reached, bound = self._reach(j, self._states[:, parents], parts)
    kept = (bound < self._enough).nonzero()[0]
    kept = self._cut(kept, bound, _SPARE)
    if j < n:
      kept = kept[_nondominated(reached[:, kept])]
    else:
      kept = kept[bound[kept].argsort()[:1]]
    kept = self._cut(kept, bound, 1)
    came = np.stack([np.full_like(kept, j), parents[kept], names[kept]], axis=1)
    self._add(reached[:, kept], came)

  def _reach(self, j, states, parts):
    """States `[4, ...]` after exchanges `[..., 3]` up to `j`; their bounds."""
    ready, (b, l, a) = self._edges.ready, np.moveaxis(parts, -1, 0)
    before = states[0] + b
    link = np.maximum(states[2], ready[j] + before) + l
    after = np.maximum(states[3], link) + a
    if j < self._edges.size:
      link = np.maximum(link, ready[j + 1] + before)
    reached = np.stack([before, states[1] + b + a, link, after])
    return reached, self._limits.under(j, reached)

  def _cut(self, kept, bound, spare):
    """The most promising, `spare` times as many as are wanted."""
    if self._width is None or len(kept) <= spare * self._width:
      return kept
    order = bound[kept].argsort(kind="stable")
    self.cut = True
    rest = bound[kept[order[spare * self._width :]]]
    self.bound_s = min(self.bound_s, float(rest[0]))
    return kept[order[: spare * self._width]]

  def _add(self, states, came) -> None:
    self._states = np.concatenate([self._states, states], axis=1)
    self.came = np.concatenate([self.came, came])
    self._starts.append(len(self.came))
    best = states.min(axis=1, keepdims=True, initial=_groups.NEVER)
    self._ideal = np.concatenate([self._ideal, best], axis=1)

  def _trace(self) -> list[tuple[int, int, int]]:
    n = self._edges.size
    if self._starts[n + 1] == self._starts[n]:
      return []
    *_, work, _, after = self._states[:, -1]
    end = float(max(self._edges.ready[n] + work, after))
    self.bound_s = min(self.bound_s, end)
    path, at = [], len(self.came) - 1
    while at:
      j, parent, name = self.came[at].tolist()
      path.append((int(self.came[parent, 0]), j, name))
      at = parent
    return path[::-1]


def _nondominated(states: np.ndarray) -> np.ndarray:
  """Which of `[4, M]` no other is nowhere greater than; one of equals."""
  order = np.lexsort(states[::-1])
  left, kept = states[:, order], []
  if order.size <= _PAIRS:
    # Of two in order the first is not greater in the first figure.
    nowhere_greater = ~np.tri(order.size, dtype=bool)
    for figure in left[1:]:
      nowhere_greater &= figure[:, None] <= figure
    return order[~nowhere_greater.any(axis=0)]
  while order.size:
    # The least in lexicographic order is dominated by none that is left.
    kept.append(order[0])
    open_ = (left < left[:, :1]).any(axis=0)
    left, order = left[:, open_], order[open_]
  return np.array(kept, dtype=int)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """`start`, ... `start + count - 1` for each, one after another."""
  ends = counts.cumsum()
  return np.arange(ends[-1] if ends.size else 0) + (
    starts - (ends - counts)
  ).repeat(counts)
