"""Sums over devices in float64 on the host, and how far rounding may lead.

Written without any of the code that exchanges rows, for `zenjax.check` judges
that code by it. Letters: `k` elements, `n` devices.
"""

import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

# Elements at a time: float64 copies of more would fill the cache, and memory.
CHUNK = 1 << 20


class HostRows(NamedTuple):
  """SparseRows on the host."""

  ids: np.ndarray  # [K]
  values: np.ndarray  # [K, D]
  num_rows: int

  def valid(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids in `[0, R)`, also of negative ones, and their values."""
    ids = np.where(self.ids < 0, self.ids + self.num_rows, self.ids)
    real = (ids >= 0) & (ids < self.num_rows)
    return ids[real], self.values[real]

  def between(self, start: int, end: int) -> "HostRows":
    """Returns those rows alone, as of a table that begins at `start`."""
    ids, values = self.valid()
    here = (ids >= start) & (ids < end)
    return HostRows(ids[here] - start, values[here], end - start)

  def dense(self) -> np.ndarray:
    """Returns the table, `[R, D] float64`."""
    ids, values = self.valid()
    table = np.zeros((self.num_rows, values.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
      np.add.at(table, ids, values.astype(np.float64))
    return table


def dense(x: Any) -> np.ndarray:
  """Returns an array or HostRows in float64."""
  if isinstance(x, HostRows):
    return x.dense()
  return x.astype(np.float64)


@dataclasses.dataclass
class Total:
  """The sum over all devices, `[k] float64` each."""

  value: np.ndarray
  size: np.ndarray  # of magnitudes that are finite
  terms: np.ndarray  # how many are not zero

  @classmethod
  def zeros(cls, shape: Any) -> "Total":
    return cls(*(np.zeros(shape) for _ in range(3)))

  def add(self, x: Any) -> None:
    """Adds an array of the same shape, or rows, of which some may be equal."""
    if isinstance(x, HostRows):
      ids, values = x.valid()
      add = lambda to, what: np.add.at(to, ids, what)
    else:
      values = x
      add = lambda to, what: np.add(to, what, out=to)
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
      add(self.value, values)
    add(self.size, np.where(np.isfinite(values), np.abs(values), 0.0))
    add(self.terms, values != 0)


class Verdict(NamedTuple):
  """The distance of values from what they must be.

  Attributes:
    absolute: The largest error.
    relative: The same as a part of the largest right value.
    share: The largest error as a part of what rounding may lead to; above 1
      something is wrong, infinite where NaN or Inf stand alone.
    wrong: Elements of which that is above 1.
    first: Where the first of these is, as text.
  """

  absolute: float = 0.0
  relative: float = 0.0
  share: float = 0.0
  wrong: int = 0
  first: str = ""

  @property
  def ok(self) -> bool:
    return self.wrong == 0

  def joined(self, other: "Verdict") -> "Verdict":
    """Returns the worse of both in everything."""
    return Verdict(
      max(self.absolute, other.absolute),
      max(self.relative, other.relative),
      max(self.share, other.share),
      self.wrong + other.wrong,
      self.first or other.first,
    )


def judged(
  got: np.ndarray, right: np.ndarray, allowed: np.ndarray, free: np.ndarray
) -> Verdict:
  """Compares arrays of one shape.

  Args:
    got: In any dtype.
    right: float64; NaN and Inf must be there in `got` too.
    allowed: How far `got` may be away.
    free: Where any value will do, as sums overflow.
  """
  got = np.asarray(got).astype(np.float64)
  with np.errstate(invalid="ignore", over="ignore"):
    error = np.abs(got - right)
    same = (got == right) | (np.isnan(got) & np.isnan(right)) | free
    error = np.where(same, 0.0, error)
    # A NaN or Inf on one side only.
    error = np.where(np.isfinite(error), error, np.inf)
    share = np.where(error > 0, error / np.maximum(allowed, 1e-300), 0.0)
  if not error.size:
    return Verdict()
  bad = ~(share <= 1)
  first = ""
  if bad.any():
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    first = f"{at}: {got[at]:.9g}, and not {right[at]:.9g}"
  finite = np.abs(right[np.isfinite(right)])
  largest = float(finite.max()) if finite.size else 0.0
  worst = float(error.max())
  relative = worst / largest if largest else (worst and np.inf)
  return Verdict(
    worst, float(relative), float(share.max()), int(bad.sum()), first
  )


def roundings(
  total: Total, devices: int, dtype: Any, mean: bool, times: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
  """Returns how far a sum may be from `total`, and where it may overflow.

  `m` terms take `m - 1` additions in float32 (float64 of float64), each of
  which rounds once; a mean divides, and 16-bit results round at the end. A
  backend may flush subnormals, once a term.

  Args:
    total: Of all terms.
    devices: `n`.
    dtype: Of the result.
    mean: Whether it is divided by `n`; the bound is that of the sum all the
      same.
    times: Further roundings of every term to `dtype`.
  """
  dtype = np.dtype(dtype)
  wide = np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
  unit, own = (float(ml_dtypes.finfo(d).eps) / 2 for d in (wide, dtype))
  tiny, least = (float(ml_dtypes.finfo(d).tiny) for d in (wide, dtype))
  with np.errstate(invalid="ignore", over="ignore"):
    # In float64 the total itself rounds as often.
    steps = (total.terms + 2) * (2 if wide.itemsize == 8 else 1)
    allowed = steps * unit * total.size * (1 + 4 * devices * unit)
    if own > unit:
      value = np.where(np.isfinite(total.value), np.abs(total.value), 0.0)
      allowed = allowed + own * value * (1 + 4 * own)
      allowed = allowed + (devices if mean else 1) * least * own
    allowed = allowed + times * own * total.size
    allowed = allowed + np.where(
      total.size > 0,
      devices * (devices + 1) * tiny + times * devices * least * own,
      0.0,
    )
    largest = float(ml_dtypes.finfo(dtype).max)
    # Parts of the sum may overflow, and meet an infinity of the other sign.
    free = total.size > float(ml_dtypes.finfo(wide).max)
    if own > unit:
      # On the edge of what the narrow dtype holds either side is right.
      result = np.abs(total.value) / (devices if mean else 1)
      free |= np.abs(result - largest) <= 2 * own * largest
  return allowed, free


def on_the_wire(total: Total, devices: int, wire: Any, levels: int):
  """Returns what rounding to a narrower dtype adds, on the way and back."""
  info = ml_dtypes.finfo(wire)
  unit, tiny = float(info.eps) / 2, float(info.tiny)
  with np.errstate(invalid="ignore", over="ignore"):
    each = (2 * unit + unit * unit) * levels
    allowed = each * (1 + each) * total.size
    allowed = allowed + np.where(total.size > 0, (devices + 1) * tiny, 0.0)
    free = total.size > float(info.max) * (1 - unit)
  return allowed, free
