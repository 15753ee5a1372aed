"""Chooses how every gradient of a model is synchronized."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zenjax._src.compress import registry
from zenjax._src.compress.cast import Cast
from zenjax._src.compress.cast import DTYPES
from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.low_bit import LowBit
from zenjax._src.core import arguments
from zenjax._src.core import row_wire
from zenjax._src.core import text
from zenjax._src.core.arguments import AxisName
from zenjax._src.machine import cost
from zenjax._src.machine.cost import CostModel
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.cost import Way
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import choice
from zenjax._src.planner import recorded_runs
from zenjax._src.planner import timeline
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.sync import plans
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan

# Buffers get more rows than the mean step needs, because steps differ.
_SPARE = 1.05
# How often a compressor reads or writes a gradient: add the residual, find a
# scale, round, keep the error; decode what came, round the sums, decode them.
_PASSES = 8
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

  @property
  def is_table(self) -> bool:
    """True for tables, whose rows may be sent."""
    return self.look_ups is not None or leaf_util.is_table(self._leaf)

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
    memory_bytes: Limit on memory; None for no limit.
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
  memory_bytes: float | None = None

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


def plan(
  value_and_grad: Callable[..., Any],
  *args: Any,
  topology: Topology,
  axis_name: AxisName = "data",
  profile: Mapping[str, Profile] | None = None,
  trace: str | os.PathLike | None = None,
  compute_seconds: float = 0.0,
  allow: Sequence[Any] = ("lossless",),
  local_seconds: Mapping[str, float] | None = None,
  capacities: Mapping[str, tuple[int, int]] | None = None,
  memory_bytes: float | None = None,
) -> Plan:
  """Predicts how much time another synchronization of a model would save.

  Use it before you have the machine, or to choose a scheme for each gradient.
  Your program is only traced, so shapes (`jax.ShapeDtypeStruct`) are enough. If
  nothing gains, all gradients take `pmean`. The plan says that there is no
  difference if the gain may be an error of the prediction.

  Args:
    value_and_grad: `zenjax.value_and_grad(loss)`, or `jax.value_and_grad(loss)`
      for gradients that are arrays.
    *args: Its arguments on one device: parameters, then its part of a batch.
    topology: The machine, from `Topology.preset`, `Topology.network` or
      `measure_links`.
    axis_name: Mesh axes of the batch, one for each level of the topology, the
      slowest first.
    profile: Densities by parameter name, from `zenjax.planner.profile(state)`.
      By default, the planner assumes a vocabulary, or all rows for arrays from
      zenjax's `value_and_grad`.
    trace: A directory that `zenjax.planner.record` wrote, instead of `profile`.
    compute_seconds: Time of a step on one device without any exchange. Measure
      it with `jax.lax.optimization_barrier(grads)` in place of the exchange, to
      keep XLA from fusing gradient and optimizer. Two thirds of it are taken as
      the backward pass, with which plain all-reduces of dense gradients
      overlap. If you leave it out, only exchanges are compared.
    allow: What gradients may lose, nothing by default. A dtype, such as
      `"bfloat16"` or `"int8"`, lets rows of tables and gradients of dense
      layers be rounded to it, where that is faster. A compressor, such as
      `zenjax.compress.ExDyna(0.01)` or its name `"ExDyna(0.01)"`, is for dense
      layers.
    local_seconds: What `zenjax.planner.measure_compressors` returned, if you
      have the machine. By default, times to compress are predicted from the
      memory bandwidth of the topology.
    capacities: Buffer sizes `(push, pull)` in rows, by parameter name.
    memory_bytes: Limit on the buffers for one parameter.

  Returns:
    The plan. Print it, and pass it to `zen_sync(plan=...)`; if it compresses
    dense layers, to `zenjax.compress.all_reduce(plan, axis_name)`.

  Raises:
    TypeError: An argument has a wrong type, or `value_and_grad` does not return
      a pair.
    ValueError: An argument is out of range or names an unknown parameter, or
      nothing fits within `memory_bytes`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> def loss(params, ids):
    ...   return jnp.mean((params["table"][ids] @ params["w"]) ** 2)
    >>> shape = jax.ShapeDtypeStruct
    >>> params = {"table": shape((100_000, 64), jnp.float32),
    ...           "w": shape((64, 64), jnp.float32)}
    >>> plan = zenjax.planner.plan(
    ...   zenjax.value_and_grad(loss), params, shape((512,), jnp.int32),
    ...   topology=zenjax.planner.Topology.network("10 Gbit/s", 8),
    ... )
    >>> [(leaf.name, leaf.scheme == "dense") for leaf in plan.leaves]
    [('table', False), ('w', True)]
    >>> plan.leaves[0].dense_seconds / plan.leaves[0].seconds > 10
    True
  """
  question = ask(
    value_and_grad,
    args,
    topology=topology,
    axis_name=axis_name,
    profile=profile,
    trace=trace,
    memory_bytes=memory_bytes,
  )
  compute_seconds = arguments.number("compute_seconds", compute_seconds)
  if not 0 <= compute_seconds < math.inf:
    raise ValueError(
      "`compute_seconds` must be a finite time of 0 or more, got"
      f" {compute_seconds!r}. Give the seconds of a step without any exchange."
    )
  pins = arguments.pins(capacities)
  check_names("capacities", pins, [g.name for g in question.gradients])
  wires, compressors = losses(allow)
  return answer(
    dataclasses.replace(
      question,
      compute_seconds=compute_seconds,
      wire_dtypes=wires,
      compressors=compressors,
      local_seconds=measured(local_seconds, compressors),
      capacities=pins,
    )
  )


# --- the question -------------------------------------------------------------


def ask(
  value_and_grad: Callable[..., Any],
  args: Sequence[Any],
  *,
  topology: Topology,
  axis_name: AxisName,
  profile: Mapping[str, Profile] | None = None,
  trace: str | os.PathLike | None = None,
  memory_bytes: float | None = None,
) -> Question:
  """Traces a program, and checks what both kinds of plans are given.

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
  if memory_bytes is not None:
    memory_bytes = arguments.number("memory_bytes", memory_bytes)
    if memory_bytes <= 0:
      raise ValueError(f"`memory_bytes` must be positive, got {memory_bytes}.")
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
  # An array from zenjax's `value_and_grad` shows that the loss uses a table
  # other than by lookups, as a tied softmax does. Such a use touches all rows.
  # `jax.value_and_grad` returns arrays for all parameters, which shows nothing.
  whole = {}
  if getattr(value_and_grad, "gives_rows", False) or any(
    g.look_ups is not None for g in gradients
  ):
    for gradient in gradients:
      if gradient.look_ups is None and gradient.shape:
        n = rows[gradient.name]
        whole[gradient.name] = Profile(
          rows=n, fullest=n, union=n, devices=topology.devices
        )
  return Question(
    gradients=gradients,
    topology=topology,
    axes=axes,
    profiles=whole | dict(known),
    memory_bytes=memory_bytes,
  )


