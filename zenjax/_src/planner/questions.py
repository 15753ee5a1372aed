"""What a planner is asked: gradients, a machine and what may be lost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from zenjax._src.compress import registry
from zenjax._src.compress.cast import Cast
from zenjax._src.compress.cast import DTYPES
from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.low_bit import LowBit
from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.machine import cost
from zenjax._src.machine.cost import CostModel
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import recorded_runs
from zenjax._src.planner import timeline
from zenjax._src.planner.optimizer_facts import Optimizer
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table

# In `allow`, if nothing may be lost.
_LOSSLESS = "lossless"
# How dense gradients are rounded to a dtype that is allowed.
_ROUNDING: Mapping[str, Compressor] = {
  "int8": LowBit(8),
  "int4": LowBit(4),
  **{dtype.name: Cast(dtype) for dtype in DTYPES},
}


class Gradient(NamedTuple):
  """The gradient of one parameter."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  look_ups: int | None  # Rows in a device's SparseRows; None for an array.
  ready: float = 1.0  # The part of the backward pass after which it is there.
  whole: bool = False  # Known to have nonzero values in all rows.

  @property
  def is_table(self) -> bool:
    """True for tables, whose rows may be sent."""
    if self.look_ups is not None:
      return True
    return not self.whole and leaf_util.is_table(self._leaf)

  @property
  def may_be_compressed(self) -> bool:
    """True for large gradients of dense layers."""
    return not self.is_table and leaf_util.is_table(self._leaf, "element")

  @property
  def dense_bytes(self) -> int:
    """Bytes in an all-reduce, where narrow floats are summed in float32."""
    return math.prod(self.shape) * max(self.dtype.itemsize, 4)

  @property
  def _leaf(self) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(self.shape, self.dtype)

  @property
  def table(self) -> Table:
    """The gradient as the table that schemes see."""
    rows, width = leaf_util.table_shape(self._leaf, "row")
    return Table(
      name=self.name,
      num_rows=rows,
      width=width,
      dtype=self.dtype,
      wire_dtype=self.dtype,
      look_ups=self.look_ups,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
  """The gradients, the machine and the options of a plan.

  Attributes:
    gradients: The gradient of each leaf.
    topology: The machine.
    axes: A name for each level of the topology.
    profiles: Densities that are known, by leaf name.
    compute_seconds: Time of a step without any exchange.
    wire_dtypes: Names of dtypes that rows may be rounded to.
    compressors: Compressors that dense leaves may take.
    local_seconds: Measured times to compress all dense leaves, by compressor.
    capacities: Buffer sizes that the user gave, by leaf name.
    optimizer: The optimizer; None if tables stay replicated.
    forms: Forms that the user demands, by leaf name.
    memory_bytes: Limit on a device's memory; None for no limit.
    per_device: Whether the program runs inside `data_parallel`, so that dense
      gradients can be compressed.
  """

  gradients: tuple[Gradient, ...]
  topology: Topology
  axes: tuple[str, ...]
  profiles: Mapping[str, Profile]
  compute_seconds: float = 0.0
  wire_dtypes: tuple[str, ...] = ()
  compressors: tuple[Compressor, ...] = ()
  local_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  capacities: Mapping[str, tuple[int, int]] = dataclasses.field(
    default_factory=dict
  )
  optimizer: Optimizer | None = None
  forms: Mapping[str, str] = dataclasses.field(default_factory=dict)
  memory_bytes: float | None = None
  per_device: bool = False

  @property
  def model(self) -> CostModel:
    """The cost model of the machine."""
    return CostModel(
      Context(axes=self.axes, sizes=self.topology.sizes, mean=True),
      dict(zip(self.axes, self.topology.links)),
    )

  def profile(self, gradient: Gradient) -> Profile:
    """Returns known densities, or else the densities of a vocabulary."""
    known = self.profiles.get(gradient.name)
    return known or cost.assumed(gradient.table, self.topology.devices)

  def may_send_rows(self, gradient: Gradient) -> bool:
    """Returns True if the plan may send rows of a gradient."""
    if self.optimizer is not None:  # It sees rows, or arrays that are whole.
      return gradient.look_ups is not None
    return gradient.is_table and self.topology.devices > 1


def ask(
  value_and_grad: Callable[..., Any],
  args: Sequence[Any],
  topology: Topology,
  axis_name: AxisName,
  profile: Mapping[str, Profile] | None = None,
  trace: str | os.PathLike | None = None,
) -> Question:
  """Traces a program, and checks the arguments that all questions have.

  The arguments are described at `plan`.
  """
  axes = arguments.axes(axis_name)
  if not isinstance(topology, Topology):
    raise TypeError(
      "`topology` must be a zenjax.planner.Topology, got"
      f" {type(topology).__name__}. Make one with"
      ' `zenjax.planner.Topology.network("25 Gbit/s", hosts)`.'
    )
  if len(axes) != len(topology.axes):
    raise ValueError(
      "`axis_name` must name one axis for each level of the topology,"
      f" {topology.axes}, got {axes}."
    )
  gradients = gradients_of(value_and_grad, args)
  rows = {g.name: g.table.num_rows for g in gradients}
  if trace is not None:
    if profile is not None:
      raise ValueError(
        "`trace` and `profile` cannot be given together, because both contain"
        " densities. Leave one out."
      )
    profile = recorded_runs.profiles(trace, rows, topology.devices)
  known = {} if profile is None else profile
  if not isinstance(known, Mapping) or not all(
    isinstance(x, Profile) for x in known.values()
  ):
    raise TypeError(
      "`profile` must map parameter names to a `zenjax.planner.Profile`, got"
      f" {profile!r}. Pass the result of `zenjax.planner.profile(state)`."
    )
  check_names("profile", known, list(rows))
  look_ups = {g.name: g.look_ups for g in gradients}
  for name, x in known.items():
    if max(x.rows, x.fullest) > 1.001 * rows[name]:
      raise ValueError(
        f"`profile` of {name!r} must count rows of that table, which has"
        f" {rows[name]}, got {x}. Take the state of a run with the same table,"
        " or count different rows, as `len(np.unique(ids))` does."
      )
    most = look_ups[name]
    if most is not None and x.rows > 1.001 * most:
      raise ValueError(
        f"`{'profile' if trace is None else 'trace'}` must count batches of the"
        f" same size: a device touches {x.rows:g} rows of {name!r} there, but"
        f" makes only {most} lookups here. Count such batches, or give the"
        " shapes of larger ones."
      )
  # What was counted says more than what the loss does with a table.
  sparse = {name for name, x in known.items() if x.union < rows[name]}
  gradients = tuple(
    gradient._replace(whole=gradient.whole and gradient.name not in sparse)
    for gradient in gradients
  )
  return Question(
    gradients=gradients, topology=topology, axes=axes, profiles=dict(known)
  )


def gradients_of(
  value_and_grad: Callable[..., Any], args: Sequence[Any]
) -> tuple[Gradient, ...]:
  """Traces a function, and returns its gradients."""
  given: Any = value_and_grad
  if not hasattr(given, "trace"):  # As a jitted function has.
    given = jax.jit(lambda *args: value_and_grad(*args))
  traced = given.trace(*args)
  shape = traced.out_info
  if not isinstance(shape, tuple) or len(shape) != 2:
    raise TypeError(
      "`value_and_grad` must return a pair (value, gradients), got"
      f" {type(shape).__name__}. Pass `zenjax.value_and_grad(loss)`."
    )
  leaves = leaf_util.named_leaves(shape[1], is_rows)
  ready = jax.tree.structure(shape).unflatten(timeline.ready(traced.jaxpr))[1]
  # An array from zenjax's `value_and_grad` shows that the loss uses a table
  # other than by lookups, as a tied softmax does. Such a use touches all rows.
  # `jax.value_and_grad` returns arrays for all parameters, which shows nothing.
  gives_rows = getattr(value_and_grad, "gives_rows", False) or any(
    is_rows(leaf) for _, leaf in leaves
  )
  return tuple(
    Gradient(
      name,
      tuple(leaf.shape),
      np.dtype(leaf.dtype),
      leaf.capacity if is_rows(leaf) else None,
      ready=max(jax.tree.leaves(at)),
      whole=gives_rows and not is_rows(leaf),
    )
    for (name, leaf), (_, at) in zip(
      leaves, leaf_util.named_leaves(ready, is_rows)
    )
  )


def check_names(
  argument: str,
  given: Iterable[str],
  names: Sequence[str],
  things: str = "parameters of the model",
) -> None:
  """Raises ValueError unless `given` are among `names`."""
  if unknown := sorted(set(given) - set(names)):
    raise ValueError(
      f"`{argument}` must name {things}, got {unknown}. Choose from"
      f" {list(names)}."
    )


def losses(allow: Any) -> tuple[tuple[str, ...], tuple[Compressor, ...]]:
  """Returns the dtypes of rows, and the compressors, that a user allows."""
  if isinstance(allow, Mapping):
    raise TypeError(
      f"`allow` must be a list for the whole model, got {allow!r}. To choose by"
      " leaf, give `leaves=` to `zenjax.compress.all_reduce`."
    )
  if isinstance(allow, str | Compressor) or not isinstance(allow, Iterable):
    allow = (allow,)
  dtypes: list[str] = []
  compressors: list[Compressor] = []
  for loss in allow:
    if isinstance(loss, Compressor):
      compressors.append(loss)
    elif isinstance(loss, str) and "(" in loss:
      compressors.append(registry.named(loss, "`allow`"))
    elif not (isinstance(loss, str) and loss == _LOSSLESS):
      dtypes.append(_rounded_to(loss))
      if compressor := _ROUNDING.get(dtypes[-1]):
        compressors.append(compressor)
  return tuple(dtypes), tuple(compressors)


def _rounded_to(loss: Any) -> str:
  """Returns the name of a dtype that a user allows."""
  try:
    dtype = arguments.row_wire_dtype("allow", loss)
  except TypeError:
    dtype = None
  if dtype is None:
    raise TypeError(
      f"`allow` must hold {_LOSSLESS!r}, dtypes such as 'int8', or compressors"
      f" of `zenjax.compress` such as 'ExDyna(0.01)', got {loss!r}."
    )
  return dtype.name


def time(name: str, given: Any, *, may_be_zero: bool = False) -> float:
  """Returns seconds; raises ValueError unless they are finite and positive."""
  seconds = arguments.number(name, given)
  if not 0 <= seconds < math.inf or not (seconds or may_be_zero):
    rule = "finite time of 0 or more" if may_be_zero else "positive finite time"
    raise ValueError(f"`{name}` must be a {rule}, got {given!r}.")
  return seconds


def measured(
  seconds: Mapping[str, float] | None, compressors: Sequence[Compressor]
) -> Mapping[str, float]:
  """Returns times by compressor; raises ValueError for other names."""
  known = {
    name: time(f"local_seconds[{name!r}]", x, may_be_zero=True)
    for name, x in dict(seconds or {}).items()
  }
  unknown = known.keys() - set(map(str, compressors))
  if unknown:
    raise ValueError(
      "`local_seconds` must name compressors that the plan may take, got"
      f" {sorted(unknown)}. Allow them, or leave their times out."
    )
  return known


def compressors_of(given: Any) -> tuple[Compressor, ...]:
  """Returns compressors that a user gave, or raises TypeError."""
  given = (given,) if isinstance(given, Compressor) else tuple(given)
  for compressor in given:
    if not isinstance(compressor, Compressor):
      raise TypeError(
        "`compressors` must be compressors of `zenjax.compress`, got"
        f" {compressor!r}. Give for example [zenjax.compress.LowBit(8)]."
      )
  return given
