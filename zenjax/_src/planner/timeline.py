"""A step on two resources, compute and link: what runs when.

The model is Espresso's (EuroSys 2023). The backward pass completes gradients
one after another. An exchange takes one of them, or several consecutive ones,
through three pieces: work before the link (mask, pack, cast), the link, and
work after it (merge, decode). Work takes the compute resource from the backward
pass. Times are in seconds from the beginning of the backward pass.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

import numpy as np

# Seconds of an exchange that is not possible: more than any step takes. Not
# infinite, for zero times infinity is NaN.
NEVER = 1e300


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
  """One way to exchange a tensor, or a group of them.

  Attributes:
    name: The strategy.
    before_s: Compute before the link.
    link_s: Time on the link, latency included.
    after_s: Compute after the link.
    bytes: Bytes that a device receives.
  """

  name: str
  before_s: float = 0.0
  link_s: float = 0.0
  after_s: float = 0.0
  bytes: float = 0.0

  def __post_init__(self):
    for field in ("before_s", "link_s", "after_s", "bytes"):
      value = getattr(self, field)
      if not 0 <= value < math.inf:
        raise ValueError(
          f"`{field}` of option {self.name!r} must be finite and not negative,"
          f" got {value!r}; a fit that says otherwise is wrong."
        )

  @property
  def work_s(self) -> float:
    """Compute that the exchange adds to a step."""
    return self.before_s + self.after_s


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
  """A gradient, in its place in the backward pass.

  Attributes:
    name: Name of the leaf.
    bytes: Size of the gradient.
    backward_s: Compute from the completion of the gradient before it, or from
      the beginning of the backward pass, to its own.
    options: Ways to exchange it, of different names. The first is the plain
      one, `pmean`.
  """

  name: str
  bytes: float
  backward_s: float
  options: tuple[Option, ...]

  def __post_init__(self):
    if not 0 <= self.backward_s < math.inf:
      raise ValueError(
        f"`backward_s` of tensor {self.name!r} must be finite and not negative,"
        f" got {self.backward_s!r}; give tensors in the order in which the"
        " backward pass completes them."
      )
    names = [option.name for option in self.options]
    if not names or len(set(names)) < len(names):
      raise ValueError(
        f"`options` of tensor {self.name!r} must be one or more, of different"
        f" names, got {names}."
      )

  def option(self, name: str) -> Option | None:
    """Returns the option called `name`, or None."""
    return next((o for o in self.options if o.name == name), None)


class GroupCosts:
  """Costs of consecutive tensors that share an exchange.

  They add up, but for the part that an exchange pays once. Letters: `N`
  tensors, `S` strategies, `K` groups.

  Args:
    tensors: All tensors of a step, in order.
    once: By strategy, the part of every tensor's own option that a group pays
      once: latency, launches, headers. Tensors of other strategies do not
      share exchanges.

  Raises:
    ValueError: A tensor's own option is less than that part.
  """

  def __init__(
    self, tensors: Sequence[Tensor], once: Mapping[str, Option] | None = None
  ):
    self.tensors = tuple(tensors)
    self.names = tuple(
      dict.fromkeys(o.name for tensor in tensors for o in tensor.options)
    )
    parts = once or {}
    self._shares = np.array([name in parts for name in self.names], bool)
    self._once = np.zeros((len(self.names), 4))
    # The last column counts tensors that do not have the option.
    sums = np.zeros((len(self.names), len(self.tensors) + 1, 5))
    for s, name in enumerate(self.names):
      if name in parts:
        self._once[s] = _figures(parts[name])
      for j, tensor in enumerate(self.tensors):
        option = tensor.option(name)
        if option is None:
          sums[s, j + 1, 4] = 1
          continue
        rest = np.array(_figures(option)) - self._once[s]
        if (rest < 0).any():
          raise ValueError(
            f"`once` of {name!r} must be no more than any tensor's own option,"
            f" got {parts[name]} and tensor {tensor.name!r} of less."
          )
        sums[s, j + 1, :4] = rest
    self._sums = sums.cumsum(axis=1)

  def seconds(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Returns the times of groups by every strategy, `NEVER` if impossible.

    Args:
      first: `[K]`, the first tensor of each group.
      stop: `[K]`, the tensor after its last.

    Returns:
      `[S, K, 3]`: work before the link, on the link, work after it.
    """
    parts = self._sums[:, stop] - self._sums[:, first]
    missing = parts[..., 4] > 0
    missing |= (stop - first > 1) & ~self._shares[:, None]
    seconds = parts[..., :3] + self._once[:, None, :3]
    return np.where(missing[..., None], NEVER, seconds)

  def exchange(self, first: int, stop: int, name: str) -> "Exchange | None":
    """Returns tensors `first` to `stop - 1` by one strategy, if possible."""
    if stop - first == 1:
      option = self.tensors[first].option(name)
      return None if option is None else Exchange(first, stop, option)
    if name not in self.names or not self._shares[s := self.names.index(name)]:
      return None
    *parts, missing = self._sums[s, stop] - self._sums[s, first]
    if missing:
      return None
    option = Option(name, *np.add(parts, self._once[s]).tolist())
    return Exchange(first, stop, option)


def _figures(option: Option) -> tuple[float, float, float, float]:
  return option.before_s, option.link_s, option.after_s, option.bytes


class Exchange(NamedTuple):
  """Tensors `first` to `stop - 1`, by one option."""

  first: int
  stop: int
  option: Option


# Exchanges in order; together they hold every tensor once.
Assignment = tuple[Exchange, ...]


def iteration_seconds(
  tensors: Sequence[Tensor], assignment: Sequence[Exchange]
) -> float:
  """Returns the time of a step in which exchanges overlap the backward pass.

  Compute runs the backward pass, and the work before an exchange as soon as its
  last gradient is complete; the work after exchanges follows the backward pass.
  The link takes exchanges in order. No other schedule that sends them in this
  order is shorter: compute is never idle until the last gradient, so work after
  an exchange could only delay what others wait for, and work before the link is
  needed in the order in which exchanges leave.

  Raises:
    ValueError: `assignment` does not hold every tensor once and in order.
  """
  stops = [0, *(exchange.stop for exchange in assignment)]
  firsts = [*(exchange.first for exchange in assignment), len(tensors)]
  if stops != firsts or any(e.first >= e.stop for e in assignment):
    ranges = [(exchange.first, exchange.stop) for exchange in assignment]
    raise ValueError(
      f"`assignment` must hold each of {len(tensors)} tensors once and in"
      f" order, got ranges {ranges}."
    )
  compute = link = 0.0
  arrived = []
  for first, stop, option in assignment:
    for tensor in tensors[first:stop]:
      compute += tensor.backward_s
    compute += option.before_s
    link = max(link, compute) + option.link_s
    arrived.append(link)
  for at, exchange in zip(arrived, assignment):
    compute = max(compute, at) + exchange.option.after_s
  return compute
