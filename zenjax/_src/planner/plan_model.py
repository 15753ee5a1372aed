"""`plan`: chooses how every gradient of a model is synchronized on a machine.

Nothing overlaps. Sparse leaves of one scheme share its exchange, so that its
latencies are paid once: for every set of schemes each leaf takes the best way
that the set allows, and the set with the shortest step wins.
"""

from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
import dataclasses
import itertools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.wire import has_range_of
from zenjax._src.machine import cost
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import recorded_runs
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.sync import plans
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan

# Predictions err: a sparse way is taken if it should take less than this part
# of pmean's time.
MARGIN = 0.8
# Steps differ: capacity for those with a few rows more than the mean of them.
_SPARE = 1.05


class Gradient(NamedTuple):
  """A gradient as a step makes it."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  look_ups: int | None  # Rows of a device's SparseRows; None for an array.


class Way(NamedTuple):
  """One way to synchronize a leaf, as `LeafPlan` has it."""

  scheme: str
  column_groups: int = 1
  wire_dtype: str | None = None


PMEAN = Way(plans.DENSE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
  """The gradients, the machine and the options of a plan.

  Attributes:
    gradients: Gradients.
    topology: The machine.
    axes: A name for each of its levels.
    profiles: Densities by leaf.
    compute_seconds: Time of a step without any exchange.
    wire_dtypes: Names of dtypes that rows may be rounded to.
    capacities: Capacities to pin, by leaf.
    memory_bytes: Limit on the buffers of a leaf; None for no limit.
  """

  gradients: tuple[Gradient, ...]
  topology: Topology
  axes: tuple[str, ...]
  profiles: Mapping[str, Profile] = dataclasses.field(default_factory=dict)
  compute_seconds: float = 0.0
  wire_dtypes: tuple[str, ...] = ()
  capacities: Mapping[str, tuple[int, int]] = dataclasses.field(
    default_factory=dict
  )
  memory_bytes: float | None = None

  @property
  def context(self) -> Context:
    """Context of an exchange over all axes."""
    return Context(axes=self.axes, sizes=self.topology.sizes, mean=True)

  @property
  def links(self) -> dict[str, Link]:
    """Link along each axis."""
    return dict(zip(self.axes, self.topology.links))

  def profile(self, gradient: Gradient) -> Profile:
    """Returns densities: measured ones, or those of a vocabulary."""
    known = self.profiles.get(gradient.name)
    table = table_of(gradient, Way("zen"))
    return known or cost.assumed(table, self.topology.devices)


def plan(
  value_and_grad: Callable[..., Any],
  *args: Any,
  topology: Topology,
  axis_name: AxisName = "data",
  profile: Mapping[str, Profile] | None = None,
  trace: str | os.PathLike | None = None,
  compute_seconds: float = 0.0,
  wire_dtypes: Sequence[Any] = (),
  capacities: Mapping[str, tuple[int, int]] | None = None,
  memory_bytes: float | None = None,
) -> Plan:
  """Chooses how every gradient of a model is synchronized on a machine.

  Use it before you have the machine. Your program is only traced: shapes of
  parameters and batch (`jax.ShapeDtypeStruct`) are enough. Each way is
  predicted from the bytes that its scheme declares, the links of the topology,
  and the device's own work. Where nothing gains, all leaves take pmean, and the
  plan says so. A gain within the error of predictions is called no difference.

  Args:
    value_and_grad: `jax.value_and_grad(loss)`, or zenjax's for tables that are
      only looked up, called on one device's part of a batch.
    *args: Its arguments: parameters first.
    topology: The machine, by `Topology.preset` or `measure_links`.
    axis_name: Axes as `zen_sync` will have them: one for every level of the
      topology, the slowest first.
    profile: Densities by leaf name, as `zenjax.planner.profile(state)` returns
      them after some steps. Other leaves are assumed to be vocabularies, except
      for arrays from zenjax's `value_and_grad`: the loss uses all their rows.
    trace: A directory that `zenjax.planner.record` wrote, instead of `profile`:
      it has densities for any number of devices.
    compute_seconds: Time of a step on one device without any exchange. Put
      `jax.lax.optimization_barrier(grads)` in its place, or XLA joins gradient
      and optimizer as no exchange lets it.
    wire_dtypes: Dtypes to which rows may be rounded on the wire, used for
      leaves whose range they have: bfloat16 has float32's, float16 does not.
    capacities: Capacities to pin, `(push, pull)` by leaf name.
    memory_bytes: Limit on the buffers of one leaf's exchange.

  Returns:
    The plan: print it, and give it to `zen_sync(plan=...)`.

  Raises:
    TypeError: `value_and_grad` returns no pair, a dtype is not floating, or
      an argument is of another kind.
    ValueError: An argument is out of range, names a leaf that is not there, or
      no way of a leaf fits the memory.

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
  axes = arguments.axes(axis_name)
  check(axes, topology, memory_bytes)
  if not 0 <= arguments.number("compute_seconds", compute_seconds) < math.inf:
    raise ValueError(
      "`compute_seconds` must be what a step takes without any exchange, not"
      f" negative, got {compute_seconds!r}."
    )
  found = gradients(value_and_grad, *args)
  known = densities(profile, trace, found, topology.devices)
  pins = arguments.pins(capacities)
  _check_names(found, pins, "capacities")
  used = _used_whole(value_and_grad, found, topology.devices)
  return answer(
    Question(
      gradients=tuple(found),
      topology=topology,
      axes=axes,
      profiles=used | known,
      compute_seconds=float(compute_seconds),
      wire_dtypes=_wires(wire_dtypes),
      capacities=pins,
      memory_bytes=None if memory_bytes is None else float(memory_bytes),
    )
  )


