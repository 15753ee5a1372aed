"""The pieces of a step in time: what overlaps, what is exposed, the bubbles.

`timeline.iteration_seconds` of the planner tells only when a step ends.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import NamedTuple

from benchmarks.library import Assignment
from benchmarks.library import Exchange
from benchmarks.library import iteration_seconds
from benchmarks.library import Tensor


def each_by(tensors: Sequence[Tensor], names: Sequence[str]) -> Assignment:
  """Returns one exchange for each tensor, by the option so named."""
  found = []
  for j, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
    option = tensor.option(name)
    assert option is not None, (tensor.name, name)
    found.append(Exchange(j, j + 1, option))
  return tuple(found)


class Span(NamedTuple):
  """Start and end of a piece."""

  start_s: float
  end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
  """An exchange and the spans of its three pieces."""

  exchange: Exchange
  before: Span
  link: Span
  after: Span


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
  """The pieces of a step in time.

  Attributes:
    backward: For each tensor the part of the backward pass that completes it.
    sent: The exchanges.
    iteration_s: End of the last piece.
    compute_s: Time for which compute is busy: backward pass and work.
    link_s: Time for which the link is busy.
    bytes: Bytes that a device receives.
  """

  backward: tuple[Span, ...]
  sent: tuple[Sent, ...]
  iteration_s: float
  compute_s: float
  link_s: float
  bytes: float

  @property
  def exposed_s(self) -> float:
    """Communication that nothing hides: the time compute waits for the link."""
    return self.iteration_s - self.compute_s

  @property
  def overlapped_s(self) -> float:
    """Communication during which compute is busy."""
    return self.link_s - self.exposed_s

  def bubbles(self) -> Iterator[int]:
    """Yields the exchanges before which the link, having sent others, idles."""
    for k in range(1, len(self.sent)):
      if self.sent[k].link.start_s > self.sent[k - 1].link.end_s:
        yield k


def simulate(
  tensors: Sequence[Tensor], assignment: Sequence[Exchange]
) -> Timeline:
  """Runs a step as `iteration_seconds` says; raises as it does."""
  iteration_s = iteration_seconds(tensors, assignment)
  backward, pairs = [], []
  compute = link = 0.0
  for exchange in assignment:
    for tensor in tensors[exchange.first : exchange.stop]:
      backward.append(Span(compute, compute + tensor.backward_s))
      compute = backward[-1].end_s
    before = Span(compute, compute + exchange.option.before_s)
    compute = before.end_s
    start = max(link, compute)
    link = start + exchange.option.link_s
    pairs.append((before, Span(start, link)))
  sent = []
  for exchange, (before, on_link) in zip(assignment, pairs):
    start = max(compute, on_link.end_s)
    compute = start + exchange.option.after_s
    sent.append(Sent(exchange, before, on_link, Span(start, compute)))
  assert compute == iteration_s
  options = [exchange.option for exchange in assignment]
  return Timeline(
    backward=tuple(backward),
    sent=tuple(sent),
    iteration_s=iteration_s,
    compute_s=sum(tensor.backward_s for tensor in tensors)
    + sum(option.work_s for option in options),
    link_s=sum(option.link_s for option in options),
    bytes=sum(option.bytes for option in options),
  )
