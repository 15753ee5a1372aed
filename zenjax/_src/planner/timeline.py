"""A step on two resources, compute and link: what runs when.

The model is Espresso's (EuroSys 2023). The backward pass completes gradients
one after another. An exchange takes one of them, or several consecutive ones,
through three pieces: work before the link (mask, pack, cast), the link, and
work after it (merge, decode). Work takes the compute resource from the backward
pass. Times are in seconds from the beginning of the backward pass.

`search` finds exchanges, greedily. The problem is NP-hard: where each tensor is
either work or link, behind one long exchange and ahead of a last gradient that
takes as long, it is to split numbers evenly. So this is a local search, and not
exact. It starts with every tensor in an exchange of its own, by the strategy
that is best at some exchange rate of compute for link, and again with runs of
one strategy joined. Then it makes the one change that shortens the step most,
until none does: another strategy for one exchange, or else two neighbours
merged into one, or else more. The times of all changes of a kind are computed
at once, in linear time.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

import numpy as np

# Seconds of an exchange that is not possible: more than any step takes. Not
# infinite, for zero times infinity is NaN.
NEVER = 1e300

# Of `search`: weights of compute, the rest the link's, by which it starts.
_WEIGHTS = np.linspace(0.0, 1.0, 17)
# Starts that are followed: those with the shortest steps.
_STARTS = 6
# Neighbours that one change may merge, at most.
_WIDEST = 4
# Times that differ by less are equal, as sums in another order are.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
  """One way to exchange a tensor, or a group of them.

  Attributes:
    name: The strategy.
    before_s: Compute before the link.
    link_s: Time on the link, latency included.
    after_s: Compute after the link.
    bytes: Bytes that a device receives.
  """

  name: str
  before_s: float = 0.0
  link_s: float = 0.0
  after_s: float = 0.0
  bytes: float = 0.0

  def __post_init__(self):
    for field in ("before_s", "link_s", "after_s", "bytes"):
      value = getattr(self, field)
      if not 0 <= value < math.inf:
        raise ValueError(
          f"`{field}` of option {self.name!r} must be finite and not negative,"
          f" got {value!r}; a fit that says otherwise is wrong."
        )

  @property
  def work_s(self) -> float:
    """Compute that the exchange adds to a step."""
    return self.before_s + self.after_s


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
  """A gradient, in its place in the backward pass.

  Attributes:
    name: Name of the leaf.
    bytes: Size of the gradient.
    backward_s: Compute from the completion of the gradient before it, or from
      the beginning of the backward pass, to its own.
    options: Ways to exchange it, of different names. The first is the plain
      one, `pmean`.
  """

  name: str
  bytes: float
  backward_s: float
  options: tuple[Option, ...]

  def __post_init__(self):
    if not 0 <= self.backward_s < math.inf:
      raise ValueError(
        f"`backward_s` of tensor {self.name!r} must be finite and not negative,"
        f" got {self.backward_s!r}; give tensors in the order in which the"
        " backward pass completes them."
      )
    names = [option.name for option in self.options]
    if not names or len(set(names)) < len(names):
      raise ValueError(
        f"`options` of tensor {self.name!r} must be one or more, of different"
        f" names, got {names}."
      )

  def option(self, name: str) -> Option | None:
    """Returns the option called `name`, or None."""
    return next((o for o in self.options if o.name == name), None)


class GroupCosts:
  """Costs of consecutive tensors that share an exchange.

  They add up, but for the part that an exchange pays once. Letters: `N`
  tensors, `S` strategies, `K` groups.

  Args:
    tensors: All tensors of a step, in order.
    once: By strategy, the part of every tensor's own option that a group pays
      once: latency, launches, headers. Tensors of other strategies do not
      share exchanges.

  Raises:
    ValueError: A tensor's own option is less than that part.
  """

  def __init__(
    self, tensors: Sequence[Tensor], once: Mapping[str, Option] | None = None
  ):
    self.tensors = tuple(tensors)
    self.names = tuple(
      dict.fromkeys(o.name for tensor in tensors for o in tensor.options)
    )
    parts = once or {}
    self._shares = np.array([name in parts for name in self.names], bool)
    self._once = np.zeros((len(self.names), 4))
    # The last column counts tensors that do not have the option.
    sums = np.zeros((len(self.names), len(self.tensors) + 1, 5))
    for s, name in enumerate(self.names):
      if name in parts:
        self._once[s] = _figures(parts[name])
      for j, tensor in enumerate(self.tensors):
        option = tensor.option(name)
        if option is None:
          sums[s, j + 1, 4] = 1
          continue
        rest = np.array(_figures(option)) - self._once[s]
        if (rest < 0).any():
          raise ValueError(
            f"`once` of {name!r} must be no more than any tensor's own option,"
            f" got {parts[name]} and tensor {tensor.name!r} of less."
          )
        sums[s, j + 1, :4] = rest
    self._sums = sums.cumsum(axis=1)

  def seconds(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Returns the times of groups by every strategy, `NEVER` if impossible.

    Args:
      first: `[K]`, the first tensor of each group.
      stop: `[K]`, the tensor after its last.

    Returns:
      `[S, K, 3]`: work before the link, on the link, work after it.
    """
    parts = self._sums[:, stop] - self._sums[:, first]
    missing = parts[..., 4] > 0
    missing |= (stop - first > 1) & ~self._shares[:, None]
    seconds = parts[..., :3] + self._once[:, None, :3]
    return np.where(missing[..., None], NEVER, seconds)

  def exchange(self, first: int, stop: int, name: str) -> "Exchange | None":
    """Returns tensors `first` to `stop - 1` by one strategy, if possible."""
    if stop - first == 1:
      option = self.tensors[first].option(name)
      return None if option is None else Exchange(first, stop, option)
    if name not in self.names or not self._shares[s := self.names.index(name)]:
      return None
    *parts, missing = self._sums[s, stop] - self._sums[s, first]
    if missing:
      return None
    option = Option(name, *np.add(parts, self._once[s]).tolist())
    return Exchange(first, stop, option)


