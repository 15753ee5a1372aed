"""A sparsifier's state on another number of devices."""

import numpy as np

from zenjax import _collectives
from zenjax._sparsify import _partitions
from zenjax._sparsify._state import SparsifierState


def on_devices(state: SparsifierState, devices: int) -> SparsifierState:
  """`state` of any number of devices for `devices`: no gradient is lost.

  Residuals are added up, or joined by zeros, so that their sum is kept;
  partitions are even again, and nothing moves by the counts of others. The
  threshold stays.
  """
  residual = np.asarray(state.residual)
  old = residual.shape[0]
  if old == devices:
    return state
  # 16-bit residuals are added in a wider dtype, rounded once.
  wide = np.zeros(
    (devices, residual.shape[1]), _collectives.accumulator(residual.dtype)
  )
  for source in range(old):
    wide[source % devices] += residual[source].astype(wide.dtype)
  total = int(np.asarray(state.parts).sum())
  return state._replace(
    step=np.zeros((), np.int32),
    residual=wide.astype(residual.dtype),
    parts=_partitions.even(total, devices),
    counts=np.zeros(devices, np.int32),
  )
