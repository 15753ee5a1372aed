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

from zenjax._src.planner import groups
from zenjax._src.planner.groups import Cost
from zenjax._src.planner.groups import Edges
from zenjax._src.planner.groups import NEVER
from zenjax._src.planner.timeline import Assignment
from zenjax._src.planner.timeline import each_by
from zenjax._src.planner.timeline import Overlap
from zenjax._src.planner.timeline import simulate
from zenjax._src.planner.timeline import Tensor
from zenjax._src.planner.timeline import Timeline

# How short a step can still become: bounds under what is left to decide.
#
# A step ends with the longest of its paths: compute until the end and all work;
# or compute until some exchange leaves, the link from there to some exchange,
# work after it from there to the end. The longest is no shorter than any
# average of paths. With a share `s` on the first and `1 - s` on one of the
# others, what is left adds up tensor by tensor, and its minimum is found
# backward, once for each share.


SHARES = np.linspace(0.0, 1.0, 9)


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
  """What is added to where a path stands after so many tensors.

  Shares come first, so that numpy's inner loops go over many states.

  Attributes:
    shares: `[K]`, of the path through compute alone.
    ready: When the backward pass alone ends.
    compute: `[K, N + 1]`, of paths that are still on compute.
    link: The same of those on the link.
    after: Of those on work after the link.
  """

  shares: np.ndarray
  ready: float
  compute: np.ndarray
  link: np.ndarray
  after: np.ndarray

  def under(self, j: int, states: np.ndarray) -> np.ndarray:
    """Of `states: [4, ...]` after `j` tensors: `[...]`, and no step is shorter.

    The four are work before exchanges, all work, link end, end of work after.
    """
    before, work, link, after = states.reshape(4, -1)
    share = self.shares[:, None]
    compute, on_link, later = (
      table[:, j, None] for table in (self.compute, self.link, self.after)
    )
    rest = np.maximum(
      before * (1 - share) + compute, link * (1 - share) + on_link
    )
    np.maximum(rest, after * (1 - share) + later, out=rest)
    rest += share * (work + self.ready)
    return rest.max(axis=0).reshape(states.shape[1:])


def bounds(edges: Edges) -> Bounds:
  """Goes through the exchanges backward."""
  n, share = edges.size, SHARES[:, None, None]
  rest = 1 - share
  shape = (len(SHARES), n + 1)
  compute, link, after = (np.full(shape, NEVER) for _ in range(3))
  leaves = (1 - SHARES) * edges.ready[:, None]
  compute[:, n], link[:, n], after[:, n] = leaves[n], 0.0, 0.0
  for j in range(n, 0, -1):
    before, on_link, later = np.moveaxis(edges.costs[j], -1, 0)
    work = share * (before + later)
    behind = rest * later + after[:, j, None, None]
    on_link = rest * on_link + np.maximum(link[:, j, None, None], behind)
    leave = leaves[j][:, None, None] + on_link
    leave = np.maximum(compute[:, j, None, None], leave)
    at = slice(j - before.shape[1], j)
    for table, value in (
      (after, behind),
      (link, on_link),
      (compute, rest * before + leave),
    ):
      value += work
      np.minimum(table[:, at], value.min(axis=1), out=table[:, at])
  return Bounds(
    shares=SHARES,
    ready=float(edges.ready[n]),
    compute=compute,
    link=link,
    after=after,
  )


# A first answer, quickly: one tensor's strategy after another is bettered.
#
# From Espresso's greedy, by size, and from what is best where compute and link
# are worth so much: of all changes the best, until none helps. It is not exact;
# the search prunes by what it finds.


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
  """What `baselines.espresso` finds, in less time."""
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
  edges = groups.edges(tensors, cost)
  if overlap == "none":
    edges = edges.serial()
  names = [edges.names[o] for o in descend(edges, tensors)]
  best = each_by(tensors, names)
  best_s = simulate(tensors, best, overlap).iteration_s
  limits = bounds(edges)
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
    exchange = groups.exchange(tensors, cost, i, j, edges.names[o])
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
    possible = edges.costs[j][..., 0].T < groups.NEVER
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
    best = states.min(axis=1, keepdims=True, initial=groups.NEVER)
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
