"""Recursive doubling as a list of steps: who sends to whom, and how much.

Along each axis, the fastest first: ranks above the largest power of two fold in
their rows, the others double, and the result is spread to those above.
"""

from collections.abc import Iterator
import math
from typing import NamedTuple

from zenjax._plan import TablePlan
from zenjax._schemes.base import Context

# The union of `k` devices is about `k ** _GROWTH` times one device's rows: what
# published workloads show at 8 devices (4.4 to 5.7).
_GROWTH = 0.75
# Room beyond the size expected: all unions of a step must fit.
_MARGIN = 1.05


class Hop(NamedTuple):
  """One step along one axis; static."""

  kind: str  # "fold" ranks above in, "double", "spread" the result to them
  axis: str
  pairs: list[tuple[int, int]]
  distance: int  # in ranks
  merged: int  # devices whose rows are sent
  after: int  # devices whose rows the receiver then holds


def hops(context: Context) -> Iterator[Hop]:
  """All steps, in order: static, the same on every device."""
  below = 1  # devices along faster axes
  for axis, n in reversed([*zip(context.axes, context.sizes)]):
    power = 1 << (n.bit_length() - 1)
    rest = n - power
    if rest:
      pairs = [(power + i, i) for i in range(rest)]
      yield Hop("fold", axis, pairs, power, below, 2 * below)
    held = below * (2 if rest else 1)
    for k in range(power.bit_length() - 1):
      step = 1 << k
      pairs = [(i, i ^ step) for i in range(power)]
      sent = min(held * step, below * n)
      after = min(held * 2 * step, below * n)
      yield Hop("double", axis, pairs, step, sent, after)
    below *= n
    if rest:
      pairs = [(i, power + i) for i in range(rest)]
      yield Hop("spread", axis, pairs, power, below, below)


def rooms(
  plan: TablePlan, capacity: int, context: Context
) -> list[tuple[int, int]]:
  """Rows sent and rows held after, for each hop."""
  growth = _GROWTH
  if plan.pinned:
    pinned = max(plan.first.pull / plan.first.push, 1.0)
    growth = math.log(pinned) / math.log(max(context.devices, 2))
  found, sent = [], capacity
  steps = list(hops(context))
  for i, hop in enumerate(steps):
    # What does not travel again costs memory only.
    room = sent if hop.kind == "spread" else 2 * sent
    if i + 1 < len(steps) and hop.kind != "spread":
      wanted = math.ceil(capacity * hop.after**growth * _MARGIN)
      room = max(min(room, wanted), sent)
    room = min(room, plan.most.pull)
    found.append((sent, room))
    sent = room
  return found
