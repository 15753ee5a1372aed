"""`plan_tables`: chooses the form of every table, and sets the program up."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import math
import os
from typing import Annotated, Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import optax

from zenjax._src.core import arguments
from zenjax._src.core import checked_json
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.checked_json import NOT_NEGATIVE
from zenjax._src.core.checked_json import POSITIVE
from zenjax._src.core.checked_json import Source
from zenjax._src.core.text import columns
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import choosing
from zenjax._src.planner import gradient_trace
from zenjax._src.planner import plan_model
from zenjax._src.planner import table_forms
from zenjax._src.planner.choosing import Question
from zenjax._src.planner.table_forms import Cost
from zenjax._src.planner.table_forms import FORMS
from zenjax._src.planner.table_forms import OF_ARRAYS
from zenjax._src.rows import lazy
from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_analysis
from zenjax._src.rows import sharded_tables
from zenjax._src.rows import value_and_grad as row_gradients
from zenjax._src.sync import sharded_optimizer as owners
from zenjax._src.sync import zen_sync as syncing

_VERSION = "zenjax_table_plan", 1
_REMEDY = "make it anew by `zenjax.planner.plan_tables`"


class Program(NamedTuple):
  """A program as a plan has it, for plain `jit` over a mesh.

  Attributes:
    params: Parameters, every table in its form.
    opt_state: State of `tx`.
    tx: A transformation, for `optax.apply_updates`.
    value_and_grad: Takes a loss that is written for whole tables and for the
      whole batch; in the place of `jax.value_and_grad`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx, params = optax.sgd(0.1), {"t": jnp.zeros(2)}
    >>> zenjax.planner.Program(
    ...   params, tx.init(params), tx, jax.value_and_grad
    ... ).params
    {'t': Array([0., 0.], dtype=float32)}
  """

  params: Any
  opt_state: Any
  tx: optax.GradientTransformationExtraArgs
  value_and_grad: Callable[..., Any]


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
    others: `(form, seconds, wire_bytes, memory_bytes)` of other forms.
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
    limit_bytes: Limit on the memory of a device; None for no limit.

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
    return _set_up(self, params, tx, mesh)


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
) -> TablePlan:
  """Chooses how every table of a model is held and trained.

  Every table that the loss only looks rows up in has one of these forms:

  - `"dense"`: whole on every device; XLA sums an array of its gradient.
  - `"rows"`: whole; `zen_sync` sums touched rows, `lazy_rows` updates them.
  - `"owners"`: whole; `sharded_optimizer` has owners update rows, and they
  alone
    hold the optimizer's state.
  - `"row-sharded"`: each device has a range of rows, `P(axis_name, None)`, and
    XLA does the rest.
  - `"sharded"`: by `zenjax.tables.shard` each device has the rows that it owns;
    over several axes those of the last one, with a copy in every group.

  The program is traced and not run. Each form is predicted from the bytes that
  it moves, the links of the topology, and the device's own work; the forms with
  the shortest step are taken whose memory fits. `TablePlan.set_up` carries the
  choice out.

  All forms train alike. Where `tx` moves rows that have no gradient, as Adam
  does, or may, forms of arrays would train otherwise than forms of rows, and
  are left out. Where it clips by a norm of all gradients, forms that need a
  transformation of their own are not joined.

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
      and buffers; activations are not among them.
    forms: Forms to demand, by leaf name.

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

  References:
    Chen et al., AutoDDL, 2023, for the question: replicate or shard.
  """
  axes = arguments.axes(axis_name)
  plan_model.check(axes, topology, 0.0, memory_bytes)
  named = leaf_util.named_leaves(params)
  gradients = gradient_trace.gradients(
    row_gradients.value_and_grad(loss_fn), params, *batch
  )
  profiles = plan_model.densities(profile, trace, gradients, topology.devices)
  question = Question(
    gradients=tuple(gradients), topology=topology, axes=axes, profiles=profiles
  )
  gradients = {g.name: g for g in gradients if g.look_ups is not None}
  if not gradients:
    raise ValueError(
      "`loss_fn` must only look up rows of a table, and it does of none of"
      f" {[name for name, _ in named]}; `zenjax.rows.explain_tables` says why,"
      " and `zenjax.planner.plan` plans for gradients that are arrays."
    )
  shapes = leaf_util.shapes(named)
  gradients = {name: gradients[name] for name in shapes if name in gradients}
  demanded = _demanded(forms, list(gradients))
  optimizer = _Optimizer(optax.with_extra_args_support(tx), params)
  known = {}
  for name, gradient in gradients.items():
    known[name] = table_forms.Table(
      gradient=gradient,
      profile=profiles.get(name)
      or table_forms.assumed(gradient, topology.devices),
      state_row=optimizer.state_row(name),
    )
  found = {
    name: table_forms.costs(table, question.context, question.links)
    for name, table in known.items()
  }
  rest = optimizer.bytes_beside(list(known))
  limit = math.inf if memory_bytes is None else memory_bytes - rest
  open_to = {}
  for name, each in found.items():
    open_to[name] = _open_to(name, each, optimizer, demanded.get(name))
  together = _together(optimizer.sums_all)
  names = table_forms.cheapest(
    list(open_to.values()), question.links, limit, together, choosing.MARGIN
  )
  if names is None:
    raise _does_not_fit(open_to, together, rest, memory_bytes)
  chosen = dict(zip(open_to, names))
  return TablePlan(
    tables=tuple(
      _form(question, known[name], form, found[name], open_to[name], optimizer)
      for name, form in chosen.items()
    ),
    mesh=tuple(zip(question.context.axes, question.context.sizes)),
    machine=topology.name,
    seconds=table_forms.seconds(
      [(form, found[name][form]) for name, form in chosen.items()],
      question.links,
    ),
    rest_bytes=rest,
    limit_bytes=None if memory_bytes is None else float(memory_bytes),
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


class _Optimizer:
  """Reads off an optimizer what the choice of forms depends on."""

  def __init__(self, tx: optax.GradientTransformationExtraArgs, params: Any):
    self._tx = tx
    self._types = jax.tree.map(row_analysis.type_of, params)
    self._named = leaf_util.named_leaves(self._types)
    self._resting: dict[str, bool] | None = None

  def _state_bytes_of(self, rows: Mapping[str, int]) -> float:
    """Returns bytes of the state if tables had so many rows."""
    leaves = [
      jax.ShapeDtypeStruct((rows[name], *leaf.shape[1:]), leaf.dtype)
      if name in rows
      else leaf
      for name, leaf in self._named
    ]
    params = jax.tree.unflatten(jax.tree.structure(self._types), leaves)
    state = jax.eval_shape(self._tx.init, params)
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)))

  def state_row(self, name: str) -> float:
    """Returns bytes of the state that one more row of a table would add."""
    shape = dict(self._named)[name].shape
    added = self._state_bytes_of({name: shape[0] + 1})
    return (added - self._state_bytes_of({})) / math.prod(shape[1:-1])

  def bytes_beside(self, tables: Sequence[str]) -> float:
    """Returns bytes of parameters, gradients and state without tables."""
    rest = [leaf for name, leaf in self._named if name not in tables]
    held = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in rest)
    return held + self._state_bytes_of(dict.fromkeys(tables, 1))

  def rests(self, name: str) -> bool:
    """Returns True if rows of a table stay as they are without a gradient.

    It is decided from the optimizer's program, and False where that does not
    tell.
    """
    if self._resting is None:
      self._resting = self._all_resting()
    return self._resting[name]

  def _all_resting(self) -> dict[str, bool]:
    names = [name for name, _ in self._named]
    rests = () if self.sums_all else self._analysis.rests
    return {name: i in rests for i, name in enumerate(names)}

  @functools.cached_property
  def _analysis(self) -> row_analysis.RowAnalysis:
    """How rows are treated, with every leaf of two dimensions as a table."""
    types = self._types
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    tables = [x.ndim == 2 and is_float(x) for _, x in self._named]
    state = jax.eval_shape(self._tx.init, types)
    return row_analysis.analyse(self._tx, types, state, types, {}, tables)

  @property
  def sums_all(self) -> bool:
    """True if updates depend on sums over all gradients, as clipping does."""
    return self._analysis.wants_more or self._analysis.sums is not None


_MOVES = (
  "`tx` moves rows without a gradient, or cannot be seen not to, so that an"
  " array of all rows would train otherwise"
)


def _open_to(
  name: str, found: Mapping[str, Cost], optimizer: _Optimizer, wanted: Any
) -> dict[str, Cost]:
  """Returns the forms that a table may have."""
  rests = optimizer.rests(name)
  if wanted is None:
    return {k: x for k, x in found.items() if rests or k not in OF_ARRAYS}
  why = ""
  if wanted not in found:
    why = "the table has not two dimensions, or its axes do not allow it"
    if wanted == "row-sharded":
      why = "devices do not divide the rows"
    if wanted == "owners":
      why = "owners of whole tables lie along one axis"
  elif wanted in OF_ARRAYS and not rests:
    why = _MOVES
  if why:
    raise ValueError(
      f"`forms[{name!r}]` must be a form that the table can have, got"
      f" {wanted!r}: {why}; leave it out to have one chosen."
    )
  return {wanted: found[wanted]}


# Forms by the transformation that carries them; arrays that all devices have
# whole go with any.
_CARRIED = ("sharded", "owners", "rows", "row-sharded")


def _together(one_alone: bool) -> list[frozenset[str]]:
  """Returns the sets of forms that one program can have."""
  most = 1 if one_alone else len(_CARRIED)
  return [
    frozenset(("dense", *carriers))
    for size in range(most + 1)
    for carriers in itertools.combinations(_CARRIED, size)
  ]


def _does_not_fit(
  open_to: Mapping[str, Mapping[str, Cost]],
  together: Iterable[frozenset[str]],
  rest: float,
  limit: float | None,
) -> ValueError:
  least = min(
    sum(
      min((x.memory for k, x in each.items() if k in forms), default=math.inf)
      for each in open_to.values()
    )
    for forms in together
  )
  if limit is None or math.isinf(least):
    return ValueError(
      "`forms` must be possible in one program, and `tx` sums over all"
      " gradients, as clipping by a norm does, so that its tables have one"
      " transformation; demand one form beside 'dense'."
    )
  return ValueError(
    f"`memory_bytes` must hold the tables in some form, {least / 1e6:.1f} MB a"
    f" device, beside {rest / 1e6:.1f} MB of other parameters, got"
    f" {limit / 1e6:.1f} MB; take more devices, fewer rows, or a smaller state,"
    " as of `zenjax.rows.rowwise_adagrad`."
  )


def _form(
  question: Question,
  table: table_forms.Table,
  form: str,
  found: Mapping[str, Cost],
  open_to: Mapping[str, Cost],
  optimizer: _Optimizer,
) -> TableForm:
  alone = {
    k: table_forms.seconds([(k, x)], question.links) for k, x in found.items()
  }
  gradient = table.gradient
  return TableForm(
    name=gradient.name,
    shape=gradient.shape,
    dtype=gradient.dtype.name,
    form=form,
    seconds=alone[form],
    wire_bytes=found[form].received,
    memory_bytes=found[form].memory,
    others=tuple(
      (k, alone[k], x.received, x.memory) for k, x in found.items() if k != form
    ),
    reason="; ".join(
      [
        _second_best(form, alone, open_to),
        *["tx may move rows without a gradient: no arrays"]
        * (not optimizer.rests(gradient.name)),
        *["densities assumed"] * (gradient.name not in question.profiles),
      ]
    ),
  )


def _second_best(
  form: str, alone: Mapping[str, float], open_to: Iterable[str]
) -> str:
  """Compares a form with the best of the others that were open."""
  others = {k: alone[k] for k in open_to if k != form}
  if not others:
    return "demanded" if len(alone) > 1 else "no other form"
  second = min(others, key=lambda k: others[k])
  ratio = others[second] / max(alone[form], 1e-12)
  told = f"{second} takes {ratio:.3g}x as long"
  if ratio < 1:
    told += " alone, but joins no exchange or takes too much memory"
  return told


# --- the program --------------------------------------------------------------


def _set_up(
  plan: TablePlan, params: Any, tx: Any, mesh: jax.sharding.Mesh
) -> Program:
  sizes = tuple((axis, mesh.shape.get(axis, 0)) for axis, _ in plan.mesh)
  if sizes != plan.mesh:
    raise ValueError(
      f"`mesh` must have the axes of the plan, {dict(plan.mesh)}, got"
      f" {dict(mesh.shape)}; {_REMEDY} for it."
    )
  types = jax.eval_shape(params) if callable(params) else params
  named = leaf_util.named_leaves(types)
  _require_tables(plan, leaf_util.shapes(named))
  form_of = {table.name: table.form for table in plan.tables}
  used = set(form_of.values())
  optimizer = _Optimizer(optax.with_extra_args_support(tx), types)
  of_arrays = [k for k, form in form_of.items() if form in OF_ARRAYS]
  moved = [name for name in of_arrays if not optimizer.rests(name)]
  if used <= {*OF_ARRAYS}:  # The plain program.
    moved = []
  carriers = [form for form in _CARRIED if form in used]
  if moved or (len(carriers) > 1 and optimizer.sums_all):
    why = (
      f"{_MOVES} (table {moved[0]!r})"
      if moved
      else (
        "it sums over all gradients, and each of the plan's forms"
        f" {carriers} has a transformation of its own"
      )
    )
    raise ValueError(
      f"`tx` must be one that the plan was made for, but {why}; {_REMEDY} with"
      " this `tx`."
    )
  place = functools.partial(_placed, plan=plan, mesh=mesh)
  if callable(params):
    make = params
    init = lambda: place(make())
    lies = _lies(jax.eval_shape(init), form_of, _axes(plan), mesh)
    placed = jax.jit(init, out_shardings=lies)()
  else:
    placed = place(params)
  made = _transformation(plan, tx, mesh, placed, carriers)
  listed = {k for k, form in form_of.items() if form not in OF_ARRAYS}
  both = jax.value_and_grad
  if listed:
    both = functools.partial(
      row_gradients.value_and_grad, tables=lambda name, _: name in listed
    )
  state = made.init(placed)
  return Program(placed, _state_placed(state, placed, mesh), made, both)


def _require_tables(
  plan: TablePlan, shapes: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
  for table in plan.tables:
    if shapes.get(table.name) != (table.shape, table.dtype):
      have = shapes.get(table.name, "no such leaf")
      raise ValueError(
        f"`params` must be those of the plan, whose table {table.name!r} is"
        f" {table.dtype}{list(table.shape)}, got {have}; {_REMEDY} for them."
      )


def _axes(plan: TablePlan) -> tuple[str, ...]:
  return tuple(axis for axis, _ in plan.mesh)


def _placed(params: Any, plan: TablePlan, mesh: jax.sharding.Mesh) -> Any:
  """Returns parameters with every table in its form."""
  form_of = {table.name: table.form for table in plan.tables}
  *others, last = axes = _axes(plan)
  sharded = {name for name, form in form_of.items() if form == "sharded"}
  named = leaf_util.named_leaves(params)
  found = []
  for name, leaf in named:
    if name not in sharded:
      over = axes if form_of.get(name) == "row-sharded" else None
      leaf = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(over)))
    found.append(leaf)
  tree = jax.tree.unflatten(jax.tree.structure(params), found)
  if not sharded:
    return tree
  return sharded_tables.shard(
    tree,
    mesh,
    last,
    tables=lambda name, _: name in sharded,
    replicas=tuple(others) or None,
  )


def _lies(
  types: Any,
  form_of: Mapping[str, str],
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
) -> Any:
  """Returns the placement of every parameter."""
  is_sharded = sharded_tables.is_sharded
  place = lambda over: NamedSharding(mesh, PartitionSpec(over))
  found = []
  for name, leaf in leaf_util.named_leaves(types, is_sharded):
    if is_sharded(leaf):
      found.append(leaf.with_value(place(axes[-1])))
    else:
      rows = form_of.get(name) == "row-sharded"
      found.append(place(axes if rows else None))
  return jax.tree.unflatten(
    jax.tree.structure(types, is_leaf=is_sharded), found
  )


def _transformation(
  plan: TablePlan,
  tx: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  params: Any,
  carriers: Sequence[str],
) -> optax.GradientTransformationExtraArgs:
  """Returns what updates all parameters, each form by its own means."""
  axes = _axes(plan)
  form_of = {table.name: table.form for table in plan.tables}
  in_form = lambda form: lambda name, _: form_of.get(name) == form
  made = {}
  for form in carriers:
    if form == "sharded":
      made[form] = owners.sharded_optimizer(tx, axes, mesh=mesh)
    elif form == "owners":
      made[form] = owners.sharded_optimizer(
        tx, axes, sparse=in_form(form), mesh=mesh
      )
    elif form == "rows":
      sync = syncing.zen_sync(axes, sparse=in_form(form), mesh=mesh)
      made[form] = optax.chain(sync, lazy.lazy_rows(tx))
    else:
      made[form] = _lying(tx, axes, mesh, in_form(form))
  if not made:
    return optax.with_extra_args_support(tx)
  first, *more = made
  if not more:
    return optax.with_extra_args_support(made[first])
  is_sharded = sharded_tables.is_sharded
  named = leaf_util.named_leaves(params, is_sharded)
  labels = [
    form if (form := form_of.get(name)) in made else first for name, _ in named
  ]
  structure = jax.tree.structure(params, is_leaf=is_sharded)
  return optax.with_extra_args_support(
    optax.partition(made, structure.unflatten(labels))
  )


def _lying(
  tx: optax.GradientTransformation,
  axes: tuple[str, ...],
  mesh: jax.sharding.Mesh,
  chosen: Callable[[str, Any], bool],
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx` with updates of chosen leaves, and state, where rows lie.

  XLA might place what a step returns otherwise than what it was given.
  """
  tx = optax.with_extra_args_support(tx)
  split = NamedSharding(mesh, PartitionSpec(axes))

  def update(updates, state, params=None, **extra):
    out, state = tx.update(updates, state, params, **extra)
    named = leaf_util.named_leaves(out)
    leaves = [
      lax.with_sharding_constraint(x, split) if chosen(name, x) else x
      for name, x in named
    ]
    shapes = {x.shape for name, x in named if chosen(name, x)}
    state = jax.tree.map(
      lambda x: (
        lax.with_sharding_constraint(x, split) if jnp.shape(x) in shapes else x
      ),
      state,
    )
    return jax.tree.unflatten(jax.tree.structure(out), leaves), state

  return optax.GradientTransformationExtraArgs(tx.init, update)


