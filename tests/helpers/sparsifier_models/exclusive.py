"""ExDyna and MiCRO: every device selects in a partition of its own.

`peers.md` 4.1 to 4.3b; ExDyna is arXiv 2402.13781, MiCRO arXiv 2310.00967.
"""

from typing import Literal

import numpy as np

from . import exchange
from . import partitions
from . import report
from . import thresholds
from .report import PartitionedStep

Partitions = partitions.StaticPartitions | partitions.BlockPartitions
Threshold = thresholds.PaperThreshold | thresholds.DampedThreshold


class _Exclusive:
  """One step of either, in this order.

  1. `acc = residual + gradient` on every device, in `dtype`.
  2. From the second step on, partitions move, then the threshold does, both
     by the counts of the step before.
  3. Device `r` at step `t`, from 0, searches partition `(t mod n + r) mod n`
     for `|acc| >= threshold` (`thresholds.at_least`).
  4. If that is empty it selects one element all the same: place `t mod length`
     of its partition (`force_one`).
  5. All devices' values at all selected indices are summed and divided by `n`.
  6. Residual = acc, cleared at all selected indices on all devices.
  7. With `wire_dtype`, which is not published, values and means are rounded on
     their way, and what that takes stays (`exchange.round_sums`).

  Choices:

  - The count of a step is what was selected by all devices together, forced
    elements included, for `n = 1` too. (There the authors' ExDyna stops with
    an error; their MiCRO counts 0 and lowers the threshold for ever.)
  - Counts belong to partitions, so those of the last step are put in order by
    the last step's rotation.
  - `force_one=False` selects nothing where nothing is large enough. Not
    published: with it a `k` below `n` does not drive the threshold up.
  - Density got is the count over `N`. No index is selected twice, so build-up
    is the count over `k`.
  """

  def __init__(
    self,
    size: int,
    n: int,
    threshold: Threshold,
    division: Partitions,
    dtype,
    wire_dtype,
    force_one: bool,
  ):
    self.n, self.size = n, size
    self.threshold, self.partitions = threshold, division
    self.wire_dtype, self.force_one = wire_dtype, force_one
    self.residuals = np.zeros((n, size), dtype)
    self.steps = 0
    self._counts = np.zeros(n, int)  # by partition

  def step(self, gradients: np.ndarray) -> PartitionedStep:
    """Takes the local gradients of all devices, `[n, N]`."""
    acc = self.residuals + np.asarray(gradients).astype(self.residuals.dtype)
    if self.steps > 0:
      self.partitions.rebalance(self._counts.tolist())
      self.threshold.update(int(self._counts.sum()))
    bounds = self.partitions.bounds()
    places = partitions.assignment(self.steps, self.n)
    selected = [
      self._select(acc[device], int(bounds[place]), int(bounds[place + 1]))
      for device, place in enumerate(places)
    ]
    sent = exchange.sent_by_all(selected, acc.shape)
    updates, residuals = exchange.exchange(acc, sent, self.wire_dtype)
    if self.wire_dtype is not None:
      updates, residuals = exchange.round_sums(
        updates, residuals, selected, self.wire_dtype
      )
    self.residuals = residuals
    for place, indices in zip(places, selected, strict=True):
      self._counts[place] = len(indices)
    self.steps += 1
    return PartitionedStep(
      updates=updates,
      selected=selected,
      threshold=float(self.threshold.value),
      partitions=bounds,
      assignment=places,
      residuals=self.residuals.copy(),
      density=int(self._counts.sum()) / self.size,
      build_up=report.build_up(selected, self.threshold.k),
      imbalance=report.imbalance(selected),
    )

  def _select(self, acc: np.ndarray, start: int, end: int) -> np.ndarray:
    large = thresholds.at_least(acc[start:end], self.threshold.value)
    found = np.flatnonzero(large) + start
    if self.force_one and not len(found):
      return np.array([start + self.steps % (end - start)])
    return found


def _controller(
  k: int,
  controller: Literal["paper", "damped"],
  start: float | None,
  dtype,
) -> Threshold:
  if controller == "paper":
    return thresholds.PaperThreshold(k, start, dtype)
  if start is None:
    raise ValueError('controller="damped" needs a start')
  return thresholds.DampedThreshold(k, start, dtype)


class Micro(_Exclusive):
  """MiCRO: `StaticPartitions`.

  Args:
    size: length `N` of the flat vector.
    n: number of devices.
    density: of the whole vector, over all devices together.
    controller: "paper" (`PaperThreshold`) or "damped" (`DampedThreshold`).
    start: the first threshold, if it is not the paper's.
    threshold_dtype: what the threshold is kept in.
    dtype: of residuals; gradients are cast to it.
    wire_dtype: what values are rounded to on their way.
    force_one: an empty selection sends one element, as published.
  """

  def __init__(
    self,
    size: int,
    n: int,
    density: float,
    *,
    controller: Literal["paper", "damped"] = "paper",
    start: float | None = None,
    threshold_dtype=np.float64,
    dtype=np.float32,
    wire_dtype=None,
    force_one: bool = True,
  ):
    k = thresholds.wanted(density, size)
    threshold = _controller(k, controller, start, threshold_dtype)
    division = partitions.StaticPartitions(size, n)
    super().__init__(size, n, threshold, division, dtype, wire_dtype, force_one)


class ExDyna(_Exclusive):
  """ExDyna: `BlockPartitions`. Arguments as for `Micro`, and

  Args:
    blocks: how many blocks the vector is cut into; 1,024 as published.
    align: a block's length is a multiple of this; 32 as published.
  """

  def __init__(
    self,
    size: int,
    n: int,
    density: float,
    *,
    blocks: int = 1024,
    align: int = 32,
    controller: Literal["paper", "damped"] = "paper",
    start: float | None = None,
    threshold_dtype=np.float64,
    dtype=np.float32,
    wire_dtype=None,
    force_one: bool = True,
  ):
    k = thresholds.wanted(density, size)
    threshold = _controller(k, controller, start, threshold_dtype)
    division = partitions.BlockPartitions(size, n, blocks, align)
    super().__init__(size, n, threshold, division, dtype, wire_dtype, force_one)
