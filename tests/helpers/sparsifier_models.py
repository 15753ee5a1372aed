"""Published sparsifiers in plain NumPy, for all devices at once.

Written from the papers and their authors' programs, never from zenjax: nothing
here imports it. A step gets what devices have, residuals included, and returns
the mean, and what each device keeps. What decides a selection is computed in
float32, so that another program can select the same. Means are taken in
float64, to be compared up to rounding. A NaN is always worth selecting.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import ml_dtypes
import numpy as np

F32 = np.float32
Leaves = dict[str, np.ndarray]
# Chooses `[N] bool` of a vector: `(x, k, update)`, where the update is what the
# other program returned for it, which shows what it has drawn.
Choose = Callable[[np.ndarray, int, np.ndarray], np.ndarray]


def at_least(x: np.ndarray, bar: float) -> np.ndarray:
  return ~(np.abs(x) < F32(bar))


def saturated(x: np.ndarray, dtype: Any) -> np.ndarray:
  """Rounds to a dtype. Finite numbers become at most its largest."""
  most = float(ml_dtypes.finfo(dtype).max)
  return np.where(np.isfinite(x), np.clip(x, -most, most), x).astype(dtype)


def exchanged(
  acc: np.ndarray, sent: np.ndarray, wire: Any
) -> tuple[np.ndarray, np.ndarray]:
  """Averages what is sent: the mean `[N]`, and what is kept, `[n, N]`.

  Without `wire` a sent element leaves nothing. With it, the element is rounded,
  and its rounding error stays, unless the element was NaN or Inf.
  """
  with np.errstate(invalid="ignore"):
    rounded = acc if wire is None else saturated(acc, wire)
    error = acc - rounded.astype(F32)
    mean = np.where(sent, rounded.astype(np.float64), 0).mean(axis=0)
  error = np.where(np.isfinite(error), error, F32(0))
  return mean, np.where(sent, error, acc)


# --- each device selects for itself -------------------------------------------


def top_k(x: np.ndarray, k: int, update: np.ndarray) -> np.ndarray:
  """The `k` largest; among equals the lower index first, and NaN before Inf."""
  del update
  order = np.lexsort((-np.where(np.isnan(x), F32(0), np.abs(x)), ~np.isnan(x)))
  chosen = np.zeros(x.shape, bool)
  chosen[order[:k]] = True
  return chosen


def threshold(bar: float) -> Choose:
  def choose(x: np.ndarray, k: int, update: np.ndarray) -> np.ndarray:
    del update
    large = at_least(x, bar)
    assert large.sum() <= k  # Otherwise the program draws which ones wait.
    return large

  return choose


def drawn(x: np.ndarray, k: int, update: np.ndarray) -> np.ndarray:
  """What was drawn is what came; padding may have been drawn, too."""
  del x
  assert k - 8 <= (update != 0).sum() <= k
  return update != 0


def _cut(x: np.ndarray, slices: int) -> np.ndarray:
  """Cuts `[.., N]` to `[.., slices, size]`, zeros at the end."""
  x = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % slices)])
  return x.reshape(*x.shape[:-1], slices, -1)


def _back(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
  """Inverse of `_cut`, for leaves of a shape."""
  flat = x.reshape(*x.shape[:-2], -1)[..., : math.prod(shape)]
  return flat.reshape(-1, *shape)


def by_each(
  given: Mapping[str, np.ndarray],
  sizes: Sequence[int],
  density: float,
  choose: Choose,
  update: Mapping[str, np.ndarray],
  wire: Any = None,
) -> tuple[Leaves, Leaves, Leaves]:
  """Each host selects from the sums of its devices (the authors' DGC, GRACE).

  With one axis, each device is a host. With two, device `d` of a host has part
  `d` of every leaf, and selects from it `int(density * size)` elements.

  Args:
    given: Leaves of all devices, `[n, ..]`, the hosts one after the other.
    sizes: Devices along each axis.
    density: The part of a leaf to send.
    choose: What to send.
    update: What the other program returned.
    wire: The dtype that values are rounded to.

  Returns:
    The mean, what devices keep, and whether the host of a device has sent.
  """
  slices = sizes[-1] if len(sizes) > 1 else 1
  means, kept, sent = {}, {}, {}
  for name, x in given.items():
    parts = _cut(x.reshape(len(x), -1), slices)
    size = parts.shape[-1]
    parts = parts.reshape(-1, slices, slices, size)  # host, device, part
    came = _cut(np.asarray(update[name]).reshape(-1), slices)
    left, gone = np.zeros_like(parts), np.zeros(parts.shape, bool)
    mean = np.zeros((slices, size))
    for i in range(slices):
      total = parts[:, 0, i]
      for device in range(1, slices):
        total = total + parts[:, device, i]
      k = max(1, int(density * size))
      chosen = np.stack([choose(host, k, came[i]) for host in total])
      mean[i], left[:, i, i] = exchanged(total, chosen, wire)
      gone[:, :, i] = chosen[:, None]
    shape = x.shape[1:]
    means[name] = _back(mean / slices, shape)[0]
    kept[name], sent[name] = _back(left, shape), _back(gone, shape)
  return means, kept, sent


# --- devices select in partitions ---------------------------------------------


class Partitioned:
  """ExDyna (arXiv 2402.13781) and MiCRO (arXiv 2310.00967).

  1. From the second step on, partitions move, then the threshold does, both by
     the counts of the step before.
  2. Device `r` at step `t`, from 0, searches partition `(t mod n + r) mod n`
     for `|acc| >= threshold`.
  3. If that is empty, it selects one element all the same, as published: place
     `t mod length` of its partition.
  4. Values of all devices at all selected elements are averaged.
  5. With `wire`, which is not published, values and means are rounded. Errors
     of values stay where they are made, and errors of means with any device,
     here with the first one.

  Without a `threshold`, the program tells its own, which few more than `k`
  elements reach, and sends the same part of them on each device, about `k`.
  """

  def __init__(self, n: int, k: int, threshold: Any, division: Any, wire: Any):
    self.n, self.k, self.wire = n, k, wire
    self.threshold, self.division = threshold, division
    self.steps, self.counts = 0, np.zeros(n, int)  # by partition

  def step(
    self, acc: np.ndarray, update: np.ndarray, told: float
  ) -> tuple[np.ndarray, np.ndarray]:
    """Takes `[n, N]`, and what the program returned: an update, and a bar."""
    if self.steps:
      self.division.move(self.counts.tolist())
      if self.threshold:
        self.threshold.move(int(self.counts.sum()))
    bounds, selected, reached = self.division.bounds(), [], []
    bar = self.threshold.value if self.threshold else told
    assert bar == told
    for device in range(self.n):
      place = (self.steps + device) % self.n
      start, end = bounds[place], bounds[place + 1]
      large = at_least(acc[device, start:end], bar)
      reached.append(large.sum())
      if not self.threshold:
        assert large[update[start:end] != 0].all()
        large = update[start:end] != 0
      found = start + np.flatnonzero(large)
      if self.threshold and not len(found):
        found = np.array([start + self.steps % (end - start)])
      selected.append(found)
      self.counts[place] = len(found)
    self.steps += 1
    if not self.threshold:
      part = self.counts.sum() / sum(reached)
      assert 0.75 * self.k <= self.counts.sum() <= 1.25 * self.k + self.n
      assert sum(reached) <= 2 * self.k + self.n
      for found, count in zip(selected, reached):
        assert -self.n < len(found) - part * count < 1 + 1e-6
    sent = np.zeros(acc.shape[1], bool)
    sent[np.concatenate(selected)] = True
    mean, kept = exchanged(acc, sent, self.wire)
    if self.wire is not None:
      rounded = mean.astype(self.wire).astype(np.float64)
      kept[0] += self.n * (mean - rounded)
      mean = rounded
    return mean, kept


def _even(total: int, n: int) -> list[int]:
  return [total // n + (i < total % n) for i in range(n)]


class Even:
  """MiCRO: even by elements."""

  def __init__(self, size: int, n: int):
    self.parts = _even(size, n)

  def bounds(self) -> np.ndarray:
    return np.cumsum([0, *self.parts])

  def move(self, counts: Sequence[int]) -> None:
    """Partitions stay as they are."""


class Blocks:
  """ExDyna: one block at a time moves between neighbors.

  A block has `size // blocks` elements, rounded down to a multiple of 32. What
  remains of the vector belongs to the last partition. In a step, one sweep goes
  from left to right over neighbors, whose counts include the moves further
  left. If one has more than 1.05 fair counts and the other less than 0.95238,
  one block goes to the other, unless fewer than `blocks / (4 n)` would be left.
  A move takes `block * total // size` from the count of the giver.
  """

  def __init__(self, size: int, n: int, blocks: int = 1024):
    self.size, self.block = size, size // blocks // 32 * 32
    self.parts, self.fewest = _even(blocks, n), blocks / (4 * n)

  def bounds(self) -> np.ndarray:
    return np.append(np.cumsum([0, *self.parts[:-1]]) * self.block, self.size)

  def move(self, counts: Sequence[int]) -> None:
    counts, total = list(counts), sum(counts)
    fair = total // len(counts)
    if not fair:
      return
    worth = self.block * total // self.size
    for i in range(len(counts) - 1):
      left, right = counts[i] / fair, counts[i + 1] / fair
      if left > 1.05 and right < 0.95238:
        giver, taker = i, i + 1
      elif left < 0.95238 and right > 1.05:
        giver, taker = i + 1, i
      else:
        continue
      if self.parts[giver] - 1 < self.fewest:
        continue
      self.parts[giver] -= 1
      self.parts[taker] += 1
      counts[giver] -= worth
      counts[taker] += worth


class Paper:
  """The published threshold of both; no clamp."""

  def __init__(self, k: int):
    self.k, self.value = k, F32(1 / (2 * math.sqrt(k)))

  def move(self, count: int) -> None:
    ratio = count / self.k
    factor = 1.005 if ratio > 1.1 else 1.00125 if ratio > 0.909 else 0.995
    self.value = self.value * F32(factor)
