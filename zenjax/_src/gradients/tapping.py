"""Runs a traced program so that its look-ups can be differentiated by rows.

A table goes through the program as a `View`. Where rows are looked up, a *tap*
of zeros is added to them: the gradient by the tap is the gradient of the rows,
and no gradient of the table is ever made. The first run has no taps; it finds
the look-ups (`Site`), and whatever is done to a table that is none.

A leaf may be a stack of tables, `[T, R, D]`, from which tables are cut on the
way: row `r` of table `t` is row `t * R + r` of the leaf.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jex_core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.gradients import look_ups

# What may be done to a whole table so that it is done to its rows instead.
#
# A cast, a factor, a row set to a constant: such a step gives the same rows
# whether the table takes it before rows are looked up or the rows do after.


# `(rows [..., D], ids [...]) -> rows`.
Step = Callable[[jax.Array, jax.Array], jax.Array]


class Operand(NamedTuple):
  """An operand of an equation beside the table."""

  value: Any
  # What it was broadcast from, and to which dimensions; None if it was not.
  source: tuple[Any, tuple[int, ...]] | None


def step_of(
  eqn: jex_core.JaxprEqn, first: int, others: Sequence[Operand]
) -> Step | str:
  """Returns the step of rows that does what an equation does to their table.

  Args:
    eqn: Whose primitive is one of `STEPS`.
    first: Position of the table among the operands.
    others: The other operands.

  Returns:
    The step, or a reason why there is none.
  """
  name = eqn.primitive.name
  if name == "convert_element_type":
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
      return f"is cast to {jnp.dtype(dtype).name}"
    return lambda rows, ids: rows.astype(dtype)
  if name == "scatter":
    return _row_set(eqn, first, others)
  if name in ("mul", "div"):
    factor = _of_a_row(others[0], eqn)
    if factor is None and name == "mul":
      return "is multiplied by more than a factor or a row of factors"
    if factor is None or (first and name == "div"):
      return "is in a quotient other than over a scalar or a row"
    op = operator.mul if name == "mul" else operator.truediv
    return lambda rows, ids: op(rows, _beside(factor, rows))
  op = operator.neg if name == "neg" else lax.stop_gradient
  return lambda rows, ids: op(rows)


STEPS = (
  "convert_element_type",
  "neg",
  "mul",
  "div",
  "scatter",
  "stop_gradient",
)


def _row_set(
  eqn: jex_core.JaxprEqn, first: int, others: Sequence[Operand]
) -> Step | str:
  """One row replaced, as for padding: `table.at[0].set(0)`."""
  dims = eqn.params["dimension_numbers"]
  indices, row = (other.value for other in others)
  one = jnp.size(indices) == 1 and tuple(dims.inserted_window_dims) == (0,)
  *stack, num_rows, width = _shape(eqn)
  if stack:
    return "is written to as a stack of tables"
  if first or not one or jnp.size(row) != width:
    return "is written to at more than one row"
  mode = jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
  clips = mode == jax.lax.GatherScatterMode.CLIP
  at_row = look_ups.in_range(jnp.reshape(indices, ()), num_rows, clips)
  # Out of range nothing is written, and lookups out of range are `num_rows`.
  at_row = jnp.where(at_row < num_rows, at_row, -1)
  row = jnp.reshape(row, width)
  return lambda rows, ids: jnp.where(
    (ids == at_row)[..., None], _beside(row, rows), rows
  )


# What changes the values that a fill stands for, unless it is 0 or NaN.
SCALES = ("neg", "mul", "div")

_UNPLACED = (
  "is looked up on automatic axes by more than `.at[ids].get(out_sharding=..)`"
)

# What changes types or places only is done to the table as it is.
TYPES = ("copy", "copy_p", "pvary", "pcast")
PLACES = (*TYPES, "sharding_constraint", "reshard")


def _of_a_row(operand: Operand, eqn: jex_core.JaxprEqn) -> Any | None:
  """A scalar or `[D]`, if that is all that the operand is."""
  *others, width = _shape(eqn)
  last, row = len(others), (*[1] * len(others), width)
  candidates: list[tuple[Any, Any]] = [(operand.value, None)]
  if operand.source is not None:
    candidates.append(operand.source)
  for value, dims in candidates:
    shape = jnp.shape(value)
    if shape == ():
      return value
    if dims is None:
      across = shape == row
    else:
      own = tuple(dims)[-1:] == (last,) and shape[-1] in (1, width)
      across = own and all(size == 1 for size in shape[:-1])
    if across:
      return jnp.reshape(value, -1)
  return None


def _beside(row: Any, rows: jax.Array) -> jax.Array:
  """A scalar or `[D]` with as many dimensions as `rows: [..., D]`."""
  return jnp.reshape(row, (*[1] * (rows.ndim - 1), -1))


def _shape(eqn: jex_core.JaxprEqn) -> tuple[int, ...]:
  aval: Any = eqn.outvars[0].aval
  return aval.shape


class View(NamedTuple):
  """A table on its way to its lookups."""

  param: int
  table: jax.Array  # [R, D], of a stack [T, R, D]
  place: look_ups.Place  # of its rows in the leaf
  steps: tuple[Step, ...] = ()
  scaled: bool = False
  mixed: bool = False  # whether a step has other operands
  # Where it was resharded: the equation, and the view before it.
  before: tuple[Any, "View"] | None = None
  # Whether `table` is only a type: taps then are the rows themselves.
  away: bool = False

  def of(self, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows as the program sees them; `ids` are those of the leaf's rows."""
    for step in self.steps:
      rows = step(rows, ids)
    return rows

  def whole(self) -> jax.Array:
    """As the program sees it, for what is not differentiated."""
    table, steps = self.table, self.steps
    if self.before is not None:
      eqn, view = self.before
      (table,) = jaxprs.bind(eqn, [view.whole()])
      steps = steps[len(view.steps) :]
    if not steps:
      return table
    ids = look_ups.all_ids(self.place, table.shape)
    return self._replace(steps=steps).of(table, ids)

  @property
  def is_stack(self) -> bool:
    """Returns True if tables may be cut out of it."""
    return bool(self.place.strides) and self.before is None

  def of_tables(self, table: Any, place: look_ups.Place) -> "View":
    """Returns the view of some tables, or of one, of the stack."""
    return self._replace(table=table, place=place)


