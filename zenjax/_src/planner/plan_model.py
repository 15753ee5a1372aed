"""Chooses how every parameter is held, and its gradient synchronized."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
import os
import types
from typing import Any

import optax

from zenjax._src.core import arguments
from zenjax._src.core import text
from zenjax._src.core.arguments import AxisName
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.cost import Way
from zenjax._src.machine.cost import Ways
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import choice
from zenjax._src.planner import predictions
from zenjax._src.planner import questions
from zenjax._src.planner import same_training
from zenjax._src.planner.optimizer_facts import Optimizer
from zenjax._src.planner.overlap import Step
from zenjax._src.planner.overlap import Strategy
from zenjax._src.planner.questions import Gradient
from zenjax._src.planner.questions import Question
from zenjax._src.rows import leaf_util
from zenjax._src.sync import plans
from zenjax._src.sync.plans import Alternative
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan

# Buffers get more rows than the mean step needs, because steps differ.
_SPARE = 1.05
# The default limit is this part of a device's memory: activations and the
# compiler's buffers need the rest.
_USABLE = 0.75
# Each further exchange of tables must reduce the time of a step to less than
# this part.
_WORTH = 0.9
# The remedy for parameters that are already sharded.
_UNSHARDED = "Give arrays or shapes, because a plan says which tables to shard"


def plan(
  value_and_grad: Callable[..., Any],
  *args: Any,
  topology: Topology,
  axis_name: AxisName = "data",
  tx: optax.GradientTransformation | None = None,
  profile: Mapping[str, Profile] | None = None,
  trace: str | os.PathLike | None = None,
  compute_seconds: float = 0.0,
  allow: Sequence[Any] = ("lossless",),
  local_seconds: Mapping[str, float] | None = None,
  capacities: Mapping[str, tuple[int, int]] | None = None,
  memory_bytes: float | None = None,
  forms: Mapping[str, str] | None = None,
  clip_norm: float | None = None,
) -> Plan:
  """Chooses how to hold each table, and how to synchronize each gradient.

  Use it before you have the machine. Your program is only traced, so shapes
  (`jax.ShapeDtypeStruct`) are enough. The plan has the shortest predicted step.
  Because predictions have errors, it replaces `pmean` only if a step then gets
  a fifth shorter.

  With your optimizer as `tx`, the plan also chooses the form of each table that
  the loss uses only by lookups:

  - `"replicated"`: an array of its gradient is all-reduced.
  - `"replicated-sparse"`: `zen_sync` and `lazy_rows` handle touched rows only.
  - `"replicated-zero1"`: `sharded_optimizer` also shards the optimizer state.
  - `"sharded-xla"`: sharded by ranges of rows, `P(axis_name, None)`, by XLA.
  - `"sharded"`: sharded by `zenjax.tables.shard` over the last axis, with a
    copy for every group of devices along the others.

  All forms in a plan train alike. If `tx` changes rows without a gradient, as
  Adam does, they update touched rows only, unlike plain JAX. `"replicated"` and
  `"sharded-xla"` cannot do that, so they are left out. If `tx` sums over all
  rows, for example to clip by a norm, `"replicated-zero1"` and `"sharded"` are
  left out. Use `clip_norm` instead.

  Args:
    value_and_grad: `zenjax.value_and_grad(loss)`, or without `tx` also
      `jax.value_and_grad(loss)` for gradients that are arrays.
    *args: Its arguments on one device: parameters, then its part of a batch.
    topology: The machine, from `Topology.preset`, `Topology.network` or
      `measure_links`.
    axis_name: Mesh axes of the batch, one for each level of the topology, the
      slowest first.
    tx: The optimizer, as for one device. Without it, all tables are replicated.
    profile: Densities by parameter name, from `zenjax.planner.profile(state)`.
      By default, the planner assumes a quarter of the lookups for row
      gradients, all rows for arrays from zenjax's `value_and_grad`, and one
      percent of the rows for those from `jax.value_and_grad`.
    trace: A directory that `zenjax.planner.record` wrote, instead of `profile`.
    compute_seconds: Time of a step on one device without any exchange. Measure
      it with `jax.lax.optimization_barrier(grads)` in place of the exchange, to
      keep XLA from fusing gradient and optimizer. Two thirds of it are taken as
      the backward pass, with which sums of dense gradients overlap. With `tx`,
      measure only loss and gradients, because the plan adds the updates of
      tables. If you leave it out, only exchanges and updates are compared.
    allow: What gradients may lose, nothing by default. A dtype, such as
      `"bfloat16"` or `"int8"`, lets gradients of dense layers and rows of
      tables be rounded to it when they are sent, where that is faster. Of
      sharded tables, rows that are looked up are rounded, too. A compressor,
      such as `zenjax.compress.ExDyna(0.01)` or its name `"ExDyna(0.01)"`, is
      for dense layers. With `tx`, a plan that compresses is for a step in
      `zenjax.data_parallel`. There, tables cannot be `"sharded-xla"`, with
      several axes they cannot be `"sharded"`, and with `clip_norm` they can be
      neither `"sharded"` nor `"replicated-zero1"`. The plan compresses only if
      the step is a fifth shorter than without compression.
    local_seconds: What `zenjax.planner.measure_compressors` returned for the
      compressors that you allow, if you have the machine. By default, these
      times are predicted from the memory bandwidth of the topology.
    capacities: Buffer sizes `(push, pull)` in rows to begin with, by parameter
      name, for rows of replicated or sharded tables. `zenjax.tune` may change
      them.
    memory_bytes: With `tx`, the limit on a device's parameters, state,
      gradients and buffers, without activations. By default 3/4 of the
      topology's memory.
    forms: With `tx`, forms that you demand, by parameter name.
    clip_norm: With `tx`, a norm to which all gradients together are clipped
      before it. All tables that are not `"replicated"` then have the same form.

  Returns:
    The plan. Print it, and follow it with `zenjax.planner.set_up` or, without
    `tx`, with `zen_sync(plan=...)` or `zenjax.compress.all_reduce(plan, ..)`.

  Raises:
    TypeError: An argument has a wrong type, or `value_and_grad` does not return
      a pair.
    ValueError: An argument is out of range, needs `tx`, or names an unknown
      parameter; a form is not possible; nothing fits within `memory_bytes`; or
      with `tx`, the loss looks up no table and nothing may be compressed.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> def loss(params, ids):
    ...   return jnp.mean((params["table"][ids] @ params["w"]) ** 2)
    >>> shape = jax.ShapeDtypeStruct
    >>> params = {"table": shape((100_000, 64), jnp.float32),
    ...           "w": shape((64, 64), jnp.float32)}
    >>> make = lambda **options: zenjax.planner.plan(
    ...   zenjax.value_and_grad(loss), params, shape((4096,), jnp.int32),
    ...   topology=zenjax.planner.Topology.network("10 Gbit/s", 8), **options
    ... )
    >>> [(leaf.name, leaf.form) for leaf in make().leaves]
    [('table', 'replicated-sparse'), ('w', 'replicated')]
    >>> make(tx=optax.adagrad(0.1)).by_name["table"].form
    'sharded'

  References:
    Wang et al., [Hi-Speed DNN Training with
    Espresso](https://arxiv.org/abs/2205.14465), EuroSys 2023, for what to
    compress. Wang et al., [MergeComp](https://arxiv.org/abs/2103.15195), 2021,
    for the parts of the backward pass in which compressed gradients are sent.
  """
  compute_seconds = questions.time(
    "compute_seconds", compute_seconds, may_be_zero=True
  )
  leaf_util.refuse_sharded(
    args[0] if args else (), "params", "plan", _UNSHARDED
  )
  if tx is not None:
    arguments.optimizer("tx", tx)
  question = questions.ask(
    value_and_grad, args, topology, axis_name, profile, trace
  )
  limit, clip_norm = _limit(memory_bytes, topology, tx), _norm(clip_norm)
  pins = arguments.pins(capacities)
  names = [gradient.name for gradient in question.gradients]
  questions.check_names("capacities", pins, names)
  wires, compressors = questions.losses(allow)
  question = dataclasses.replace(
    question,
    compute_seconds=compute_seconds,
    wire_dtypes=wires,
    compressors=compressors,
    local_seconds=questions.measured(local_seconds, compressors),
    capacities=pins,
    memory_bytes=limit,
  )
  if tx is None:
    given = dict(memory_bytes=memory_bytes, forms=forms, clip_norm=clip_norm)
    for name, value in given.items():
      if value is not None:
        raise ValueError(
          f"`{name}` needs `tx`, because it is about how tables are held and"
          " updated. Give your optimizer as `tx`."
        )
    return answer(question)
  return answer(_with_optimizer(question, args, tx, forms, clip_norm))


def _limit(memory_bytes: Any, topology: Topology, tx: Any) -> float | None:
  """Returns the bytes that a plan may take, if there is a limit."""
  if memory_bytes is None:
    known = topology.memory_bytes if tx is not None else None
    return known and _USABLE * known
  memory_bytes = arguments.number("memory_bytes", memory_bytes)
  if not memory_bytes > 0:
    raise ValueError(f"`memory_bytes` must be positive, got {memory_bytes}.")
  return memory_bytes


def _norm(clip_norm: Any) -> float | None:
  """Returns the norm to which gradients are clipped, if any."""
  if clip_norm is None:
    return None
  clip_norm = arguments.number("clip_norm", clip_norm)
  if not 0 < clip_norm < math.inf:
    raise ValueError(
      f"`clip_norm` must be positive and finite, got {clip_norm!r}. Leave"
      " it out for no clipping."
    )
  return clip_norm


def _with_optimizer(
  question: Question,
  args: Sequence[Any],
  tx: optax.GradientTransformation,
  forms: Mapping[str, str] | None,
  clip_norm: float | None,
) -> Question:
  """Returns the question with an optimizer and the demanded forms."""
  names = [gradient.name for gradient in question.gradients]
  given = [name for name, _ in leaf_util.named_leaves(args[0])]
  if names != given:
    missing = [name for name in given if name not in names]
    raise ValueError(
      "`value_and_grad` must return gradients of its first argument, which `tx`"
      f" updates, but it returns none of {missing}, only of {names}. Make them"
      " another argument. For a module of Flax nnx, write `graph, params, rest"
      " = nnx.split(net, nnx.Param, ...)`, and merge these in the loss."
    )
  tables = [g.name for g in question.gradients if g.look_ups is not None]
  if not tables and not question.compressors:
    raise ValueError(
      "With `tx`, `value_and_grad` must return rows of a table, got arrays of"
      f" {names}. Give `zenjax.value_and_grad(loss)`, and ask"
      " `zenjax.rows.explain_tables` why a parameter is not a table."
    )
  if not isinstance(forms, Mapping | None):
    raise TypeError(
      "`forms` must map parameter names to forms, got"
      f" {forms!r}. Give for example {{'table': 'sharded'}}."
    )
  forms = dict(forms or {})
  questions.check_names(
    "forms", forms, tables, "tables that the loss uses only by lookups"
  )
  for name, form in forms.items():
    arguments.one_of(f"forms[{name!r}]", form, list(plans.FORMS))
  return dataclasses.replace(
    question, optimizer=Optimizer(tx, args[0], clip_norm), forms=forms
  )


def answer(question: Question) -> Plan:
  """Returns the plan with the shortest step.

  Gradients are compressed only in a per-device step, in which tables have fewer
  forms. So if both are to be chosen, the best program of each kind is compared.
  """
  if question.optimizer is None:
    return _answer(question)
  plain = _answer(dataclasses.replace(question, compressors=()))
  if not question.compressors:
    return plain
  refused = same_training.beside_compressed(question)
  for form in question.forms.values():
    if form in refused:
      return _not_compressed(plain, question, refused[form])
  try:
    other = _answer(dataclasses.replace(question, per_device=True))
  except _NothingFitsError:
    return _not_compressed(plain, question, "tables would not fit in memory")
  ratio = other.seconds / max(plain.seconds, 1e-12)
  if not other.per_device:
    why = "compression would shorten a step by less than a fifth"
    return _not_compressed(plain, question, why)
  if ratio < choice.MARGIN:
    return other
  why = f"with compression, a step takes {ratio:.3g}x as long"
  if ratio < 1:
    why += ", within the error of predictions"
  if forms := [form for form in refused if form != plans.XLA]:
    why += f" (tables cannot be {' or '.join(forms)}: {refused[forms[0]]})"
  return _not_compressed(plain, question, why)


class _NothingFitsError(ValueError):
  """Raised if a device's memory is too small."""


def _not_compressed(plan: Plan, question: Question, why: str) -> Plan:
  """Returns a plan that says why it does not compress large gradients."""
  names = [g.name for g in question.gradients if g.may_be_compressed]
  leaves = [
    dataclasses.replace(leaf, reason=why) if leaf.name in names else leaf
    for leaf in plan.leaves
  ]
  return dataclasses.replace(plan, leaves=tuple(leaves))


def _answer(question: Question) -> Plan:
  """Returns the plan with the shortest step, of one kind of program."""
  predicted = predictions.every_way(question)
  possible = same_training.ways(question, predicted)
  gradients = question.gradients
  is_table = [question.may_send_rows(gradient) for gradient in gradients]
  tables = [i for i, yes in enumerate(is_table) if yes]
  others = [i for i, yes in enumerate(is_table) if not yes]
  fitting, fastest = _of_tables(question, tables, possible)
  apart = choice.choose([possible[i] for i in others])
  assert apart is not None  # Memory has no limit here.
  of_leaf = dict(zip(tables, fitting)) | dict(zip(others, apart))
  chosen = [of_leaf[i] for i in range(len(gradients))]
  # The choice assumes that nothing overlaps. Plain all-reduces do, and
  # compressed ones in parts.
  plain = [
    PMEAN if way.compressor and PMEAN in ways else way
    for way, ways in zip(chosen, possible)
  ]
  step, best = Step(question, predicted), Strategy(tuple(plain))
  found = [step.improved(possible, ways) for ways in (plain, chosen)]
  other = min(found, key=step.seconds)
  if step.seconds(other) < choice.MARGIN * step.seconds(best):
    best = other
  return planned(question, predicted, best, dict(zip(tables, fastest)))


def _of_tables(
  question: Question, tables: Sequence[int], possible: Sequence[Ways]
) -> tuple[list[Way], list[Way]]:
  """Returns the fastest ways of tables that fit into memory, and the fastest.

  Args:
    question: The question.
    tables: Numbers of the gradients of tables.
    possible: The ways of every gradient that give the same training.
  """
  names = [question.gradients[i].name for i in tables]
  allowed = [
    {
      way: x
      for way, x in possible[i].items()
      if form in (None, plans.form_of(way.scheme))
    }
    for i, form in zip(tables, map(question.forms.get, names))
  ]
  optimizer, limit, rest = question.optimizer, math.inf, 0.0
  if optimizer is not None and question.memory_bytes is not None:
    limit, rest = question.memory_bytes, optimizer.bytes_beside(names)
    if question.compressors:
      rest += _kept(x for x in question.gradients if x.may_be_compressed)
  most = 1 if optimizer is not None and optimizer.sums_all else math.inf
  choose = lambda limit: choice.choose(
    allowed, limit=limit, most=most, worth=_WORTH
  )
  fitting, fastest = choose(limit - rest), choose(math.inf)
  if fastest is None:
    raise ValueError(
      f"`forms` cannot be met in one program, got {dict(question.forms)}. If"
      " updates depend on a sum over all gradients, such as a norm, all tables"
      " that are not 'replicated' need the same form. Demand one that each of"
      " them can have, such as 'replicated-sparse'."
    )
  if fitting is None:
    least = sum(min(x.memory for x in ways.values()) for ways in allowed)
    raise _NothingFitsError(
      f"`memory_bytes` must hold the tables, at least {text.size(least)} per"
      f" device, and {text.size(rest)} of other parameters, got"
      f" {text.size(limit)}. Use more devices, or an optimizer with less state,"
      " for example `zenjax.rows.rowwise_adagrad`."
    )
  return fitting, fastest


def _kept(gradients: Iterable[Gradient]) -> float:
  """Returns the bytes of the errors that a device keeps of such gradients."""
  return 4.0 * sum(math.prod(gradient.shape) for gradient in gradients)


def planned(
  question: Question,
  predicted: Sequence[Ways],
  chosen: Strategy,
  fastest: Mapping[int, Way] = types.MappingProxyType({}),
) -> Plan:
  """Returns the plan that holds and sends each leaf in the chosen way.

  Args:
    question: The question.
    predicted: Every way of every gradient.
    chosen: The chosen ways.
    fastest: The fastest ways without a limit on memory, by number of the leaf.
  """
  schemes = list(dict.fromkeys(way.scheme for way in chosen.ways))
  possible, leaves = same_training.ways(question, predicted), []
  for i, (gradient, ways, way) in enumerate(
    zip(question.gradients, possible, chosen.ways)
  ):
    profile = question.profiles.get(gradient.name)
    rows = union = None
    if profile is not None:
      rows = float(profile.rows)
      union = profile.union_of(question.topology.devices)
      union = float(min(union, gradient.table.num_rows))
    reason = _reason(question, gradient, ways, way, fastest.get(i, way))
    if way.compressor and chosen.cuts:
      part = f"part {chosen.part(gradient) + 1} of {len(chosen.cuts) + 1}"
      reason = "; ".join([*filter(None, [reason]), part])
    holds_table = question.optimizer and question.may_send_rows(gradient)
    memory = ways[way].memory if holds_table else None
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
        dense_seconds=predicted[i][PMEAN].seconds,
        wire_bytes=ways[way].received,
        memory_bytes=memory,
        look_ups=gradient.look_ups,
        rows=rows,
        union=union,
        others=_others(ways, way, with_memory=memory is not None),
        reason=reason,
      )
    )
  step, pmean = Step(question, predicted), (PMEAN,) * len(predicted)
  held = dense_held = None
  if question.optimizer is not None:
    both = list(zip(question.gradients, chosen.ways))
    tables = [i for i, x in enumerate(leaves) if x.memory_bytes is not None]
    rest = question.optimizer.bytes_beside([leaves[i].name for i in tables])
    held = rest + _kept(gradient for gradient, way in both if way.compressor)
    held += sum(leaves[i].memory_bytes for i in tables)
    dense_held = rest + sum(predicted[i][PMEAN].memory for i in tables)
  return Plan(
    leaves=tuple(leaves),
    mesh=tuple(zip(question.axes, question.topology.sizes)),
    machine=question.topology.name,
    compute_seconds=question.compute_seconds,
    seconds=step.seconds(chosen),
    dense_seconds=step.seconds(Strategy(pmean)),
    memory_bytes=held,
    dense_memory_bytes=dense_held,
    limit_bytes=question.memory_bytes,
    clip_norm=question.optimizer and question.optimizer.clip_norm,
  )


