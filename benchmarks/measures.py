"""What the Zen paper measures of sparse gradients, by its definitions.

NumPy only, and exact: counts of rows, divided once. A set is the ascending ids
of the rows that are not zero on one device in one step. Letters: `n` devices,
`R` rows, `P` parts, `I_i` the set of device `i`, `U` the union.
"""

from collections.abc import Sequence

import numpy as np

Sets = Sequence[np.ndarray]

# Row counts are summed by a matrix product of zeros and ones in float32, which
# is exact up to 2**24; so many elements at a time also fit in memory.
_ELEMENTS = 1 << 24


def overlaps(first: Sets, second: Sets | None = None) -> np.ndarray:
  """`|I n J| / min(|I|, |J|)` of pairs of sets that hold a row (definition 3).

  Args:
    first: Sets of one step.
    second: Those of another: every pair of one of each. By default the pairs
      within `first`.
  """
  common = _common(first, first if second is None else second)
  sizes = [len(s) for s in first], [len(s) for s in second or first]
  smaller = np.minimum.outer(*sizes)
  wanted = smaller > 0
  if second is None:
    wanted &= np.triu(np.ones_like(wanted), 1)
  return common[wanted] / smaller[wanted]


def _common(first: Sets, second: Sets) -> np.ndarray:
  """`[len(first), len(second)]` numbers of common rows."""
  total = np.zeros((len(first), len(second)))
  ends = [int(s[-1]) + 1 for s in (*first, *second) if len(s)]
  step = max(1, _ELEMENTS // max(len(first), len(second), 1))
  for low in range(0, max(ends, default=0), step):
    high = min(low + step, max(ends))
    a = _members(first, low, high)
    b = a if second is first else _members(second, low, high)
    total += a @ b.T
  return total


def _members(sets, low, high):
  members = np.zeros((len(sets), high - low), np.float32)
  for row, ids in zip(members, sets):
    start, stop = np.searchsorted(ids, [low, high])
    row[ids[start:stop].astype(np.int64) - low] = 1
  return members


def union(sets: Sets, rows: int) -> np.ndarray:
  """`U`, ascending."""
  touched = np.zeros(rows, bool)
  for ids in sets:
    touched[ids] = True
  return np.flatnonzero(touched)


def boundaries(rows: int, parts: int) -> np.ndarray:
  """`[P + 1]`: where `P` parts of `R` rows begin and end, evenly cut."""
  return np.arange(parts + 1) * rows // parts


def skew(ids: np.ndarray, rows: int, parts: int) -> tuple[float, float]:
  """The densest part's density over that of the table (definition 5).

  Args:
    ids: One set, not empty.
    rows: `R`.
    parts: `P`, at most `R`.

  Returns:
    That ratio, and the share of the set that lies in the first part.
  """
  edges = boundaries(rows, parts)
  counts = np.diff(np.searchsorted(ids, edges))
  densest = np.max(counts / np.diff(edges))
  return float(densest / (len(ids) / rows)), float(counts[0] / len(ids))


def loads(sets: Sets, owner: np.ndarray, owners: int) -> np.ndarray:
  """`[len(sets), owners]`: how many rows of each set each owner has.

  Args:
    sets: The sets.
    owner: `[R]`, who owns a row.
    owners: How many there are.
  """
  return np.array([np.bincount(owner[i], minlength=owners) for i in sets])


def push_imbalance(pushed: np.ndarray) -> float:
  """`max_ij n |I_i^j| / |I_i|` (definition 8); 1 where nothing is sent.

  Args:
    pushed: `[n, n]`, rows that device `i` sends owner `j`.
  """
  sent = pushed.sum(axis=1)
  some = sent > 0
  if not some.any():
    return 1.0
  return float(np.max(pushed.shape[1] * pushed[some].max(axis=1) / sent[some]))


def pull_imbalance(pulled: np.ndarray) -> float:
  """`max_j n |U_j| / |U|` (definition 8); 1 where nothing is sent.

  Args:
    pulled: `[n]`, rows of the union that owner `j` has.
  """
  total = pulled.sum()
  return float(len(pulled) * pulled.max() / total) if total else 1.0


def push_paid(pushed: np.ndarray) -> float:
  """`n max_ij |I_i^j| / mean_i |I_i|`: buffers of one size for all pairs.

  More than `push_imbalance` where the device with most rows decides.
  """
  mean = pushed.sum() / len(pushed)
  return float(pushed.shape[1] * pushed.max() / mean) if mean else 1.0
