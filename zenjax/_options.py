"""What the user asked for, checked when the transform is built."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
from typing import Any

import jax.numpy as jnp

from zenjax import _arguments
from zenjax import _cost
from zenjax import _decided
from zenjax._arguments import AxisName
from zenjax._arguments import Capacities
from zenjax._arguments import Capacity
from zenjax._arguments import Partition
from zenjax._arguments import SparseSpec
from zenjax._arguments import Unit
from zenjax._collectives import Axes
from zenjax._cost import Profile
from zenjax._link import Link
from zenjax._planner import _plan as _planned
from zenjax._schemes import DENSE
from zenjax._schemes import SPARSE
from zenjax._schemes.base import Context


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
  plan: _planned.Plan | None = None
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
  plan: _planned.Plan | None,
  exchange: str,
) -> Options:
  """Raises `ValueError` or `TypeError` where an argument cannot be meant."""
  if plan is not None:
    _decided.require_free(plan, locals(), DEFAULTS)
  _arguments.one_of("scheme", scheme, ["auto", *sorted([*DENSE, *SPARSE])])
  _arguments.one_of("op", op, ["mean", "sum"])
  _arguments.one_of("on_overflow", on_overflow, ["exact", "carry"])
  _arguments.one_of("output", output, ["same", "dense", "rows"])
  _check_auto(scheme, link, profile)
  _arguments.check_unit(unit)
  follows = unit == "auto"
  unit = "row" if follows else unit
  if unit == "row" and scheme in SPARSE:
    unit = SPARSE[scheme].unit or unit
  _arguments.check_partition(partition)
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
    axes=_arguments.axes(axis_name),
    sparse=sparse,
    scheme=scheme,
    mean=op == "mean",
    exact=on_overflow == "exact",
    output=output,
    unit=unit,
    partition=partition,
    wire_dtype=_arguments.wire_dtype("wire_dtype", wire_dtype),
    capacities=_arguments.capacities_of(capacities),
    seed=hash_seed,
    link=link,
    profile=profile,
    ids_first=_ids_first(ids_first, scheme),
    overlap=_arguments.boolean("overlap", overlap),
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
    return dataclasses.replace(options, **_decided.by_plan(plan))
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
      f"`link` must be a zenjax.Link, got {link!r}; give"
      " zenjax.Link(bandwidth=bytes a second, latency_s=seconds)."
    )
  _cost.check_profile(profile)


def _ids_first(value: Any, scheme: str) -> bool:
  if _arguments.boolean("ids_first", value) and scheme != "zen":
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
  _arguments.one_of("exchange", exchange, ["collectives", "remote_copies"])
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
  if len(_arguments.axes(axis_name)) > 1:
    raise NotImplementedError(
      "`exchange='remote_copies'` can serve one axis, got"
      f" {axis_name=}: sums over slow links are exchanged by collectives; use"
      " exchange='collectives', which runs everywhere."
    )
  return True
