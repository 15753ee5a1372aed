"""Moves what waits on each device to another number of devices."""

from typing import Any

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
      f"`state` keeps {x.dtype} residuals of {len(x)} devices, and their sums"
      f" for {devices} devices overflow. Use `residual_dtype=jnp.float32`."
    )
  return out