# Where an equation is: its number in the program, the number in the program
# that this equation runs, and so on.
Path = tuple[int, ...]


class Site(NamedTuple):
  """One lookup: what its tap must be."""

  param: int
  shape: tuple[int, ...]  # [..., D], without the turns of scans
  dtype: Any
  varying: frozenset[str]
  spec: tuple[Any, ...]  # how explicit sharding spreads the dimensions
  lengths: tuple[int, ...]  # of the scans around it

  @property
  def rows(self) -> int:
    """Returns how many rows it reads in all."""
    return math.prod([*self.lengths, *self.shape[:-1]])

  def tap(self) -> jax.Array:
    """Zeros typed like the rows, or autodiff sums them over devices."""
    zeros = jnp.zeros((*self.lengths, *self.shape), self.dtype)
    axes = tuple(self.varying)
    if axes:
      return lax.pcast(zeros, axes, to="varying")
    if any(self.spec):
      spec = PartitionSpec(*[None] * len(self.lengths), *self.spec)
      return jax.sharding.reshard(zeros, spec)
    return zeros


class Unplaced(NamedTuple):
  """Rows that explicit sharding has not said yet how to spread.

  `table.at[ids].get(out_sharding=..)` looks up on automatic axes, and reshards
  what it has read.
  """

  view: View
  found: look_ups.LookUp
  eqn: Any
  others: Sequence[Any]  # operands of the lookup beside the table


class Refusal(NamedTuple):
  """A reason why a table's gradient stays dense."""

  reason: str
  place: str


class Ids(NamedTuple):
  """Ids of a lookup, with the turns of scans in front."""

  to: jax.Array  # rows that the gradient goes to
  read: jax.Array  # rows that were read


