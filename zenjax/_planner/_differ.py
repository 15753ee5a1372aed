"""What differs between two plans of one model, in words."""

from zenjax._planner._plan import DENSE
from zenjax._planner._plan import LeafPlan
from zenjax._planner._plan import Plan
from zenjax._planner._strategies import Strategy


def strategy_name(leaf: LeafPlan) -> str:
  """Of its way, as the search has it."""
  return Strategy(
    scheme=leaf.scheme,
    column_groups=leaf.column_groups,
    wire_dtype=leaf.wire_dtype,
  ).name


def changes(plan: Plan, found: Plan) -> tuple[str, ...]:
  """A line for each leaf whose program differs."""
  before = plan.by_name
  with_old, with_new = _together(plan), _together(found)
  lines = []
  for leaf in found.leaves:
    name, old = leaf.name, before[leaf.name]
    if leaf.choice != old.choice:
      lines.append(f"{name}: {old.choice} -> {leaf.choice}")
    elif leaf.capacities != old.capacities:
      lines.append(
        f"{name}: first round {_rows(old)} -> {_rows(leaf)} rows (push, pull)"
      )
    elif with_old.get(name) != with_new.get(name):
      members = ", ".join(sorted(with_new[name]))
      lines.append(f"{name}: in one exchange: {members}")
  return tuple(lines)


def _rows(leaf: LeafPlan) -> str:
  return "guessed" if leaf.capacities is None else str(leaf.capacities)


def _together(plan: Plan) -> dict[str, frozenset[str]]:
  """With which leaves each sparse one shares an exchange."""
  sparse = [x for x in plan.leaves if x.scheme != DENSE]
  key = lambda leaf: (strategy_name(leaf), leaf.group)
  return {
    x.name: frozenset(y.name for y in sparse if key(y) == key(x))
    for x in sparse
  }
