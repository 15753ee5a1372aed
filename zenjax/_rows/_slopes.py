"""Derivatives of a step without gradients, and what they depend on."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenjax._rows import _transitions
from zenjax._rows._idle import Idle


class Slopes:
  """Derivatives of what a step adds to an element."""

  def __init__(self, idle: Idle):
    self._idle = idle
    self._x = [jnp.ones((), dtype) for dtype in idle.dtypes]

  def _at(self, i: int, j: int, x: Any, counts: Any) -> jax.Array:
    """Of output `i` by input `j`, that alone: no other counts as an input."""

    def added(v):
      values = [*x[:j], v, *x[j + 1 :]]
      out = _transitions.precise(self._idle(values, counts)[i])
      # The last output is what is added already.
      return out if i == len(x) - 1 else out - _transitions.precise(values[i])

    return jax.jvp(added, (x[j],), (jnp.ones_like(x[j]),))[1]

  def value(self, i: int, j: int) -> float:
    return float(self._at(i, j, self._x, self._idle.start))

  def bends(self, i: int, j: int) -> bool:
    """Whether it depends on the element."""
    start = self._idle.start
    return _depends(lambda x: self._at(i, j, x, start), self._x)

  def varies(self, i: int, j: int) -> bool:
    """Whether it depends on the counters."""
    counts = list(self._idle.start)
    return _depends(lambda c: self._at(i, j, self._x, c), counts)

  def matrix(
    self, which: Sequence[int], counts: Sequence[jax.Array]
  ) -> jax.Array:
    at = lambda i, j: self._at(i, j, self._x, counts)
    return jnp.stack([jnp.stack([at(i, j) for j in which]) for i in which])

  def sum_up_to(self, outputs: Sequence[int]) -> bool:
    """Whether some outputs are inputs times slopes, tried for signs and steps.

    Their slopes are those of constants, which they are not.
    """
    idle, n = self._idle, len(self._x)
    rng = np.random.default_rng(0)
    rounding = 16 * max(float(jnp.finfo(d).eps) for d in idle.dtypes)
    for scale in (1e-3, 1.0, 1e3):
      x = [jnp.asarray(scale * rng.random(), d) for d in idle.dtypes]
      counts = [c + int(scale) for c in idle.start]
      before = np.array([*map(float, x[:-1]), 0.0])
      added = np.array([float(v) for v in idle(x, counts)]) - before
      slopes = np.asarray(self.matrix(range(n), counts), np.float64)
      terms = slopes * np.array([float(v) for v in x])
      size = np.abs(terms).sum(1) + np.abs(before)
      off = np.abs(added - terms.sum(1)) > rounding * size
      if np.any(off[list(outputs)]):
        return False
    return True


def _depends(fun, args):
  """Whether what `fun` returns is another for other `args`; never run.

  A program under `vmap` is mapped only where it depends on what is mapped.
  """
  many = jax.tree.map(lambda x: jnp.stack([x, x]), args)
  if not many:
    return False
  try:
    jax.eval_shape(jax.vmap(fun, out_axes=None), many)
  except ValueError as error:
    if "out_axes" not in str(error):
      raise
    return True
  return False
