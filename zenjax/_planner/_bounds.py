"""How short a step can still become: bounds under what is left to decide.

A step ends with the longest of its paths: compute until the end and all work;
or compute until some exchange leaves, the link from there to some exchange,
work after it from there to the end. The longest is no shorter than any average
of paths. With a share `s` on the first and `1 - s` on one of the others, what
is left adds up tensor by tensor, and its minimum is found backward, once for
each share.
"""

import dataclasses

import numpy as np

from zenjax._planner._groups import Edges
from zenjax._planner._groups import NEVER

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
