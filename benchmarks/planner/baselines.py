"""What others do, by name, on the same timeline: the search must not be worse.

Espresso (EuroSys 2023) as its Algorithm 1 has it; the program that came with it
differs (one candidate a tensor, by its size). MergeComp (arXiv 2103.15195) as
its program has it, one cut found by halving, beside no cut at all; its groups
take their best strategy here, where the paper has one for the whole model.
"""

from collections.abc import Iterator, Sequence
import itertools
import math

from benchmarks.library import Assignment
from benchmarks.library import Exchange
from benchmarks.library import GroupCosts
from benchmarks.library import iteration_seconds
from benchmarks.library import Tensor


def each_by(tensors: Sequence[Tensor], names: Sequence[str]) -> Assignment:
  """Returns one exchange for each tensor, by the option so named."""
  found = []
  for j, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
    option = tensor.option(name)
    assert option is not None, (tensor.name, name)
    found.append(Exchange(j, j + 1, option))
  return tuple(found)


def uncompressed(tensors: Sequence[Tensor]) -> Assignment:
  """Each tensor by itself and by its first option."""
  return each_by(tensors, [tensor.options[0].name for tensor in tensors])


def espresso(tensors: Sequence[Tensor], *, passes: int = 1) -> Assignment:
  """The greedy of Espresso's Algorithm 1, each tensor by itself.

  Tensors are taken by size, the largest first and of equals the one that is
  ready last; each gets the option with which the iteration is shortest, what
  was decided before being kept. Uncompressed tensors (the first option) that
  are sent before a bubble, the link then being idle, are left as they are. The
  paper goes through all of them once.
  """
  chosen = list(uncompressed(tensors))
  order = sorted(
    range(len(tensors)), key=lambda j: (tensors[j].bytes, j), reverse=True
  )
  for _ in range(passes):
    removed: set[int] = set()
    _remove(tensors, chosen, removed)
    for j in order:
      if j not in removed:
        chosen[j] = _best_option(tensors, chosen, j)
        _remove(tensors, chosen, removed)
  return tuple(chosen)


def _remove(tensors, chosen, removed) -> None:
  """Adds uncompressed tensors that are sent before the last bubble."""
  for j in range(max(bubbles(tensors, chosen), default=0)):
    if chosen[j].option is tensors[j].options[0]:
      removed.add(j)


def bubbles(
  tensors: Sequence[Tensor], assignment: Sequence[Exchange]
) -> Iterator[int]:
  """Yields the exchanges before which the link, having sent others, idles."""
  compute = link = 0.0
  for k, exchange in enumerate(assignment):
    for tensor in tensors[exchange.first : exchange.stop]:
      compute += tensor.backward_s
    compute += exchange.option.before_s
    if k and compute > link:
      yield k
    link = max(link, compute) + exchange.option.link_s


def _best_option(tensors, chosen, j) -> Exchange:
  options = [Exchange(j, j + 1, option) for option in tensors[j].options]
  changed = lambda exchange: [*chosen[:j], exchange, *chosen[j + 1 :]]
  return min(
    [chosen[j], *options],
    key=lambda exchange: iteration_seconds(tensors, changed(exchange)),
  )


def mergecomp(groups: GroupCosts) -> Assignment | None:
  """One group or two, the cut found by halving as if time had one minimum.

  None if no such groups can be exchanged.
  """
  n = len(groups.tensors)
  tried: dict[int, Assignment | None] = {}

  def seconds(cut: int) -> float:
    tried.setdefault(cut, cut_at(groups, cut))
    return _seconds(groups, tried[cut])

  start, end = 1, n - 1
  while start < end - 1:
    middle = (start + end) // 2
    if seconds(middle) > seconds(middle + 1):
      start = middle + 1
    else:
      end = middle
  seconds(n)  # No cut.
  best = min(tried, key=seconds)
  return tried[best]


def cut_at(groups: GroupCosts, cut: int) -> Assignment | None:
  """Two groups, or one if `cut` is the number of tensors: the best options."""
  n = len(groups.tensors)
  choices = []
  for i, j in ((0, cut), (cut, n)) if cut < n else ((0, n),):
    ones = [groups.exchange(i, j, name) for name in groups.names]
    choices.append([one for one in ones if one is not None])
  return min(
    itertools.product(*choices),
    key=lambda assignment: _seconds(groups, assignment),
    default=None,
  )


def _seconds(groups, assignment) -> float:
  if assignment is None:
    return math.inf
  return iteration_seconds(groups.tensors, assignment)
