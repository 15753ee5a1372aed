"""Where the ids of a workload come from. NumPy only: tests draw them too.

A source yields the rows that each of `n` devices looks up in one step. Rows are
sorted by frequency, row 0 the most frequent, as vocabularies usually are.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Protocol

import numpy as np


class Source(Protocol):
  def draw(
    self, rows: int, n: int, rng: np.random.Generator
  ) -> list[np.ndarray]:
    """The look-ups of each device, `n` arrays `[T]` int32 in `[0, rows)`."""
    ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
  """Independent look-ups from one Zipf-Mandelbrot distribution.

  The probability of row `k` is the integral of `(x + shift) ** -exponent` over
  `[k, k + 1]`: the usual formula smoothed, with an inverse in closed form, so
  that a table of ten million rows needs no table of probabilities.

  Attributes:
    density: Distinct rows of a device over the rows of the table. Exact: what
      varies between devices is which rows, and how often.
    exponent: Decides how the union grows with the number of devices.
    shift: Flattens the head: fewer look-ups repeat the very first rows. Hardly
      changes the union.
  """

  density: float
  exponent: float
  shift: float = 2.7  # Mandelbrot's value for words

  def draw(self, rows, n, rng):
    distinct = max(1, round(self.density * rows))
    lookups = _expected_lookups(distinct, rows, self.exponent, self.shift)
    sample = functools.partial(zipf, rng, rows, self.exponent, self.shift)
    return [_until_distinct(sample, distinct, lookups, rng) for _ in range(n)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HashedFields:
  """Fields with vocabularies of their own, hashed into one table.

  Attributes:
    cardinalities: Size of each field's vocabulary.
    global_batch: Examples of all devices together; one look-up a field each.
    exponent: Zipf exponent of every field.
    shift: Zipf-Mandelbrot shift of every field.
  """

  cardinalities: tuple[int, ...]
  global_batch: int
  exponent: float
  shift: float

  def draw(self, rows, n, rng):
    batch = self.global_batch // n
    return [
      np.concatenate(
        [
          self._field(field, size, rows, batch, rng)
          for field, size in enumerate(self.cardinalities)
        ]
      )
      for _ in range(n)
    ]

  def _field(self, field, size, rows, batch, rng):
    values = zipf(rng, size, self.exponent, self.shift, batch)
    mixed = _fmix64(values.astype(np.uint64) + np.uint64(field << 40))
    return (mixed % np.uint64(rows)).astype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
  """Contiguous text: every device reads `tokens` ids from a place of its own.

  Attributes:
    load: Returns the ids of the whole corpus, `[N]`.
    tokens: Ids read by a device in one step.
  """

  load: Callable[[], np.ndarray]
  tokens: int

  def draw(self, rows, n, rng):
    corpus = self.load()
    if len(corpus) < self.tokens:
      raise ValueError(
        f"`tokens` must not exceed the corpus, got {self.tokens} tokens a"
        f" device from {len(corpus)}: take fewer tokens or a longer text."
      )
    starts = rng.integers(0, len(corpus) - self.tokens + 1, size=n)
    return [corpus[start : start + self.tokens] for start in starts]


@dataclasses.dataclass(frozen=True, slots=True)
class EveryRow:
  """Every device looks up every row once: density 100 %."""

  def draw(self, rows, n, rng):
    return [rng.permutation(rows).astype(np.int32) for _ in range(n)]


def zipf(
  rng: np.random.Generator,
  rows: int,
  exponent: float,
  shift: float,
  size: int,
) -> np.ndarray:
  """Samples `[size]` int64 of a Zipf-Mandelbrot distribution over `rows`."""
  a, b = _power(np.array([shift, rows + shift]), exponent)
  x = _inverse_power(a + rng.random(size) * (b - a), exponent) - shift
  return np.clip(x.astype(np.int64), 0, rows - 1)


def _power(x, exponent):
  # The antiderivative of x ** -exponent, but for a constant factor.
  return np.log(x) if exponent == 1 else x ** (1 - exponent)


def _inverse_power(y, exponent):
  return np.exp(y) if exponent == 1 else y ** (1 / (1 - exponent))


@functools.lru_cache(maxsize=64)
def _expected_lookups(distinct, rows, exponent, shift):
  """Look-ups after which `distinct` different rows are expected."""
  # Row k is missed by T look-ups with probability exp(-T p_k), about. On a
  # geometric grid of rows 4,096 cells are as good as ten million.
  edges = np.unique(np.geomspace(1, rows + 1, 4096).astype(np.int64)) - 1
  count = np.diff(edges)
  mass = np.diff(_power(edges + shift, exponent))
  p = mass / mass.sum() / count
  low, high = float(distinct), 1e12
  while high / low > 1 + 1e-6:
    middle = np.sqrt(low * high)
    seen = -(count * np.expm1(-middle * p)).sum()
    low, high = (middle, high) if seen < distinct else (low, middle)
  return int(np.ceil(high))


def _until_distinct(sample, distinct, lookups, rng):
  """Draws until `distinct` rows were seen; returns exactly `lookups` ids."""
  ids = sample(lookups)
  while True:
    _, first = np.unique(ids, return_index=True)
    if len(first) >= distinct:
      break
    ids = np.concatenate([ids, sample(max(64, lookups // 8))])
  first = np.sort(first)[:distinct]
  stream = ids[: first[-1] + 1]
  # Shapes are static under jit, so every device makes the same number of
  # look-ups: repeated ones are dropped if in excess, and fill up if lacking.
  repeats = np.delete(stream, first)[: lookups - distinct]
  missing = lookups - distinct - len(repeats)
  filled = [stream[first], repeats, rng.choice(stream, missing)]
  return rng.permutation(np.concatenate(filled)).astype(np.int32)


def _fmix64(x):
  # Finalizer of MurmurHash3 (Austin Appleby, public domain), 64 bits.
  x = x ^ (x >> np.uint64(33))
  x = x * np.uint64(0xFF51AFD7ED558CCD)
  x = x ^ (x >> np.uint64(33))
  x = x * np.uint64(0xC4CEB9FE1A85EC53)
  return x ^ (x >> np.uint64(33))
