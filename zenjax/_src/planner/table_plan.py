"""`plan_tables`: chooses how every table is held and trained."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import os
from typing import Annotated, Any

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
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import plan_model
from zenjax._src.planner import table_forms
from zenjax._src.planner import table_program
from zenjax._src.planner.optimizer_facts import Optimizer
from zenjax._src.planner.plan_model import Question
from zenjax._src.planner.table_forms import Cost
from zenjax._src.planner.table_forms import FORMS
from zenjax._src.planner.table_forms import OF_ARRAYS
from zenjax._src.planner.table_forms import OF_OWNERS
from zenjax._src.planner.table_forms import REPLICATED
from zenjax._src.planner.table_program import CARRIED
from zenjax._src.planner.table_program import Program
from zenjax._src.rows import leaf_util

_VERSION = "zenjax_table_plan", 2
_REMEDY = "make it anew by `zenjax.planner.plan_tables`"
# The part of a device's memory that tables may take where no limit is given:
# activations and the compiler's buffers need the rest.
_USABLE = 0.75


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableForm:
  """The form of one table, and what others would cost.

  Attributes:
    name: Name of the leaf, as `zenjax.report` shows it.
    shape: Shape of the table.
    dtype: Name of its dtype.
    form: How it is held and trained; see `plan_tables`.
    seconds: Predicted time of a step's exchange and update, by itself.
    wire_bytes: Predicted bytes that a device receives in a step.
    memory_bytes: Predicted bytes that a device holds: rows, state, gradient and
      buffers.
    others: `(form, seconds, wire_bytes, memory_bytes)` of the other forms that
      train alike.
    reason: Reason of the choice, in words.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
  """The form of every table of a program on a mesh.

  Made by `zenjax.planner.plan_tables`.

  Attributes:
    tables: One for every table that the loss only looks rows up in.
    mesh: `(axis, devices)`, the slowest link first.
    machine: Name of the topology that it was made for.
    seconds: Predicted time of all exchanges and updates of a step.
    rest_bytes: Bytes that a device holds of all other parameters.
    limit_bytes: Limit on the memory of a device; None if none is known.
    clip_norm: Largest norm of all gradients; None for any.

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
  limit_bytes: float | None = None
  clip_norm: float | None = None

  @property
  def by_name(self) -> dict[str, TableForm]:
    """The tables by their names."""
    return {table.name: table for table in self.tables}

  @property
  def memory_bytes(self) -> float:
    """Predicted bytes that a device holds, activations left out."""
    return self.rest_bytes + sum(table.memory_bytes for table in self.tables)

  def __str__(self) -> str:
    return _text(self)

  def to_json(self) -> str:
    """Returns all of it as text, for `from_json`."""
    return json.dumps(dict([_VERSION]) | dataclasses.asdict(self), indent=2)

  @classmethod
  def from_json(cls, text: str) -> "TablePlan":
    """Reads a plan that `to_json` wrote.

    Raises:
      ValueError: The text is no plan, or is cut short.
    """
    source = Source("the table plan", _REMEDY)
    return checked_json.parse(
      cls, checked_json.fields(text, _VERSION, source), source
    )

  def set_up(
    self,
    params: Any,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
  ) -> Program:
    """Places parameters and state, and makes the program's transformation.

    Steps are plain `jit` over the mesh, of the loss of a whole batch::

        loss, grads = program.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = program.tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)

    Args:
      params: The parameters, or a function without arguments that makes them:
        it runs inside `jit`, where nothing whole is made of a sharded table.
      tx: The optimizer, written for whole parameters. Tables of rows are
        updated as by `lazy_rows`.
      mesh: Has the axes of the plan.

    Returns:
      What a step needs.

    Raises:
      ValueError: The plan is of other parameters or another mesh, or `tx` is an
        optimizer by which its forms would train otherwise.
    """
    sizes = tuple((axis, mesh.shape.get(axis, 0)) for axis, _ in self.mesh)
    if sizes != self.mesh:
      raise ValueError(
        f"`mesh` must have the axes of the plan, {dict(self.mesh)}, got"
        f" {dict(mesh.shape)}; {_REMEDY} for it."
      )
    types = jax.eval_shape(params) if callable(params) else params
    shapes = leaf_util.shapes(leaf_util.named_leaves(types))
    for table in self.tables:
      if shapes.get(table.name) != (table.shape, table.dtype):
        raise ValueError(
          f"`params` must be those of the plan, whose table {table.name!r} is"
          f" {table.dtype}{list(table.shape)}, got {shapes.get(table.name)};"
          f" {_REMEDY} for them."
        )
    form_of = {table.name: table.form for table in self.tables}
    axes = tuple(axis for axis, _ in self.mesh)
    return table_program.set_up(form_of, axes, mesh, params, tx, self.clip_norm)


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
) -> TablePlan:
  """Chooses how every table of a model is held and trained.

  Use it to see whether tables should be replicated or sharded. Every table that
  the loss only looks rows up in has one of these forms:

  - `"replicated"`: whole on every device; XLA sums an array of its gradient.
  - `"replicated-sparse"`: whole; `zen_sync` sums touched rows, and `lazy_rows`
    updates them.
  - `"replicated-zero1"`: whole; `sharded_optimizer` has owners update rows, and
    they alone hold the optimizer's state.
  - `"sharded-xla"`: each device has a range of rows, `P(axis_name, None)`, and
    XLA does the rest.
  - `"sharded"`: by `zenjax.tables.shard` each device has the rows that it owns;
    over several axes those of the last one, with a copy in every group.

  Your program is traced and not run. Of the forms whose memory fits those with
  the shortest step are taken. `TablePlan.set_up` carries the choice out.

  All forms train alike. Where `tx` moves rows that have no gradient, as Adam
  does, arrays would train otherwise than rows, and are left out. Owners have
  some rows only: where `tx` sums over all of them, as for a clip by a global
  norm, no table is `"replicated-zero1"` or `"sharded"`. Clip by `clip_norm`
  instead.

  Args:
    loss_fn: The loss, called on one device's part of a batch.
    params: Its first argument: arrays, or shapes (`jax.ShapeDtypeStruct`).
    *batch: Its other arguments, likewise.
    tx: The optimizer, which says how much state a row has.
    topology: The machine, by `Topology.preset` or `measure_links`.
    axis_name: Axes of the batch, one for every level of the topology, the
      slowest first.
    profile: Densities by leaf name, as `zenjax.planner.profile(state)` returns
      them. Without one they are assumed by the number of look-ups.
    trace: A directory that `zenjax.planner.record` wrote, in place of
      `profile`.
    memory_bytes: Limit on what a device holds of parameters, state, gradients
      and buffers; activations are not among them. By default three quarters of
      the topology's memory, if that is known.
    forms: Forms to demand, by leaf name.
    clip_norm: Clips gradients by the norm of all of them before `tx` sees them,
      in every form. Tables that are not replicated arrays then have one form.

  Returns:
    The plan: print it, and call its `set_up`.

  Raises:
    TypeError: An argument is of another kind.
    ValueError: The loss looks up no table, an argument is out of range or names
      a leaf that is not there, a demanded form is not possible, or nothing fits
      the memory.

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
  axes = arguments.axes(axis_name)
  plan_model.check(axes, topology, memory_bytes)
  if memory_bytes is None and topology.memory_bytes is not None:
    memory_bytes = _USABLE * topology.memory_bytes
  found = plan_model.gradients(
    row_gradients.value_and_grad(loss_fn), params, *batch
  )
  profiles = plan_model.densities(profile, trace, found, topology.devices)
  question = Question(
    gradients=tuple(found), topology=topology, axes=axes, profiles=profiles
  )
  gradients = {g.name: g for g in found if g.look_ups is not None}
  if not gradients:
    raise ValueError(
      "`loss_fn` must only look up rows of a table, and it does of none of"
      f" {[g.name for g in found]}; `zenjax.rows.explain_tables` says why,"
      " and `zenjax.planner.plan` plans for gradients that are arrays."
    )
  demanded = _demanded(forms, list(gradients))
  optimizer = Optimizer(tx, params, clip_norm)
  possible, open_to = {}, {}
  for name, gradient in gradients.items():
    table = table_forms.Table(
      gradient, question.profile(gradient), optimizer.state_row(name)
    )
    costs = table_forms.costs(table, question.context, question.links)
    # Forms that would train otherwise.
    others = () if name in optimizer.resting else OF_ARRAYS
    others = (*others, *(OF_OWNERS if optimizer.sums else ()))
    possible[name] = {k: x for k, x in costs.items() if k not in others}
    form = demanded.get(name)
    if form is not None and form not in possible[name]:
      raise _not_possible(name, form, costs)
    open_to[name] = {form: costs[form]} if form else possible[name]
  rest = optimizer.bytes_beside(list(gradients))
  limit = math.inf if memory_bytes is None else float(memory_bytes)
  # Sets of forms that one program can have.
  together = [
    frozenset((REPLICATED, *some))
    for size in range(2 if optimizer.sums_all else len(CARRIED) + 1)
    for some in itertools.combinations(CARRIED, size)
  ]
  choose = lambda limit: table_forms.cheapest(
    list(open_to.values()), question.links, limit, together
  )
  names, free = choose(limit - rest), choose(math.inf)
  if free is None:
    raise ValueError(
      "`forms` must be possible in one program, and a sum over all gradients,"
      " as clipping by a norm needs, has one transformation. Demand one form"
      " besides 'replicated'."
    )
  if names is None:
    held = [[x.memory for x in each.values()] for each in open_to.values()]
    least = text.size(sum(map(min, held)))
    raise ValueError(
      f"`memory_bytes` must hold the tables in some form, {least} a device, and"
      f" {text.size(rest)} of other parameters, got {text.size(limit)}. Take"
      " more devices, fewer rows, or a smaller state, as of"
      " `zenjax.rows.rowwise_adagrad`."
    )
  chosen = dict(zip(open_to, names))
  tables = []
  for (name, form), unlimited in zip(chosen.items(), free):
    table = _form(question, gradients[name], form, possible[name], unlimited)
    if name in demanded:
      table = dataclasses.replace(table, reason="demanded")
    elif optimizer.sums:
      hint = "; clip by clip_norm= and not in tx to have more forms"
      table = dataclasses.replace(table, reason=table.reason + hint)
    tables.append(table)
  return TablePlan(
    tables=tuple(tables),
    mesh=tuple(zip(axes, topology.sizes)),
    machine=topology.name,
    seconds=table_forms.seconds(
      [(form, possible[name][form]) for name, form in chosen.items()],
      question.links,
    ),
    rest_bytes=rest,
    limit_bytes=limit if math.isfinite(limit) else None,
    clip_norm=clip_norm,
  )