def gradients(value_and_grad: Callable[..., Any], *args: Any) -> list[Gradient]:
  """Returns the gradients of a function that is traced and not run.

  Raises:
    TypeError: It does not return a pair.
    ValueError: There are none.
  """
  shape = jax.eval_shape(value_and_grad, *args)
  if not isinstance(shape, tuple) or len(shape) != 2:
    raise TypeError(
      "`value_and_grad` must return a pair (value, gradients), got"
      f" {type(shape).__name__}; give `jax.value_and_grad(loss)` or"
      " `zenjax.value_and_grad(loss)`."
    )
  named = leaf_util.named_leaves(shape[1], is_rows)
  if not named:
    raise ValueError(
      "`value_and_grad` must return gradients, got a tree without leaves; give"
      " parameters as its first argument."
    )
  return [
    Gradient(
      name,
      tuple(leaf.shape),
      np.dtype(leaf.dtype),
      leaf.capacity if is_rows(leaf) else None,
    )
    for name, leaf in named
  ]


# --- the choice ---------------------------------------------------------------


def answer(question: Question) -> Plan:
  """Returns the plan with the shortest step."""
  found = predictions(question)
  fitting = [
    _fitting(g, each, question.memory_bytes)
    for g, each in zip(question.gradients, found)
  ]
  schemes = sorted({way.scheme for each in fitting for way in each} - {"dense"})
  sets = [
    {plans.DENSE, *some}
    for size in range(len(schemes) + 1)
    for some in itertools.combinations(schemes, size)
  ]
  best, best_s = None, math.inf
  for some in sets:
    ways = [_best_of(each, some) for each in fitting]
    chosen = [way for way in ways if way is not None]
    if len(chosen) == len(ways):
      seconds = _seconds(fitting, chosen, MARGIN)
      if seconds < best_s:
        best, best_s = chosen, seconds
  if best is None:
    raise AssertionError("dense always fits")
  return planned(question, found, best)


def planned(
  question: Question,
  found: Sequence[Mapping[Way, Prediction]],
  chosen: Sequence[Way],
) -> Plan:
  """Returns the plan that sends each gradient by its way."""
  schemes = list(dict.fromkeys(way.scheme for way in chosen))
  leaves = []
  for gradient, ways, way in zip(question.gradients, found, chosen):
    profile = question.profiles.get(gradient.name)
    union = None
    if profile is not None:
      union = profile.union_of(question.topology.devices)
      union = float(min(union, rows_of(gradient)))
    leaves.append(
      LeafPlan(
        name=gradient.name,
        shape=gradient.shape,
        dtype=gradient.dtype.name,
        scheme=way.scheme,
        group=schemes.index(way.scheme),
        column_groups=way.column_groups,
        wire_dtype=way.wire_dtype,
        capacities=_capacities(question, gradient, ways[way]),
        seconds=ways[way].seconds,
        dense_seconds=ways[PMEAN].seconds,
        wire_bytes=ways[way].received,
        rows=None if profile is None else float(profile.rows),
        union=union,
        reason=_reason(question, gradient, ways, way),
      )
    )
  compute_s = question.compute_seconds
  return Plan(
    leaves=tuple(leaves),
    mesh=tuple(zip(question.axes, question.topology.sizes)),
    machine=question.topology.name,
    compute_seconds=compute_s,
    seconds=compute_s + _seconds(found, chosen),
    dense_seconds=compute_s + _seconds(found, [PMEAN] * len(found)),
  )