def _state_placed(state: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns a state on the mesh.

  A part that does not lie there yet goes where parameters of its shape lie.
  """
  is_sharded = sharded_tables.is_sharded
  lies = {
    x.shape: x.sharding
    for x in jax.tree.leaves(params, is_leaf=is_sharded)
    if not is_sharded(x)
  }
  everywhere = NamedSharding(mesh, PartitionSpec())

  def place(x: Any) -> Any:
    sharding = getattr(x, "sharding", None)
    if getattr(sharding, "mesh", None) == mesh:
      return x
    return jax.device_put(x, lies.get(jnp.shape(x), everywhere))

  return jax.tree.map(place, state)


# --- a plan as text -----------------------------------------------------------

# Other forms of a table, the fastest ones.
_SHOWN = 3
_HEADINGS = (
  "table",
  "shape",
  "form",
  "ms",
  "MB",
  "memory",
  "other forms",
  "because",
)


def _text(plan: TablePlan) -> str:
  axes = " x ".join(f"{name} {n}" for name, n in plan.mesh)
  machine = f" on {plan.machine}" if plan.machine else ""
  devices = math.prod(n for _, n in plan.mesh)
  lines = [f"tables on {devices} devices ({axes}){machine}"]
  lines += columns(
    [_HEADINGS, *(_line(table) for table in plan.tables)], last_left=True
  )
  limit = plan.limit_bytes
  lines.append(
    f"a device holds {_mb(plan.memory_bytes)} MB of parameters, state,"
    f" gradients and buffers, {_mb(plan.rest_bytes)} MB of these beside tables"
    + ("" if limit is None else f"; the limit is {_mb(limit)} MB")
  )
  lines.append(
    f"exchanges and updates of tables: {_ms(plan.seconds)} ms a step, predicted"
  )
  return "\n".join(lines)


def _line(table: TableForm) -> tuple[str, ...]:
  others = sorted(table.others, key=lambda x: x[1])
  return (
    table.name,
    "x".join(map(str, table.shape)),
    table.form,
    _ms(table.seconds),
    _mb(table.wire_bytes),
    _mb(table.memory_bytes),
    ", ".join(f"{form} {_ms(s)} ms" for form, s, *_ in others[:_SHOWN]),
    table.reason,
  )


def _ms(seconds: float) -> str:
  return f"{seconds * 1e3:.3g}"


def _mb(size: float) -> str:
  return f"{size / 1e6:.3g}"
