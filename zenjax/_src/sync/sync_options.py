"""Checks the arguments of `zen_sync` when the transform is built."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import Capacity
from zenjax._src.core.arguments import Kernels
from zenjax._src.core.arguments import Partition
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.core.arguments import Unit
from zenjax._src.core.collectives import Axes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import plans

# What a plan decides for every leaf, so that it cannot be given as well.
_PLANNED = ("sparse", "scheme", "unit", "partition", "wire_dtype", "capacities")


def require_free(plan: Any, given: Mapping[str, Any]) -> None:
  """Raises if an argument is given that the plan decides."""
  if not isinstance(plan, plans.Plan):
    raise TypeError(
      f"`plan` must be a zenjax.planner.Plan, got {type(plan).__name__}; give"
      " what `zenjax.planner.plan` or `zenjax.planner.Plan.from_json` returned."
    )
  for name in _PLANNED:
    default = ARGUMENTS[name].default
    value = given.get(name, default)
    alike = type(value) is type(default) and value == default
    if value is not default and not alike:
      raise ValueError(
        f"`{name}` is decided by the plan for every leaf, got {name}={value!r}"
        " and a `plan`; leave one of them out."
      )
  plans.require_version(plan)


def by_plan(plan: plans.Plan) -> dict[str, Any]:
  """Returns options as a plan has them; raises `ValueError` if it cannot be."""
  known = [*SPARSE, plans.DENSE]
  for leaf in plan.leaves:
    where = f"plan.leaves[{leaf.name!r}]"
    arguments.one_of(f"{where}.scheme", leaf.scheme, known)
    _check_column_groups(leaf.column_groups, plan.mesh, where)
  sparse = [leaf for leaf in plan.leaves if leaf.scheme != plans.DENSE]
  wire = {leaf.name: _wire_named(leaf) for leaf in sparse if leaf.wire_dtype}
  sizes = {leaf.name: leaf.capacities for leaf in sparse if leaf.capacities}
  arguments.capacities_of(sizes)
  return dict(plan=plan, sparse=plan.sparse, wire_dtype=wire)


def _check_column_groups(groups: Any, mesh: Any, where: str) -> None:
  axis, devices = mesh[-1] if mesh else ("", 1)
  whole = isinstance(groups, int) and groups > 0
  if not whole or devices % groups:
    raise ValueError(
      f"`{where}.column_groups` must divide the {devices} devices along"
      f" {axis!r}, got {groups!r}; give 1 for hashed rows."
    )


def _wire_named(leaf: plans.LeafPlan) -> jnp.dtype | None:
  where = f"plan.leaves[{leaf.name!r}].wire_dtype"
  try:
    dtype = jnp.dtype(leaf.wire_dtype)
  except TypeError as error:
    raise TypeError(
      f"`{where}` must name a floating dtype such as 'bfloat16', got"
      f" {leaf.wire_dtype!r}."
    ) from error
  return arguments.wire_dtype(where, dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
  """Checked arguments of `zen_sync`; see there."""

  axes: Axes
  sparse: SparseSpec
  scheme: str
  mean: bool
  output: str
  unit: Unit  # the default of a leaf: never "auto"
  partition: Partition
  wire_dtype: jnp.dtype | dict[str, jnp.dtype] | None  # one, or by leaf
  capacities: Capacity | dict[str, Capacity] | None
  kernels: Kernels = "auto"
  hash_seed: int = 0
  plan: plans.Plan | None = None

  def wire_of(self, name: str) -> jnp.dtype | None:
    """Returns the dtype in which rows are sent; None for the leaf's own."""
    if isinstance(self.wire_dtype, dict):
      return self.wire_dtype.get(name)
    return self.wire_dtype

  def context(self, sizes: Sequence[int]) -> Context:
    """Returns the context of an exchange over axes of these sizes."""
    return Context(axes=self.axes, sizes=tuple(sizes), mean=self.mean)


class Argument(NamedTuple):
  """An argument of `zen_sync`."""

  default: Any
  rule: Callable[[Any], Any] | None = None  # returns it checked, or raises


def _one_of(name: str, *known: str) -> Callable[[Any], Any]:
  return lambda value: arguments.one_of(name, value, list(known))


def _operation(value: Any) -> str | None:
  if value is None:
    return None
  return arguments.one_of("op", value, ["mean", "sum"])


def _mesh(value: Any) -> jax.sharding.Mesh | None:
  if value is not None and not isinstance(value, jax.sharding.Mesh):
    raise TypeError(
      f"`mesh` must be a jax.sharding.Mesh, got {value!r}; give the mesh that"
      " the step's arrays lie on."
    )
  return value


# All but `axis_name`.
ARGUMENTS = {
  "sparse": Argument(None),
  "scheme": Argument("zen", _one_of("scheme", *sorted([*DENSE, *SPARSE]))),
  "op": Argument(None, _operation),
  "output": Argument("same", _one_of("output", "same", "dense", "rows")),
  "unit": Argument("auto", arguments.check_unit),
  "partition": Argument("hash", arguments.check_partition),
  "wire_dtype": Argument(None, lambda x: arguments.wire_dtype("wire_dtype", x)),
  "capacities": Argument(None, arguments.capacities_of),
  "plan": Argument(None),
  "mesh": Argument(None, _mesh),
  "kernels": Argument("auto", arguments.check_kernels),
  "hash_seed": Argument(0, arguments.hash_seed),
}


def check(axis_name: AxisName, **given: Any) -> Options:
  """Returns the options of a `zen_sync` with these arguments.

  Raises:
    ValueError: An argument is out of range, or contradicts another.
    TypeError: An argument is unknown or of another type.
  """
  unknown = sorted(set(given) - set(ARGUMENTS))
  if unknown:
    raise TypeError(
      f"unexpected keyword arguments {unknown}; known are {sorted(ARGUMENTS)}."
    )
  plan = given.get("plan")
  if plan is not None:
    require_free(plan, given)
  found = {}
  for name, argument in ARGUMENTS.items():
    value = given.get(name, argument.default)
    found[name] = argument.rule(value) if argument.rule else value
  scheme, unit = found["scheme"], found["unit"]
  unit = "row" if unit == "auto" else unit
  if unit == "row" and scheme in SPARSE:
    unit = SPARSE[scheme].unit or unit
  if found["output"] == "rows" and unit != "row":
    raise ValueError(
      f"`output='rows'` returns rows of the leaf, got {unit=} with"
      f" {scheme=}; use `unit='row'` with another scheme than 'block_sparse',"
      " or `output='dense'`."
    )
  options = Options(
    axes=arguments.axes(axis_name),
    sparse=found["sparse"],
    scheme=scheme,
    mean=found["op"] != "sum",
    output=found["output"],
    unit=unit,
    partition=found["partition"],
    wire_dtype=found["wire_dtype"],
    capacities=found["capacities"],
    kernels=found["kernels"],
    hash_seed=found["hash_seed"],
  )
  if plan:
    return dataclasses.replace(options, **by_plan(plan))
  return options
