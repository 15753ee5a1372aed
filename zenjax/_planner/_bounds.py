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

  Attributes:
    shares: `[K]`, of the path through compute alone.
    ready: When the backward pass alone ends.
    compute: `[N + 1, K]`, of paths that are still on compute.
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
    share = self.shares
    before, work, link, after = (x[..., None] for x in states)
    rest = np.maximum(
      (1 - share) * before + self.compute[j], (1 - share) * link + self.link[j]
    )
    rest = np.maximum(rest, (1 - share) * after + self.after[j])
    return (share * (self.ready + work) + rest).max(axis=-1)


def bounds(edges: Edges) -> Bounds:
  """Goes through the exchanges backward."""
  n, share = edges.size, SHARES
  rest = 1 - share
  shape = (n + 1, len(share))
  compute, link, after = (np.full(shape, NEVER) for _ in range(3))
  compute[n], link[n], after[n] = rest * edges.ready[n], 0.0, 0.0
  for j in range(n, 0, -1):
    parts = edges.costs[j][..., None]
    work = share * (parts[:, :, 0] + parts[:, :, 2])
    before, on_link, later = (rest * parts[:, :, k] for k in range(3))
    tail = np.maximum(link[j], later + after[j])
    leave = rest * edges.ready[j] + on_link + tail
    at = slice(j - parts.shape[1], j)
    for table, value in (
      (after, work + later + after[j]),
      (link, work + on_link + tail),
      (compute, work + before + np.maximum(compute[j], leave)),
    ):
      np.minimum(table[at], value.min(axis=0), out=table[at])
  return Bounds(
    shares=share,
    ready=float(edges.ready[n]),
    compute=compute,
    link=link,
    after=after,
  )
