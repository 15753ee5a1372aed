"""What the user asked for, checked when the transform is built."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
from typing import Any

import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import Capacities
from zenjax._src.core.arguments import Capacity
from zenjax._src.core.arguments import Partition
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.core.arguments import Unit
from zenjax._src.core.collectives import Axes
from zenjax._src.machine import cost
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import plans

# What a plan decides for every leaf, in the place of arguments.


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
  "capacities": ", or give `zenjax.planner.plan` these capacities",
  "profile": ", or give `zenjax.planner.plan` this profile",
}


def require_free(
  plan: Any, given: Mapping[str, Any], usual: Mapping[str, Any]
) -> None:
  """Raises where an argument stands beside a plan that decides it."""
  if not isinstance(plan, plans.Plan):
    raise TypeError(
      f"`plan` must be a zenjax.planner.Plan, got {type(plan).__name__}; give"
      " what"
      " `zenjax.planner.plan` or `zenjax.planner.Plan.from_json` returned."
    )
  for name in _NAMES:
    value, default = given[name], usual.get(name)
    alike = type(value) is type(default) and value == default
    if value is not default and not alike:
      raise ValueError(
        f"`{name}` is decided by the plan for every leaf, got"
        f" {value!r} beside `plan`; leave one of them out{_WAYS.get(name, '')}."
      )
  plans.require_version(plan)


def by_plan(plan: plans.Plan) -> dict[str, Any]:
  """Options as a plan has them; raises `ValueError` where none can be."""
  known = [*SPARSE, plans.DENSE]
  for leaf in plan.leaves:
    where = f"plan.leaves[{leaf.name!r}]"
    arguments.one_of(f"{where}.scheme", leaf.scheme, known)
    _check_column_groups(leaf.column_groups, plan.mesh, where)
  sparse = [leaf for leaf in plan.leaves if leaf.scheme != plans.DENSE]
  wire = {leaf.name: _wire_named(leaf) for leaf in sparse if leaf.wire_dtype}
  pinned = {leaf.name: leaf.capacities for leaf in sparse if leaf.capacities}
  return dict(
    plan=plan,
    sparse=plan.sparse,
    wire_dtype=wire,
    capacities=arguments.capacities_of(pinned),
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


def _wire_named(leaf: plans.LeafPlan) -> jnp.dtype | None:
  try:
    dtype = jnp.dtype(leaf.wire_dtype)
  except TypeError as error:
    raise TypeError(
      f"`plan.leaves[{leaf.name!r}].wire_dtype` must name a floating dtype such"
      f" as 'bfloat16', got {leaf.wire_dtype!r}."
    ) from error
  return arguments.wire_dtype(f"plan.leaves[{leaf.name!r}].wire_dtype", dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
  """Checked arguments of `zen_sync`; see there."""

  axes: Axes
  sparse: SparseSpec
  scheme: str
  mean: bool
  exact: bool
  output: str
  unit: Unit  # of leaves of which nothing else is said: never "auto"
  partition: Partition
  wire_dtype: jnp.dtype | dict[str, jnp.dtype] | None  # one, or by leaf
  capacities: Capacity | dict[str, Capacity] | None
  seed: int
  link: Link | None
  profile: Mapping[str, Profile] | None
  ids_first: bool
  remote_copies: bool
  overlap: bool = False
  plan: plans.Plan | None = None
  # Whether leaves that a sparsifier selects from travel by elements.
  follows: bool = False
  # These leaves, with the dtype that they were rounded to.
  selected: Mapping[str, jnp.dtype] = dataclasses.field(default_factory=dict)

  def unit_of(self, name: str) -> Unit:
    """What of a leaf is sent or not sent as a whole."""
    return "element" if name in self.elements else self.unit

  @property
  def elements(self) -> Collection[str]:
    """Leaves that travel by elements whatever `unit` is."""
    return self.selected if self.follows else ()

  def wire_of(self, name: str) -> jnp.dtype | None:
    """In which rows of a leaf travel; None for their own."""
    if isinstance(self.wire_dtype, dict):
      return self.wire_dtype.get(name)
    return self.wire_dtype

  def context(self, sizes: Sequence[int]) -> Context:
    """Of an exchange over axes of these sizes."""
    return Context(
      axes=self.axes,
      sizes=tuple(sizes),
      mean=self.mean,
      ids_first=self.ids_first,
      remote_copies=self.remote_copies,
    )

  @property
  def rows_out(self) -> bool:
    """Whether arrays come back as SparseRows."""
    return self.output == "rows"

  @property
  def overlaps(self) -> bool:
    """Whether exchanges are to run beside the backward pass."""
    return self.plan.overlap if self.plan else self.overlap


# Of every argument of `zen_sync` but `axis_name` and `sparse`.
DEFAULTS: dict[str, Any] = dict(
  scheme="zen",
  op="mean",
  on_overflow="exact",
  output="same",
  unit="auto",
  partition="auto",
  wire_dtype=None,
  capacities=None,
  hash_seed=0,
  link=None,
  profile=None,
  ids_first=False,
  overlap=False,
  plan=None,
  exchange="collectives",
)


def check(
  axis_name: AxisName,
  *,
  sparse: SparseSpec,
  scheme: str,
  op: str,
  on_overflow: str,
  output: str,
  unit: Unit,
  partition: Partition,
  wire_dtype: Any,
  capacities: Capacities,
  hash_seed: int,
  link: Link | None,
  profile: Mapping[str, Profile] | None,
  ids_first: bool,
  overlap: bool,
  plan: plans.Plan | None,
  exchange: str,
) -> Options:
  """Raises `ValueError` or `TypeError` where an argument cannot be meant."""
  if plan is not None:
    require_free(plan, locals(), DEFAULTS)
  arguments.one_of("scheme", scheme, ["auto", *sorted([*DENSE, *SPARSE])])
  arguments.one_of("op", op, ["mean", "sum"])
  arguments.one_of("on_overflow", on_overflow, ["exact", "carry"])
  arguments.one_of("output", output, ["same", "dense", "rows"])
  _check_auto(scheme, link, profile)
  arguments.check_unit(unit)
  follows = unit == "auto"
  unit = "row" if follows else unit
  if unit == "row" and scheme in SPARSE:
    unit = SPARSE[scheme].unit or unit
  arguments.check_partition(partition)
  if not isinstance(hash_seed, int) or not 0 <= hash_seed < 2**32:
    raise ValueError(
      f"`hash_seed` must be an integer in [0, 2**32), got {hash_seed=}."
    )
  if output == "rows" and unit != "row":
    raise ValueError(
      f"`output='rows'` returns rows of the leaf, got {unit=} with"
      f" {scheme=}; use `unit='row'` with another scheme than 'block_sparse',"
      " or `output='dense'`."
    )
  options = Options(
    axes=arguments.axes(axis_name),
    sparse=sparse,
    scheme=scheme,
    mean=op == "mean",
    exact=on_overflow == "exact",
    output=output,
    unit=unit,
    partition=partition,
    wire_dtype=arguments.wire_dtype("wire_dtype", wire_dtype),
    capacities=arguments.capacities_of(capacities),
    seed=hash_seed,
    link=link,
    profile=profile,
    ids_first=_ids_first(ids_first, scheme),
    overlap=arguments.boolean("overlap", overlap),
    follows=follows,
    remote_copies=_remote_copies(
      exchange,
      scheme,
      axis_name,
      {"ids_first": ids_first, "overlap": overlap},
      plan,
    ),
  )
  if plan:
    return dataclasses.replace(options, **by_plan(plan))
  return options


def _check_auto(scheme: str, link: Any, profile: Any) -> None:
  for name, value in (("link", link), ("profile", profile)):
    if value is not None and scheme != "auto":
      raise ValueError(
        f"`{name}` is for `scheme='auto'`, which chooses by it, got {scheme=};"
        " leave it out."
      )
  if link is not None and not isinstance(link, Link):
    raise TypeError(
      f"`link` must be a zenjax.planner.Link, got {link!r}; give"
      " zenjax.planner.Link(bandwidth=bytes a second, latency_s=seconds)."
    )
  cost.check_profile(profile)


def _ids_first(value: Any, scheme: str) -> bool:
  if arguments.boolean("ids_first", value) and scheme != "zen":
    raise ValueError(
      f"`ids_first=True` is for `scheme='zen'`, got {scheme=}; leave one of"
      " them out."
    )
  return value


def _remote_copies(
  exchange: Any,
  scheme: str,
  axis_name: AxisName,
  alone: Mapping[str, bool],
  plan: plans.Plan | None,
) -> bool:
  arguments.one_of("exchange", exchange, ["collectives", "remote_copies"])
  if exchange == "collectives":
    return False
  if scheme != "zen":
    raise ValueError(
      f"`exchange='remote_copies'` is for `scheme='zen'`, got {scheme=}; leave"
      " one of them out."
    )
  if plan is not None:
    raise ValueError(
      "`exchange='remote_copies'` is for `scheme='zen'`, and `plan` decides"
      " schemes, by what collectives take; leave one of them out."
    )
  for name, given in alone.items():
    if given:
      raise ValueError(
        f"`{name}=True` has parts sent beside the backward pass, and"
        " `exchange='remote_copies'` sends everything in one kernel, beside"
        " which nothing runs; leave one of them out."
      )
  if len(arguments.axes(axis_name)) > 1:
    raise NotImplementedError(
      "`exchange='remote_copies'` can serve one axis, got"
      f" {axis_name=}: sums over slow links are exchanged by collectives; use"
      " exchange='collectives', which runs everywhere."
    )
  return True
