"""Checks the arguments of `zen_sync` when the transform is built."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

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
from zenjax._src.machine import cost
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import plans

# What a plan decides for every leaf, in the place of arguments.


# Arguments, then fields of `tuning`.
_DECIDED = (
  "sparse",
  "scheme",
  "unit",
  "partition",
  "wire_dtype",
  "capacities",
)
_DECIDED_TUNING = ("link", "profile", "overlap")


# How else to say it.
_WAYS = {
  "capacities": ", or give `zenjax.planner.plan` these capacities",
  "profile": ", or give `zenjax.planner.plan` this profile",
}


def require_free(plan: Any, given: Mapping[str, Any]) -> None:
  """Raises where an argument stands beside a plan that decides it."""
  if not isinstance(plan, plans.Plan):
    raise TypeError(
      f"`plan` must be a zenjax.planner.Plan, got {type(plan).__name__}; give"
      " what `zenjax.planner.plan` or `zenjax.planner.Plan.from_json` returned."
    )
  beside = {
    name: (given[name], ARGUMENTS[name].default)
    for name in _DECIDED
    if name in given
  }
  tuning, usual = _tuning(given.get("tuning")), Tuning()
  for name in _DECIDED_TUNING:
    beside[name] = getattr(tuning, name), getattr(usual, name)
  for name, (value, default) in beside.items():
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
class Tuning:
  """How an exchange runs, for experts: it changes times and never sums.

  Attributes:
    exchange: What carries rows between devices. `"collectives"` run everywhere
      and send whole buffers, padding and all. `"remote_copies"` is for TPUs:
      one kernel in the place of each collective, by which every device writes
      the rows that it has into the memory of the others, counts first. Padding
      stays where it is (ids travel as before), so buffers are larger and
      further rounds fewer. The sums are the same bits. It was compiled for
      TPUs and checked in a simulator, and measured on none; nothing runs
      beside such a kernel. For one axis, inside `shard_map` over all axes of
      its mesh, at most 127 tables of at most 32 bits an element.
    hash_seed: Draws another hash.
    ids_first: Sends ids of SparseRows in collectives of their own. Ids come
      with the batch, so where collectives run beside computation (GPUs) they
      are exchanged, and unions formed, while the backward pass still computes
      the values: seen in compiled schedules, measured on none. Elsewhere it
      only costs two latencies more, and arrays it leaves as they are.
    kernels: Who does the local work on rows. Rows of arrays are found,
      gathered, added up and written, and SparseRows are added up. `"xla"` is
      plain JAX. `"pallas"` takes kernels written by hand for TPUs and NVIDIA
      GPUs, which give the same bits; tables then travel one by one. Where there
      is no kernel, as on CPUs and for narrow rows on TPUs, that is an error
      when the program is lowered: XLA never takes its place. `"auto"` takes a
      kernel on devices on which it was measured to be no slower, and XLA
      elsewhere. These are H200 GPUs, for float32, with JAX before 0.12, which
      warns that kernels for GPUs will go. Which devices a program is for is
      known when it is traced. What has no kernels is XLA's whatever this
      says, as sums of whole leaves and sorted look-ups, and with `"auto"` the
      reading and writing of tables that travel together, those of one width.
    link: The connection of the devices, for `scheme="auto"`; by default 100
      Gbit/s with 10 microseconds.
    overlap: Gives each table an exchange of its own, which leaves when that
      gradient is complete, and not when the last one is. In schedules compiled
      for GPUs, and for TPUs with the compiler option
      `xla_tpu_enable_async_all_to_all`, the push of each stands beside backward
      work; on TPUs sums of "zen" wait for all pushes, or one table's would take
      the place of backward work beside another's push. CPUs run nothing beside
      an exchange: there it only costs latencies. It is for tables whose
      gradients are complete early.
    profile: Densities of leaves by name, for `scheme="auto"`, as
      `zenjax.planner.profile(state)` finds them after some steps. By default a
      vocabulary's, 1 % on a device.

  Raises:
    ValueError: A value is out of range.
    TypeError: A value is of another type.

  Example:
    >>> import zenjax
    >>> tx = zenjax.zen_sync("data", tuning=zenjax.Tuning(overlap=True))
  """

  exchange: Literal["collectives", "remote_copies"] = "collectives"
  hash_seed: int = 0
  ids_first: bool = False
  kernels: Kernels = "auto"
  link: Link | None = None
  overlap: bool = False
  profile: Mapping[str, Profile] | None = None

  def __post_init__(self):
    arguments.one_of(
      "exchange", self.exchange, ["collectives", "remote_copies"]
    )
    arguments.hash_seed(self.hash_seed)
    arguments.boolean("ids_first", self.ids_first)
    arguments.check_kernels(self.kernels)
    arguments.boolean("overlap", self.overlap)
    if self.link is not None and not isinstance(self.link, Link):
      raise TypeError(
        f"`link` must be a zenjax.planner.Link, got {self.link!r}; give"
        " zenjax.planner.Link(bandwidth=bytes a second, latency_s=seconds)."
      )
    cost.check_profile(self.profile)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
  """Checked arguments of `zen_sync`; see there."""

  axes: Axes
  sparse: SparseSpec
  scheme: str
  mean: bool
  exact: bool  # `on_overflow="exact"`; else "carry"
  output: str
  unit: Unit  # of leaves of which nothing else is said: never "auto"
  partition: Partition
  wire_dtype: jnp.dtype | dict[str, jnp.dtype] | None  # one, or by leaf
  capacities: Capacity | dict[str, Capacity] | None
  tuning: Tuning
  plan: plans.Plan | None = None

  def wire_of(self, name: str) -> jnp.dtype | None:
    """In which rows of a leaf travel; None for their own."""
    if isinstance(self.wire_dtype, dict):
      return self.wire_dtype.get(name)
    return self.wire_dtype

  def context(self, sizes: Sequence[int]) -> Context:
    """Returns the context of an exchange over axes of these sizes."""
    return Context(
      axes=self.axes,
      sizes=tuple(sizes),
      mean=self.mean,
      ids_first=self.tuning.ids_first,
      remote_copies=self.tuning.exchange == "remote_copies",
    )


def _tuning(value: Any) -> Tuning:
  if value is None:
    return Tuning()
  if not isinstance(value, Tuning):
    raise TypeError(
      f"`tuning` must be a zenjax.Tuning, got {value!r}; give"
      " zenjax.Tuning(overlap=True) or such."
    )
  return value


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
  "scheme": Argument(
    "zen", _one_of("scheme", "auto", *sorted([*DENSE, *SPARSE]))
  ),
  "op": Argument(None, _operation),
  "on_overflow": Argument("exact", _one_of("on_overflow", "exact", "carry")),
  "output": Argument("same", _one_of("output", "same", "dense", "rows")),
  "unit": Argument("auto", arguments.check_unit),
  "partition": Argument("auto", arguments.check_partition),
  "wire_dtype": Argument(None, lambda x: arguments.wire_dtype("wire_dtype", x)),
  "capacities": Argument(None, arguments.capacities_of),
  "plan": Argument(None),
  "mesh": Argument(None, _mesh),
  "tuning": Argument(None, _tuning),
}


def check(axis_name: AxisName, **given: Any) -> Options:
  """Returns the options of a `zen_sync` with these arguments.

  Raises:
    ValueError: An argument is out of range, or cannot be meant beside others.
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
  scheme, tuning, unit = found["scheme"], found["tuning"], found["unit"]
  unit = "row" if unit == "auto" else unit
  if unit == "row" and scheme in SPARSE:
    unit = SPARSE[scheme].unit or unit
  if found["output"] == "rows" and unit != "row":
    raise ValueError(
      f"`output='rows'` returns rows of the leaf, got {unit=} with"
      f" {scheme=}; use `unit='row'` with another scheme than 'block_sparse',"
      " or `output='dense'`."
    )
  partition = found["partition"]
  if scheme == "auto" and partition != "auto":
    raise ValueError(
      f"`partition` is chosen for every leaf by `scheme='auto'`, got"
      f" {partition=} beside it; leave `partition` out, or give `scheme='zen'`."
    )
  axes = arguments.axes(axis_name)
  _check_tuning(tuning, scheme, axes, plan)
  options = Options(
    axes=axes,
    sparse=found["sparse"],
    scheme=scheme,
    mean=found["op"] != "sum",
    exact=found["on_overflow"] == "exact",
    output=found["output"],
    unit=unit,
    partition=partition,
    wire_dtype=found["wire_dtype"],
    capacities=found["capacities"],
    tuning=tuning,
  )
  if plan:
    return dataclasses.replace(options, **by_plan(plan))
  return options


def _check_tuning(
  tuning: Tuning, scheme: str, axes: Axes, plan: plans.Plan | None
) -> None:
  """Raises where it does not fit the arguments beside it."""
  for name in ("link", "profile"):
    if getattr(tuning, name) is not None and scheme != "auto":
      raise ValueError(
        f"`{name}` is for `scheme='auto'`, which chooses by it, got {scheme=};"
        " leave it out."
      )
  if tuning.ids_first and scheme != "zen":
    raise ValueError(
      f"`ids_first=True` is for `scheme='zen'`, got {scheme=}; leave one of"
      " them out."
    )
  if tuning.exchange == "collectives":
    return
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
  for name in ("ids_first", "overlap"):
    if getattr(tuning, name):
      raise ValueError(
        f"`{name}=True` has parts sent beside the backward pass, and"
        " `exchange='remote_copies'` sends everything in one kernel, beside"
        " which nothing runs; leave one of them out."
      )
  if len(axes) > 1:
    raise NotImplementedError(
      "`exchange='remote_copies'` can serve one axis, got"
      f" axis_name={axes!r}: sums over slow links are exchanged by collectives;"
      " use exchange='collectives', which runs everywhere."
    )
