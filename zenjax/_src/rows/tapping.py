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
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jex_core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.rows import look_ups

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


def cast(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """To another floating dtype."""
  del at, others
  dtype = eqn.params["new_dtype"]
  if not jnp.issubdtype(dtype, jnp.floating):
    return f"is cast to {jnp.dtype(dtype).name}"
  return lambda rows, ids: rows.astype(dtype)


def negative(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """Minus the table."""
  del eqn, at, others
  return lambda rows, ids: -rows


def times(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """By a scalar, or a factor for each column."""
  del at
  factor = _of_a_row(others[0], eqn)
  if factor is None:
    return "is multiplied by more than a factor or a row of factors"
  return lambda rows, ids: rows * _beside(factor, rows)


def over(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """Divided by a scalar, or a divisor for each column."""
  divisor = _of_a_row(others[0], eqn)
  if at != 0 or divisor is None:
    return "is in a quotient other than over a scalar or a row"
  return lambda rows, ids: rows / _beside(divisor, rows)


def row_set(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """One row replaced, as for padding: `table.at[0].set(0)`."""
  dims = eqn.params["dimension_numbers"]
  indices, row = (other.value for other in others)
  one = jnp.size(indices) == 1 and tuple(dims.inserted_window_dims) == (0,)
  *stack, num_rows, width = _shape(eqn)
  if stack:
    return "is written to as a stack of tables"
  if at != 0 or not one or jnp.size(row) != width:
    return "is written to at more than one row"
  mode = jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
  clips = mode == jax.lax.GatherScatterMode.CLIP
  at_row = look_ups.in_range(jnp.reshape(indices, ()), num_rows, clips)
  # Out of range nothing is written, and look-ups out of range are `num_rows`.
  at_row = jnp.where(at_row < num_rows, at_row, -1)
  row = jnp.reshape(row, width)
  return lambda rows, ids: jnp.where(
    (ids == at_row)[..., None], _beside(row, rows), rows
  )


STEPS: dict[str, Callable[..., Step | str]] = {
  "convert_element_type": cast,
  "neg": negative,
  "mul": times,
  "div": over,
  "scatter": row_set,
}

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
  """A table on its way to its look-ups."""

  param: int
  table: jax.Array  # [R, D], of a stack [T, R, D]
  place: look_ups.Place  # of its rows in the leaf
  steps: tuple[Step, ...] = ()
  scaled: bool = False
  mixed: bool = False  # whether a step has other operands
  # Where it was resharded: the equation, and the view before it.
  before: tuple[Any, "View"] | None = None
  # Whether `table` is a type alone: taps then are the rows themselves.
  away: bool = False

  @classmethod
  def of_leaf(cls, param: int, table: Any, away: bool) -> "View":
    """Returns the view of a whole leaf."""
    place = look_ups.Place.of(jnp.shape(table))
    return cls(param, table, place, away=away)

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
    ids = look_ups.all_ids(self.place, table.shape)
    return self._replace(steps=steps).of(table, ids)

  @property
  def is_stack(self) -> bool:
    """Returns True if tables may be cut out of it."""
    return bool(self.place.strides) and self.before is None

  def of_tables(self, table: Any, place: look_ups.Place) -> "View":
    """Returns the view of some tables, or of one, of the stack."""
    return self._replace(table=table, place=place)


class Site(NamedTuple):
  """One look-up: what its tap must be."""

  param: int
  shape: tuple[int, ...]  # [..., D]
  dtype: Any
  varying: frozenset[str]
  spec: tuple[Any, ...]  # how explicit sharding spreads the dimensions

  def tap(self, lengths: tuple[int, ...] = ()) -> jax.Array:
    """Zeros typed like the rows, or autodiff sums them over devices."""
    zeros = jnp.zeros((*lengths, *self.shape), self.dtype)
    axes = tuple(self.varying)
    if axes:
      return lax.pcast(zeros, axes, to="varying")
    if any(self.spec):
      spec = PartitionSpec(*[None] * len(lengths), *self.spec)
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
  others: Sequence[Any]  # operands of the look-up beside the table


class Nest(NamedTuple):
  """Look-ups inside a scan, or inside what is rematerialized."""

  length: int | None
  sites: list["Site | Nest"]

  def tap(self, lengths: tuple[int, ...] = ()) -> list[Any]:
    """Taps of all sites within, one for each turn."""
    inner = lengths if self.length is None else (*lengths, self.length)
    return [site.tap(inner) for site in self.sites]


class Refusal(NamedTuple):
  """A reason why a table's gradient stays dense."""

  reason: str
  place: str


@dataclasses.dataclass
class Run:
  """One evaluation.

  Attributes:
    taps: Of the sites, in order; None to find them.
    sites: Those found.
    ids: Looked up, nested like the sites: those of a scan have its length
      first.
    read: Likewise the ids of the rows that were read.
    refusals: By parameter, the first of each.
  """

  taps: Sequence[Any] | None = None
  sites: list[Site | Nest] = dataclasses.field(default_factory=list)
  ids: list[Any] = dataclasses.field(default_factory=list)
  read: list[Any] = dataclasses.field(default_factory=list)
  refusals: dict[int, Refusal] = dataclasses.field(default_factory=dict)

  def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list:
    """The program's outputs; a table that is one of them stays a `View`."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
    broadcasts: dict[Any, tuple[Any, tuple[int, ...]]] = {}

    def read(atom):
      is_literal = isinstance(atom, jex_core.Literal)
      return atom.val if is_literal else env[atom]

    def operand(atom):
      is_literal = isinstance(atom, jex_core.Literal)
      return Operand(read(atom), None if is_literal else broadcasts.get(atom))

    for eqn in jaxpr.eqns:
      operands = [operand(atom) for atom in eqn.invars]
      values = [o.value for o in operands]
      if any(isinstance(value, View | Unplaced) for value in values):
        outs = self._with_views(eqn, operands)
      else:
        outs = jaxprs.bind(eqn, values)
        source = _broadcast_from(eqn, operands)
        if source is not None:
          broadcasts[eqn.outvars[0]] = source
      env.update(zip(eqn.outvars, outs))
    return [read(atom) for atom in jaxpr.outvars]

  def _with_views(self, eqn, operands) -> list:
    name = eqn.primitive.name
    values = [o.value for o in operands]
    if isinstance(values[0], Unplaced) and name == "reshard":
      return self._placed(eqn, values[0])
    if any(isinstance(value, Unplaced) for value in values):
      return jaxprs.bind(eqn, self._given_up(values))
    if name in jaxprs.CALLS:
      return self.run(*jaxprs.called(eqn), values)
    if name in ("checkpoint", "remat", "remat2"):
      return self._rematerialized(eqn, values)
    if name == "scan":
      return self._scan(eqn, values)
    if name == "stop_gradient":
      if any(isinstance(v, View) and v.away for v in values):
        return self._refuse(eqn, values, "is used whole by `stop_gradient`")
      return jaxprs.bind(eqn, wholes(values))
    at, *more = [i for i, v in enumerate(values) if isinstance(v, View)]
    view = values[at]
    others = [*operands[:at], *operands[at + 1 :]]
    if more:
      return self._refuse(eqn, values, f"is used by `{name}` with other tables")
    if name in PLACES:
      (table,) = jaxprs.bind(eqn, [view.table])
      # Of another mesh than the operands of its steps.
      before = (eqn, view) if name == "reshard" else view.before
      return [view._replace(table=table, before=before)]
    if name in STEPS:
      step = STEPS[name](eqn, at, others)
      if isinstance(step, str):
        return self._refuse(eqn, values, step)
      changed = view._replace(
        steps=(*view.steps, _by_leaf(step, view.place)),
        scaled=view.scaled or name in SCALES,
        mixed=view.mixed or bool(others),
      )
      return [changed]
    if at == 0 and view.before is None:
      places = look_ups.cut(eqn, view.table, view.place, values[1:])
      if places is not None:
        tables = jaxprs.bind(eqn, [view.table, *values[1:]])
        return [view.of_tables(*x) for x in zip(tables, places, strict=True)]
    if name in look_ups.FORMS and at == 0:
      return self._look_up(eqn, view, values)
    return self._refuse(eqn, values, f"is used by `{name}`")

  def _look_up(self, eqn, view, values) -> list:
    read = look_ups.FORMS[eqn.primitive.name]
    with eqn.ctx.manager:
      found = read(eqn, view.table, view.place.here(), values[1:])
    if isinstance(found, str):
      return self._refuse(eqn, values, found)
    if found.fill and view.scaled:
      reason = "is scaled, and ids out of range read a value of their own"
      return self._refuse(eqn, values, reason)
    if compat.explicit_axes() and not compat.explicit_axes(found.out):
      return [Unplaced(view, found, eqn, values[1:])]
    return [self._tapped(view, found)]

  def _placed(self, eqn, unplaced: Unplaced) -> list:
    """Ids and rows where a look-up says that they lie."""
    view, found = unplaced.view, unplaced.found
    (out,) = jaxprs.bind(eqn, [found.out])
    *spec, _ = compat.explicit_spec(found.rows(out))
    place = lambda ids: jax.sharding.reshard(ids, PartitionSpec(*spec))
    found = found._replace(
      out=out, ids=place(found.ids), read=place(found.read)
    )
    return [self._tapped(view, found)]

  def _tapped(self, view: View, found: look_ups.LookUp) -> jax.Array:
    rows = found.rows(found.out)
    varying, spec = compat.varying_axes(rows), compat.explicit_spec(rows)
    self.sites.append(Site(view.param, rows.shape, rows.dtype, varying, spec))
    tap = None if self.taps is None else self.taps[len(self.sites) - 1]
    if view.away:
      rows = jnp.zeros_like(rows) if tap is None else tap
      if found.fill_value is not None:
        real = (found.read < view.place.num_rows)[..., None]
        rows = jnp.where(real, rows, jnp.asarray(found.fill_value, rows.dtype))
    elif tap is not None:
      rows = rows + tap
    self.ids.append(found.ids)
    self.read.append(found.read)
    return found.restored(_stepped(view, found, rows))

  def _scan(self, eqn, values) -> list:
    consts, carry, xs = jaxprs.scan_parts(eqn, values)
    stacks = {
      i: x for i, x in enumerate(xs) if isinstance(x, View) and x.is_stack
    }
    rows = [x for i, x in enumerate(xs) if i not in stacks]
    self._note(eqn, [*carry, *rows], "is carried or cut up by a `scan`")
    carry = wholes(carry)
    body, body_consts = jaxprs.opened(eqn.params["jaxpr"])
    length = eqn.params["length"]
    at = jnp.arange(length, dtype=jnp.int32) if stacks else None

    def turn(carry, inputs):
      nonlocal inner
      xs, at, taps = inputs
      xs = list(xs)
      for i, view in stacks.items():
        xs[i] = view.of_tables(xs[i], view.place.at(at))
      inner = Run(taps=taps, refusals=self.refusals)
      outs = inner.run(body, body_consts, [*consts, *carry, *xs])
      outs = self._returned(eqn, outs)
      found = inner.ids, inner.read
      return outs[: len(carry)], (outs[len(carry) :], found)

    inner = Run()
    plain = [stacks[i].table if i in stacks else x for i, x in enumerate(xs)]
    carry, (ys, (ids, read)) = lax.scan(
      turn,
      carry,
      (wholes(plain), at, self._inner_taps()),
      length=length,
      reverse=eqn.params["reverse"],
      unroll=eqn.params["unroll"],
    )
    self.sites.append(Nest(length, inner.sites))
    self.ids.append(ids)
    self.read.append(read)
    return [*carry, *ys]

  def _rematerialized(self, eqn, values) -> list:
    body, body_consts = jaxprs.opened(eqn.params["jaxpr"])
    is_view = [isinstance(value, View) for value in values]

    def inside(taps, plain):
      nonlocal inner
      left = iter(plain)
      args = [v if is_ else next(left) for v, is_ in zip(values, is_view)]
      inner = Run(taps=taps, refusals=self.refusals)
      outs = inner.run(body, body_consts, args)
      return self._returned(eqn, outs), (inner.ids, inner.read)

    inner = Run()
    params = eqn.params
    inside = jax.checkpoint(
      inside, policy=params["policy"], prevent_cse=params["prevent_cse"]
    )
    plain = [v for v, is_ in zip(values, is_view) if not is_]
    outs, (ids, read) = inside(self._inner_taps(), plain)
    self.sites.append(Nest(None, inner.sites))
    self.ids.append(ids)
    self.read.append(read)
    return outs

  def _inner_taps(self):
    return None if self.taps is None else self.taps[len(self.sites)]

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


def _broadcast_from(eqn, operands):
  """Returns the value that the equation's was broadcast from, if any."""
  name = eqn.primitive.name
  if name == "broadcast_in_dim":
    return operands[0].value, tuple(eqn.params["broadcast_dimensions"])
  if name in TYPES and operands[0].source is not None:
    value, dims = operands[0].source
    return jaxprs.bind(eqn, [value])[0], dims
  return None


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
