"""What a synchronized gradient must be, computed without zenjax.

A stack holds the local gradients of all devices, `[n, R, D]`; a result holds
what each device got back, `[n, R, D]` again, so that every shard is compared.

The sum over devices is taken in float64. The contract leaves an implementation
these freedoms and no others:

- `k` devices that hold a nonzero value need `k - 1` additions in float32
  (float64 for float64 leaves), in any order, each rounding once: an error of
  at most `(k - 1) u sum(|x|)`, with `u = 2^-24`. A mean divides once (XLA
  multiplies by a rounded `1 / n`, in `lax.pmean` too), and a 16-bit leaf is
  rounded once at the end. Rounding is monotone, so the result lies between the
  rounded ends of the interval: nothing looser is accepted.
- A backend may flush subnormals: at most `n * 2^-126`, for each step of a sum
  flushes its input or its output, never both, and a mean divides by `n >= 2`
  before its own result may be flushed.
- The sign of a zero is free; that it is zero is not.
- Where the sum of magnitudes overflows the accumulator, `lax.pmean` overflows
  too (or not, by its order), and any value will do.
"""

from typing import Literal

import ml_dtypes
import numpy as np

Op = Literal["mean", "sum"]


def bits(x) -> np.ndarray:
  """The bit patterns of floats, as unsigned integers of the same shape."""
  x = np.asarray(x)
  return x.view(np.dtype(f"uint{8 * x.dtype.itemsize}"))


def nonzero_rows(stack) -> np.ndarray:
  """Rows with any bit set other than signs: `[n, R, D]` -> `[n, R]` bool."""
  words = bits(stack)
  magnitude = words.dtype.type(np.iinfo(words.dtype).max >> 1)
  return ((words & magnitude) != 0).any(axis=-1)


def exact(stack, op: Op = "mean") -> np.ndarray:
  """The float64 sum or mean over devices, `[n, ...]` -> `[...]`."""
  stack = np.asarray(stack)
  with np.errstate(invalid="ignore", over="ignore"):
    total = stack.astype(np.float64).sum(axis=0)
    return total / stack.shape[0] if op == "mean" else total


def bounds(
  stack, op: Op = "mean", wire_dtype=None
) -> tuple[np.ndarray, np.ndarray]:
  """Lowest and highest right value of every element, in the leaf's dtype.

  NaN in both means that the result must be NaN.

  Args:
    stack: local gradients, `[n, ...]`.
    op: what is taken over the devices.
    wire_dtype: the dtype that rows are rounded to on their way, if any.
  """
  stack = np.asarray(stack)
  dtype, n = stack.dtype, stack.shape[0]
  with np.errstate(invalid="ignore", over="ignore"):
    x = stack.astype(np.float64)
    size = np.abs(x).sum(axis=0)
    contributors = (x != 0).sum(axis=0)
    error = _rounding(dtype, n, size, contributors)
    if wire_dtype is not None:
      error += _wire_error(wire_dtype, n, size)
    if op == "mean":
      error = error / n + _quotient(dtype, n) * size / n
    error += np.where(size > 0, _flushed(dtype, n), 0.0)
    middle = exact(stack, op)
    # An infinite middle plus a finite error is that infinity.
    error = np.where(np.isfinite(error), error, 0.0)
    low = (middle - error).astype(dtype)
    high = (middle + error).astype(dtype)
  return low, high


def wrong(result, stack, op: Op = "mean", wire_dtype=None) -> np.ndarray:
  """Elements of any shard that break the contract, bool of result's shape."""
  result, stack = np.asarray(result), np.asarray(stack)
  low, high = bounds(stack, op, wire_dtype)
  with np.errstate(invalid="ignore"):
    low, high = low.astype(np.float64), high.astype(np.float64)
    got = result.astype(np.float64)
    fits = np.where(
      np.isnan(low)[None], np.isnan(got), (got >= low) & (got <= high)
    )
  return ~(fits | _may_overflow(stack)[None])