def _figures(option: Option) -> tuple[float, float, float, float]:
  return option.before_s, option.link_s, option.after_s, option.bytes


class Exchange(NamedTuple):
  """Tensors `first` to `stop - 1`, by one option."""

  first: int
  stop: int
  option: Option


# Exchanges in order; together they hold every tensor once.
Assignment = tuple[Exchange, ...]


def iteration_seconds(
  tensors: Sequence[Tensor], assignment: Sequence[Exchange]
) -> float:
  """Returns the time of a step in which exchanges overlap the backward pass.

  Compute runs the backward pass, and the work before an exchange as soon as its
  last gradient is complete; the work after exchanges follows the backward pass.
  The link takes exchanges in order. No other schedule that sends them in this
  order is shorter: compute is never idle until the last gradient, so work after
  an exchange could only delay what others wait for, and work before the link is
  needed in the order in which exchanges leave.

  Raises:
    ValueError: `assignment` does not hold every tensor once and in order.
  """
  stops = [0, *(exchange.stop for exchange in assignment)]
  firsts = [*(exchange.first for exchange in assignment), len(tensors)]
  if stops != firsts or any(e.first >= e.stop for e in assignment):
    ranges = [(exchange.first, exchange.stop) for exchange in assignment]
    raise ValueError(
      f"`assignment` must hold each of {len(tensors)} tensors once and in"
      f" order, got ranges {ranges}."
    )
  compute = link = 0.0
  arrived = []
  for first, stop, option in assignment:
    for tensor in tensors[first:stop]:
      compute += tensor.backward_s
    compute += option.before_s
    link = max(link, compute) + option.link_s
    arrived.append(link)
  for at, exchange in zip(arrived, assignment):
    compute = max(compute, at) + exchange.option.after_s
  return compute


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