def gradients_of(
  value_and_grad: Callable[..., Any], args: Sequence[Any]
) -> tuple[Gradient, ...]:
  """Traces a function, and returns its gradients."""
  shape = jax.eval_shape(value_and_grad, *args)
  if not isinstance(shape, tuple) or len(shape) != 2:
    raise TypeError(
      "`value_and_grad` must return a pair (value, gradients), got"
      f" {type(shape).__name__}. Pass `zenjax.value_and_grad(loss)`."
    )
  return tuple(
    Gradient(
      name,
      tuple(leaf.shape),
      np.dtype(leaf.dtype),
      leaf.capacity if is_rows(leaf) else None,
    )
    for name, leaf in leaf_util.named_leaves(shape[1], is_rows)
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


def measured(
  seconds: Mapping[str, float] | None, compressors: Sequence[Compressor]
) -> Mapping[str, float]:
  """Returns times by compressor; raises ValueError for other names."""
  known = {
    name: arguments.number(f"local_seconds[{name!r}]", x)
    for name, x in dict(seconds or {}).items()
  }
  for name, x in known.items():
    if not 0 <= x < math.inf:
      raise ValueError(
        f"`local_seconds[{name!r}]` must be a finite time of 0 or more, got"
        f" {x!r}."
      )
  check_names(
    "local_seconds", known, list(map(str, compressors)), "compressors"
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


# --- the choice ---------------------------------------------------------------


def answer(question: Question) -> Plan:
  """Returns the plan with the shortest step."""
  predicted = predictions(question)
  possible = [
    _within(gradient.name, ways, question.memory_bytes)
    for gradient, ways in zip(question.gradients, predicted)
  ]
  chosen = choice.choose(possible)
  assert chosen is not None  # Memory has no limit here.
  # The choice assumes that nothing overlaps. Plain all-reduces do.
  plain = [
    PMEAN if way.compressor and PMEAN in ways else way
    for way, ways in zip(chosen, possible)
  ]
  seconds = [_step_s(question, predicted, ways) for ways in (plain, chosen)]
  if seconds[1] >= seconds[0] * choice.MARGIN:
    chosen = plain
  return planned(question, predicted, chosen)


def planned(
  question: Question,
  predicted: Sequence[Mapping[Way, Prediction]],
  chosen: Sequence[Way],
) -> Plan:
  """Returns the plan that sends each gradient in the chosen way."""
  schemes = list(dict.fromkeys(way.scheme for way in chosen))
  leaves = []
  for gradient, ways, way in zip(question.gradients, predicted, chosen):
    profile = question.profiles.get(gradient.name)
    rows = union = None
    reason = choice.reason(ways, way, _in_words)
    if profile is not None:
      rows = float(profile.rows)
      union = profile.union_of(question.topology.devices)
      union = float(min(union, gradient.table.num_rows))
    elif reason and gradient.is_table:
      reason += ", densities assumed"
    if way == PMEAN and gradient.may_be_compressed and question.compute_seconds:
      if reason.endswith("by itself"):
        reason += ", but not during the backward pass"
    leaves.append(
      LeafPlan(
        name=gradient.name,
        shape=gradient.shape,
        dtype=gradient.dtype.name,
        scheme=way.scheme,
        group=schemes.index(way.scheme),
        column_groups=way.column_groups,
        wire_dtype=way.wire_dtype,
        compressor=way.compressor,
        capacities=_capacities(question, gradient, ways[way].sizes),
        seconds=ways[way].seconds,
        dense_seconds=ways[PMEAN].seconds,
        wire_bytes=ways[way].received,
        rows=rows,
        union=union,
        others=tuple(
          sorted(
            [(_in_words(k), x.seconds) for k, x in ways.items() if k != way],
            key=lambda other: other[1],
          )
        ),
        reason=reason,
      )
    )
  pmean = [PMEAN] * len(predicted)
  return Plan(
    leaves=tuple(leaves),
    mesh=tuple(zip(question.axes, question.topology.sizes)),
    machine=question.topology.name,
    compute_seconds=question.compute_seconds,
    seconds=_step_s(question, predicted, chosen),
    dense_seconds=_step_s(question, predicted, pmean),
  )


def _step_s(
  question: Question,
  predicted: Sequence[Mapping[Way, Prediction]],
  ways: Sequence[Way],
) -> float:
  """Predicts a step in which each gradient is sent in its way."""
  computed_s = question.compute_seconds
  overlap = computed_s and not any(way.compressor for way in ways)
  nbytes, others = 0, []
  for gradient, of_leaf, way in zip(question.gradients, predicted, ways):
    if overlap and way == PMEAN and not gradient.is_table:
      nbytes += gradient.dense_bytes
    else:
      others.append(of_leaf[way])
  backward_s = timeline.BACKWARD * computed_s
  first = timeline.computed(question.model, nbytes, computed_s, backward_s)
  return first + choice.seconds(others)


def predictions(question: Question) -> list[dict[Way, Prediction]]:
  """Predicts every way of every gradient.

  Gradients of tables may be sent by rows, and those of dense layers compressed.
  Small ones have one way.
  """
  predicted = []
  for gradient in question.gradients:
    table, profile = gradient.table, question.profile(gradient)
    ways = {PMEAN: question.model.of_way(PMEAN, table, profile)}
    if question.topology.devices > 1 and gradient.may_be_compressed:
      for compressor in question.compressors:
        if fitting(compressor, [gradient], question.model.context):
          way = PMEAN._replace(compressor=str(compressor))
          ways[way] = compressed(question, compressor, [gradient])
    elif question.topology.devices > 1 and gradient.is_table:
      narrower = [
        name
        for name in question.wire_dtypes
        if jnp.dtype(name).itemsize < gradient.dtype.itemsize
        and not row_wire.refusal(
          gradient.name, gradient.dtype, jnp.dtype(name), table.width
        )
      ]
      ways = question.model.of_ways(table, profile, narrower)
    predicted.append(ways)
  return predicted


def fitting(
  compressor: Compressor, gradients: Iterable[Gradient], context: Context
) -> list[Gradient]:
  """Returns the gradients that a compressor can take."""
  return [
    x
    for x in gradients
    if x.may_be_compressed and _fits(compressor, x.shape, context)
  ]


def _fits(
  compressor: Compressor, shape: tuple[int, ...], context: Context
) -> bool:
  try:
    compressor.messages([shape], context)
  except ValueError:
    return False
  return True


def compressed(
  question: Question, compressor: Compressor, gradients: Sequence[Gradient]
) -> Prediction:
  """Predicts the compressed sum of gradients, which share its exchange."""
  model, name = question.model, str(compressor)
  messages = compressor.messages([x.shape for x in gradients], model.context)
  size = lambda them: 4 * sum(math.prod(x.shape) for x in them)
  local_s = _PASSES * size(gradients) * model.work.mask_byte
  if name in question.local_seconds:
    them = fitting(compressor, question.gradients, model.context)
    local_s = question.local_seconds[name] * size(gradients) / size(them)
  return model.of_messages(name, messages, local_s=local_s)


def _within(
  name: str, ways: Mapping[Way, Prediction], limit: float | None
) -> Mapping[Way, Prediction]:
  """Returns the ways of a leaf whose buffers fit."""
  if limit is None:
    return ways
  within = {way: x for way, x in ways.items() if x.memory <= limit}
  if not within:
    least = min(x.memory for x in ways.values())
    raise ValueError(
      f"`memory_bytes` must hold the buffers for parameter {name!r}, at least"
      f" {text.size(least)}, got {text.size(limit)}. Raise the limit, or shard"
      " the table with `zenjax.tables.shard`."
    )
  return within


def _capacities(
  question: Question, gradient: Gradient, sizes: tuple[float, float] | None
) -> tuple[int, int] | None:
  """Returns buffer sizes: given ones, or predictions from measured rows."""
  given = question.capacities.get(gradient.name)
  if sizes is None:
    return None
  if given or gradient.name not in question.profiles:
    return given
  rows = gradient.table.num_rows
  push, pull = (min(max(math.ceil(x * _SPARE), 1), rows) for x in sizes)
  # If all devices have the same rows, the allowance for chance can make push
  # larger than pull.
  return push, max(push, pull)


def _in_words(way: Way) -> str:
  return plans.in_words(*way)