def _reason(
  question: Question, gradient: Gradient, ways: Ways, way: Way, fastest: Way
) -> str:
  """Returns why a leaf has its way; empty for leaves without a choice.

  Args:
    question: The question.
    gradient: The gradient of the leaf.
    ways: All ways of the leaf.
    way: The chosen one.
    fastest: The one that would be chosen without a limit on memory.
  """
  if gradient.name in question.forms:
    return "demanded"

  def words(way: Way) -> str:
    text = plans.in_words(*way)
    if question.optimizer is None:
      return text
    return plans.with_form(text, plans.form_of(way.scheme))

  reason = choice.reason(ways, way, words)
  part = ways[fastest].seconds / max(ways[way].seconds, 1e-12)
  if fastest != way and part < 1:
    reason = f"{words(fastest)} takes {part:.3g}x as long, but too much memory"
  if way == PMEAN and reason.endswith("if sent alone"):
    reason += ", but the whole step would gain too little"
  if reason and gradient.is_table and gradient.name not in question.profiles:
    reason += ", densities assumed"
  if question.optimizer is not None and gradient.look_ups is not None:
    reason = reason or "no other form"
    if question.optimizer.sums:
      reason += "; if tx clips by a norm, clip_norm= has more forms"
  return reason


def _others(
  ways: Ways, chosen: Way, with_memory: bool
) -> tuple[Alternative, ...]:
  """Returns the ways that were not chosen, the fastest first."""
  others = [
    Alternative(
      choice=plans.in_words(*way),
      form=plans.form_of(way.scheme),
      seconds=x.seconds,
      wire_bytes=x.received,
      memory_bytes=x.memory if with_memory else None,
    )
    for way, x in ways.items()
    if way != chosen
  ]
  return tuple(sorted(others, key=lambda other: other.seconds))


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