def check(
  result, stack, op: Op = "mean", wire_dtype=None, label: str = ""
) -> None:
  """Raises AssertionError unless every shard is right and all are bit-equal.

  Args:
    result: what each device got back, `[n, R, D]`.
    stack: the local gradients, `[n, R, D]`.
    op: what was asked for.
    wire_dtype: the lossy dtype on the wire, if one was asked for.
    label: named in the message.
  """
  result, stack = np.asarray(result), np.asarray(stack)
  if result.shape != stack.shape or result.dtype != stack.dtype:
    raise AssertionError(
      f"{label}: got {result.dtype}{list(result.shape)}, local gradients are"
      f" {stack.dtype}{list(stack.shape)}"
    )
  bad = wrong(result, stack, op, wire_dtype)
  if bad.any():
    raise AssertionError(_describe(bad, result, stack, op, wire_dtype, label))
  check_replicas(result, label)


def check_replicas(result, label: str = "") -> None:
  """Raises AssertionError unless all devices hold the same bits.

  Those of zeros included: replicas that differ in them part sooner or later.

  Args:
    result: what each device holds, `[n, ...]`.
    label: named in the message.
  """
  result = np.asarray(result)
  first = np.broadcast_to(result[:1], result.shape)
  check_same_bits(result, first, f"{label}: replicas")


def check_same_bits(a, b, label: str = "", *, any_nan: bool = False) -> None:
  """Raises AssertionError unless two arrays hold the same bits.

  Args:
    a: One array.
    b: The other.
    label: named in the message.
    any_nan: whether one NaN is as good as another: which of its bits come out
      of a sum, IEEE 754 leaves to the compiler.
  """
  a, b = np.asarray(a), np.asarray(b)
  if a.shape != b.shape or a.dtype != b.dtype:
    raise AssertionError(f"{label}: {a.dtype}{a.shape} != {b.dtype}{b.shape}")
  differs = bits(a) != bits(b)
  if any_nan:
    differs &= ~((a != a) & (b != b))
  if differs.any():
    where = tuple(int(i) for i in np.argwhere(differs)[0])
    raise AssertionError(
      f"{label}: {int(differs.sum())} elements differ; at {where}"
      f" {a[where]!r} != {b[where]!r}"
    )


def _accumulator(dtype) -> np.dtype:
  return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def _flushed(dtype, n: int) -> float:
  return n * float(np.finfo(_accumulator(dtype)).smallest_normal)


def _rounding(dtype, n, size, contributors) -> np.ndarray:
  roundings = np.maximum(contributors - 1, 0)
  if dtype.itemsize == 8:
    roundings = 2 * roundings  # the oracle's own sum rounds as often
  unit = float(np.finfo(_accumulator(dtype)).eps) / 2
  # The second factor covers products of roundings.
  return roundings * unit * size * (1 + 2 * n * unit)


def _quotient(dtype, n: int) -> float:
  """Roundings of a mean before the one that makes it the leaf's dtype."""
  unit = float(np.finfo(_accumulator(dtype)).eps) / 2
  reciprocal = 0 if n & (n - 1) == 0 else 1
  before_narrowing = 1 if dtype.itemsize == 2 else 0
  return (reciprocal + before_narrowing) * unit


def _wire_error(wire_dtype, n, size) -> np.ndarray:
  """Rows are rounded to `wire_dtype` on the way out and on the way back."""
  info = ml_dtypes.finfo(wire_dtype)
  unit = float(info.eps) / 2
  tiny = float(info.smallest_normal)
  return (2 * unit + unit * unit) * size + np.where(
    size > 0, (n + 1) * tiny, 0.0
  )


def _may_overflow(stack) -> np.ndarray:
  """Where finite magnitudes already add up to more than the accumulator."""
  with np.errstate(invalid="ignore", over="ignore"):
    x = np.abs(stack.astype(np.float64))
    finite = np.where(np.isfinite(x), x, 0.0).sum(axis=0)
  largest = float(np.finfo(_accumulator(stack.dtype)).max)
  return ~np.isfinite(finite) | (finite > largest)


def _describe(bad, result, stack, op, wire_dtype, label) -> str:
  low, high = bounds(stack, op, wire_dtype)
  lines = [f"{label}: {int(bad.sum())} of {bad.size} elements are wrong"]
  for device, *place in np.argwhere(bad)[:4]:
    at = tuple(int(i) for i in place)
    terms = [float(v) for v in stack[(slice(None), *at)]]
    lines.append(
      f"  device {int(device)}, element {at}: got"
      f" {float(result[(device, *at)])!r}, right is {float(low[at])!r} to"
      f" {float(high[at])!r}, the {op} of {terms}"
    )
  return "\n".join(lines)
