"""Local gradients that a synchronization must get right.

`CASES` maps a name to `make(rng, n, rows, width, dtype) -> stack [n, R, D]`.
Every case fits every shape: where a shape is too small for an idea (a table of
one row has no disjoint ids), the case degenerates and stays legal.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

Make = Callable[[np.random.Generator, int, int, int, np.dtype], np.ndarray]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
DTYPES = (FLOAT32, BFLOAT16, FLOAT16)

CASES: dict[str, Make] = {}


def case(make: Make) -> Make:
  """Adds a generator to `CASES` under its own name."""
  CASES[make.__name__] = make
  return make


def normal(rng, n, rows, width, dtype) -> np.ndarray:
  """Ordinary gradients without a zero, `[n, R, D]`."""
  x = rng.standard_normal((n, rows, width)).astype(dtype)
  return np.where(x == 0, np.ones((), dtype), x)


def keep(stack, ids) -> np.ndarray:
  """`stack` with every row zeroed but `ids[i]` on device `i`."""
  result = np.zeros_like(stack)
  for device, kept in enumerate(ids):
    kept = np.asarray(kept, dtype=np.int64)
    result[device, kept] = stack[device, kept]
  return result


def draw(rng, rows, count) -> np.ndarray:
  """At least one and at most `rows` distinct ids."""
  return rng.choice(rows, size=min(rows, max(1, int(count))), replace=False)


def every_case(n, rows, width, dtype, seed=0):
  """Yields `(name, stack)` for all of `CASES`."""
  for index, (name, make) in enumerate(CASES.items()):
    rng = np.random.default_rng([seed, index, n, rows, width])
    stack = make(rng, n, rows, width, np.dtype(dtype))
    if stack.shape != (n, rows, width) or stack.dtype != dtype:
      raise TypeError(f"{name} made {stack.dtype}{stack.shape}")
    yield name, stack


# --- which rows on which device ---------------------------------------------

# `(rng, n, rows)` to the ids of each device, whose values are ordinary.
IDS = {
  "empty": lambda rng, n, rows: [[]] * n,
  "one_row_of_one_device": lambda rng, n, rows: [
    *([[]] * (n - 1)),
    draw(rng, rows, 1),
  ],
  "one_percent": lambda rng, n, rows: _each(rng, n, rows, rows / 100),
  "half": lambda rng, n, rows: _each(rng, n, rows, rows / 2),
  "all_rows": lambda rng, n, rows: [np.arange(rows)] * n,
  "same_ids": lambda rng, n, rows: [draw(rng, rows, rows / 10)] * n,
  "disjoint_ids": lambda rng, n, rows: np.array_split(rng.permutation(rows), n),
  "some_devices_empty": lambda rng, n, rows: [
    draw(rng, rows, rows / 5) if i % 2 else [] for i in range(n)
  ],
  "one_device_full": lambda rng, n, rows: [
    np.arange(rows if i == n - 1 else 0) for i in range(n)
  ],
  "one_device_has_ten_times": lambda rng, n, rows: [
    draw(rng, rows, rows / 2),
    *_each(rng, n - 1, rows, rows / 20),
  ],
  "first_row": lambda rng, n, rows: [[0]] * n,
  "last_row": lambda rng, n, rows: [[rows - 1]] * n,
  "contiguous": lambda rng, n, rows: [
    np.arange(start, start + max(1, rows // 4))
    for start in rng.integers(rows - max(1, rows // 4) + 1, size=n)
  ],
  # Ids that a plain `id mod n` would send to one owner.
  "every_nth_row": lambda rng, n, rows: (
    [np.arange(int(rng.integers(min(n, rows))), rows, n)] * n
  ),
  # One id in each word of a bitmap over rows.
  "every_32nth_row": lambda rng, n, rows: [np.arange(0, rows, 32)] * n,
}


def _each(rng, n, rows, count) -> list:
  return [draw(rng, rows, count) for _ in range(n)]


def _of_ids(name: str) -> Make:
  def make(rng, n, rows, width, dtype):
    return keep(normal(rng, n, rows, width, dtype), IDS[name](rng, n, rows))

  return make


CASES |= {name: _of_ids(name) for name in IDS}
disjoint_ids, half = CASES["disjoint_ids"], CASES["half"]


# --- values that a wrong mask or a wrong sum would lose ----------------------


@case
def rows_that_sum_to_zero(rng, n, rows, width, dtype):
  """Rows like [1, -1]: their float sum is zero, they are not."""
  signs = np.where(np.arange(width) % 2, -1.0, 1.0)
  scale = rng.integers(1, 9, size=(n, rows, 1))
  ids = [draw(rng, rows, rows / 5) for _ in range(n)]
  return keep((scale * signs).astype(dtype), ids)


@case
def devices_that_cancel(rng, n, rows, width, dtype):
  """Gradients whose sum over devices is exactly zero, but for odd `n`."""
  x = normal(rng, 1, rows, width, dtype)
  signs = np.where(np.arange(n) % 2, -1, 1).astype(dtype)
  return keep(x * signs[:, None, None], [draw(rng, rows, rows / 5)] * n)


@case
def one_element_a_row(rng, n, rows, width, dtype):
  """All but one column zero, another column in each row."""
  x = normal(rng, n, rows, width, dtype)
  column = rng.integers(width, size=(n, rows, 1))
  return np.where(np.arange(width) == column, x, np.zeros((), dtype))


@case
def last_column(rng, n, rows, width, dtype):
  x = np.zeros((n, rows, width), dtype)
  x[..., -1:] = normal(rng, n, rows, 1, dtype)
  return keep(x, [draw(rng, rows, rows / 5) for _ in range(n)])


@case
def subnormals(rng, n, rows, width, dtype):
  """Rows of subnormals of the leaf's dtype only."""
  x = _random_bits(rng, (n, rows, width), 1, largest_subnormal(dtype), dtype)
  return keep(x, [draw(rng, rows, rows / 5) for _ in range(n)])


