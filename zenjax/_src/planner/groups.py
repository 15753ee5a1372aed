"""What it costs to exchange consecutive tensors together, as tables to search.

A cost function says it: `cost(i, j, name)` is the option for tensors `i` to
`j - 1` by the strategy `name`, or None where they cannot go together. It is
asked for groups of two and more; a tensor by itself has its own options.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from zenjax._src.planner.timeline import Exchange
from zenjax._src.planner.timeline import Option
from zenjax._src.planner.timeline import Tensor

Cost = Callable[[int, int, str], Option | None]

# Seconds of what cannot be done: more than any step, and a share of zero of it
# is zero, as of infinity it is not.
NEVER = 1e300


@runtime_checkable
class Tabulated(Protocol):
  """A cost function that knows many groups at once."""

  def __call__(self, i: int, j: int, name: str) -> Option | None: ...

  def ending_at(self, j: int, name: str) -> np.ndarray:
    """`[j, 3]`: before, link, after of groups `0..j` to `j - 1..j`."""
    ...


class Merged:
  """Costs that add up, but for what an exchange pays once.

  Args:
    tensors: All of them.
    once: Of each strategy that can merge tensors, the part of every tensor's
      own option that a group pays once: latency, launches, headers.

  Raises:
    ValueError: A tensor's own option is less than that.
  """

  def __init__(self, tensors: Sequence[Tensor], once: Mapping[str, Option]):
    self._once = dict(once)
    self._sums: dict[str, np.ndarray] = {}
    for name, part in self._once.items():
      whole = np.reshape([_own(tensor, name) for tensor in tensors], (-1, 4))
      fixed = np.array(_row(part))
      if (whole < fixed).any():
        least = tensors[int((whole < fixed).any(axis=1).argmax())]
        raise ValueError(
          f"`once` of {name!r} must be no more than any tensor's own option,"
          f" got {part} and tensor {least.name!r} of less."
        )
      # Column 4 counts tensors that do not have the option.
      missing = (whole >= NEVER).any(axis=1, keepdims=True)
      rest = np.where(missing, 0.0, whole - fixed)
      table = np.concatenate([rest, missing], axis=1)
      self._sums[name] = np.concatenate([np.zeros((1, 5)), table.cumsum(0)])

  def __call__(self, i: int, j: int, name: str) -> Option | None:
    if name not in self._sums:
      return None
    *parts, missing = (self._sums[name][j] - self._sums[name][i]).tolist()
    if missing:
      return None
    return Option(name, *np.add(parts, _row(self._once[name])).tolist())

  def ending_at(self, j: int, name: str) -> np.ndarray:
    """`[j, 3]`: before, link, after of groups `0..j` to `j - 1..j`."""
    if name not in self._sums:
      return np.full((j, 3), NEVER)
    sums = self._sums[name]
    parts = sums[j] - sums[:j]
    once = np.array(_row(self._once[name])[:3])
    return np.where(parts[:, 4:] > 0, NEVER, parts[:, :3] + once)


def _row(option: Option) -> list[float]:
  return [option.before_s, option.link_s, option.after_s, option.bytes]


def _own(tensor: Tensor, name: str) -> list[float]:
  for option in tensor.options:
    if option.name == name:
      return _row(option)
  return [NEVER] * 4


@dataclasses.dataclass(frozen=True, slots=True)
class Edges:
  """Every exchange there is, as arrays.

  Attributes:
    ready: `[N + 1]`: when backward compute alone would complete so many.
    names: Of all strategies.
    costs: Of `j`, `[names, width, 3]`: before, link, after of the groups that
      end with tensor `j - 1`, the last of them that tensor alone; `NEVER`
      where there is none.
  """

  ready: np.ndarray
  names: tuple[str, ...]
  costs: tuple[np.ndarray, ...]

  @property
  def size(self) -> int:
    """How many tensors."""
    return len(self.costs) - 1

  def serial(self) -> "Edges":
    """The same where nothing overlaps: all is work, nothing is on a link."""
    costs = [c.copy() for c in self.costs]
    for c in costs:
      c[..., 0] = c.sum(axis=-1)
      c[..., 1:] = 0.0
    return dataclasses.replace(self, costs=tuple(costs))


def edges(tensors: Sequence[Tensor], cost: Cost | None = None) -> Edges:
  """Tabulates all exchanges; without `cost` each tensor goes by itself."""
  options = (option.name for tensor in tensors for option in tensor.options)
  names = tuple(dict.fromkeys(options))
  costs: list[np.ndarray] = [np.zeros((len(names), 0, 3))]
  for j in range(1, len(tensors) + 1):
    table = np.full((len(names), j if cost else 1, 3), NEVER)
    if cost:
      for o, name in enumerate(names):
        table[o] = _ending_at(cost, j, name)
    table[:, -1] = [_own(tensors[j - 1], name)[:3] for name in names]
    costs.append(table)
  seconds = [tensor.backward_s for tensor in tensors]
  ready = np.concatenate([[0.0], np.cumsum(seconds)])
  return Edges(ready=ready, names=names, costs=tuple(costs))


def _ending_at(cost: Cost, j: int, name: str) -> np.ndarray:
  if isinstance(cost, Tabulated):
    return cost.ending_at(j, name)
  table = np.full((j, 3), NEVER)
  for i in range(j - 1):
    option = cost(i, j, name)
    if option is not None:
      table[i] = _row(option)[:3]
  return table


def exchange(
  tensors: Sequence[Tensor], cost: Cost | None, i: int, j: int, name: str
) -> Exchange | None:
  """Tensors `i` to `j - 1` by a strategy, if they can go that way."""
  if j - i > 1:
    option = cost(i, j, name) if cost else None
  else:
    own = (o for o in tensors[i].options if o.name == name)
    option = next(own, None)
  return None if option is None else Exchange(i, j, option)
