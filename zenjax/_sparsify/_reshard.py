"""Sparsifiers' states on another number of devices."""

from typing import Any

import numpy as np

from zenjax import _collectives
from zenjax._sparsify import _partitions
from zenjax._sparsify._state import FeedbackLeaf
from zenjax._sparsify._state import SparsifierState


def on_devices(state: SparsifierState, devices: int) -> SparsifierState:
  """`state` of any number of devices for `devices`: no gradient is lost.

  Residuals are added up, or joined by zeros, so that their sum is kept;
  partitions are even again, and nothing moves by the counts of others. The
  threshold and its drift stay.
  """
  residual = np.asarray(state.residual)
  old = residual.shape[0]
  if old == devices:
    return state
  total = int(np.asarray(state.parts).sum())
  return state._replace(
    step=np.zeros((), np.int32),
    residual=_folded(residual, devices),
    parts=_partitions.even(total, devices),
    counts=np.zeros(devices, np.int32),
    fullest=np.zeros_like(np.asarray(state.fullest)),
  )


def leaf_on_devices(leaf: FeedbackLeaf, devices: int) -> FeedbackLeaf:
  """The same of a leaf of `error_feedback`; nothing is known of a last step."""
  if leaf.selected.shape[0] == devices:
    return leaf
  return leaf._replace(
    residual=_folded(leaf.residual, devices),
    momentum=_folded(leaf.momentum, devices),
    threshold=np.full(devices, np.nan, np.float32),
    selected=np.zeros(devices, np.int32),
  )


def _folded(x: Any, devices: int) -> Any:
  """`[old, ...]` as `[devices, ...]` of the same sum; None of None."""
  if x is None:
    return None
  x = np.asarray(x)
  # 16-bit floats are added in a wider dtype, rounded once.
  wide = np.zeros((devices, *x.shape[1:]), _collectives.accumulator(x.dtype))
  for source in range(x.shape[0]):
    wide[source % devices] += x[source].astype(wide.dtype)
  return wide.astype(x.dtype)
