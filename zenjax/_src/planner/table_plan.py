"""Chooses whether each table is replicated or sharded."""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
from typing import Annotated, Any, ClassVar

import jax
import optax

from zenjax._src.core import arguments
from zenjax._src.core import checked_json
from zenjax._src.core import text
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.checked_json import NOT_NEGATIVE
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Source
from zenjax._src.gradients import value_and_grad as row_gradients
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import choice
from zenjax._src.planner import plan_model
from zenjax._src.planner import questions
from zenjax._src.planner import table_forms
from zenjax._src.planner import table_program
from zenjax._src.planner.optimizer_facts import Optimizer
from zenjax._src.planner.questions import Gradient
from zenjax._src.planner.questions import Question
from zenjax._src.planner.table_forms import FORMS
from zenjax._src.planner.table_forms import OF_ARRAYS
from zenjax._src.planner.table_forms import OF_OWNERS
from zenjax._src.planner.table_forms import SHARDED
from zenjax._src.planner.table_program import Program
from zenjax._src.rows import leaf_util
from zenjax._src.sync import plans
from zenjax._src.sync.plans import Plan

# The default limit is this part of a device's memory: activations and the
# compiler's buffers need the rest.
_USABLE = 0.75
# Each further form is a further exchange, so it must reduce the time of a step
# to less than this part.
_WORTH = 0.9
# From this many sharded tables of one width on, a plan advises to join them.
_MANY = 4
# What to do if parameters are sharded before they are planned.
_UNSHARDED = (
  "Give arrays, or a function that makes them, because `set_up` shards tables"
  " as planned"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableForm:
  """The form of one table in a plan, compared with others.

  Attributes:
    name: Name of the parameter, as `zenjax.report` shows it.
    shape: Shape of the table.
    dtype: Name of its dtype.
    form: How the table is held and trained: one of the forms that `plan_tables`
      lists.
    seconds: Predicted time of the table's exchange and update in a step, if
      it does not share an exchange with other tables.
    wire_bytes: Predicted bytes that a device receives in a step.
    memory_bytes: Predicted bytes that a device holds: rows, state, gradient and
      buffers.
    others: `(form, seconds, wire_bytes, memory_bytes)` of the other forms that
      give the same training.
    reason: Why this form was chosen, in words.

  Example:
    >>> import zenjax
    >>> zenjax.planner.TableForm(
    ...   name="table", shape=(4096, 8), dtype="float32", form="sharded"
    ... ).form
    'sharded'
  """

  name: str
  shape: tuple[Annotated[int, NOT_NEGATIVE], ...]
  dtype: str
  form: str
  seconds: float = 0.0
  wire_bytes: float = 0.0
  memory_bytes: float = 0.0
  others: tuple[tuple[str, float, float, float], ...] = ()
  reason: str = ""

  def __post_init__(self):
    arguments.one_of("form", self.form, list(FORMS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan(checked_json.Document):
  """The form of every table of a program on a mesh.

  `zenjax.planner.plan_tables` makes it. Print it to compare forms, and call
  `set_up` to run your program with them.

  Attributes:
    tables: The form of each table that the loss uses only by lookups.
    mesh: `(axis, devices)`, the slowest link first.
    machine: Name of the topology that the plan was made for.
    seconds: Predicted time of all exchanges and updates of tables in a step.
    rest_bytes: Bytes that a device holds of all other parameters, with their
      gradients and state.
    rest_seconds: Predicted time of exchanging the gradients of these other
      parameters, which is the same for all forms.
    limit_bytes: Limit on the memory of a device; None if none is known.
    clip_norm: Norm to which gradients are clipped; None for no clipping.
    gradients: How the gradients of all other parameters are sent, if some of
      them may be compressed; None if XLA sums them.

  Example:
    >>> import zenjax
    >>> table = zenjax.planner.TableForm(
    ...   name="table", shape=(4096, 8), dtype="float32", form="sharded"
    ... )
    >>> plan = zenjax.planner.TablePlan(tables=(table,), mesh=(("data", 8),))
    >>> zenjax.planner.TablePlan.from_json(plan.to_json()) == plan
    True
  """

  tables: tuple[TableForm, ...]
  mesh: tuple[tuple[str, Annotated[int, POSITIVE]], ...]
  machine: str = ""
  seconds: float = 0.0
  rest_bytes: float = 0.0
  rest_seconds: float = 0.0
  limit_bytes: float | None = None
  clip_norm: float | None = None
  gradients: Plan | None = None

  _VERSION: ClassVar[tuple[str, int]] = "zenjax_table_plan", 2
  _SOURCE: ClassVar[Source] = Source(
    "the table plan", "make a new plan with `zenjax.planner.plan_tables`"
  )

  @property
  def by_name(self) -> dict[str, TableForm]:
    """The form of each table, by name."""
    return {table.name: table for table in self.tables}

  @property
  def memory_bytes(self) -> float:
    """Predicted bytes that a device holds, except for activations."""
    return self.rest_bytes + sum(table.memory_bytes for table in self.tables)

  def __str__(self) -> str:
    axes = " x ".join(f"{name} {n}" for name, n in self.mesh)
    machine = f" on {self.machine}" if self.machine else ""
    devices = math.prod(n for _, n in self.mesh)
    limit = self.limit_bytes
    others = [
      "all-reduce of other gradients, the same in every form:"
      f" {text.ms(self.rest_seconds)} ms per step"
    ]
    if self.gradients is not None:
      others = [
        "other gradients, the same in every form:"
        f" {text.ms(self.rest_seconds)} ms per step, with pmean alone"
        f" {text.ms(self.gradients.dense_seconds)} ms",
        *plans.lines_of(self.gradients.leaves),
      ]
    widths = collections.Counter(
      table.shape[-1] for table in self.tables if table.form == SHARDED
    )
    notes = [
      f"{n} sharded tables have {width} columns: joined to one, as the guide"
      ' "Many tables of one width" shows, they compile much faster'
      for width, n in widths.items()
      if n >= _MANY
    ]
    return "\n".join(
      [
        f"tables on {devices} devices ({axes}){machine}",
        *text.columns([_HEADINGS, *map(_line, self.tables)], last_left=True),
        f"a device holds {text.size(self.memory_bytes)} of parameters, state,"
        f" gradients and buffers, {text.size(self.rest_bytes)} not for tables"
        + ("" if limit is None else f"; the limit is {text.size(limit)}"),
        "exchanges and updates of all tables, which share latency:"
        f" {text.ms(self.seconds)} ms per step",
        *others,
        *notes,
      ]
    )

  def set_up(
    self,
    params: Any,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
  ) -> Program:
    """Places parameters and optimizer state on a mesh, as planned.

    Your step is then plain `jit` over the mesh, with the loss of a whole
    batch::

        loss, grads = program.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = program.tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)

    If the plan may compress gradients, put the same three lines into a step for
    `zenjax.data_parallel`, with the loss of one device's part of a batch.

    Args:
      params: The parameters, or a function without arguments that makes them.
        The function runs inside `jit`, so that no device holds all rows of a
        sharded table.
      tx: The optimizer, as you would write it for one device. Sparse forms
        apply it only to touched rows, as `lazy_rows` does.
      mesh: A mesh with the axes of the plan.

    Returns:
      A `Program`: parameters, state, optimizer and `value_and_grad`.

    Raises:
      TypeError: An argument has a wrong type.
      ValueError: The plan was made for other parameters or another mesh, or
        with this `tx` its forms would train differently.
    """
    arguments.optimizer("tx", tx)
    if not isinstance(mesh, jax.sharding.Mesh):
      raise TypeError(
        f"`mesh` must be a jax.sharding.Mesh, got {type(mesh).__name__}."
      )
    for name, x in leaf_util.named_leaves(params):
      if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
          "`params` must be arrays, or a function that makes them, but"
          f" {name!r} is a shape."
        )
    leaf_util.refuse_sharded(params, "params", "set_up", _UNSHARDED)
    sizes = tuple((axis, mesh.shape.get(axis, 0)) for axis, _ in self.mesh)
    if sizes != self.mesh:
      raise ValueError(
        f"`mesh` must have the axes of the plan, {dict(self.mesh)}, got"
        f" {dict(mesh.shape)}. Use such a mesh, or make a new plan."
      )
    make = params if callable(params) else lambda: params
    types = jax.eval_shape(make)
    planned = {x.name: (x.shape, x.dtype) for x in self.tables}
    if self.gradients is not None:
      planned |= {x.name: (x.shape, x.dtype) for x in self.gradients.leaves}
    got = leaf_util.shapes(leaf_util.named_leaves(types))
    if self.gradients is None:  # Only tables are known.
      got = {name: x for name, x in got.items() if name in planned}
    plans.require_same(planned, got, "`params` must be as in the plan")
    form_of = {table.name: table.form for table in self.tables}
    axes = tuple(axis for axis, _ in self.mesh)
    return table_program.set_up(
      form_of, axes, mesh, params, tx, self.clip_norm, self.gradients
    )


def plan_tables(
  loss_fn: Callable[..., Any],
  params: Any,
  *batch: Any,
  tx: optax.GradientTransformation,
  topology: Topology,
  axis_name: AxisName = "data",
  profile: Mapping[str, Profile] | None = None,
  trace: str | os.PathLike | None = None,
  memory_bytes: float | None = None,
  forms: Mapping[str, str] | None = None,
  clip_norm: float | None = None,
  allow: Any = (),
) -> TablePlan:
  """Chooses whether each table of a model is replicated or sharded.

  Use it before you have the machine. Your program is only traced. The plan
  takes the forms that fit in memory and give the shortest step:

  - `"replicated"`: XLA sums arrays of gradients.
  - `"replicated-sparse"`: `zen_sync` and `lazy_rows` handle touched rows only.
  - `"replicated-zero1"`: `sharded_optimizer` also shards the optimizer state.
  - `"sharded-xla"`: sharded by ranges of rows, `P(axis_name, None)`, by XLA.
  - `"sharded"`: sharded by `zenjax.tables.shard` over the last axis, with a
    copy for every group of devices along the others.

  Only forms that give the same training are offered. If `tx` changes rows
  without a gradient, as Adam does, `"replicated"` and `"sharded-xla"` are left
  out, and all other forms update touched rows only. If `tx` sums over all rows,
  for example to clip by a norm, `"replicated-zero1"` and `"sharded"` are left
  out. Use `clip_norm` instead.

  With `allow`, the gradients of dense layers may be compressed, as by
  `zenjax.planner.plan`. Tables stay exact. Your step then runs inside
  `zenjax.data_parallel`, where XLA places no tables, so `"replicated"` and
  `"sharded-xla"` are left out, and with several axes `"sharded"`, too.

  Args:
    loss_fn: The loss, called on one device's part of a batch.
    params: Its first argument: arrays or shapes (`jax.ShapeDtypeStruct`).
    *batch: Its other arguments: arrays or shapes.
    tx: The optimizer.
    topology: The machine, from `Topology.preset`, `Topology.network` or
      `measure_links`.
    axis_name: Mesh axes of the batch, one for each level of the topology, the
      slowest first.
    profile: Densities by parameter name, from `zenjax.planner.profile(state)`.
      By default they are assumed from the number of lookups.
    trace: A directory that `zenjax.planner.record` wrote, instead of `profile`.
    memory_bytes: Limit on a device's parameters, state, gradients and buffers,
      without activations. By default 3/4 of the topology's memory.
    forms: Forms that you demand, by parameter name.
    clip_norm: Norm to which all gradients together are clipped before `tx`. All
      tables that are not `"replicated"` then have one form.
    allow: What gradients of dense layers may lose: dtypes, such as `"int8"`, or
      compressors, such as `zenjax.compress.ExDyna(0.01)`. Nothing by default.

  Returns:
    The plan. Print it, and call its `set_up`.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: The loss looks up no table, an argument is out of range or names
      an unknown parameter, a form is not possible or does not fit in memory, or
      updates depend on a norm of all gradients, some of which are compressed.

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
    >>> plan = zenjax.planner.plan_tables(
    ...   loss, params, shape((4096,), jnp.int32), tx=optax.adagrad(0.1),
    ...   topology=zenjax.planner.Topology.network("10 Gbit/s", 8),
    ... )
    >>> plan.by_name["table"].form
    'sharded'
  """
  if getattr(loss_fn, "gives_rows", False):
    raise TypeError(
      "`loss_fn` must be the loss itself, got `zenjax.value_and_grad` of it."
      " Leave `zenjax.value_and_grad` out here."
    )
  if not isinstance(forms, Mapping | None):
    raise TypeError(
      "`forms` must map parameter names to forms, got"
      f" {forms!r}. Give for example {{'table': 'sharded'}}."
    )
  if clip_norm is not None:
    clip_norm = arguments.number("clip_norm", clip_norm)
    if not 0 < clip_norm < math.inf:
      raise ValueError(
        f"`clip_norm` must be positive and finite, got {clip_norm!r}. Leave it"
        " out for no clipping."
      )
  arguments.optimizer("tx", tx)
  leaf_util.refuse_sharded(params, "params", "plan_tables", _UNSHARDED)
  if memory_bytes is None and isinstance(topology, Topology):
    memory_bytes = topology.memory_bytes and _USABLE * topology.memory_bytes
  question = questions.ask(
    row_gradients.value_and_grad(loss_fn),
    (params, *batch),
    topology=topology,
    axis_name=axis_name,
    profile=profile,
    trace=trace,
    memory_bytes=memory_bytes,
  )
  tables = [g for g in question.gradients if g.look_ups is not None]
  others = [g for g in question.gradients if g.look_ups is None]
  names = [table.name for table in tables]
  if not tables:
    raise ValueError(
      "`loss_fn` must use a parameter only by lookups, got none among"
      f" {[g.name for g in question.gradients]}. Ask"
      " `zenjax.rows.explain_tables` for the reasons."
    )
  demanded = dict(forms or {})
  questions.check_names(
    "forms", demanded, names, "tables that the loss uses only by lookups"
  )
  for name, form in demanded.items():
    arguments.one_of(f"forms[{name!r}]", form, list(FORMS))
  optimizer = Optimizer(tx, params, clip_norm)
  gradients = _compressed(others, question, optimizer, allow)
  by_device = gradients is not None
  possible = [
    _possible(table, question, optimizer, by_device, demanded.get(table.name))
    for table in tables
  ]
  allowed = [
    {form: costs[form]} if (form := demanded.get(name)) else costs
    for name, costs in zip(names, possible)
  ]
  rest = optimizer.bytes_beside(names)
  if gradients is not None:  # Each device keeps what it could not send.
    sent = [leaf for leaf in gradients.leaves if leaf.compressor]
    rest += sum(4 * math.prod(leaf.shape) for leaf in sent)
  limit = question.memory_bytes or math.inf
  choose = lambda limit: choice.choose(
    allowed,
    limit=limit,
    most=1 if optimizer.sums_all else math.inf,
    worth=_WORTH,
  )
  chosen, unlimited = choose(limit - rest), choose(math.inf)
  if unlimited is None:
    raise ValueError(
      f"`forms` cannot be combined in one program, got {demanded}, because"
      " updates depend on a sum over all gradients, such as a norm. Demand one"
      " form for all tables that are not 'replicated'."
    )
  if chosen is None:
    least = sum(min(x.memory for x in costs.values()) for costs in allowed)
    raise ValueError(
      f"`memory_bytes` must hold the tables, at least {text.size(least)} per"
      f" device, and {text.size(rest)} of other parameters, got"
      f" {text.size(limit)}. Use more devices, or an optimizer with less state,"
      " for example `zenjax.rows.rowwise_adagrad`."
    )
  if gradients is not None:
    rest_seconds = gradients.seconds
  else:
    rest_seconds = choice.seconds(
      [
        question.model.of_way(PMEAN, g.table, question.profile(g))
        for g in others
      ]
    )
  entries = []
  for table, costs, form, faster in zip(tables, possible, chosen, unlimited):
    reason = choice.reason(costs, form, str) or "no other form"
    if faster != form:
      part = costs[faster].seconds / costs[form].seconds
      reason = f"{faster} takes {part:.3g}x as long, but too much memory"
    if table.name not in question.profiles:
      reason += "; densities assumed"
    if optimizer.sums:
      reason += "; clip by clip_norm= instead of in tx to have more forms"
    if table.name in demanded:
      reason = "demanded"
    entries.append(_entry(table, form, costs, reason))
  return TablePlan(
    tables=tuple(entries),
    mesh=tuple(zip(question.axes, topology.sizes)),
    machine=topology.name,
    seconds=choice.seconds(
      [costs[form] for costs, form in zip(possible, chosen)]
    ),
    rest_bytes=rest,
    rest_seconds=rest_seconds,
    limit_bytes=limit if math.isfinite(limit) else None,
    clip_norm=clip_norm,
    gradients=gradients,
  )


def _compressed(
  gradients: Sequence[Gradient],
  question: Question,
  optimizer: Optimizer,
  allow: Any,
) -> Plan | None:
  """Plans gradients that may be compressed; None if none of them may."""
  _, compressors = questions.losses(allow)
  if not compressors:
    return None
  if optimizer.sums_all:
    raise ValueError(
      "`allow` must be left out if updates depend on a norm of all gradients,"
      " by `clip_norm` or in `tx`, because compressed gradients are updated"
      " apart from tables."
    )
  return plan_model.answer(
    dataclasses.replace(
      question,
      gradients=tuple(gradients),
      compressors=compressors,
      memory_bytes=None,
    )
  )


def _possible(
  table: Gradient,
  question: Question,
  optimizer: Optimizer,
  by_device: bool,
  form: str | None,
) -> dict[str, Prediction]:
  """Predicts the forms of a table that give the same training.

  Args:
    table: The gradient of the table.
    question: The question.
    optimizer: The optimizer.
    by_device: Whether the step runs inside `data_parallel`.
    form: The form that the user demands.

  Raises:
    ValueError: `form` is demanded, but is not one of them, or there is none,
      because `tx` mixes the rows of the table.
  """
  state_row = optimizer.state_row(table.name)
  profile = question.profile(table)
  costs = table_forms.costs(table, profile, state_row, question.model)
  refused: dict[str, str] = {}
  if table.name not in optimizer.resting:
    refused |= {k: table_program.MOVES for k in OF_ARRAYS}
  if optimizer.sums:
    refused |= {k: table_program.SUMS for k in OF_OWNERS}
  if by_device:
    refused |= {k: table_program.BY_XLA for k in OF_ARRAYS}
    if len(question.axes) > 1:
      refused[table_forms.SHARDED] = table_program.COPIES
  mixing = optimizer.mixing.get(table.name)
  if mixing:
    refused |= {k: mixing for k in (table_forms.ROWS, *OF_OWNERS)}
  possible = {k: x for k, x in costs.items() if k not in refused}
  if mixing and not possible:
    raise ValueError(
      "`tx` must update a row by that row alone, or by sums over all"
      f" gradients, but for table {table.name!r} {mixing}. Give this table"
      " another optimizer, such as `optax.adagrad`, with `optax.partition`."
    )
  if form is None or form in possible:
    return possible
  missing = {
    table_forms.XLA: f"its shape {table.shape} must have two dimensions and a"
    f" number of rows that {question.model.context.devices} devices divide",
    table_forms.ZERO1: "this form needs a topology with one level",
    table_forms.SHARDED: "the table does not have two dimensions, or there is"
    " only one device",
  }
  why = refused[form] if form in costs else missing[form]
  raise ValueError(
    f"`forms[{table.name!r}]` cannot be {form!r}, because {why}. Leave the"
    " form out to let the plan choose."
  )


def _entry(
  table: Gradient, form: str, costs: Mapping[str, Prediction], reason: str
) -> TableForm:
  """Returns the entry of a plan for a table."""
  numbers = {k: (x.seconds, x.received, x.memory) for k, x in costs.items()}
  seconds, received, memory = numbers.pop(form)
  return TableForm(
    name=table.name,
    shape=table.shape,
    dtype=table.dtype.name,
    form=form,
    seconds=seconds,
    wire_bytes=received,
    memory_bytes=memory,
    others=tuple((k, *each) for k, each in numbers.items()),
    reason=reason,
  )


# --- a plan as text -----------------------------------------------------------

# How many other forms of a table a plan prints, the fastest first.
_SHOWN = 3
_HEADINGS = (
  *("table", "shape", "form", "ms", "received", "memory"),
  *("other forms", "because"),
)


def _line(table: TableForm) -> tuple[str, ...]:
  others = sorted(table.others, key=lambda x: x[1])
  return (
    table.name,
    "x".join(map(str, table.shape)),
    table.form,
    text.ms(table.seconds),
    text.size(table.wire_bytes),
    text.size(table.memory_bytes),
    ", ".join(f"{form} {text.ms(s)} ms" for form, s, *_ in others[:_SHOWN]),
    table.reason,
  )
