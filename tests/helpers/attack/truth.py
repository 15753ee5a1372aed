"""What must come out, in float64 and without zenjax."""

import numpy as np
import oracle

from .data import Rows

U = 2.0**-24
TINY = 2.0**-126


def check_mean(stack, result, op: oracle.Op = "mean", wire_dtype=None) -> None:
  """Results of all devices, `[n, ...]`, of local gradients `[n, ...]`."""
  oracle.check(result, stack, op, wire_dtype)


def check_rows(
  given: Rows, num_rows: int, ids, values, op: oracle.Op = "mean"
) -> None:
  """Rows that came out, `[n, U]` and `[n, U, D]`, of float32 look-ups.

  Each row that was looked up, once, whatever its sum, and `num_rows`.
  """
  same_everywhere(ids, "ids")
  same_everywhere(values, "values")
  ids, values = ids[0].astype(np.int64), values[0].astype(np.float64)
  real = ids < num_rows
  assert (ids >= 0).all() and (ids <= num_rows).all(), "an id is out of range"
  assert not values[~real].any(), "padding has values"
  ids, values = ids[real], values[real]
  assert len(np.unique(ids)) == len(ids), "a row came out twice"
  n = len(given.ids)
  at = given.ids.astype(np.int64).reshape(-1)
  at = np.where(at < 0, at + num_rows, at)
  x = given.values.reshape(-1, given.values.shape[-1]).astype(np.float64)
  known = (at >= 0) & (at < num_rows)
  union, place = np.unique(at[known], return_inverse=True)
  assert np.isin(ids, union).all(), "a row came out that nobody looked up"
  assert len(ids) == len(union), "a row that was looked up did not come out"
  total, size, terms = (np.zeros((len(union), x.shape[1])) for _ in range(3))
  np.add.at(total, place, x[known])
  np.add.at(size, place, finite(x[known]))
  np.add.at(terms, place, x[known] != 0)
  got = values[np.argsort(ids)]
  if op == "mean":
    got = got * n
  within(got, total, (terms + 2) * U * size * (1 + 8 * n * U), size, n)


def within(got, total, allowed, size, n: int) -> None:
  """`got` is `total` up to `allowed`; sums that overflow may be anything.

  `size` is the sum of finite magnitudes: one that overflows by itself may meet
  an infinity of the other sign.
  """
  allowed = allowed + np.where(size > 0, n * (n + 1) * TINY, 0)
  free = size > float(np.finfo(np.float32).max)
  same = (got == total) | (np.isnan(got) & np.isnan(total)) | free
  wrong = ~same & ~(np.abs(got - total) <= allowed)
  if wrong.any():
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise AssertionError(
      f"{int(wrong.sum())} elements are wrong; at {at} the sum is"
      f" {got[at]!r}, right is {total[at]!r} +- {allowed[at]:.3g}"
    )


def check_kept(given, came, out, waits, scale: int, dtype) -> None:
  """What came out and waits is what went in and waited, over all devices.

  Args:
    given: Local gradients, `[n, ...]`.
    came: What waited before, `[n, ...]`.
    out: Of every device, `[n, ...]`.
    waits: What waits now, `[n, ...]`.
    scale: `n` of a mean, 1 of a sum.
    dtype: In which all of it is kept.
  """
  same_everywhere(out, "out")
  n = len(given)
  wide = lambda x: np.asarray(x).astype(np.float64)
  total = wide(given).sum(axis=0) + wide(came).sum(axis=0)
  size = (finite(wide(given)) + finite(wide(came))).sum(axis=0)
  got = wide(out)[0] * scale + wide(waits).sum(axis=0)
  unit = float(np.finfo(np.float32).eps if dtype == np.float32 else 2.0**-8)
  within(got, total, (n + 4) * unit * size, size, n)


def finite(x):
  """Magnitudes, and zero in the place of NaN and Inf."""
  return np.where(np.isfinite(x), np.abs(x), 0.0)


def same_everywhere(copies, what: str) -> None:
  """All devices hold the same bits."""
  words = [np.ascontiguousarray(copy).tobytes() for copy in copies]
  assert len(set(words)) == 1, f"{what}: replicas differ"
