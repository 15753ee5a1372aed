"""Sparsifiers' states on another number of devices."""

from typing import Any

import numpy as np

from zenjax import _collectives
from zenjax._sparsify import _partitions
from zenjax._sparsify._state import FeedbackLeaf
from zenjax._sparsify._state import SparsifierState


def on_devices(state: SparsifierState, devices: int) -> SparsifierState:
  """`state` of any number of devices for `devices`: no gradient is lost.

  Residuals are added up, or joined by zeros, so that their sum is kept, or for
  `op="mean"` what is to be averaged of them; partitions are even again, and
  nothing moves by the counts of others. The threshold and its drift stay.
  """
  residual = np.asarray(state.residual)
  old = residual.shape[0]
  if old == devices:
    return state
  if len(state.parts) != old:
    raise ValueError(
      "`axis_name` must be that of the sparsifier, which has partitions for"
      f" {len(state.parts)} devices, got a state with residuals of {old}: along"
      " further axes they are copies, and would be added up."
    )
  total = int(np.asarray(state.parts).sum())
  return state._replace(
    step=np.zeros((), np.int32),
    residual=folded(residual, devices, averages=averages(state)),
    parts=_partitions.even(total, devices),
    counts=np.zeros(devices, np.int32),
    fullest=np.zeros_like(np.asarray(state.fullest)),
  )


def averages(state: SparsifierState) -> bool:
  """Returns whether what waits is to be averaged, not summed."""
  return "mean" in state.op


def leaf_on_devices(
  leaf: FeedbackLeaf, devices: int, *, averages: bool
) -> FeedbackLeaf:
  """The same of a leaf of `error_feedback`; nothing is known of a last step."""
  return leaf._replace(
    residual=folded(leaf.residual, devices, averages=averages),
    momentum=folded(leaf.momentum, devices, averages=averages),
    threshold=np.full(devices, np.nan, np.float32),
    selected=np.zeros(devices, np.int32),
  )


def folded(x: Any, devices: int, *, averages: bool) -> Any:
  """Returns `[old, ...]` as `[devices, ...]` of the same sum; None of None.

  Where it `averages` the sum over as many is kept: that of the same mean.
  """
  if x is None:
    return None
  x = np.asarray(x)
  scale = devices / len(x) if averages else 1.0
  # 16-bit floats are added in a wider dtype, rounded once.
  wide = np.zeros((devices, *x.shape[1:]), _collectives.accumulator(x.dtype))
  for source in range(x.shape[0]):
    wide[source % devices] += x[source].astype(wide.dtype)
  wide *= wide.dtype.type(scale)
  with np.errstate(over="ignore"):
    out = wide.astype(x.dtype)
  lost = np.isfinite(wide) & ~np.isfinite(out)
  if lost.any():
    raise ValueError(
      f"`state` keeps {x.dtype} of what waits on {len(x)} devices, which does"
      f" not hold its sum for {devices}, up to {np.abs(wide[lost]).max():.3g};"
      " move it when less waits, or keep it in float32, as `residual_dtype=`"
      " has it."
    )
  return out
