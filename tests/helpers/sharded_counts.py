"""What a step counts of sharded tables, once more in NumPy.

Letters: `n` owners, `m` devices that share a batch, `K` look-ups of a device.
"""

from collections.abc import Mapping
import math
from typing import Any

from forced import sharded_tables
import jax.numpy as jnp
import numpy as np


def counted(
  tables: Mapping[str, Any],
  look_ups: Mapping[str, np.ndarray],
  gradients: Mapping[str, np.ndarray] | None = None,
  *,
  norms: int = 0,
) -> dict[str, dict[str, float]]:
  """Returns the numbers of `zenjax.stats` of tables that travel together.

  Args:
    tables: Sharded tables by name, of `[R, D]` in float32.
    look_ups: Ids `[m, K]` of each device, the last of which are those of the
      fastest axis; those below 0 or from `R` on are of no row.
    gradients: Ids of gradient rows, if they are not the same.
    norms: How often owners must agree on a value of all rows.
  """
  found: dict[str, dict[str, float]] = {}
  pairs, rooms, slots = {}, {}, {}
  for name, table in tables.items():
    ids, n, rows = look_ups[name], table.devices, table.num_rows
    group, slot = map(np.asarray, table.layout.place(jnp.arange(rows)))
    own = [np.unique(x[(x >= 0) & (x < rows)]) for x in ids]
    slots[name] = [
      [np.sort(slot[x[group[x] == p]]) for p in range(n)] for x in own
    ]
    pairs[name] = np.array([list(map(len, x)) for x in slots[name]])
    moved = np.unique((gradients or look_ups)[name])
    union = moved[(moved >= 0) & (moved < rows)]
    at_owner = np.bincount(group[union], minlength=n)
    mean = np.mean([len(x) for x in own])
    k = ids.shape[1]
    rooms[name] = sharded_tables._rooms(k, table.layout)
    found[name] = {
      "num_rows": rows,
      "width": table.shape[1],
      "devices": len(ids),
      "owners": n,
      "density": mean / rows,
      "union_density": len(union) / rows,
      "growth": len(union) / mean,
      "push_imbalance": pairs[name].max() * n / mean,
      "pull_imbalance": at_owner.max() * n / len(union),
      "dense_bytes": 8 * (len(ids) - 1) / len(ids) * rows * table.shape[1],
    }
  n = next(iter(tables.values())).devices
  levels = len(sharded_tables._PARTS)
  level = max(
    sum(room < pairs[name].max() for room in rooms[name]) for name in tables
  )
  fits = level < levels or n == 1
  fetches = max(
    math.ceil(pairs[name].max() / rooms[name][-1]) for name in tables
  )
  fetches = 1 if fits else fetches
  ends = {name: tables[name].layout.slots for name in tables}
  pushes = max(_pushes(slots[x], rooms[x][-1], ends[x]) for x in tables)
  pushes = 1 if fits else pushes
  exchanges = 1 + (pushes - 1) * (1 + norms)
  for name, own in found.items():
    k, width = look_ups[name].shape[1], int(own["width"])
    room, largest = rooms[name][min(level, levels - 1)], rooms[name][-1]
    ids = n * (largest + 3)  # Each device tells all three counts.
    words = ids + n * room * width
    words += (fetches - 1) * (ids + n * largest * width)
    words += exchanges * n * room * (1 + width)
    ends_words = 0 if fits else exchanges  # Where a push ends, and all of it.
    got = (words + n * ends_words) * (n - 1) / n + (n - 1) * ends_words
    copies = int(own["devices"]) // n
    summed = n * room if n > 1 else k
    got += (copies - 1) * exchanges * summed * (1 + width)
    beyond = np.maximum(pairs[name] - largest, 0).sum() if n > 1 else 0
    own |= {
      "rounds": pushes,
      "fetch_rounds": fetches,
      "overflow_rows": beyond,
      "room": room if n > 1 else 0,
      "wire_bytes": 4 * got,
    }
  return found


def _pushes(slots: list[list[np.ndarray]], room: int, end: int) -> int:
  """Exchanges until all gradient rows have been summed.

  In each every device sends an owner its next rows from where all have come.
  """
  most = 1
  for owner in range(len(slots[0])):
    start, count = 0, 0
    while start < end:
      begins = [np.searchsorted(x[owner], start) for x in slots]
      rest = [x[owner][at + room :] for x, at in zip(slots, begins)]
      start = min(x[0] if len(x) else end for x in rest)
      count += 1
    most = max(most, count)
  return most
