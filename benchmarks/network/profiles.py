"""What a workload's gradients are, counted: what predictions are made of."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from benchmarks.workloads import Workload
import zenjax
from zenjax._src.core.partition import Layout
from zenjax._src.schemes.buffer_sizes import Table


def table(workload: Workload, unit: int | None) -> Table:
  """The workload's table, or the same in blocks of `unit` elements."""
  rows, width = workload.rows, workload.width
  if unit is not None:
    rows, width = -(-rows * width // unit), unit
  dtype = jnp.dtype(jnp.float32)
  return Table(
    name="table", num_rows=rows, width=width, dtype=dtype, wire_dtype=dtype
  )


def profile(
  workload: Workload, n: int, unit: int | None, batches: int
) -> zenjax.planner.Profile:
  """Mean over the batches that were timed, of rows or of blocks."""
  num_rows = table(workload, unit).num_rows
  slots = Layout(num_rows=num_rows, groups=n, contiguous=True).slots
  found = []
  for seed in range(batches):
    ids = [np.unique(i) for i in workloads.ids(workload, n, seed)]
    if unit is not None:
      ids = [_blocks(i, workload.width, unit) for i in ids]
    union = np.unique(np.concatenate(ids))
    rows = float(np.mean([len(i) for i in ids]))
    fullest = max(map(len, ids))
    pushed = max(_fullest_range(i, slots, n) for i in ids) * n / fullest
    pulled = _fullest_range(union, slots, n) * n / len(union)
    found.append((rows, fullest, len(union), pushed, pulled))
  rows, fullest, union, pushed, pulled = np.mean(found, axis=0)
  return zenjax.planner.Profile(
    rows=rows, fullest=fullest, union=union, devices=n, skew=(pushed, pulled)
  )


def _blocks(ids: np.ndarray, width: int, unit: int) -> np.ndarray:
  """Blocks of the flat table in which these rows have elements."""
  first, last = ids * width // unit, ((ids + 1) * width - 1) // unit
  most = int((last - first).max(initial=0))
  spans: Sequence[np.ndarray] = [
    np.minimum(first + k, last) for k in range(most + 1)
  ]
  return np.unique(np.concatenate(spans))


def _fullest_range(ids: np.ndarray, slots: int, n: int) -> int:
  return int(np.bincount(ids // slots, minlength=n).max())
