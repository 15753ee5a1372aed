"""`ExDyna` and `MiCRO`: sparsifiers without build-up.

Devices select in partitions of their own, so that nothing is selected twice.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.compress import element_exchange
from zenjax._src.compress import partitions
from zenjax._src.compress import sparsifier
from zenjax._src.compress import thresholds
from zenjax._src.compress.compressor import Reduced
from zenjax._src.compress.partitions import Division
from zenjax._src.compress.sparsifier import Sparsifier
from zenjax._src.core import arguments
from zenjax._src.core import compat
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes

ControllerName = Literal["sampled", "paper"]

# Indices that a device sends in a round, as a multiple of a fair share, and the
# fewest: because of a link's latency, fewer would take no less time.
_SLACK = 1.25
_FEWEST = 128


class PartitionMemory(NamedTuple):
  """What `ExDyna` and `MiCRO` remember, equal on all devices.

  Threshold, parts and counts are from the last step. The next step moves them
  first.
  """

  step: jax.Array  # [] int32, steps taken
  threshold: jax.Array  # [] float32, 0 before it is sampled
  # [n] int32, blocks (ExDyna) or elements (MiCRO), under what they count: keys
  # are known when a step is traced.
  parts: dict[str, jax.Array]
  counts: jax.Array  # [n] int32, elements selected in each partition

  def on_devices(self, devices: int) -> "PartitionMemory":
    """Converts it to another number of devices, in host memory.

    Partitions start evenly again. The threshold stays.
    """
    ((unit, parts),) = self.parts.items()
    if len(parts) == devices:
      return self
    parts = partitions.even(int(np.asarray(parts).sum()), devices)
    return self._replace(
      step=np.zeros((), np.int32),
      parts={unit: parts},
      counts=np.zeros(devices, np.int32),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Partitioned(Sparsifier):
  """A sparsifier in which each device selects in a partition of its own."""

  by_level = False
  stats = ("density", "threshold", "build_up", "imbalance", "rounds")

  density: float
  controller: ControllerName = "sampled"
  capacity: int | None = None
  wire_dtype: Any = None

  _division: ClassVar[Callable[[int, int], Division]] = partitions.Even

  def __post_init__(self):
    sparsifier.check_density(self.density)
    arguments.one_of("controller", self.controller, ["sampled", "paper"])
    if self.capacity is not None and (
      not arguments.is_integer(self.capacity) or self.capacity < 1
    ):
      raise ValueError(
        f"`capacity` must be a positive integer, got {self.capacity!r}. Leave"
        f" it out for {_SLACK} fair shares."
      )
    wire = arguments.wire_dtype("wire_dtype", self.wire_dtype)
    object.__setattr__(self, "wire_dtype", wire)

  def first(self, size: int, context: Context) -> PartitionMemory:
    plan = self._plan(size, context.devices)
    parts = jnp.asarray(plan.division.start())
    threshold = thresholds.paper_start(plan.k) if self._is_paper else 0.0
    return PartitionMemory(
      step=jnp.zeros((), jnp.int32),
      threshold=jnp.float32(threshold),
      parts={plan.division.unit: parts},
      counts=jnp.zeros_like(parts),
    )

  def select(
    self,
    x: jax.Array,
    sizes: Sequence[int],
    memory: Any,
    key: jax.Array,
    context: Context,
  ) -> Reduced:
    """Moves partitions by the last step's counts, and selects."""
    del sizes
    axes, n = context.axes, context.devices
    plan = self._plan(x.shape[0], n)
    known = jax.tree.map(lambda y: compat.agreed(y, axes), memory)
    (old,) = known.parts.values()
    moved = plan.division.moved(old, known.counts)
    parts = jnp.where(known.step > 0, moved, old)
    turn = lax.rem(known.step, jnp.int32(n))
    place = lax.rem(turn + lax.axis_index(axes), jnp.int32(n))
    bounds = plan.division.bounds(parts)
    start, end = bounds[place], bounds[place + 1]
    to_sample, to_select = jax.random.split(key)
    with jax.named_scope("zenjax/select"):
      seen = element_exchange.window(x, start, end, plan.division.longest)
      bar = self._bar(seen, known, plan, to_sample, context)
      chosen = element_exchange.select(seen, bar.bar, bar.part, to_select)
      if self._is_paper:
        chosen = element_exchange.forced(chosen, start, end, known.step)
    with jax.named_scope("zenjax/exchange"):
      out = element_exchange.exchange(
        x, chosen, plan.capacity, self.wire_dtype, context
      )
    # Partition p was searched by the rank that is `turn` less.
    rank = jnp.arange(n, dtype=jnp.int32) - turn + jnp.int32(n)
    counts = out.counts[lax.rem(rank, jnp.full_like(rank, n))]
    total = jnp.sum(counts, dtype=jnp.int32).astype(jnp.float32)
    largest = jnp.max(counts).astype(jnp.float32) * n
    of_bar, of_indices, of_values = (
      received_bytes(each, context) for each in self._messages(plan, context)
    )
    again = lambda count: jnp.asarray(count - 1, jnp.float32)
    return Reduced(
      sums=out.update,
      kept=out.kept,
      sent=out.sent,
      memory=PartitionMemory(
        step=known.step + 1,
        threshold=bar.bar,
        parts={plan.division.unit: parts},
        counts=counts,
      ),
      stats=(
        total / np.float32(x.shape[0]),
        bar.bar,
        total / np.float32(plan.k),
        jnp.where(total > 0, largest / jnp.maximum(total, 1.0), 1.0),
        out.rounds.astype(jnp.float32),
      ),
      # Only the first round of indices sends counts.
      more_bytes=again(bar.passes) * of_bar
      + again(out.rounds) * (of_indices - 4 * (n - 1))
      + again(out.parts) * of_values,
    )

  def sent(self, sizes: Sequence[int], context: Context) -> list[Message]:
    plan = self._plan(sum(sizes), context.devices)
    return sum(self._messages(plan, context), [])

  def _messages(
    self, plan: "_Plan", context: Context
  ) -> tuple[list[Message], list[Message], list[Message]]:
    """Returns the collectives for a threshold, for indices, and for values."""
    n, axes = context.devices, context.axes
    counts = [Message("all_reduce", axes, float(thresholds.WORDS))]
    return (
      [] if self._is_paper or plan.whole else counts,
      element_exchange.index_messages(plan.capacity, axes),
      element_exchange.value_messages(n, plan.capacity, self.wire_dtype, axes),
    )

  @property
  def _is_paper(self) -> bool:
    return self.controller == "paper"

  def _plan(self, size: int, n: int) -> "_Plan":
    """Raises `ValueError` if there is nothing to select."""
    division, k = type(self)._division(size, n), int(self.density * size)
    if k == 0:
      raise ValueError(
        f"`density` {self.density} selects none of {size} elements. Give"
        f" {min(1.01 / max(size, 1), 1):.3g} or more."
      )
    capacity = self.capacity or max(int(_SLACK * k / n) + 1, _FEWEST)
    return _Plan(k, k == size, division, min(capacity, division.longest))

  def _bar(
    self,
    seen: element_exchange.Window,
    known: PartitionMemory,
    plan: "_Plan",
    key: jax.Array,
    context: Context,
  ) -> thresholds.Bar:
    """Returns what a step selects by."""
    bar = last = known.threshold
    if self._is_paper:
      count = jnp.sum(known.counts, dtype=jnp.int32)
      moved = thresholds.paper(last, count, plan.k)
      bar = jnp.where(known.step > 0, moved, last)
    elif plan.whole:
      bar = jnp.zeros_like(last)
    else:
      return thresholds.sampled(seen, last, plan.k, key, context.axes)
    return thresholds.Bar(bar, part=jnp.ones((), jnp.float32), passes=1)


