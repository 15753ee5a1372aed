"""A step on two resources, compute and link: when each piece of it runs.

As Espresso models it. The backward pass completes gradients one after another.
An exchange takes one of them, or several consecutive ones, through three
pieces: work before it (mask, pack, cast), the link, and work after it (merge,
decode). Work takes the compute resource from the backward pass. All times are
in seconds from the beginning of the backward pass, all sizes in bytes.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import Literal, NamedTuple

# "none": the backward pass, then one exchange after another, nothing beside
# anything else. "overlap": gradients leave when they are complete.
Overlap = Literal["none", "overlap"]


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
  """One way to exchange a tensor, or a group of them.

  Attributes:
    name: Of the strategy.
    before_s: Compute before the link.
    link_s: On the link, latency included. Phases of a hierarchy are added up.
    after_s: Compute after the link.
    bytes: That a device receives.
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
    name: Of the leaf.
    bytes: Of the gradient.
    backward_s: Compute until it is complete, from the gradient before it or,
      of the first, from the beginning of the backward pass.
    options: Strategies, of different names. The first is what baselines start
      from: plain `pmean`.
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


class Exchange(NamedTuple):
  """Tensors `first` to `stop - 1`, by one option."""

  first: int
  stop: int
  option: Option


# Exchanges in order; together they hold every tensor once.
Assignment = tuple[Exchange, ...]


class Span(NamedTuple):
  """When a piece runs."""

  start_s: float
  end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
  """An exchange and when its three pieces run."""

  exchange: Exchange
  before: Span
  link: Span
  after: Span


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
  """What a step does when.

  Attributes:
    backward: Of each tensor, the part of the backward pass that completes it.
    sent: The exchanges.
    iteration_s: When the last piece ends.
    compute_s: How long compute is busy: backward pass and work.
    link_s: How long the link is.
    bytes: That a device receives.
  """

  backward: tuple[Span, ...]
  sent: tuple[Sent, ...]
  iteration_s: float
  compute_s: float
  link_s: float
  bytes: float

  @property
  def exposed_s(self) -> float:
    """Communication that nothing hides: how long compute waits for the link."""
    return self.iteration_s - self.compute_s

  @property
  def overlapped_s(self) -> float:
    """Communication beside which compute is busy."""
    return self.link_s - self.exposed_s

  def bubbles(self) -> Iterator[int]:
    """Exchanges before which the link, having sent others, is idle."""
    for k in range(1, len(self.sent)):
      if self.sent[k].link.start_s > self.sent[k - 1].link.end_s:
        yield k


def each_by(tensors: Sequence[Tensor], names: Sequence[str]) -> Assignment:
  """One exchange for each tensor, by the option so named."""
  return tuple(
    Exchange(j, j + 1, next(o for o in tensor.options if o.name == name))
    for j, (tensor, name) in enumerate(zip(tensors, names, strict=True))
  )


def simulate(
  tensors: Sequence[Tensor],
  assignment: Sequence[Exchange],
  overlap: Overlap = "overlap",
) -> Timeline:
  """When each piece runs.

  With overlap: compute runs the backward pass, and the work before an exchange
  as soon as its last gradient is complete; when all that is over, the work
  after the exchanges. The link takes exchanges in order. Of all schedules that
  send them in this order none is shorter: until the last gradient compute is
  never idle, so that work after an exchange can only delay what others wait
  for, and work before one is wanted in the order in which exchanges leave.

  Raises:
    ValueError: `assignment` leaves tensors out, or `overlap` is unknown.
  """
  _check(tensors, assignment, overlap)
  option_s = [e.option for e in assignment]
  if overlap == "none":
    backward, sent = _one_by_one(tensors, assignment)
  else:
    backward, sent = _beside(tensors, assignment)
  work = sum(option.work_s for option in option_s)
  return Timeline(
    backward=backward,
    sent=sent,
    iteration_s=max((sent[-1].after if sent else Span(0.0, 0.0)).end_s, 0.0),
    compute_s=sum(tensor.backward_s for tensor in tensors) + work,
    link_s=sum(option.link_s for option in option_s),
    bytes=sum(option.bytes for option in option_s),
  )


def _one_by_one(tensors, assignment):
  backward, now = [], 0.0
  for tensor in tensors:
    backward.append(Span(now, now + tensor.backward_s))
    now = backward[-1].end_s
  sent = []
  for exchange in assignment:
    option, spans = exchange.option, []
    for seconds in (option.before_s, option.link_s, option.after_s):
      spans.append(Span(now, now + seconds))
      now += seconds
    sent.append(Sent(exchange, *spans))
  return tuple(backward), tuple(sent)


def _beside(tensors, assignment):
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
  return tuple(backward), tuple(sent)


def _check(tensors, assignment, overlap):
  if overlap not in ("none", "overlap"):
    raise ValueError(f"`overlap` must be 'none' or 'overlap', got {overlap!r}.")
  stops = [0, *(exchange.stop for exchange in assignment)]
  firsts = [*(exchange.first for exchange in assignment), len(tensors)]
  if stops != firsts or any(e.first >= e.stop for e in assignment):
    ranges = [(exchange.first, exchange.stop) for exchange in assignment]
    raise ValueError(
      f"`assignment` must hold each of {len(tensors)} tensors once and in"
      f" order, got ranges {ranges}."
    )
