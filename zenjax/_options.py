"""What the user asked for, checked when the transform is built."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from zenjax._collectives import Axes
from zenjax._cost import Link
from zenjax._cost import Profile
from zenjax._plan import Capacity
from zenjax._plan import Partition
from zenjax._planner import _plan as _planned
from zenjax._schemes import DENSE
from zenjax._schemes import SPARSE
from zenjax._schemes.base import Context

AxisName = str | tuple[str, ...]
SparseSpec = Any  # None, a pytree prefix of bools, or (name, leaf) -> bool
Capacities = tuple[int, int] | Mapping[str, tuple[int, int]] | None
SchemeName = Literal[
  "auto",
  "all_gather",
  "block_sparse",
  "dense",
  "recursive_doubling",
  "ring",
  "split_all_gather",
  "split_dense_gather",
  "zen",
]
Unit = Literal["row", "element"] | int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
  """Checked arguments of `zen_sync`; see there."""

  axes: Axes
  sparse: SparseSpec
  scheme: str
  mean: bool
  exact: bool
  output: str
  unit: Unit
  partition: Partition
  wire_dtype: jnp.dtype | dict[str, jnp.dtype] | None  # one, or by leaf
  capacities: Capacity | dict[str, Capacity] | None
  seed: int
  link: Link | None
  profile: Mapping[str, Profile] | None
  ids_first: bool
  remote_copies: bool
  overlap: bool = False
  plan: _planned.Plan | None = None

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
  unit="row",
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
  plan: _planned.Plan | None,
  exchange: str,
) -> Options:
  """Raises `ValueError` or `TypeError` where an argument cannot be meant."""
  if plan is not None:
    _require_free(plan, locals())
  one_of("scheme", scheme, ["auto", *sorted([*DENSE, *SPARSE])])
  one_of("op", op, ["mean", "sum"])
  one_of("on_overflow", on_overflow, ["exact", "carry"])
  one_of("output", output, ["same", "dense", "rows"])
  _check_auto(scheme, link, profile)
  _check_unit(unit)
  if unit == "row" and scheme in SPARSE:
    unit = SPARSE[scheme].unit or unit
  _check_partition(partition)
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
    axes=axes(axis_name),
    sparse=sparse,
    scheme=scheme,
    mean=op == "mean",
    exact=on_overflow == "exact",
    output=output,
    unit=unit,
    partition=partition,
    wire_dtype=floating("wire_dtype", wire_dtype),
    capacities=_capacities(capacities),
    seed=hash_seed,
    link=link,
    profile=profile,
    ids_first=_ids_first(ids_first, scheme),
    overlap=boolean("overlap", overlap),
    remote_copies=_remote_copies(
      exchange,
      scheme,
      axis_name,
      {"ids_first": ids_first, "overlap": overlap},
      plan,
    ),
  )
  return _as_planned(options, plan) if plan else options


# What a plan decides for every leaf.
_DECIDED = (
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


def _require_free(plan: Any, given: dict[str, Any]) -> None:
  """Raises where an argument stands beside a plan that decides it."""
  if not isinstance(plan, _planned.Plan):
    raise TypeError(
      f"`plan` must be a zenjax.Plan, got {type(plan).__name__}; give what"
      " `zenjax.plan` or `zenjax.Plan.from_json` returned."
    )
  for name in _DECIDED:
    usual = DEFAULTS.get(name)
    if given[name] is not usual and given[name] != usual:
      raise ValueError(
        f"`{name}` is decided by the plan for every leaf, got"
        f" {given[name]!r} beside `plan`; leave one of them out."
      )
  _planned.require_version(plan)


def _as_planned(options: Options, plan: _planned.Plan) -> Options:
  known = [*SPARSE, _planned.DENSE]
  for leaf in plan.leaves:
    where = f"plan.leaves[{leaf.name!r}]"
    one_of(f"{where}.scheme", leaf.scheme, known)
    _check_column_groups(leaf.column_groups, plan.mesh, where)
  sparse = [leaf for leaf in plan.leaves if leaf.scheme != _planned.DENSE]
  wire = {leaf.name: _wire_named(leaf) for leaf in sparse if leaf.wire_dtype}
  pinned = {leaf.name: leaf.capacities for leaf in sparse if leaf.capacities}
  return dataclasses.replace(
    options,
    plan=plan,
    sparse=plan.sparse,
    wire_dtype=wire,
    capacities=_capacities(pinned),
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
  return floating(f"plan.leaves[{leaf.name!r}].wire_dtype", dtype)


def one_of(name: str, value: Any, known: list[str]) -> None:
  """Raises `ValueError` where a value is none of those known."""
  if not isinstance(value, str) or value not in known:
    options = ", ".join(repr(k) for k in known)
    raise ValueError(f"`{name}` must be one of {options}, got {value!r}.")


def _check_auto(scheme: str, link: Any, profile: Any) -> None:
  for name, value in (("link", link), ("profile", profile)):
    if value is not None and scheme != "auto":
      raise ValueError(
        f"`{name}` is for `scheme='auto'`, which chooses by it, got {scheme=};"
        " leave it out."
      )
  if link is not None and not isinstance(link, Link):
    raise TypeError(
      f"`link` must be a zenjax.Link, got {link!r}; give"
      " zenjax.Link(bandwidth=bytes a second, latency_s=seconds)."
    )
  check_profile(profile)


def check_profile(profile: Any) -> None:
  """Raises `TypeError` where it is no mapping of `Profile`s, and not None."""
  fit = isinstance(profile, Mapping) and all(
    isinstance(p, Profile) for p in profile.values()
  )
  if profile is not None and not fit:
    raise TypeError(
      "`profile` must map leaf names to what was measured of them, got"
      f" {profile!r}; give what `zenjax.profile(state)` returns."
    )


def boolean(name: str, value: Any) -> bool:
  """The value; raises `TypeError` where it is neither True nor False."""
  if not isinstance(value, bool):
    raise TypeError(f"`{name}` must be True or False, got {value!r}.")
  return value


def _ids_first(value: Any, scheme: str) -> bool:
  if boolean("ids_first", value) and scheme != "zen":
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
  plan: _planned.Plan | None,
) -> bool:
  one_of("exchange", exchange, ["collectives", "remote_copies"])
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
  if len(axes(axis_name)) > 1:
    raise NotImplementedError(
      "`exchange='remote_copies'` can serve one axis, got"
      f" {axis_name=}: sums over slow links are exchanged by collectives; use"
      " exchange='collectives', which runs everywhere."
    )
  return True


def axes(axis_name: AxisName) -> Axes:
  """`axis_name` as a tuple, checked: each axis once."""
  given = isinstance(axis_name, tuple | list)
  axes = tuple(axis_name) if given else (axis_name,)
  if not axes:
    raise ValueError(
      "`axis_name` must name at least one axis, got an empty tuple; give the"
      ' name that shard_map or pmap binds, say "data".'
    )
  for axis in axes:
    if not isinstance(axis, str):
      raise ValueError(
        "`axis_name` must be the name of an axis, or a tuple of names, got"
        f" {type(axis).__name__} {axis!r}; give the name that shard_map or pmap"
        ' binds, say "data".'
      )
  if len(set(axes)) != len(axes):
    raise ValueError(
      f"`axis_name` must name each axis once, got {axis_name!r}; list each"
      " axis once, from the slowest link to the fastest."
    )
  return axes


def _check_unit(unit: Unit) -> None:
  block = isinstance(unit, int) and not isinstance(unit, bool) and unit > 0
  if not block and unit not in ("row", "element"):
    raise ValueError(
      "`unit` must be 'row', 'element' or a block size of at least 1, got"
      f" {unit!r}."
    )


def _check_partition(partition: Partition) -> None:
  grid = (
    isinstance(partition, int)
    and not isinstance(partition, bool)
    and partition > 0
  )
  if not grid and partition not in ("auto", "hash", "columns"):
    raise ValueError(
      "`partition` must be 'auto', 'hash', 'columns' or a number of column"
      f" groups that divides the devices, got {partition!r}."
    )


def floating(name: str, dtype: Any) -> jnp.dtype | None:
  """The dtype; raises `TypeError` where it is no floating one."""
  if dtype is None:
    return None
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
      f"`{name}` must be a floating dtype such as jnp.bfloat16, got {dtype!r}."
    )
  return jnp.dtype(dtype)


def _capacities(
  capacities: Capacities,
) -> Capacity | dict[str, Capacity] | None:
  if capacities is None:
    return None
  if isinstance(capacities, Mapping):
    return {name: _capacity(c, f"[{name!r}]") for name, c in capacities.items()}
  return _capacity(capacities, "")


def pins(
  capacities: Mapping[str, tuple[int, int]] | None,
) -> dict[str, tuple[int, int]]:
  """Capacities by leaf, checked."""
  if not isinstance(capacities, Mapping | None):
    raise TypeError(
      "`capacities` must map leaf names to pairs (push, pull), got"
      f" {capacities!r}; give what `zenjax.advise(state)` returned."
    )
  found = {}
  for name, value in (capacities or {}).items():
    push, pull = _capacity(value, f"[{name!r}]")
    found[name] = push, pull
  return found


def _capacity(value: Any, where: str) -> Capacity:
  what = f"`capacities{where}`"
  if not isinstance(value, tuple | list) or len(value) != 2:
    raise ValueError(
      f"{what} must be a pair (push, pull) of rows, as `zenjax.report` prints"
      f" it, got {value!r}."
    )
  if not all(isinstance(c, int) and not isinstance(c, bool) for c in value):
    raise TypeError(f"{what} must hold integers, got {value!r}.")
  push, pull = value
  if push < 1 or pull < 1:
    raise ValueError(f"{what} must be positive, got {value!r}.")
  if push > pull:
    raise ValueError(
      f"{what} must be increasing, push <= pull, since an owner's union holds"
      f" every row that one source sends it, got {value!r}."
    )
  return Capacity(push, pull)