class _Plan(NamedTuple):
  """Static facts of one vector on some devices."""

  k: int  # elements that a step is to select
  whole: bool  # whether these are all elements
  division: Division
  capacity: int  # indices that a device sends in a round


@dataclasses.dataclass(frozen=True, slots=True)
class ExDyna(_Partitioned):
  """Sends the largest numbers of all devices together, none of them twice.

  The vector of all leaves, `N` elements, has a partition for each device, and
  partitions rotate from step to step. A device selects the elements of its
  partition that reach a threshold, about `density * N` on all devices together.
  All devices then average their values at the selected elements. NaN and Inf
  are sent within `n` steps.

  Partitions consist of 1,024 blocks. In each step one block may move from a
  partition with a large selection to its neighbor.

  Attributes:
    density: The part of the leaves that all devices together send in a step, in
      (0, 1].
    controller: How the threshold is found. `"sampled"` counts a sample in each
      step. `"paper"` is the published rule: it starts at `1 / (2 sqrt(density *
      N))` and needs 462 steps for a factor of 10. Each device then sends at
      least one element.
    capacity: Indices that a device sends in one round; by default 1.25 fair
      shares, but at least 128. Overflow follows in further rounds, so a small
      capacity costs time, but loses nothing.
    wire_dtype: A dtype such as `jnp.bfloat16` to round values and their sums
      to. Rounding errors are kept, and so is what exceeds its largest number.

  Raises:
    ValueError: An argument is out of range; or, in `init` and `update`, there
      are fewer than `1024 * 32` elements or more than 1,024 devices, or
      `density * N` is below 1.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> exdyna = zenjax.compress.ExDyna(1 / 16_384)  # 2 of 32,768 elements
    >>> tx = zenjax.compress.all_reduce(exdyna, "data")
    >>> grads = jnp.ones((2, 32_768)).at[0, 5].set(6.0).at[1, 20_000].set(-9.0)
    >>> def step(g):
    ...   return tx.update(g, tx.init(g))
    >>> update, state = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    >>> jnp.flatnonzero(update[0]).tolist(), update[1, [5, 20_000]].tolist()
    ([5, 20000], [3.5, -4.0])
    >>> state.residuals["leaf"].value[:, 0, 4:7].tolist()  # the rest waits
    [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]]

  References:
    Yoon and Oh, [Preserving Near-Optimal Gradient Sparsification Cost for
    Scalable Distributed Deep Learning](https://arxiv.org/abs/2402.13781),
    CCGrid 2024.
  """

  _division = partitions.Blocks


@dataclasses.dataclass(frozen=True, slots=True)
class MiCRO(_Partitioned):
  """Sends the largest numbers of all devices, from fixed even partitions.

  Use it as `ExDyna`, for models of any size. It saves the time to move
  partitions. Devices select as unevenly as large gradients are distributed over
  the leaves.

  Attributes:
    density: The part of the leaves that all devices together send in a step, in
      (0, 1].
    controller: How the threshold is found: `"sampled"` or `"paper"`, as in
      `ExDyna`.
    capacity: Indices that a device sends in one round; by default 1.25 fair
      shares, but at least 128.
    wire_dtype: A dtype such as `jnp.bfloat16` to round values and their sums
      to. Rounding errors are kept.

  Raises:
    ValueError: As in `ExDyna`; but one element for each device is enough.

  Example:
    >>> import zenjax
    >>> str(zenjax.compress.MiCRO(0.001))
    'MiCRO(0.001)'

  References:
    Yoon and Oh, [MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and
    Accelerating Distributed DNN Training](https://arxiv.org/abs/2310.00967),
    HiPC 2023.
  """
