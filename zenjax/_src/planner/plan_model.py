"""Chooses how every gradient of a model is synchronized."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
from typing import Any

from zenjax._src.core import arguments
from zenjax._src.core import text
from zenjax._src.core.arguments import AxisName
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.cost import Way
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import choice
from zenjax._src.planner import predictions
from zenjax._src.planner import questions
from zenjax._src.planner.overlap import Step
from zenjax._src.planner.overlap import Strategy
from zenjax._src.planner.questions import Gradient
from zenjax._src.planner.questions import Question
from zenjax._src.sync import plans
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan

# Buffers get more rows than the mean step needs, because steps differ.
_SPARE = 1.05


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
  difference if the gain may be an error of the prediction. Compressed gradients
  may be sent in parts, while the backward pass still computes others.

  Args:
    value_and_grad: `zenjax.value_and_grad(loss)`, or `jax.value_and_grad(loss)`
      for gradients that are arrays.
    *args: Its arguments on one device: parameters, then its part of a batch.
    topology: The machine, from `Topology.preset`, `Topology.network` or
      `measure_links`.
    axis_name: Mesh axes of the batch, one for each level of the topology, the
      slowest first.
    profile: Densities by parameter name, from `zenjax.planner.profile(state)`.
      By default, the planner assumes a quarter of the lookups for row
      gradients, all rows for arrays from zenjax's `value_and_grad`, and one
      percent of the rows for those from `jax.value_and_grad`.
    trace: A directory that `zenjax.planner.record` wrote, instead of `profile`.
    compute_seconds: Time of a step on one device without any exchange. Measure
      it with `jax.lax.optimization_barrier(grads)` in place of the exchange, to
      keep XLA from fusing gradient and optimizer. Two thirds of it are taken as
      the backward pass, with which sums of dense gradients overlap. If you
      leave it out, only exchanges are compared.
    allow: What gradients may lose, nothing by default. A dtype, such as
      `"bfloat16"` or `"int8"`, lets rows of tables and gradients of dense
      layers be rounded to it, where that is faster. A compressor, such as
      `zenjax.compress.ExDyna(0.01)` or its name `"ExDyna(0.01)"`, is for dense
      layers.
    local_seconds: What `zenjax.planner.measure_compressors` returned for the
      compressors that you allow, if you have the machine. By default, these
      times are predicted from the memory bandwidth of the topology.
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

  References:
    Wang et al., [Hi-Speed DNN Training with
    Espresso](https://arxiv.org/abs/2205.14465), EuroSys 2023, for what to
    compress. Wang et al., [MergeComp](https://arxiv.org/abs/2103.15195), 2021,
    for the parts.
  """
  question = questions.ask(
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
  questions.check_names(
    "capacities", pins, [g.name for g in question.gradients]
  )
  wires, compressors = questions.losses(allow)
  return answer(
    dataclasses.replace(
      question,
      compute_seconds=compute_seconds,
      wire_dtypes=wires,
      compressors=compressors,
      local_seconds=questions.measured(local_seconds, compressors),
      capacities=pins,
    )
  )


def answer(question: Question) -> Plan:
  """Returns the plan with the shortest step."""
  predicted = predictions.every_way(question)
  possible = [
    _within(gradient.name, ways, question.memory_bytes)
    for gradient, ways in zip(question.gradients, predicted)
  ]
  chosen = choice.choose(possible)
  assert chosen is not None  # Memory has no limit here.
  # The choice assumes that nothing overlaps. Plain all-reduces do, and
  # compressed ones in parts.
  plain = [
    PMEAN if way.compressor and PMEAN in ways else way
    for way, ways in zip(chosen, possible)
  ]
  step, best = Step(question, predicted), Strategy(tuple(plain))
  found = [step.improved(possible, ways) for ways in (plain, chosen)]
  fastest = min(found, key=step.seconds)
  if step.seconds(fastest) < choice.MARGIN * step.seconds(best):
    best = fastest
  return planned(question, predicted, best)


def planned(
  question: Question,
  predicted: Sequence[Mapping[Way, Prediction]],
  chosen: Strategy,
) -> Plan:
  """Returns the plan that sends each gradient in the chosen way."""
  schemes = list(dict.fromkeys(way.scheme for way in chosen.ways))
  leaves = []
  for gradient, ways, way in zip(question.gradients, predicted, chosen.ways):
    profile = question.profiles.get(gradient.name)
    rows = union = None
    reason = choice.reason(ways, way, _in_words)
    if profile is not None:
      rows = float(profile.rows)
      union = profile.union_of(question.topology.devices)
      union = float(min(union, gradient.table.num_rows))
    elif reason and gradient.is_table:
      reason += ", densities assumed"
    if way.compressor and chosen.cuts:
      part = f"part {chosen.part(gradient) + 1} of {len(chosen.cuts) + 1}"
      reason = "; ".join([*filter(None, [reason]), part])
    if way == PMEAN and gradient.may_be_compressed and question.compute_seconds:
      if reason.endswith("by itself"):
        reason += ", but the whole step would gain too little"
    leaves.append(
      LeafPlan(
        name=gradient.name,
        shape=gradient.shape,
        dtype=gradient.dtype.name,
        scheme=way.scheme,
        group=chosen.part(gradient)
        if way.compressor
        else schemes.index(way.scheme),
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
  step, pmean = Step(question, predicted), (PMEAN,) * len(predicted)
  return Plan(
    leaves=tuple(leaves),
    mesh=tuple(zip(question.axes, question.topology.sizes)),
    machine=question.topology.name,
    compute_seconds=question.compute_seconds,
    seconds=step.seconds(chosen),
    dense_seconds=step.seconds(Strategy(pmean)),
  )


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