def _demanded(
  forms: Mapping[str, str] | None, tables: Sequence[str]
) -> dict[str, str]:
  demanded = dict(forms or {})
  if unknown := sorted(set(demanded) - set(tables)):
    raise ValueError(
      "`forms` must name tables that the loss only looks up rows of, got"
      f" {unknown}; they are {list(tables)}."
    )
  for name, form in demanded.items():
    arguments.one_of(f"forms[{name!r}]", form, list(FORMS))
  return demanded


_SUMS = (
  "`tx` sums over all rows, and owners have some of them; to clip by a norm"
  " give `clip_norm=`"
)


def _not_possible(name: str, form: str, costs: Iterable[str]) -> ValueError:
  why = {
    table_forms.XLA: "the table has not two dimensions whose rows the devices"
    " divide",
    table_forms.ZERO1: "owners of replicated tables lie along one axis",
    table_forms.SHARDED: "the table has not two dimensions, or there is one"
    " device",
  }
  reason = why.get(form)
  if form in costs:
    reason = table_program.MOVES if form in OF_ARRAYS else _SUMS
  return ValueError(
    f"`forms[{name!r}]` must be a form that the table can have, got {form!r}:"
    f" {reason}. Leave it out to have one chosen."
  )


def _form(
  question: Question,
  gradient: plan_model.Gradient,
  form: str,
  possible: Mapping[str, Cost],
  unlimited: str,
) -> TableForm:
  """Returns what a plan says of a table, which might be `unlimited` instead."""
  links = question.links
  alone = {k: table_forms.alone_s(x, links) for k, x in possible.items()}
  others = [k for k in possible if k != form]
  ratio = lambda k: alone[k] / max(alone[form], 1e-12)
  if unlimited != form:
    reason = f"{unlimited} takes {ratio(unlimited):.3g}x as long, but too much"
    reason += " memory"
  elif others:
    second = min(others, key=ratio)
    reason = f"{second} takes {ratio(second):.3g}x as long"
    if ratio(second) < 1:
      reason += " by itself, but cannot share the other tables' exchange"
  else:
    reason = "no other form"
  if gradient.name not in question.profiles:
    reason += "; densities assumed"
  return TableForm(
    name=gradient.name,
    shape=gradient.shape,
    dtype=gradient.dtype.name,
    form=form,
    seconds=alone[form],
    wire_bytes=possible[form].received,
    memory_bytes=possible[form].memory,
    others=tuple(
      (k, alone[k], possible[k].received, possible[k].memory) for k in others
    ),
    reason=reason,
  )


# --- a plan as text -----------------------------------------------------------

# Other forms of a table, the fastest ones.
_SHOWN = 3
_HEADINGS = (
  *("table", "shape", "form", "ms", "received", "memory"),
  *("other forms", "because"),
)


def _text(plan: TablePlan) -> str:
  axes = " x ".join(f"{name} {n}" for name, n in plan.mesh)
  machine = f" on {plan.machine}" if plan.machine else ""
  devices = math.prod(n for _, n in plan.mesh)
  limit = plan.limit_bytes
  return "\n".join(
    [
      f"tables on {devices} devices ({axes}){machine}",
      *text.columns([_HEADINGS, *map(_line, plan.tables)], last_left=True),
      f"a device holds {text.size(plan.memory_bytes)} of parameters, state,"
      f" gradients and buffers, {text.size(plan.rest_bytes)} not of tables"
      + ("" if limit is None else f"; the limit is {text.size(limit)}"),
      f"exchanges and updates of tables: {text.ms(plan.seconds)} ms a step",
    ]
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
