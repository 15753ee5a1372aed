"""Every assignment there is, one as good as another: the oracle of the search.

It shares with the search only what an exchange costs. Pieces follow each other
as `iteration_seconds` has them, for all choices of options at once.
"""

from collections.abc import Iterator
import itertools
import math

import numpy as np

from zenjax._src.planner.timeline import Assignment
from zenjax._src.planner.timeline import Exchange
from zenjax._src.planner.timeline import GroupCosts

MOST = 5_000_000


def exhaustive(groups: GroupCosts) -> tuple[Assignment, float]:
  """An assignment with the shortest iteration, and that.

  Raises:
    ValueError: There are too many.
  """
  best: Assignment = ()
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


def groupings(groups: GroupCosts) -> Iterator[list[list[Exchange]]]:
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
