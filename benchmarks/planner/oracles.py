"""The search's oracles: all assignments, and a bound by a linear program.

Both share with the search only what an exchange costs.
"""

from collections.abc import Iterator, Sequence
import itertools
import math

import numpy as np
from scipy import optimize
from scipy import sparse

from benchmarks import library

MOST = 5_000_000


def exhaustive(groups: library.GroupCosts) -> tuple[library.Assignment, float]:
  """An assignment with the shortest iteration, and that.

  ValueError if there are too many.
  """
  best: library.Assignment = ()
  best_s = math.inf
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


def groupings(
  groups: library.GroupCosts,
) -> Iterator[list[list[library.Exchange]]]:
  """Every way to cut the tensors, and of each group what it can go by."""
  n = len(groups.tensors)
  for cut in itertools.product((True, False), repeat=n - 1):
    cuts = [0, *(j for j in range(1, n) if cut[j - 1]), n]
    choices = []
    for i, j in zip(cuts, cuts[1:]):
      ones = (groups.exchange(i, j, name) for name in groups.names)
      choices.append([one for one in ones if one is not None])
    if all(choices):
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


def relaxed_s(tensors: Sequence[library.Tensor]) -> float:
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
