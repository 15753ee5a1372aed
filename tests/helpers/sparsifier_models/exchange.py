"""What leaves the devices, and what they get back."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np


def exchange(
  acc: np.ndarray, sent: np.ndarray, wire_dtype=None
) -> tuple[np.ndarray, np.ndarray]:
  """Averages what is sent and keeps the rest.

  Without `wire_dtype` a sent element leaves a residual of exactly 0. With it
  (not in the papers, asked for by the issue) the element is rounded once, its
  rounding error stays on the device that made it, and sums are taken in wider
  numbers. Of a finite value that the wire cannot hold its largest is sent, and
  the rest is such an error. One that is not finite (of an Inf or a NaN) is
  dropped: kept, it would poison the residual.

  Args:
    acc: residual plus gradient, `[n, N]`.
    sent: which elements of it each device contributes, `[n, N]` bool.
    wire_dtype: the dtype that values are rounded to on their way.

  Returns:
    The update `[N]` in float64 and the new residuals `[n, N]`.
  """
  with np.errstate(invalid="ignore", over="ignore"):
    wire = acc if wire_dtype is None else saturated(acc, wire_dtype)
    total = np.where(sent, wire.astype(np.float64), 0.0).sum(axis=0)
    error = np.zeros_like(acc) if wire is acc else acc - wire.astype(acc.dtype)
    # The comparison is False for a NaN.
    error = np.where(np.abs(error) < np.inf, error, acc.dtype.type(0))
  return total / len(acc), np.where(sent, error, acc)


def saturated(x: np.ndarray, dtype) -> np.ndarray:
  """`x` in `dtype`; what is finite stays so."""
  most = ml_dtypes.finfo(dtype).max
  if most >= ml_dtypes.finfo(x.dtype).max:
    return x.astype(dtype)
  within = np.clip(x, -x.dtype.type(most), x.dtype.type(most))
  return np.where(np.isinf(x), x, within).astype(dtype)


def sent_by_all(selected: Sequence[np.ndarray], shape) -> np.ndarray:
  """Every device contributes its value at every index that any selected."""
  return np.broadcast_to(sent_by_each(selected, shape).any(axis=0), shape)


def sent_by_each(selected: Sequence[np.ndarray], shape) -> np.ndarray:
  """Every device contributes its values at the indices it selected itself."""
  sent = np.zeros(shape, bool)
  for device, indices in enumerate(selected):
    sent[device, indices] = True
  return sent


def round_sums(
  updates: np.ndarray,
  residuals: np.ndarray,
  selected: Sequence[np.ndarray],
  wire_dtype,
) -> tuple[np.ndarray, np.ndarray]:
  """Means are rounded on their way back too, by those who selected.

  What that takes of the sum stays with the device that selected the element. A
  mean of what the wire holds does not exceed it.

  Args:
    updates: `[N]`, means.
    residuals: `[n, N]`, of what `exchange` kept.
    selected: by device; no two have an index in common.
    wire_dtype: the dtype that means are rounded to.

  Returns:
    Both, after that.
  """
  n = len(residuals)
  with np.errstate(invalid="ignore", over="ignore"):
    rounded = updates.astype(wire_dtype).astype(np.float64)
    lost = n * updates - n * rounded
  lost = np.where(np.abs(lost) < np.inf, lost, 0.0)
  for residual, indices in zip(residuals, selected, strict=True):
    residual[indices] += lost[indices].astype(residual.dtype)
  return rounded, residuals