def predictions(question: Question) -> list[dict[Way, Prediction]]:
  """Predicts every way of every gradient."""
  found = []
  for gradient in question.gradients:
    profile, ways = question.profile(gradient), {}
    for way in _ways(question, gradient):
      ways[way] = cost.predict(
        way.scheme,
        table_of(gradient, way),
        profile,
        question.context,
        question.links,
        way.column_groups,
      )
    found.append(ways)
  return found


def _ways(question: Question, gradient: Gradient) -> Iterator[Way]:
  """Yields the ways of a leaf, pmean first and alone where it is no table."""
  yield PMEAN
  leaf = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
  is_table = gradient.look_ups is not None or leaf_util.is_table(leaf)
  if question.topology.devices == 1 or not is_table:
    return
  narrower = [
    name
    for name in question.wire_dtypes
    if jnp.dtype(name).itemsize < gradient.dtype.itemsize
    and has_range_of(jnp.dtype(name), gradient.dtype)
  ]
  ways = cost.sparse_ways(gradient.shape[-1], question.context)
  for wire in (None, *narrower):
    for scheme, groups in ways:
      yield Way(scheme, groups, wire)


def table_of(gradient: Gradient, way: Way) -> Table:
  """Returns a gradient as its scheme has it."""
  leaf: Any = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
  dtype = jnp.dtype(gradient.dtype)
  return Table(
    name=gradient.name,
    num_rows=rows_of(gradient),
    width=leaf_util.table_shape(leaf, "row")[1],
    dtype=dtype,
    wire_dtype=jnp.dtype(way.wire_dtype or dtype),
    look_ups=None if way == PMEAN else gradient.look_ups,
  )


def rows_of(gradient: Gradient) -> int:
  """Returns the rows of a gradient, as zen_sync counts them."""
  leaf: Any = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
  return leaf_util.table_shape(leaf, "row")[0]


def _best_of(
  ways: Mapping[Way, Prediction], schemes: Collection[str]
) -> Way | None:
  """Returns the best of a leaf's ways by these schemes, None without any."""
  open_to = [way for way in ways if way.scheme in schemes]
  # Of a shared exchange a leaf pays its bytes and its own work.
  own = lambda way: (ways[way].seconds - ways[way].once_s) * _raised(way)
  return min(open_to, key=own, default=None)


def _raised(way: Way, margin: float = MARGIN) -> float:
  """Returns the factor on a way's times by which pmean is preferred."""
  return 1.0 if way == PMEAN else 1 / margin


def _seconds(
  found: Sequence[Mapping[Way, Prediction]],
  chosen: Sequence[Way],
  margin: float = 1.0,
) -> float:
  """Returns the time of all exchanges: a scheme's leaves wait once."""
  own, once = 0.0, {}
  for ways, way in zip(found, chosen):
    raised = _raised(way, margin)
    own += (ways[way].seconds - ways[way].once_s) * raised
    once[way.scheme] = max(once.get(way.scheme, 0), ways[way].once_s * raised)
  return own + sum(once.values())


def _fitting(
  gradient: Gradient, ways: Mapping[Way, Prediction], limit: float | None
) -> Mapping[Way, Prediction]:
  """Returns the ways whose buffers fit: what arrives, or a copy to sum."""
  if limit is None:
    return ways
  copy = math.prod(gradient.shape) * gradient.dtype.itemsize
  need = {way: copy if way == PMEAN else p.received for way, p in ways.items()}
  fitting = {way: p for way, p in ways.items() if need[way] <= limit}
  if not fitting:
    raise ValueError(
      f"`memory_bytes` must hold the buffers of one way for every leaf, but"
      f" {gradient.name!r} needs {min(need.values()) / 1e6:.1f} MB at least,"
      f" got {limit / 1e6:.1f} MB; shard that table, or give more."
    )
  return fitting


def _capacities(
  question: Question, gradient: Gradient, chosen: Prediction
) -> tuple[int, int] | None:
  """Returns rows to pin: those given, or those predicted from counted rows."""
  given = question.capacities.get(gradient.name)
  counted = gradient.name in question.profiles
  if chosen.sizes is None or given or not counted:
    return given if chosen.sizes else None
  most = rows_of(gradient)
  push, pull = (
    min(max(math.ceil(size * _SPARE), 1), most) for size in chosen.sizes
  )
  # Where all devices have the same rows, chance makes a push the fuller one.
  return push, max(push, pull)


