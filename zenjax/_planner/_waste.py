"""What a run spends beyond what its rows need, and what of it a plan saves."""

from collections.abc import Mapping

from zenjax._planner._differ import strategy_name
from zenjax._planner._plan import DENSE
from zenjax._planner._plan import Plan
from zenjax._planner._strategies import PMEAN
from zenjax._planner._strategies import Space


def wasted_seconds(
  plan: Plan, space: Space, seen: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
  """Seconds that each leaf took beyond what its rows are predicted to take."""
  found = {}
  for i, leaf in enumerate(plan.leaves):
    if leaf.name not in seen:
      continue
    own, bytes_seen = seen[leaf.name], seen[leaf.name]["wire_bytes"]
    least = space.predictions[i][strategy_name(leaf)]
    if own["went_dense"]:  # Which may take less: rows were too many.
      dense_s = space.predictions[i][PMEAN].seconds
      sent_s = dense_s * bytes_seen / max(own["dense_bytes"], 1.0)
      found[leaf.name] = sent_s - least.seconds
    elif least.received:
      bytes_s = max(least.wire_s - least.once_s, 0.0)
      found[leaf.name] = bytes_s * max(bytes_seen / least.received - 1, 0.0)
  return found


def still_wasted(found: Plan, plan: Plan, wasted: Mapping[str, float]) -> float:
  """Of `wasted`, what a new plan wastes as well."""
  before = plan.by_name
  gone = {
    x.name
    for x in found.leaves
    if x.scheme == DENSE
    or x.capacities not in (None, before[x.name].capacities)
  }
  return sum(s for name, s in wasted.items() if name not in gone)
