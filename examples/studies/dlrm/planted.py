"""Click logs that are made up: ids follow Zipf's law, clicks a hidden model.

The hidden model is logistic. It looks at a few numbers, at the values of a few
categories and at one pair of them, so a model that learns these predicts
clicks, and none can do better than the hidden one. Other columns are noise.
Letters: N rows.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from examples.studies.dlrm.rows import CARDINALITIES
from examples.studies.dlrm.rows import CATEGORIES
from examples.studies.dlrm.rows import joined
from examples.studies.dlrm.rows import MISSING_CATEGORY
from examples.studies.dlrm.rows import MISSING_NUMBER
from examples.studies.dlrm.rows import NUMBERS
from examples.studies.dlrm.rows import Rows

_BLOCK = 1024  # Rows that are drawn at once.
_EXPONENT = 1.2  # Value k of a category is drawn in proportion to k ** -1.2.

_BIAS = -1.6
_NUMBER_WEIGHTS = {0: 0.5, 4: -0.3, 10: 0.4}
_CATEGORY_WEIGHTS = {2: 0.7, 3: 0.7, 5: 0.7, 9: 0.7, 15: 0.7}
_PAIR, _PAIR_WEIGHT = (0, 24), 0.9

# Missing in this share of the rows, as some of Criteo's columns are.
_MISSING_NUMBERS = {1: 0.2, 11: 0.7}
_MISSING_CATEGORIES = {18: 0.4, 21: 0.7, 25: 0.4}


class Planted:
  """An endless log, a function of its seed: no row is seen twice.

  Args:
    seed: Draws the hidden model and the rows.
  """

  def __init__(self, seed: int):
    self._seed = seed

  def rows(self, first: int, stop: int) -> Rows:
    """Returns rows `first` to `stop`: the same in any order of calls."""
    return self._rows(first, stop)[0]

  def logits(self, first: int, stop: int) -> np.ndarray:
    """Returns what the hidden model gives these rows, float64."""
    return self._rows(first, stop)[1]

  def held_out(self, count: int) -> Rows:
    """Returns the first `count` rows."""
    return self.rows(0, count)

  def batches(self, held: int, size: int, first_step: int) -> Iterator[Rows]:
    """Yields batches of `size` rows from `first_step` on, without the held."""
    first = held + first_step * size
    while True:
      yield self.rows(first, first + size)
      first += size

  def blocks(self, count: int) -> Iterator[Rows]:
    """Yields the first `count` rows in parts."""
    for first in range(0, count, _BLOCK):
      yield self.rows(first, min(first + _BLOCK, count))

  def _rows(self, first: int, stop: int) -> tuple[Rows, np.ndarray]:
    numbers = range(first // _BLOCK, -(-stop // _BLOCK))
    rows, logits = zip(*(self._block(number) for number in numbers))
    which = slice(first - _BLOCK * numbers.start, stop - _BLOCK * numbers.start)
    return joined(rows)[which], np.concatenate(logits)[which]

  def _block(self, number: int) -> tuple[Rows, np.ndarray]:
    rng = np.random.default_rng([self._seed, number])
    scores = rng.standard_normal((_BLOCK, NUMBERS))
    values = _zipf(rng.random((_BLOCK, CATEGORIES)))
    numbers = np.expm1(1.5 + scores).clip(0).astype(np.int64)
    hashes = _hash(values, self._seed)
    logits = self._logits(scores, hashes)
    labels = rng.random(_BLOCK) < 1 / (1 + np.exp(-logits))
    _drop(numbers, _MISSING_NUMBERS, MISSING_NUMBER, rng)
    _drop(hashes, _MISSING_CATEGORIES, MISSING_CATEGORY, rng)
    return Rows(labels.astype(np.int8), numbers, hashes), logits

  def _logits(self, scores: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    weights = _value_weights(hashes)
    logits = np.full(len(scores), _BIAS)
    for column, weight in _NUMBER_WEIGHTS.items():
      logits += weight * scores[:, column]
    for column, weight in _CATEGORY_WEIGHTS.items():
      logits += weight * weights[:, column]
    return logits + _PAIR_WEIGHT * np.prod(weights[:, _PAIR], axis=1)


def _zipf(uniform: np.ndarray) -> np.ndarray:
  """Maps [N, 26] in [0, 1) to values, 0 being the most frequent of a column."""
  # The inverse of the cumulative distribution of x ** -s between 1 and V + 1.
  power = 1 - _EXPONENT
  farthest = (np.array(CARDINALITIES) + 1.0) ** power
  x = (1 - uniform * (1 - farthest)) ** (1 / power)
  return np.minimum(x.astype(np.int64), CARDINALITIES) - 1


def _hash(values: np.ndarray, seed: int) -> np.ndarray:
  """Spreads each column's values over 32 bits; different ones stay different.

  One value that would read as a missing one is the exception.
  """
  columns = _mix(
    np.arange(CATEGORIES, dtype=np.uint32) + np.uint32(seed % 2**31)
  )
  hashes = _mix(values.astype(np.uint32) ^ columns)
  return np.where(hashes == MISSING_CATEGORY, np.uint32(1), hashes)


def _value_weights(hashes: np.ndarray) -> np.ndarray:
  """Returns a number for each value, with mean 0 and variance 1."""
  uniform = _mix(hashes ^ np.uint32(0x9E3779B9)) / 2**32
  return (uniform - 0.5) * np.sqrt(12)


def _mix(x: np.ndarray) -> np.ndarray:
  """Mixes 32 bits by the finalizer of MurmurHash3, a bijection."""
  x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
  return x ^ (x >> np.uint32(16))


def _drop(
  values: np.ndarray,
  shares: Mapping[int, float],
  missing: int,
  rng: np.random.Generator,
) -> None:
  for column, share in shares.items():
    values[rng.random(len(values)) < share, column] = missing
