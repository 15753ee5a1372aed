"""Rows of Criteo's click logs as arrays, and what a model sees of them.

Letters: N rows, 13 numbers and 26 categories of each.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

NUMBERS = 13

# Distinct values of the categorical columns in the training set of the Criteo
# Kaggle display advertising challenge, as DLRM publishes them.
CARDINALITIES = (
  (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683)
  + (8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18)
  + (15, 286181, 105, 142572)
)
CATEGORIES = len(CARDINALITIES)

MISSING_NUMBER = np.iinfo(np.int64).min
MISSING_CATEGORY = 0

# Smaller tables cost next to nothing: no table is scaled below so many rows.
_FEWEST_ROWS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
  """Holds some rows of a log.

  Attributes:
    labels: [N] int8, 1 for a click.
    numbers: [N, 13] int64, counts; `MISSING_NUMBER` where there is none.
    categories: [N, 26] uint32, hashes of values; `MISSING_CATEGORY` where there
      is none.
  """

  labels: np.ndarray
  numbers: np.ndarray
  categories: np.ndarray

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, which: slice) -> "Rows":
    return Rows(self.labels[which], self.numbers[which], self.categories[which])


def joined(parts: Sequence[Rows]) -> Rows:
  """Puts all parts one behind the other."""
  return Rows(
    np.concatenate([part.labels for part in parts]),
    np.concatenate([part.numbers for part in parts]),
    np.concatenate([part.categories for part in parts]),
  )


def table_rows(scale: float) -> tuple[int, ...]:
  """Returns the rows of 26 tables at `scale` times their cardinalities."""
  return tuple(
    max(min(size, _FEWEST_ROWS), round(size * scale)) for size in CARDINALITIES
  )


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
  """Holds what all devices see in one step, split along the first axes.

  Attributes:
    labels: [N] float32.
    numbers: [N, 13] float32, logarithms of counts.
    ids: [N, 26] int32, rows of the tables.
  """

  labels: np.ndarray
  numbers: np.ndarray
  ids: np.ndarray

  @property
  def arrays(self) -> tuple[np.ndarray, ...]:
    """The arrays that a step takes."""
    return self.labels, self.numbers, self.ids

  @property
  def size(self) -> int:
    """Rows of the log."""
    return len(self.labels)


def as_batch(rows: Rows, tables: Sequence[int]) -> Batch:
  """Returns what a model with `tables` rows in its tables sees of `rows`.

  A hash falls on a row modulo the table's size, so several values may share a
  row. Missing and negative numbers count as 0, a missing category is row 0.
  """
  counts = np.maximum(rows.numbers, 0)
  ids = rows.categories % np.array(tables, np.uint32)
  return Batch(
    rows.labels.astype(np.float32),
    np.log1p(counts).astype(np.float32),
    ids.astype(np.int32),
  )