@dataclasses.dataclass(kw_only=True)
class Run:
  """One evaluation of a program in which tables are views.

  Attributes:
    taps: What is added to the rows of each lookup; None in the first run, which
      finds the lookups.
    drawn: Results of callbacks that have run already.
    keeps_drawn: Whether results of callbacks are kept in `drawn`.
    sites: The lookups, in the order of the program.
    refusals: Of each parameter that is used in another way, the first.
    ids: Of each lookup.
    lengths: Of the scans around the program.
  """

  taps: dict[Path, Any] | None = None
  drawn: dict[Path, list[Any]] = dataclasses.field(default_factory=dict)
  keeps_drawn: bool = False
  sites: dict[Path, Site] = dataclasses.field(default_factory=dict)
  refusals: dict[int, Refusal] = dataclasses.field(default_factory=dict)
  ids: dict[Path, Ids] = dataclasses.field(default_factory=dict)
  lengths: tuple[int, ...] = ()

  def run(
    self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], path: Path
  ) -> list:
    """The program's outputs; a table that is one of them stays a `View`."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def read(atom):
      is_literal = isinstance(atom, jex_core.Literal)
      return atom.val if is_literal else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
      values = [read(atom) for atom in eqn.invars]
      at = (*path, i)
      if [x for x in values if isinstance(x, View | Unplaced)]:
        sources = lambda eqn=eqn: [_source(x, jaxpr, read) for x in eqn.invars]
        outs = self._with_views(eqn, values, at, sources)
      elif (self.keeps_drawn or self.drawn) and _draws(eqn):
        outs = self._drawing(eqn, values, at)
      else:
        outs = jaxprs.bind(eqn, values)
      env.update(zip(eqn.outvars, outs))
    return [read(atom) for atom in jaxpr.outvars]

  def _with_views(self, eqn, values, at, sources) -> list:
    name = eqn.primitive.name
    if [x for x in values if isinstance(x, Unplaced)]:
      if name == "reshard":
        return self._placed(eqn, values[0], at)
      return jaxprs.bind(eqn, self._given_up(values))
    if name in INSIDE:
      return INSIDE[name](self, eqn, values, at)
    first, *more = [i for i, v in enumerate(values) if isinstance(v, View)]
    view = values[first]
    if name == "stop_gradient" and not view.away:
      return jaxprs.bind(eqn, wholes(values))  # No gradient, so no rows of it.
    if more:
      return self._refuse(eqn, values, f"is used by `{name}` with other tables")
    if name in PLACES:
      (table,) = jaxprs.bind(eqn, [view.table])
      # Of another mesh than the operands of its steps.
      before = (eqn, view) if name == "reshard" else view.before
      return [view._replace(table=table, before=before)]
    if name in STEPS:
      return self._stepping(eqn, view, values, first, sources())
    if first == 0 and name in look_ups.CUTS and view.before is None:
      places = look_ups.cut(eqn, view.table, view.place, values[1:])
      if places is not None:
        tables = jaxprs.bind(eqn, [view.table, *values[1:]])
        return [view.of_tables(*x) for x in zip(tables, places, strict=True)]
    if name in look_ups.FORMS and first == 0:
      return self._look_up(eqn, view, values, at)
    return self._refuse(eqn, values, f"is used by `{name}`")

  def _stepping(self, eqn, view, values, first, sources) -> list:
    """The table after a step that its rows can take instead."""
    others = list(map(Operand, values, sources))
    del others[first]
    name = eqn.primitive.name
    step = step_of(eqn, first, others)
    if isinstance(step, str):
      return self._refuse(eqn, values, step)
    changed = view._replace(
      steps=(*view.steps, _by_leaf(step, view.place)),
      scaled=view.scaled or name in SCALES,
      mixed=view.mixed or bool(others),
    )
    return [changed]

  def _look_up(self, eqn, view, values, at) -> list:
    read = look_ups.FORMS[eqn.primitive.name]
    with eqn.ctx.manager:
      found = read(eqn, view.table, view.place, values[1:])
    if isinstance(found, str):
      return self._refuse(eqn, values, found)
    if found.fill and view.scaled:
      reason = "is scaled, and ids out of range read a value of their own"
      return self._refuse(eqn, values, reason)
    if compat.explicit_axes() and not compat.explicit_axes(found.out):
      return [Unplaced(view, found, eqn, values[1:])]
    return [self._tapped(view, found, at)]

  def _placed(self, eqn, unplaced: Unplaced, at) -> list:
    """Ids and rows where a lookup says that they are."""
    view, found = unplaced.view, unplaced.found
    (out,) = jaxprs.bind(eqn, [found.out])
    *spec, _ = compat.explicit_spec(found.rows(out))
    place = lambda ids: jax.sharding.reshard(ids, PartitionSpec(*spec))
    found = found._replace(
      out=out, ids=place(found.ids), read=place(found.read)
    )
    return [self._tapped(view, found, at)]

  def _tapped(self, view: View, found: look_ups.LookUp, at: Path) -> jax.Array:
    rows = found.rows(found.out)
    varying, spec = compat.varying_axes(rows), compat.explicit_spec(rows)
    self.sites[at] = Site(
      view.param, rows.shape, rows.dtype, varying, spec, self.lengths
    )
    if self.taps is not None and view.away:
      rows = self.taps[at]
      if found.fill_value is not None:
        real = (found.read < view.place.num_rows)[..., None]
        rows = jnp.where(real, rows, jnp.asarray(found.fill_value, rows.dtype))
    elif self.taps is not None:
      rows = rows + self.taps[at]
    self.ids[at] = Ids(found.ids, found.read)
    return found.restored(_stepped(view, found, rows))

  def _called(self, eqn, values, at) -> list:
    return self.run(*jaxprs.opened(jaxprs.called(eqn)), values, at)

  def _scan(self, eqn, values, at) -> list:
    consts, carry, xs = jaxprs.scan_parts(eqn, values)
    stacks = {
      i: x for i, x in enumerate(xs) if isinstance(x, View) and x.is_stack
    }
    rows = [x for i, x in enumerate(xs) if i not in stacks]
    self._note(eqn, [*carry, *rows], "is carried or cut up by a `scan`")
    carry = wholes(carry)
    body, body_consts = jaxprs.opened(eqn.params["jaxpr"])
    length = eqn.params["length"]
    turns = jnp.arange(length, dtype=jnp.int32) if stacks else None

    def turn(carry, inputs):
      xs, number, given = inputs
      xs = list(xs)
      for i, view in stacks.items():
        xs[i] = view.of_tables(xs[i], view.place.at(number))
      inner = self._inner(given, length)
      outs = inner.run(body, body_consts, [*consts, *carry, *xs], at)
      outs = self._returned(eqn, outs)
      return outs[: len(carry)], (outs[len(carry) :], inner.ids, inner.kept)

    plain = [stacks[i].table if i in stacks else x for i, x in enumerate(xs)]
    carry, (ys, ids, drawn) = lax.scan(
      turn,
      carry,
      (wholes(plain), turns, self._given(at)),
      length=length,
      reverse=eqn.params["reverse"],
      unroll=eqn.params["unroll"],
    )
    self.ids, self.drawn = self.ids | ids, self.drawn | drawn
    return [*carry, *ys]

  def _rematerialized(self, eqn, values, at) -> list:
    body, body_consts = jaxprs.opened(eqn.params["jaxpr"])
    views = {i: x for i, x in enumerate(values) if isinstance(x, View)}
    count = range(len(values))
    same: dict[int, View] = {}  # Tables that come out as they went in.

    def inside(given, plain):
      left = iter(plain)
      args = [views[i] if i in views else next(left) for i in count]
      inner = self._inner(given)
      outs = inner.run(body, body_consts, args, at)
      for k, out in enumerate(outs):
        if any(out is view for view in views.values()):
          same[k], outs[k] = out, None
      return self._returned(eqn, outs), inner.ids, inner.kept

    inside = jax.checkpoint(
      inside,
      policy=eqn.params["policy"],
      prevent_cse=eqn.params["prevent_cse"],
    )
    plain = [x for i, x in enumerate(values) if i not in views]
    outs, ids, drawn = inside(self._given(at), plain)
    self.ids, self.drawn = self.ids | ids, self.drawn | drawn
    return [same.get(k, out) for k, out in enumerate(outs)]

  def _given(self, at: Path) -> Any:
    """Taps and results of callbacks for the program of an equation."""
    inside = lambda x: {p: v for p, v in x.items() if p[: len(at)] == at}
    return inside(self.taps or {}), inside(self.drawn)

  def _inner(self, given: Any, *length: int) -> "Run":
    """Returns the run of a program that JAX traces by itself."""
    taps, drawn = given
    return dataclasses.replace(
      self,
      taps=None if self.taps is None else taps,
      drawn=drawn,
      ids={},
      lengths=(*self.lengths, *length),
    )

  @property
  def kept(self) -> dict[Path, list[Any]]:
    """Results of callbacks, if they are wanted."""
    return self.drawn if self.keeps_drawn else {}

  def _drawing(self, eqn, values, at) -> list:
    """What a callback returns, or has returned; also inside other programs."""
    if eqn.primitive.name in INSIDE:
      return INSIDE[eqn.primitive.name](self, eqn, values, at)
    if at in self.drawn:
      return self.drawn[at]
    outs = jaxprs.bind(eqn, values)
    if self.keeps_drawn:
      self.drawn[at] = outs
    return outs

  def _returned(self, eqn, outs) -> list:
    self._note(eqn, outs, f"is returned by a `{eqn.primitive.name}`")
    return wholes(outs)

  def note_returned(self, outs: Sequence[Any]) -> None:
    """Refuses tables that are away, of which the program returns all."""
    for value in outs:
      if isinstance(value, View) and value.away:
        refusal = Refusal("is returned by the loss", "")
        self.refusals.setdefault(value.param, refusal)

  def _refuse(self, eqn, values, reason) -> list:
    self._note(eqn, values, reason)
    return jaxprs.bind(eqn, wholes(values))

  def _given_up(self, values) -> list:
    """Rows as they are; the gradient of their table stays dense."""
    values = list(values)
    for i, value in enumerate(values):
      if isinstance(value, Unplaced):
        self._note(value.eqn, [value.view], _UNPLACED)
        table = value.view.whole()
        (values[i],) = jaxprs.bind(value.eqn, [table, *value.others])
    return wholes(values)

  def _note(self, eqn, values, reason):
    for value in values:
      if isinstance(value, View):
        refusal = Refusal(reason, jaxprs.source_place(eqn))
        self.refusals.setdefault(value.param, refusal)


# Equations that run another program, which may look up rows or call the host.
INSIDE: dict[str, Callable[..., list]] = {
  **dict.fromkeys(jaxprs.CALLS, Run._called),
  **dict.fromkeys(("checkpoint", "remat", "remat2"), Run._rematerialized),
  "scan": Run._scan,
}


def _draws(eqn) -> bool:
  """Whether an equation calls the host for values, maybe inside a program."""
  if eqn.primitive.name in ("pure_callback", "io_callback"):
    return True
  programs = jex_core.jaxprs_in_params(eqn.params)
  inside = eqn.primitive.name in INSIDE
  return inside and any(
    _draws(x) for program in programs for x in jaxprs.opened(program)[0].eqns
  )


def _source(atom, jaxpr, read) -> tuple[Any, tuple[int, ...]] | None:
  """What a value was broadcast from, and to which dimensions, if it was."""
  made = [x for x in jaxpr.eqns if [v for v in x.outvars if v is atom]]
  if not made:
    return None
  (eqn,), name = made, made[0].primitive.name
  if name == "broadcast_in_dim":
    value = read(eqn.invars[0])
    is_table = isinstance(value, View | Unplaced)
    dims = tuple(eqn.params["broadcast_dimensions"])
    return None if is_table else (value, dims)
  source = _source(eqn.invars[0], jaxpr, read) if name in TYPES else None
  if source is None:
    return None
  value, dims = source
  return jaxprs.bind(eqn, [value])[0], dims


def _by_leaf(step: Step, place: look_ups.Place) -> Step:
  """`step` of a table's own ids as one of the leaf's."""
  if place.is_table or place.strides:
    return step
  return lambda rows, ids: step(rows, ids - place.first)


def _stepped(view, found, rows):
  """`view.of`; what is out of range has no gradient by any operand."""
  if not view.mixed:
    return view.of(rows, found.read)
  real = (found.ids < view.place.num_rows)[..., None]
  other = lax.stop_gradient(view.of(rows, found.read))
  # Zeros, for a gradient of 0 times NaN would be NaN.
  rows = view.of(jnp.where(real, rows, 0), found.read)
  return jnp.where(real, rows, other)


def wholes(values: Sequence[Any]) -> list:
  """The same with whole tables in the place of views."""
  return [v.whole() if isinstance(v, View) else v for v in values]
