"""What a plan decides for every leaf, in the place of arguments."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from zenjax import _arguments
from zenjax._planner import _plan as _planned
from zenjax._schemes import SPARSE

_NAMES = (
  "sparse",
  "scheme",
  "unit",
  "partition",
  "wire_dtype",
  "capacities",
  "link",
  "profile",
  "overlap",
)


# How else to say it.
_WAYS = {
  "capacities": ", or give `zenjax.plan` these capacities",
  "profile": ", or give `zenjax.plan` this profile",
}


def require_free(
  plan: Any, given: Mapping[str, Any], usual: Mapping[str, Any]
) -> None:
  """Raises where an argument stands beside a plan that decides it."""
  if not isinstance(plan, _planned.Plan):
    raise TypeError(
      f"`plan` must be a zenjax.Plan, got {type(plan).__name__}; give what"
      " `zenjax.plan` or `zenjax.Plan.from_json` returned."
    )
  for name in _NAMES:
    value, default = given[name], usual.get(name)
    alike = type(value) is type(default) and value == default
    if value is not default and not alike:
      raise ValueError(
        f"`{name}` is decided by the plan for every leaf, got"
        f" {value!r} beside `plan`; leave one of them out{_WAYS.get(name, '')}."
      )
  _planned.require_version(plan)


def by_plan(plan: _planned.Plan) -> dict[str, Any]:
  """Options as a plan has them; raises `ValueError` where none can be."""
  known = [*SPARSE, _planned.DENSE]
  for leaf in plan.leaves:
    where = f"plan.leaves[{leaf.name!r}]"
    _arguments.one_of(f"{where}.scheme", leaf.scheme, known)
    _check_column_groups(leaf.column_groups, plan.mesh, where)
  sparse = [leaf for leaf in plan.leaves if leaf.scheme != _planned.DENSE]
  wire = {leaf.name: _wire_named(leaf) for leaf in sparse if leaf.wire_dtype}
  pinned = {leaf.name: leaf.capacities for leaf in sparse if leaf.capacities}
  return dict(
    plan=plan,
    sparse=plan.sparse,
    wire_dtype=wire,
    capacities=_arguments.capacities_of(pinned),
  )


def _check_column_groups(groups: Any, mesh: Any, where: str) -> None:
  """They divide the devices of the fastest axis."""
  axis, devices = mesh[-1] if mesh else ("", 1)
  whole = isinstance(groups, int) and groups > 0
  if not whole or devices % groups:
    raise ValueError(
      f"`{where}.column_groups` must divide the {devices} devices along"
      f" {axis!r}, got {groups!r}; give 1 for hashed rows."
    )


def _wire_named(leaf: _planned.LeafPlan) -> jnp.dtype | None:
  try:
    dtype = jnp.dtype(leaf.wire_dtype)
  except TypeError as error:
    raise TypeError(
      f"`plan.leaves[{leaf.name!r}].wire_dtype` must name a floating dtype such"
      f" as 'bfloat16', got {leaf.wire_dtype!r}."
    ) from error
  return _arguments.wire_dtype(f"plan.leaves[{leaf.name!r}].wire_dtype", dtype)
