"""A bound that owes nothing to the planner: tensors in parts by each option.

A tensor may go by several options at once, a share of it by each. The shortest
iteration of that is a linear program, and no assignment of whole tensors, each
by itself, is shorter.
"""

from collections.abc import Sequence

import numpy as np
from scipy import optimize
from scipy import sparse

from zenjax._src.planner.timeline import Tensor


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
