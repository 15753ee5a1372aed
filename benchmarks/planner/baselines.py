"""Assignments beside the search's, on the same timeline: others', and the best.

Espresso (EuroSys 2023) as its Algorithm 1 has it; the program that came with it
differs (one candidate a tensor, by its size). MergeComp (arXiv 2103.15195) as
its program has it, one cut found by halving, beside no cut at all; its groups
take their best strategy here, where the paper has one for the whole model.

The oracles, all assignments and a bound by a linear program, share with the
search only what an exchange costs.
"""

from collections.abc import Iterable, Iterator, Sequence
import itertools
import math

import numpy as np
from scipy import optimize
from scipy import sparse

from benchmarks.library import Assignment
from benchmarks.library import Exchange
from benchmarks.library import GroupCosts
from benchmarks.library import iteration_seconds
from benchmarks.library import Tensor

MOST = 5_000_000  # Assignments of one grouping that are tried.


def uncompressed(tensors: Sequence[Tensor]) -> Assignment:
  """Each tensor by itself and by its first option."""
  return tuple(Exchange(j, j + 1, t.options[0]) for j, t in enumerate(tensors))


def espresso(tensors: Sequence[Tensor], *, passes: int = 1) -> Assignment:
  """The greedy of Espresso's Algorithm 1, each tensor by itself.

  Tensors are taken by size, the largest first and of equals the one that is
  ready last; each gets the option with which the iteration is shortest, what
  was decided before being kept. Uncompressed tensors (the first option) that
  are sent before a bubble, the link then being idle, are left as they are. The
  paper goes through all of them once.
  """
  chosen = list(uncompressed(tensors))
  by_size = lambda j: (tensors[j].bytes, j)
  for _ in range(passes):
    removed = _hidden(tensors, chosen)
    for j in sorted(range(len(tensors)), key=by_size, reverse=True):
      if j not in removed:
        chosen[j] = _best_option(tensors, chosen, j)
        removed |= _hidden(tensors, chosen)
  return tuple(chosen)


def _hidden(tensors, chosen) -> set[int]:
  """Returns uncompressed tensors that are sent before the last bubble."""
  before = range(max(bubbles(tensors, chosen), default=0))
  return {j for j in before if chosen[j].option is tensors[j].options[0]}


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
  seconds = lambda exchange: iteration_seconds(
    tensors, [*chosen[:j], exchange, *chosen[j + 1 :]]
  )
  return min([chosen[j], *options], key=seconds)


def mergecomp(groups: GroupCosts) -> Assignment | None:
  """One group or two, the cut found by halving as if time had one minimum.

  None if no such groups can be exchanged.
  """
  n = len(groups.tensors)
  tried: dict[int, Assignment | None] = {}

  def seconds(cut: int) -> float:
    tried[cut] = tried.get(cut) or cut_at(groups, cut)
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
  ends = dict.fromkeys((0, cut, len(groups.tensors)))
  return min(
    itertools.product(*_choices(groups, ends)),
    key=lambda assignment: _seconds(groups, assignment),
    default=None,
  )


def _choices(groups: GroupCosts, ends: Iterable[int]) -> list[list[Exchange]]:
  """Returns of each group, from end to end, what it can go by."""
  return [
    [one for name in groups.names if (one := groups.exchange(i, j, name))]
    for i, j in itertools.pairwise(ends)
  ]


def _seconds(groups, assignment) -> float:
  known = assignment is not None
  return iteration_seconds(groups.tensors, assignment) if known else math.inf


def exhaustive(groups: GroupCosts) -> tuple[Assignment, float]:
  """An assignment with the shortest iteration, and that.

  ValueError if there are too many.
  """
  best, best_s = (), math.inf
  for choices in groupings(groups):
    count = math.prod(map(len, choices))
    if count > MOST:
      raise ValueError(
        f"`groups` must have no more than {MOST:,} assignments to try all, got"
        f" {count:,} of one grouping alone; use `search`."
      )
    seconds = _iterations(groups.tensors, choices)
    least = int(seconds.argmin())
    if seconds[least] < best_s:
      best_s = float(seconds[least])
      at = np.unravel_index(least, [len(options) for options in choices])
      best = tuple(options[k] for options, k in zip(choices, at))
  return best, best_s


def groupings(groups: GroupCosts) -> Iterator[list[list[Exchange]]]:
  """Every way to cut the tensors, and of each group what it can go by."""
  n = len(groups.tensors)
  for cut in itertools.product((True, False), repeat=n - 1):
    cuts = [j for j in range(1, n) if cut[j - 1]]
    if all(choices := _choices(groups, [0, *cuts, n])):
      yield choices


def _iterations(tensors, choices) -> np.ndarray:
  """Of all combinations of options, in the order of their product."""
  shape = [len(options) for options in choices]
  at = np.indices(shape).reshape(len(shape), -1)
  parts = []
  for options, chosen in zip(choices, at):
    table = [[o.before_s, o.link_s, o.after_s] for _, _, o in options]
    parts.append(np.array(table)[chosen].T)
  compute, link, arrived = 0.0, 0.0, []
  for (exchange, *_), (before, on_link, _) in zip(choices, parts):
    for tensor in tensors[exchange.first : exchange.stop]:
      compute = compute + tensor.backward_s
    compute = compute + before
    link = np.maximum(link, compute) + on_link
    arrived.append(link)
  for link, (_, _, after) in zip(arrived, parts):
    compute = np.maximum(compute, link) + after
  return np.asarray(compute)


def relaxed_s(tensors: Sequence[Tensor]) -> float:
  """The shortest iteration if tensors could be split between options."""
  n = len(tensors)
  owners = [j for j, tensor in enumerate(tensors) for _ in tensor.options]
  options = [option for tensor in tensors for option in tensor.options]
  ready = np.cumsum([tensor.backward_s for tensor in tensors])
  whole = sparse.csr_array(
    (np.ones(len(owners)), (owners, np.arange(len(owners))))
  )

  def part(name):
    return whole * np.array([getattr(option, name) for option in options])

  before, link, after = map(part, ("before_s", "link_s", "after_s"))
  # Variables: shares, when each exchange leaves the link, when work after it
  # ends, and the iteration.
  none, one = sparse.csr_array((n, n)), sparse.eye_array(n)
  last = sparse.diags_array(np.ones(n - 1), offsets=-1, shape=(n, n))
  summed = sparse.csr_array(np.tril(np.ones((n, n)))) @ before
  zero = sparse.csr_array((n, 1))
  ends = sparse.csr_array(([1.0], ([0], [n - 1])), shape=(1, n))
  work = np.ones((1, n)) @ (before + after)
  rows = [
    [summed + link, -one, none, zero],  # no sooner than it is ready
    [link, last - one, none, zero],  # nor than the link is
    [after, one, -one, zero],
    [after, none, last - one, zero],
    [work, None, None, -np.ones((1, 1))],
    [None, None, ends, -np.ones((1, 1))],
  ]
  upper = [-ready, np.zeros(3 * n), [-ready[-1], 0.0]]
  split = sparse.block_array([[whole, none, none, zero]])
  solved = optimize.linprog(
    np.append(np.zeros(len(options) + 2 * n), 1.0),
    A_ub=sparse.block_array(rows).tocsr(),
    b_ub=np.concatenate(upper),
    A_eq=split.tocsr(),
    b_eq=np.ones(n),
  )
  if not solved.success:
    raise RuntimeError(f"The linear program was not solved: {solved.message}")
  return float(solved.fun)