@case
def subnormals_on_one_device(rng, n, rows, width, dtype):
  """A row that only one device sees, and only through its bits."""
  x = normal(rng, n, rows, width, dtype)
  x[0] = _random_bits(rng, (rows, width), 1, largest_subnormal(dtype), dtype)
  ids = [draw(rng, rows, rows / 10) for _ in range(n)]
  return keep(x, ids)


@case
def smallest_normals(rng, n, rows, width, dtype):
  """Sums and means around the edge of what is flushed."""
  edge = largest_subnormal(dtype) + 1
  x = _random_bits(rng, (n, rows, width), edge, 3 * edge, dtype)
  return keep(x, [draw(rng, rows, rows / 5) for _ in range(n)])


@case
def minus_zero(rng, n, rows, width, dtype):
  """All -0.0: nothing is to be sent."""
  del rng
  return np.full((n, rows, width), -0.0, dtype)


@case
def minus_zero_on_some_devices(rng, n, rows, width, dtype):
  """-0.0 on one device where another has +0.0: replicas stay bit-equal."""
  x = np.zeros((n, rows, width), dtype)
  x[: (n + 1) // 2] = np.full((rows, width), -0.0, dtype)
  ids = draw(rng, rows, rows / 10)
  x[:, ids] = normal(rng, n, len(ids), width, dtype)
  return x


@case
def nan(rng, n, rows, width, dtype):
  """A NaN on one device, of either sign; some rows hold nothing else."""
  return _sprinkle(rng, n, rows, width, dtype, [np.nan, -np.nan])


@case
def infinities(rng, n, rows, width, dtype):
  """Infinities of both signs: together on one element they make NaN."""
  return _sprinkle(rng, n, rows, width, dtype, [np.inf, -np.inf])


@case
def opposite_infinities(rng, n, rows, width, dtype):
  x = np.zeros((n, rows, width), dtype)
  ids = draw(rng, rows, rows / 10)
  x[0, ids] = np.inf
  x[-1, ids] = -np.inf
  return x


@case
def whole_rows_of_nan(rng, n, rows, width, dtype):
  x = normal(rng, n, rows, width, dtype)
  x[int(rng.integers(n)), draw(rng, rows, rows / 10)] = np.nan
  return x


@case
def large(rng, n, rows, width, dtype):
  """A partial sum in 16 bits overflows, the mean fits."""
  top = ml_dtypes.finfo(dtype).max
  x = rng.uniform(0.5, 0.95, (n, rows, width)) * float(top)
  return keep(x.astype(dtype), [draw(rng, rows, rows / 5)] * n)


@case
def large_of_both_signs(rng, n, rows, width, dtype):
  """Partial sums overflow 16 bits, the sum fits them."""
  top = float(ml_dtypes.finfo(dtype).max)
  x = rng.uniform(0.5, 0.95, (n, rows, width)) * top
  x[n // 2 :] *= -1
  return keep(x.astype(dtype), [draw(rng, rows, rows / 5)] * n)


@case
def small_beside_large(rng, n, rows, width, dtype):
  """Addends that a 16-bit accumulator would lose one by one."""
  x = np.full((n, rows, width), 2.0**-8, dtype)
  x[0] = 1.0
  return keep(x, [draw(rng, rows, rows / 5)] * n)


@case
def any_bits(rng, n, rows, width, dtype):
  """Uniform bit patterns: every exponent, every NaN."""
  x = _random_bits(rng, (n, rows, width), 0, None, dtype)
  return keep(x, [draw(rng, rows, rows / 3) for _ in range(n)])


# --- ids all on one owner ----------------------------------------------------


def one_owner(owner_of, count, rng, n, rows, width, dtype) -> np.ndarray:
  """Ids that all belong to some one owner, the same on every device.

  Args:
    owner_of: the owner of every row, `[R]` integers.
    count: how many ids.
    rng, n, rows, width, dtype: as for every case.
  """
  ids = np.flatnonzero(owner_of == rng.choice(owner_of))
  ids = rng.permutation(ids)[:count]
  return keep(normal(rng, n, rows, width, dtype), [ids] * n)


# --- bits --------------------------------------------------------------------


def word_of(dtype) -> np.dtype:
  return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def largest_subnormal(dtype) -> int:
  tiny = np.asarray(ml_dtypes.finfo(dtype).smallest_normal, dtype)
  return int(tiny.view(word_of(dtype))) - 1


def _random_bits(rng, shape, low, high, dtype) -> np.ndarray:
  """Floats of any sign whose magnitudes as integers are in [low, high]."""
  word = word_of(dtype)
  if high is None:
    high = int(np.iinfo(word).max) >> 1
  magnitude = rng.integers(low, high, shape, dtype=word, endpoint=True)
  sign = rng.integers(0, 2, shape, dtype=word) << (8 * word.itemsize - 1)
  return (magnitude | sign).astype(word).view(dtype)


def _sprinkle(rng, n, rows, width, dtype, values) -> np.ndarray:
  x = keep(
    normal(rng, n, rows, width, dtype),
    [draw(rng, rows, rows / 5) for _ in range(n)],
  )
  for value in values:
    at = (
      rng.integers(n, size=3),
      rng.integers(rows, size=3),
      rng.integers(width, size=3),
    )
    x[at] = np.asarray(value, dtype)
  return x