def _reason(
  question: Question,
  gradient: Gradient,
  ways: Mapping[Way, Prediction],
  chosen: Way,
) -> str:
  """Says why: the next best way, by itself, and what was assumed."""
  if len(ways) == 1:
    return ""
  ratio = lambda way: ways[way].seconds / max(ways[chosen].seconds, 1e-12)
  parts = [f"pmean takes {ratio(PMEAN):.3g}x as long"]
  second = min(ways.keys() - {chosen, PMEAN}, key=ratio)
  words = plans.in_words(*second)
  if chosen == PMEAN:
    parts = [f"{words} takes {ratio(second):.3g}x as long"]
    if MARGIN <= ratio(second) < 1:
      parts.append("within the error of predictions")
    elif ratio(second) < MARGIN:
      parts.append("in an exchange of its own")
  else:
    parts.append(f"{words} {ratio(second):.3g}x")
    if ratio(PMEAN) < 1:
      parts.append("shares its exchange with other leaves")
  if gradient.name not in question.profiles:
    parts.append("densities assumed")
  return ", ".join(parts)


# --- what is given ------------------------------------------------------------


def densities(
  profile: Mapping[str, Profile] | None,
  trace: str | os.PathLike | None,
  gradients: Sequence[Gradient],
  devices: int,
) -> dict[str, Profile]:
  """Returns the densities that a profile or a trace tells, by leaf name.

  Raises:
    TypeError: `profile` is no mapping of profiles.
    ValueError: Both are given, or one names a leaf that is not there.
  """
  if trace is not None:
    if profile is not None:
      raise ValueError(
        "`trace` must be left out where `profile` is given: both tell"
        " densities."
      )
    rows = {g.name: rows_of(g) for g in gradients}
    profile = recorded_runs.profiles(trace, rows, devices)
  is_profile = lambda x: isinstance(x, Profile)
  if profile is not None and not (
    isinstance(profile, Mapping) and all(map(is_profile, profile.values()))
  ):
    raise TypeError(
      "`profile` must map leaf names to what was measured of them, got"
      f" {profile!r}; give what `zenjax.planner.profile(state)` returns."
    )
  _check_names(gradients, profile, "profile")
  return dict(profile or {})


def _used_whole(
  value_and_grad: Callable[..., Any],
  gradients: Sequence[Gradient],
  devices: int,
) -> dict[str, Profile]:
  """Returns densities of tables that are used otherwise than by look-ups.

  A tied softmax touches all rows. Where zenjax's `value_and_grad` gives an
  array, the loss does such a thing; of `jax.value_and_grad` nothing is known.
  """
  listed = any(gradient.look_ups is not None for gradient in gradients)
  if not listed and not getattr(value_and_grad, "gives_rows", False):
    return {}
  found = {}
  for gradient in gradients:
    if gradient.look_ups is None and gradient.shape:
      rows = rows_of(gradient)
      found[gradient.name] = Profile(
        rows=rows, fullest=rows, union=rows, devices=devices
      )
  return found


def check(
  axes: Sequence[str], topology: Any, memory_bytes: float | None
) -> None:
  """Raises TypeError or ValueError where an argument of a plan is wrong."""
  if not isinstance(topology, Topology):
    raise TypeError(
      "`topology` must be a zenjax.planner.Topology, got"
      f" {type(topology).__name__}; give `zenjax.planner.Topology.preset(..)`"
      " or what `zenjax.planner.measure_links` found."
    )
  if len(axes) != len(topology.axes):
    raise ValueError(
      "`axis_name` must name an axis for every level of the topology, the"
      f" slowest first: its levels are {topology.axes}, got {tuple(axes)}."
    )
  if memory_bytes is not None and not (
    arguments.number("memory_bytes", memory_bytes) > 0
  ):
    raise ValueError(
      f"`memory_bytes` must be positive, got {memory_bytes!r}; leave it out for"
      " the default."
    )


def _wires(dtypes: Any) -> tuple[str, ...]:
  if isinstance(dtypes, str) or not isinstance(dtypes, Iterable):
    raise TypeError(
      "`wire_dtypes` must be a sequence of floating dtypes, got"
      f" {dtypes!r}; give (jnp.bfloat16,) for one."
    )
  wires = [arguments.wire_dtype("wire_dtypes", dtype) for dtype in dtypes]
  return tuple(jnp.dtype(wire).name for wire in wires)


def _check_names(
  gradients: Sequence[Gradient], given: Mapping[str, Any] | None, argument: str
) -> None:
  known = [gradient.name for gradient in gradients]
  unknown = sorted(set(given or ()) - set(known))
  if unknown:
    raise ValueError(
      f"`{argument}` must name leaves of the model, got {unknown}; they are"
      f" {known}: was it recorded with another model?"
    )
