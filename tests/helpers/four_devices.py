"""Tables of gradients on four devices, and what options make of them."""

import cases
import numpy as np
import runners

import zenjax

N = 4
F32 = np.dtype(np.float32)


def table(rng, rows, width, density=0.1):
  """A stack `[N, rows, width]` in which each device has rows of its own."""
  x = cases.normal(rng, N, rows, width, F32)
  count = max(1, round(density * rows))
  return cases.keep(x, [rng.permutation(rows)[:count] for _ in range(N)])


def run_with(runner, f=zenjax.sparse_pmean, **options):
  """`f` of a stack, as one of `runners.RUNNERS` runs it."""
  return runners.RUNNERS[runner](lambda x, axis: f(x, axis, **options), N)
