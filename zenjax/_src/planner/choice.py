"""Chooses a way for each leaf, by the predicted time of a whole step.

The prediction assumes that nothing overlaps. Leaves of one exchange pay its
latencies once, so leaves cannot be chosen one by one. Instead, every set of
exchanges is tried: each leaf takes the best way that the set allows, and the
set with the shortest step wins. The dense sum of an array is in every set,
because every program can have it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import TypeVar

from zenjax._src.machine.cost import Prediction
from zenjax._src.sync import plans
from zenjax._src.sync.plans import DENSE

# A way, as its caller names it.
_Way = TypeVar("_Way")

# Predictions have errors. A way replaces the dense sum only if its predicted
# time is less than this part of the dense sum's.
_MARGIN = 1 - plans.ERROR


def seconds(chosen: Iterable[Prediction]) -> float:
  """Returns the time of all exchanges; each exchange's latency counts once."""
  own_s, once_s = 0.0, {}
  for prediction in chosen:
    own_s += prediction.seconds - prediction.once_s
    once_s[prediction.exchange] = max(
      once_s.get(prediction.exchange, 0), prediction.once_s
    )
  return own_s + sum(once_s.values())


def _raised(prediction: Prediction) -> Prediction:
  """Returns a prediction, raised by the margin unless it is a dense sum."""
  if prediction.exchange == DENSE:
    return prediction
  return dataclasses.replace(
    prediction,
    seconds=prediction.seconds / _MARGIN,
    once_s=prediction.once_s / _MARGIN,
  )


def choose(
  leaves: Sequence[Mapping[_Way, Prediction]],
  *,
  limit: float = math.inf,
  most: int | None = None,
  worth: float = 1.0,
) -> list[_Way] | None:
  """Returns the way of each leaf that makes the step shortest.

  If the fastest ways do not fit in memory, some leaves take slower ways.

  Args:
    leaves: The ways of each leaf.
    limit: Bytes of memory that all leaves may take together.
    most: Exchanges that one program can have besides dense sums; None for any
      number.
    worth: One more exchange must reduce the time to less than this part.

  Returns:
    None if nothing fits.
  """
  raised = [{way: _raised(x) for way, x in ways.items()} for ways in leaves]
  names = {x.exchange for ways in raised for x in ways.values()} - {DENSE}
  sizes = len(names) if most is None else min(most, len(names))
  best, least, used = None, (math.inf, math.inf), 0
  for size in range(sizes + 1):
    for some in itertools.combinations(sorted(names), size):
      # A leaf of a shared exchange pays its bytes and its own work, not the
      # latency.
      open_to = [
        {
          way: (max(x.seconds - x.once_s, 0.0), x.memory)
          for way, x in ways.items()
          if x.exchange in (DENSE, *some)
        }
        for ways in raised
      ]
      chosen = _within(open_to, limit) if all(open_to) else None
      if chosen is None:
        continue
      taken = [ways[way] for ways, way in zip(raised, chosen)]
      # A tie goes to the choice with less memory.
      step = seconds(taken), sum(x.memory for x in taken)
      wanted_s = worth * least[0] if size > used else least[0]
      if step < (wanted_s, least[1]):
        best, least, used = chosen, step, size
  return best


# Sums of memory are rounded up to multiples of this fraction of the limit.
_BUCKETS = 512


def _within(
  leaves: Sequence[Mapping[_Way, tuple[float, float]]], limit: float
) -> list[_Way] | None:
  """Returns the fastest ways whose memory is within the limit.

  This is a knapsack problem, solved by dynamic programming over the leaves with
  memory rounded to buckets.
  """
  fastest = [min(own, key=lambda way: own[way]) for own in leaves]
  if sum(own[way][1] for own, way in zip(leaves, fastest)) <= limit:
    return fastest
  leanest = [min(own, key=lambda way: own[way][::-1]) for own in leaves]
  least = [own[way][1] for own, way in zip(leaves, leanest)]
  # Buckets count memory above the least possible sum, so that rounding never
  # rejects a choice that fits.
  step = (limit - sum(least)) / _BUCKETS
  if step < 0:
    return None
  best: dict[int, tuple[float, list[_Way]]] = {0: (0.0, [])}
  for own, few in zip(leaves, least):
    new: dict[int, tuple[float, list[_Way]]] = {}
    for used, (spent, ways) in best.items():
      for way, (more_s, memory) in own.items():
        extra = memory - few
        at = used + (math.ceil(extra / step) if extra > 0 and step else 0)
        if at > _BUCKETS or (extra > 0 and not step):
          continue
        if at not in new or spent + more_s < new[at][0]:
          new[at] = spent + more_s, [*ways, way]
    best = new
  return min(best.values(), key=lambda x: x[0])[1]


def reason(
  ways: Mapping[_Way, Prediction],
  chosen: _Way,
  in_words: Callable[[_Way], str],
) -> str:
  """Compares the chosen way with the next best one, in words for a plan.

  Args:
    ways: All ways of a leaf, each as if the leaf had its own exchange.
    chosen: The chosen way.
    in_words: Returns the name of a way.
  """
  others = [way for way in ways if way != chosen]
  if not others:
    return ""
  ratio = lambda way: ways[way].seconds / max(ways[chosen].seconds, 1e-12)
  second = min(others, key=ratio)
  text = f"{in_words(second)} takes {ratio(second):.3g}x as long"
  if ratio(second) >= 1:
    return text
  if ways[chosen].exchange != DENSE:
    return f"{text} by itself, but cannot share an exchange with the others"
  if ratio(second) >= _MARGIN:
    return f"{text}, within the error of predictions"
  return f"{text} in an exchange of its own"
