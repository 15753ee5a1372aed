"""A float64 model of rows that are rounded when they are sent."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# Half a level of a row's largest magnitude, or of an element's own.
HALF_LEVEL = {
  "int8": 1 / 254,
  "int4": 1 / 14,
  "float8_e4m3fn": 1 / 16,
  "float8_e5m2": 1 / 8,
  "float16": 1 / 2048,
}
SCALED = tuple(HALF_LEVEL)


def rounded(rows: np.ndarray, dtype: Any, groups: int = 1) -> np.ndarray:
  """Returns rows `[.., D]` as they arrive.

  Args:
    rows: The rows, in float64.
    dtype: What they are sent in, without the range of float32.
    groups: Column groups, each with a scale.
  """
  dtype, width = jnp.dtype(dtype), rows.shape[-1]
  block = -(-width // groups)
  pads = [(0, 0)] * (rows.ndim - 1) + [(0, block * groups - width)]
  x = np.pad(rows, pads).reshape(*rows.shape[:-1], groups, block)
  largest = np.abs(x).max(axis=-1, keepdims=True)
  if jnp.issubdtype(dtype, jnp.integer):
    scale = largest / jnp.iinfo(dtype).max
    arrived = np.rint(x / np.where(scale > 0, scale, 1)) * scale
  else:
    scale = 2.0 ** (np.frexp(largest)[1] - jnp.finfo(dtype).maxexp + 1)
    arrived = (x / scale).astype(dtype).astype(np.float64) * scale
  lost = ~np.isfinite(x).all(axis=-1, keepdims=True)
  arrived = np.where(lost, np.nan, arrived)
  return arrived.reshape(*rows.shape[:-1], -1)[..., :width]


def mean(
  stack: np.ndarray,
  dtype: Any,
  *,
  groups: int = 1,
  pushed: bool = True,
  pulled: bool = True,
) -> np.ndarray:
  """Returns the mean of `[n, R, D]` over devices, rounded as it is sent.

  Args:
    stack: What each device has.
    dtype: What rows are sent in.
    groups: Column groups.
    pushed: Whether rows are rounded before they are added up.
    pulled: Whether the mean is sent again.
  """
  with np.errstate(invalid="ignore"):
    sent = stack.astype(np.float64)
    sent = rounded(sent, dtype, groups) if pushed else sent
    total = sent.mean(axis=0)
    return rounded(total, dtype, groups) if pulled else total


def agree(got: Any, want: np.ndarray, levels: float, few: float = 2e-3) -> None:
  """Compares rows with the model.

  Sums in float32 put a few numbers on the other side of the middle between two
  levels, so these may differ by a level.

  Args:
    got: Rows `[.., D]`.
    want: The model's.
    levels: The distance of levels, over the largest magnitude of a row.
    few: Which part of the numbers may differ by a level.
  """
  got = np.asarray(got, np.float64)
  lost = np.isnan(want)
  np.testing.assert_array_equal(np.isnan(got), np.broadcast_to(lost, got.shape))
  size = np.abs(np.where(lost, 0, want)).max(axis=-1, keepdims=True)
  off = np.where(lost, 0, np.abs(got - want))
  assert (off <= 1.01 * levels * size).all(), (off / size).max()
  assert (off > 2e-6 * size).mean() <= few, (off > 2e-6 * size).mean()


def sparse(
  rng: np.random.Generator, n: int, shape: Sequence[int], rows: int
) -> np.ndarray:
  """Returns `[n, R, D]` with a few rows of very different sizes."""
  stack = np.zeros((n, *shape), np.float32)
  for local in stack:
    ids = rng.choice(shape[0] // 2, rows, replace=False)
    sizes = 2.0 ** rng.integers(-60, 60, (rows, 1))
    local[ids] = rng.standard_normal((rows, shape[1])) * sizes
  return stack
