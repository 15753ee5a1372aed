"""The values of a synchronized gradient, in float64 NumPy.

Values are small integers: any order of float32 additions gives the same sum, so
an element that differs is wrong, and not rounded.
"""

import numpy as np

# A mean over n devices is rounded once where n is no power of two.
_RELATIVE = 2.0**-22


def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
  """Integers in [-8, 8] as float32, none of them zero."""
  magnitude = rng.integers(1, 9, size=shape).astype(np.float32)
  return magnitude * rng.choice(np.array([-1, 1], np.float32), size=shape)


def row_sums(ids: np.ndarray, values: np.ndarray, rows: int) -> np.ndarray:
  """`[R, D] float64`: zeros with `values: [T, D]` added to rows `ids: [T]`."""
  total = np.zeros((rows, values.shape[1]))
  order = np.argsort(ids, kind="stable")
  unique, starts = np.unique(ids[order], return_index=True)
  total[unique] = np.add.reduceat(values[order].astype(np.float64), starts)
  return total


def count_wrong(got: np.ndarray, want: np.ndarray) -> int:
  """Elements of `got` that are not `want`, NaN included."""
  right = np.abs(got - want) <= _RELATIVE * np.abs(want)
  return int(got.size - np.count_nonzero(right))


def count_different(a: np.ndarray, b: np.ndarray) -> int:
  """Elements whose bits differ, float32."""
  return int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32)))
