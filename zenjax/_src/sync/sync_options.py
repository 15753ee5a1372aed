"""Checks the arguments of `zen_sync` when the transformation is built."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core.collectives import Axes
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import plans

_SCHEMES = sorted([DENSE, *SPARSE])
# The arguments that a plan decides for every leaf.
_PLANNED = "sparse", "scheme", "unit", "partition", "wire_dtype", "capacities"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
  """The arguments of `zen_sync`, with their defaults."""

  axes: Axes
  sparse: arguments.SparseSpec = None
  scheme: str = "zen"
  op: str | None = None
  output: str = "same"
  unit: arguments.Unit = "auto"  # After `check`, never "auto".
  partition: arguments.Partition = "hash"
  # One for all leaves, or by leaf.
  wire_dtype: jnp.dtype | dict[str, jnp.dtype] | None = None
  capacities: arguments.Capacity | dict[str, arguments.Capacity] | None = None
  plan: plans.Plan | None = None
  mesh: jax.sharding.Mesh | None = None
  kernels: arguments.Kernels = "xla"
  hash_seed: int = 0

  @property
  def mean(self) -> bool:
    """True for a mean over devices, False for a sum."""
    return self.op != "sum"


def check(axis_name: arguments.AxisName, **given: Any) -> Options:
  """Returns the checked options of a `zen_sync` with these arguments.

  Args:
    axis_name: The axis or axes that devices are mapped over.
    **given: Fields of `Options`, as users write them.

  Raises:
    ValueError: An argument is out of range, or contradicts another.
    TypeError: An argument has another type.
  """
  options = Options(axes=arguments.axes(axis_name), **given)
  scheme, unit, mesh = options.scheme, options.unit, options.mesh
  arguments.one_of("scheme", scheme, _SCHEMES)
  arguments.one_of("output", options.output, ["same", "dense", "rows"])
  arguments.one_of("kernels", options.kernels, ["xla", "pallas"])
  if options.op is not None:
    arguments.one_of("op", options.op, ["mean", "sum"])
  if mesh is not None:
    if not isinstance(mesh, jax.sharding.Mesh):
      raise TypeError(
        f"`mesh` must be a jax.sharding.Mesh, got {mesh!r}. Give the mesh that"
        " the step's arrays are on."
      )
    arguments.mesh_axes(axis_name, mesh)
  sparse = options.sparse
  wire = arguments.row_wire_dtype("wire_dtype", options.wire_dtype)
  if wire is not None and scheme == DENSE:
    raise ValueError(
      f"`wire_dtype` is for rows, got {wire} with scheme='dense', which sends"
      " whole arrays. Leave `wire_dtype` or `scheme` out."
    )
  if options.plan is not None:
    _require_plan(options.plan, options)
    sparse, wire = options.plan.sparse, _planned_wire_dtypes(options.plan)
  if arguments.check_unit(unit) in ("auto", "row"):
    unit = (scheme in SPARSE and SPARSE[scheme].unit) or "row"
  if options.output == "rows" and unit != "row":
    raise ValueError(
      f"`output='rows'` returns rows of a leaf, but got {unit=} with"
      f" {scheme=}. Leave `unit` out and take another scheme than"
      " 'block_sparse', or give `output='dense'`."
    )
  return dataclasses.replace(
    options,
    sparse=sparse,
    unit=unit,
    partition=arguments.check_partition(options.partition),
    wire_dtype=wire,
    capacities=arguments.capacities_of(options.capacities),
    hash_seed=arguments.hash_seed(options.hash_seed),
  )


def _require_plan(plan: plans.Plan, options: Options) -> None:
  """Raises if a plan is broken, or an argument is given that it decides."""
  if not isinstance(plan, plans.Plan):
    raise TypeError(
      f"`plan` must be a zenjax.planner.Plan, got {type(plan).__name__}. Call"
      " `zenjax.planner.plan` or `zenjax.planner.Plan.from_json`."
    )
  defaults = Options(axes=options.axes)
  for name in _PLANNED:
    value, default = getattr(options, name), getattr(defaults, name)
    if type(value) is not type(default) or value != default:
      raise ValueError(
        f"`{name}` is decided by the plan for every leaf, got {name}={value!r}"
        " and a `plan`. Leave one of them out."
      )
  plans.require_version(plan)
  if compressed := [x.name for x in plan.leaves if x.compressor]:
    raise ValueError(
      f"`plan` compresses leaves {compressed}, which zen_sync cannot do. Give"
      " it to `zenjax.compress.all_reduce(plan, axis_name)`."
    )
  by_set_up = [x.name for x in plan.leaves if x.form not in plans.SYNCED]
  if by_set_up or plan.clip_norm is not None:
    what = f"shards {by_set_up}" if by_set_up else "clips gradients by a norm"
    raise ValueError(
      f"`plan` {what}, which zen_sync cannot do. Follow it with"
      " `zenjax.planner.set_up(plan, params, tx, mesh)`."
    )
  axis, devices = plan.mesh[-1] if plan.mesh else ("", 1)
  for leaf in plan.leaves:
    where = f"plan.leaves[{leaf.name!r}]"
    arguments.one_of(f"{where}.scheme", leaf.scheme, _SCHEMES)
    if leaf.column_groups < 1 or devices % leaf.column_groups:
      raise ValueError(
        f"`{where}.column_groups` must divide the {devices} devices along"
        f" {axis!r}, got {leaf.column_groups}. Give 1 for hashed rows."
      )
    if leaf.capacities:
      arguments.capacities_of({leaf.name: leaf.capacities})


def _planned_wire_dtypes(plan: plans.Plan) -> dict[str, jnp.dtype]:
  """Returns the wire dtypes of a plan, by the leaves that have one."""
  dtypes = {}
  for leaf in plan.leaves:
    where = f"plan.leaves[{leaf.name!r}].wire_dtype"
    wire = arguments.row_wire_dtype(where, leaf.wire_dtype)
    if wire is not None and leaf.scheme != DENSE:
      dtypes[leaf.name] = wire
  return dtypes
