"""Deep Gradient Compression (arXiv 1712.01887): momentum before selection."""

import numpy as np

from . import feedback
from . import selectors
from .report import MomentumStep


class MomentumCorrection:
  """Clip, add to the momentum, add the momentum up, select, mask both.

  A device, in the order of the authors' program (`DGCSGDMemory`):

  1. `g` is clipped to the norm `clip_norm / sqrt(n)`, before it is added to
     anything.
  2. `u = momentum * u + g`, then `v = v + u`. With `nesterov`:
     `u = momentum * (u + g)`, then `v = v + u + g`, added from the left.
  3. Select from `|v|` and send `v` there, each device its own indices; the
     update is the sum over `n`. The optimizer after it has no momentum.
  4. `v = 0` where sent, and `u = 0` there with `masking`.

  The sum of updates and residuals is not the sum of gradients, by design.

  Choices:

  - Residuals are `v`; `u` is reported as `momenta`. There is no dampening.
  - The norm is that of a device's whole vector. (The authors' program hands a
    clipping function one tensor at a time and leaves the `n ** -0.5` of the
    paper to the user; it adds 1e-6 to the norm.)
  - Its square is summed in float64, its root rounded to `dtype`; the factor
    `dtype(clip_norm / sqrt(n)) / norm` and its product are taken in `dtype`,
    and only where the norm is larger. A norm that is not finite clips nothing,
    or one NaN would become `N` of them.
  - Every product and sum is rounded by itself. A program that fuses
    `momentum * u + g` into one rounding is bit-equal only where the product is
    exact, as with a momentum of 0.5.
  - With `wire_dtype` the rounding error stays in `v`, and `u` is masked all
    the same.
  - A NaN or Inf leaves `u` by masking alone: without it, it stays for ever.

  Args:
    size: length `N` of the flat vector.
    n: number of devices.
    selector: what a device selects from `v`.
    momentum: of `u`.
    nesterov: see step 2.
    masking: momentum factor masking.
    clip_norm: as for one device; each of `n` gets its `n ** -0.5`. None clips
      nothing.
    dtype: of `u` and `v`; gradients are cast to it.
    wire_dtype: what values are rounded to on their way.
  """

  def __init__(
    self,
    size: int,
    n: int,
    selector: selectors.Selector,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip_norm: float | None = None,
    dtype=np.float32,
    wire_dtype=None,
  ):
    self.n, self.size, self.selector = n, size, selector
    self.nesterov, self.masking = nesterov, masking
    self.clip_norm, self.wire_dtype = clip_norm, wire_dtype
    self.momentum = np.dtype(dtype).type(momentum)
    self.momenta = np.zeros((n, size), dtype)  # u
    self.residuals = np.zeros((n, size), dtype)  # v
    self.steps = 0

  def step(self, gradients: np.ndarray) -> MomentumStep:
    """Takes the local gradients of all devices, `[n, N]`."""
    g = np.asarray(gradients).astype(self.residuals.dtype)
    if self.clip_norm is not None:
      limit = self.clip_norm / np.sqrt(self.n)
      g = np.stack([clip(row, limit) for row in g])
    if self.nesterov:
      u = (self.momenta + g) * self.momentum
      v = self.residuals + u + g
    else:
      u = self.momenta * self.momentum + g
      v = self.residuals + u
    result = feedback.select_and_send(
      v, self.selector, self.steps, "own", self.wire_dtype
    )
    if self.masking:
      for device, indices in enumerate(result["selected"]):
        u[device, indices] = 0
    self.momenta, self.residuals = u, result["residuals"].copy()
    self.steps += 1
    return MomentumStep(**result, momenta=u.copy())


def clip(g: np.ndarray, limit: float) -> np.ndarray:
  """`g` of one device, scaled down to a norm of `limit` if it is longer."""
  with np.errstate(over="ignore", invalid="ignore"):
    norm = np.sqrt(np.square(g.astype(np.float64)).sum()).astype(g.dtype)
  bound = g.dtype.type(limit)
  return g * (bound / norm) if bound < norm < np.inf else g
