"""Chooses what to compress, and in which parts, by the time of a whole step.

A compressor has to wait for all gradients of its exchange. So a gradient that
is summed while others are computed gains nothing if it is compressed, and one
exchange for all gradients overlaps with nothing. Two published procedures
answer these questions, and take turns here until nothing gains:

- "Hi-Speed DNN Training with Espresso" (Wang et al., EuroSys 2023), Algorithm
  1: take gradients from the largest to the smallest, and give each the way with
  which the whole step is the shortest.
- "MergeComp" (Wang et al., 2021): cut the backward pass into parts. Gradients
  of a part share an exchange. Add cuts for as long as they gain.
"""

import bisect
from collections.abc import Sequence
import functools
from typing import NamedTuple

from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Way
from zenjax._src.machine.cost import Ways
from zenjax._src.planner import choice
from zenjax._src.planner import predictions
from zenjax._src.planner import timeline
from zenjax._src.planner.questions import Gradient
from zenjax._src.planner.questions import Question
from zenjax._src.planner.timeline import Part

# A further cut must reduce the time of a step to less than this part.
_WORTH = 0.998

Cuts = tuple[float, ...]


class Strategy(NamedTuple):
  """A way for every gradient, and where the backward pass is cut."""

  ways: tuple[Way, ...]
  cuts: Cuts = ()  # ascending values of `Gradient.ready`

  def part(self, gradient: Gradient) -> int:
    """Returns the number of the part that a compressed gradient is in."""
    return bisect.bisect_left(self.cuts, gradient.ready)


class Step:
  """Predicts steps of a question.

  Args:
    question: The question.
    predicted: Every way of every gradient, as if it had its own exchange.
  """

  def __init__(self, question: Question, predicted: Sequence[Ways]):
    self._question, self._predicted = question, predicted
    self._dense = [not gradient.is_table for gradient in question.gradients]
    self._compressors = {
      str(x): (x, predictions.seconds_per_byte(question, x))
      for x in question.compressors
    }
    self._shared = functools.cache(self._share)

  def seconds(self, strategy: Strategy) -> float:
    """Predicts the time of a step."""
    together: dict[tuple[int, str], list[int]] = {}
    plain, others = [], []
    for i, way in enumerate(strategy.ways):
      gradient = self._question.gradients[i]
      if way.compressor:
        key = strategy.part(gradient), way.compressor
        together.setdefault(key, []).append(i)
      elif way == PMEAN and self._dense[i]:
        plain.append((gradient.ready, gradient.dense_bytes))
      else:
        others.append(self._predicted[i][way])
    parts = [
      self._shared(name, tuple(them)) for (_, name), them in together.items()
    ]
    parts += timeline.buckets(self._question.model, plain)
    compute_s = self._question.compute_seconds
    backward_s = timeline.BACKWARD * compute_s
    return timeline.seconds(parts, compute_s, backward_s) + choice.seconds(
      others
    )

  def _share(self, compressor: str, which: tuple[int, ...]) -> Part:
    """Returns the exchange of gradients that share a compressor."""
    gradients = [self._question.gradients[i] for i in which]
    found = predictions.compressed(
      self._question, *self._compressors[compressor], gradients
    )
    return Part.of(found, ready=max(x.ready for x in gradients))

  def improved(self, possible: Sequence[Ways], ways: Sequence[Way]) -> Strategy:
    """Improves ways, and cuts the backward pass, until nothing gains.

    Args:
      possible: The ways that each gradient may take.
      ways: The ways to begin with.
    """
    best = Strategy(tuple(ways))
    while True:
      found = self._in_turn(possible, self._cut(best))
      if self.seconds(found) >= _WORTH * self.seconds(best):
        return best
      best = found

  def _in_turn(self, possible: Sequence[Ways], best: Strategy) -> Strategy:
    """Gives each gradient its best way, the largest first."""
    gradients = self._question.gradients
    compressible = [i for i, x in enumerate(gradients) if x.may_be_compressed]
    size = lambda i: (gradients[i].dense_bytes, gradients[i].ready)
    for i in sorted(compressible, key=size, reverse=True):
      others = [
        best._replace(ways=(*best.ways[:i], way, *best.ways[i + 1 :]))
        for way in possible[i]
        if way != best.ways[i]
      ]
      best = min([best, *others], key=self.seconds)
    return best

  def _cut(self, best: Strategy) -> Strategy:
    """Cuts the backward pass where a step gains."""
    if not self._question.compute_seconds:
      return best
    places = {
      gradient.ready
      for gradient, way in zip(self._question.gradients, best.ways)
      if way.compressor
    }
    best = best._replace(cuts=())
    while True:
      further = [
        best._replace(cuts=tuple(sorted([*best.cuts, place])))
        for place in sorted(places - set(best.cuts))
      ]
      found = min([best, *further], key=self.seconds)
      if self.seconds(found) >= _WORTH * self.seconds(best):
        return best
      best = found
