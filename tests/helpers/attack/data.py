"""Drawn gradients: ids, densities, values and what is special in them."""

from typing import NamedTuple

import ml_dtypes
import numpy as np


class Rows(NamedTuple):
  """Look-ups of every device; ids out of the table are padding."""

  ids: np.ndarray  # [n, K] int32
  values: np.ndarray  # [n, K, D]


def stack(rng, n: int, rows: int, width: int, dtype) -> np.ndarray:
  """Local gradients of all devices, `[n, R, D]`."""
  x = np.zeros((n, rows, width), dtype)
  pool = _ids(rng, rows)
  apart = rng.random() < 0.15
  for device in range(n):
    ids = pool[device::n] if apart else _of_device(rng, rows, pool)
    x[device, ids] = values(rng, (len(ids), width), dtype)
  return _with_specials(rng, x)


def rows(rng, n: int, count: int, num_rows: int, width: int, dtype) -> Rows:
  """Look-ups with equal ids, negative ones and padding.

  Now and then no row is looked up twice: the union is as large as it can be.
  """
  ids = np.empty((n, count), np.int64)
  pool = _ids(rng, num_rows, 4 * count)
  apart = _distinct(rng, num_rows, n * count) if rng.random() < 0.3 else None
  for device in range(n):
    if apart is not None:
      ids[device] = num_rows
      own = apart[device::n]
      ids[device, : len(own)] = own
    elif len(pool) and rng.random() < 0.8:
      ids[device] = rng.choice(pool, count)
    else:
      ids[device] = rng.integers(0, num_rows, count)
    some = rng.random(count) < rng.choice([0, 0, 0.1, 0.5, 1])
    ids[device, some] = num_rows  # padding
    behind = rng.random(count) < rng.choice([0, 0, 0.2])
    inside = behind & (ids[device] < num_rows)
    ids[device, inside] -= num_rows  # counts from the end
  x = _with_specials(rng, values(rng, (n, count, width), dtype))
  return Rows(ids.astype(np.int32), x)


def values(rng, shape, dtype) -> np.ndarray:
  """Of one magnitude, of many, of few bits that cancel, or any bits at all."""
  kind = rng.integers(5)
  if kind == 0:
    words = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    high = np.iinfo(words).max
    return rng.integers(0, high, shape, words, endpoint=True).view(dtype)
  x = rng.standard_normal(shape)
  if kind == 1:
    x *= 2.0 ** rng.integers(-20, 12, shape)
  if kind == 2:
    x = rng.integers(-3, 4, shape)
  if kind == 3:
    x *= 2.0 ** rng.choice([-120, -14, 10])
  return x.astype(dtype)


def integers(rng, n: int, rows: int, width: int, dtype) -> np.ndarray:
  """Small ones, which add and divide by powers of two without rounding."""
  x = np.zeros((n, rows, width), dtype)
  pool = _ids(rng, rows)
  for device in range(n):
    ids = _of_device(rng, rows, pool)
    x[device, ids] = rng.integers(-4, 5, (len(ids), width)).astype(dtype)
  return x


def _of_device(rng, rows: int, pool: np.ndarray) -> np.ndarray:
  """Distinct ids: none, all, of a pool that devices share, or any."""
  kind = rng.integers(8)
  if kind == 0:
    return np.zeros(0, int)
  if kind == 1 and rows <= 1 << 16:
    return np.arange(rows)
  if kind <= 5 and len(pool):
    return pool[rng.random(len(pool)) < rng.choice([0.1, 0.5, 1])]
  most = min(rows, 1 << 12)
  count = int(most ** rng.random())
  return np.unique(rng.integers(0, rows, count))


def _distinct(rng, rows: int, count: int) -> np.ndarray:
  """As many distinct ids, or all: neighbours, or from anywhere."""
  count = min(rows, count)
  if rng.random() < 0.5:
    return rng.integers(0, rows - count + 1) + rng.permutation(count)
  if rows <= 1 << 16:
    return rng.permutation(rows)[:count]
  return np.unique(rng.integers(0, rows, count))


def _ids(rng, rows: int, count: int | None = None) -> np.ndarray:
  """Distinct ids that follow a pattern."""
  most = min(rows, count or 1 << 12)
  few = int(most ** rng.random())
  count = few if rng.random() < 0.5 else int(rng.integers(1, most + 1))
  kind = rng.integers(6)
  if kind == 0:  # the first, the last, and neighbours of powers of two
    edges = 2 ** np.arange(0, 31)[:, None] + np.arange(-1, 2)
    ends = [0, 1, rows - 2, rows - 1]
    ids = np.concatenate([edges.reshape(-1), ends])
  elif kind == 1:
    ids = rng.integers(0, rows) + np.arange(count)
  elif kind == 2:
    stride = int(rng.choice([2, 3, 8, 31, 32, 33, 256]))
    ids = rng.integers(0, rows) + stride * np.arange(count)
  elif kind == 3:
    ids = rng.zipf(1.2, count)
  elif kind == 4:
    ids = rng.integers(0, rows, 1)
  else:
    ids = rng.integers(0, rows, count)
  return np.unique(ids[(ids >= 0) & (ids < rows)])


def _with_specials(rng, x: np.ndarray) -> np.ndarray:
  """A few NaN, Inf, -0.0, subnormals and largest numbers, or none."""
  if not x.size or rng.random() < 0.5:
    return x
  info = ml_dtypes.finfo(x.dtype)
  special = np.array(
    [
      np.nan,
      np.inf,
      -np.inf,
      -0.0,
      float(info.smallest_subnormal),
      -float(info.tiny),
      float(info.max),
      -float(info.max),
    ]
  ).astype(x.dtype)
  flat = x.reshape(-1)
  at = rng.integers(0, flat.size, int(rng.integers(1, 9)))
  flat[at] = rng.choice(special, len(at))
  if rng.random() < 0.3:  # rows of nothing but -0.0
    row = x.reshape(-1, x.shape[-1])
    row[rng.integers(0, len(row), 3)] = -0.0
  return x
