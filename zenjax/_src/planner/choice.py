"""Chooses a way for each leaf, by the predicted time of a whole step.

The prediction assumes that nothing overlaps. Leaves of one exchange pay its
latencies once, so leaves cannot be chosen one by one. Instead, every set of
exchanges is tried: each leaf takes the best way that the set allows, and the
set with the shortest step wins.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import itertools
import math

from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Way
from zenjax._src.machine.cost import Ways
from zenjax._src.sync import plans
from zenjax._src.sync.plans import DENSE

# Predictions have errors. A way replaces the dense sum only if its predicted
# time is less than this part of the dense sum's.
MARGIN = 1 - plans.ERROR


def seconds(predictions: Iterable[Prediction]) -> float:
  """Returns the time of all exchanges; each exchange's latency counts once."""
  bytes_and_work_s, latency_s = 0.0, {}
  for prediction in predictions:
    bytes_and_work_s += prediction.seconds - prediction.once_s
    exchange = prediction.exchange
    latency_s[exchange] = max(latency_s.get(exchange, 0), prediction.once_s)
  return bytes_and_work_s + sum(latency_s.values())


def _raised(prediction: Prediction) -> Prediction:
  """Returns a prediction, raised by the margin unless it is a dense sum."""
  if prediction.exchange == DENSE:
    return prediction
  return dataclasses.replace(
    prediction,
    seconds=prediction.seconds / MARGIN,
    once_s=prediction.once_s / MARGIN,
  )


def choose(
  leaves: Sequence[Ways],
  *,
  limit: float = math.inf,
  most: float = math.inf,
  worth: float = 1.0,
) -> list[Way] | None:
  """Returns the way of each leaf that makes the step shortest.

  Args:
    leaves: The ways of each leaf.
    limit: Bytes of memory that all leaves may take together.
    most: Exchanges that one program can have besides dense sums.
    worth: Each after the first must reduce the time to less than this part.

  Returns:
    None if nothing fits.
  """
  raised = [{way: _raised(x) for way, x in ways.items()} for ways in leaves]
  names = {x.exchange for ways in raised for x in ways.values()} - {DENSE}
  best, least, used = None, (math.inf, math.inf), 0
  for size in range(len(names) + 1):
    sets = itertools.combinations(sorted(names), size)
    for exchanges, dense in itertools.product(sets, ((DENSE,), ())):
      allowed = [
        {way: x for way, x in of.items() if x.exchange in (*exchanges, *dense)}
        for of in raised
      ]
      if size > most or not all(allowed):
        continue
      ways = _within(allowed, limit)
      if ways is None:
        continue
      chosen = [of_leaf[way] for of_leaf, way in zip(raised, ways)]
      # A tie goes to the choice with less memory.
      step = seconds(chosen), sum(x.memory for x in chosen)
      wanted_s = worth * least[0] if size > max(used, 1) else least[0]
      if step < (wanted_s, least[1]):
        best, least, used = ways, step, size
  return best


def _within(leaves: Sequence[Ways], limit: float) -> list[Way] | None:
  """Returns the fastest ways whose memory is within the limit.

  While memory is exceeded, it takes the slower way that costs the least time
  for each byte of the excess that it saves.
  """
  # A leaf of a shared exchange pays its bytes and its own work, not latency.
  seconds = lambda x: max(x.seconds - x.once_s, 0.0)
  chosen = [
    min(ways, key=lambda way: (seconds(ways[way]), ways[way].memory))
    for ways in leaves
  ]
  while True:
    now = [ways[way] for ways, way in zip(leaves, chosen)]
    excess = sum(x.memory for x in now) - limit
    if excess <= 0:
      return chosen
    swaps = {
      (i, way): (seconds(x) - seconds(now[i])) / min(saved, excess)
      for i, ways in enumerate(leaves)
      for way, x in ways.items()
      if (saved := now[i].memory - x.memory) > 0
    }
    if not swaps:
      return None
    leaf, way = min(swaps, key=lambda swap: swaps[swap])
    chosen[leaf] = way


def reason(ways: Ways, chosen: Way, words: Callable[[Way], str]) -> str:
  """Compares the chosen way with the next best one, in words for a plan.

  Args:
    ways: All ways of a leaf, each as if the leaf had its own exchange.
    chosen: The chosen way.
    words: Describes a way.
  """
  times = {way: x.seconds for way, x in ways.items() if way != chosen}
  if not times:
    return ""
  second = min(times, key=lambda way: times[way])
  ratio = times[second] / max(ways[chosen].seconds, 1e-12)
  text = f"{words(second)} takes {ratio:.3g}x as long"
  if MARGIN <= ratio < 1 / MARGIN:
    return f"{text}, within the error of predictions"
  if ratio >= 1:
    return text
  if ways[chosen].exchange != DENSE:
    return f"{text} if sent alone, but not if sent with other tables"
  return f"{text} if sent alone"
