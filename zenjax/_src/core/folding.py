"""Moves what waits on each device to another number of devices."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives


def folded(x: Any, devices: int, *, averages: bool) -> Any:
  """Converts `[old, ...]` to `[devices, ...]`, with the same sum or mean."""
  x = np.asarray(x)
  scale = devices / len(x) if averages else 1.0
  # 16-bit floats are added in a wider dtype, rounded once.
  wide = np.zeros((devices, *x.shape[1:]), collectives.accumulator(x.dtype))
  for i, part in enumerate(x):
    wide[i % devices] += part.astype(wide.dtype)
  wide *= wide.dtype.type(scale)
  with np.errstate(over="ignore"):
    out = wide.astype(x.dtype)
  if (np.isfinite(wide) & ~np.isfinite(out)).any():
    raise ValueError(
      f"`state` keeps {x.dtype} gradients of {len(x)} devices, and their sums"
      f" for {devices} devices overflow. Keep them in float32."
    )
  return out


def spread(x: Any, devices: int) -> Any:
  """Converts `[old, ...]` to `[devices, ...]`, with the same mean.

  Each result is a weighted mean of old parts, so that a second moment, for
  example, stays as large as gradients are. Leaves that are neither floating nor
  complex are the first device's.
  """
  if len(x) == devices:
    return x
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return x[np.zeros(devices, np.int32)]
  old = len(x)
  wide = np.zeros((devices, *x.shape[1:]), collectives.accumulator(x.dtype))
  # Old part `i` covers [i / old, (i + 1) / old) of all, and new ones the same.
  for i, j in itertools.product(range(old), range(devices)):
    overlap = min((i + 1) * devices, (j + 1) * old) - max(i * devices, j * old)
    if overlap > 0:  # Zero times infinity is NaN.
      share = wide.dtype.type(overlap / old)
      wide[j] += share * np.asarray(x[i], wide.dtype)
  return wide.astype(x.dtype)
