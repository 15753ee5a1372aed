"""Runs a traced program so that it can be differentiated by looked-up rows.

A table goes through the program as a `View`. When rows are looked up, a *tap*
of zeros is added to them. The gradient by the tap is the gradient of the rows,
so no gradient of the table is ever made. The first run has no taps. It finds
the lookups (`Site`) and all other uses of tables.

A leaf may be a stack of tables, `[T, R, D]`, from which the program cuts
tables. Row `r` of table `t` is row `t * R + r` of the leaf.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
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

# Operations on a whole table that are done to its rows instead: a cast, a
# factor, a row set to a constant. They give the same rows before and after the
# lookup.
STEPS = "convert_element_type neg mul div scatter stop_gradient".split()
# Operations that change only types or placement are done to the table.
PLACES = "copy copy_p pvary pcast sharding_constraint reshard".split()

# `(rows [..., D], ids [...]) -> rows`, where ids are rows of the leaf.
Step = Callable[[jax.Array, jax.Array], jax.Array]


def step_of(
  eqn: jex_core.JaxprEqn,
  first: int,
  others: Sequence[Any],
  place: look_ups.Place,
) -> Step | str:
  """Returns an equation on a table as an operation on its rows.

  Args:
    eqn: An equation with one of the primitives in `STEPS`.
    first: The position of the table among the operands.
    others: The other operands.
    place: The place of the table's rows in the leaf.

  Returns:
    The operation, or a reason why there is none.
  """
  name = eqn.primitive.name
  if name == "convert_element_type":
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
      return f"is cast to {jnp.dtype(dtype).name}"
    return lambda rows, ids: rows.astype(dtype)
  if name == "scatter":
    return _row_set(eqn, first, others, place)
  if name in ("mul", "div"):
    (factor,) = others
    *dims, width = _shape(eqn)
    if jnp.shape(factor) not in ((), (*[1] * len(dims), width)):
      return f"is used by `{name}` with more than a factor or a row of factors"
    if first and name == "div":
      return "is used by `div` as a divisor"
    op = operator.mul if name == "mul" else operator.truediv
    return lambda rows, ids: op(rows, _beside(factor, rows))
  op = operator.neg if name == "neg" else lax.stop_gradient
  return lambda rows, ids: op(rows)


def _row_set(eqn, first, others, place) -> Step | str:
  """Returns the replacement of one row, as in `table.at[0].set(0)`."""
  dims = eqn.params["dimension_numbers"]
  indices, row = others
  one = jnp.size(indices) == 1 and tuple(dims.inserted_window_dims) == (0,)
  *stack, num_rows, width = _shape(eqn)
  if stack:
    return "is written to as a stack of tables"
  if first or not one or jnp.size(row) != width:
    return "is written to at more than one row"
  mode = jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
  clips = mode == jax.lax.GatherScatterMode.CLIP
  at_row = look_ups.in_range(jnp.reshape(indices, ()), num_rows, clips)
  # Nothing is written out of range, and ids of lookups are not negative.
  at_row = jnp.where(at_row < 0, -1, place.ids([at_row]))
  return lambda rows, ids: jnp.where(
    (ids == at_row)[..., None], _beside(row, rows), rows
  )


def _beside(row: Any, rows: jax.Array) -> jax.Array:
  """Reshapes a scalar or a row to broadcast with `rows: [..., D]`."""
  return jnp.reshape(row, (*[1] * (rows.ndim - 1), -1))


def _shape(eqn: jex_core.JaxprEqn) -> tuple[int, ...]:
  aval: Any = eqn.outvars[0].aval
  return aval.shape


class View(NamedTuple):
  """A table on its way to its lookups.

  Attributes:
    param: The number of the leaf.
    table: `[R, D]`, or a stack `[T, R, D]`, before the steps.
    place: The place of its rows in the leaf.
    whole: Computes the table as the program has it, for other uses.
    steps: Operations of the program on the table, to be done to rows.
    is_changed: True if a step is more than a cast.
    away: True for a sharded table, of which `table` is only the type. Taps are
      then the rows themselves.
    found: A lookup whose rows are not resharded yet. On explicit axes,
      `table.at[ids].get(out_sharding=..)` looks up rows on automatic axes and
      reshards them afterwards.
  """

  param: int
  table: jax.Array
  place: look_ups.Place
  whole: Callable[[], jax.Array]
  steps: tuple[Step, ...] = ()
  is_changed: bool = False
  away: bool = False
  found: look_ups.LookUp | None = None

  @classmethod
  def of(cls, param: int, table: jax.Array, away: bool) -> "View":
    """Returns the view of a whole leaf."""
    shape = jnp.shape(table)
    strides = look_ups.strides_of(shape)
    place = look_ups.Place(math.prod(shape[:-1]), strides=strides)
    return cls(param, table, place, lambda: table, away=away)

  def rows(self, found: look_ups.LookUp, rows: jax.Array) -> jax.Array:
    """Returns looked-up rows after the steps.

    Rows out of range have no gradient by any operand of a step.
    """
    steps = lambda rows: functools.reduce(
      lambda x, step: step(x, found.read), self.steps, rows
    )
    is_filled = found.fill_value is not None
    if not self.is_changed and not (self.away and is_filled):
      return steps(rows)
    real = (found.ids < self.place.num_rows)[..., None]
    other = found.fill_value if is_filled else lax.stop_gradient(steps(rows))
    # With zeros, because a gradient of 0 times NaN would be NaN.
    rows = steps(jnp.where(real, rows, 0))
    return jnp.where(real, rows, jnp.asarray(other, rows.dtype))


# The position of an equation: its number in the program, then its number in the
# program that this equation runs, and so on.
Path = tuple[int, ...]


class Site(NamedTuple):
  """One lookup, and the type of its tap."""

  param: int
  shape: tuple[int, ...]  # [..., D], without the steps of scans
  dtype: Any
  varying: frozenset[str]
  spec: tuple[Any, ...]  # explicit axes of each dimension
  lengths: tuple[int, ...]  # lengths of the scans around it

  @property
  def rows(self) -> int:
    """Returns the number of rows that it reads in all."""
    return math.prod([*self.lengths, *self.shape[:-1]])

  @property
  def place(self) -> PartitionSpec:
    """Returns how its rows are sharded, with the steps of scans in front."""
    return PartitionSpec(*[None] * len(self.lengths), *self.spec)

  def tap(self) -> jax.Array:
    """Returns zeros typed like the rows.

    With another type, autodiff would sum the gradient over devices.
    """
    zeros = jnp.zeros((*self.lengths, *self.shape), self.dtype)
    axes = tuple(self.varying)
    if axes:
      return lax.pcast(zeros, axes, to="varying")
    return jax.sharding.reshard(zeros, self.place) if any(self.spec) else zeros


class Refusal(NamedTuple):
  """A reason why a table's gradient stays dense."""

  reason: str
  place: str = ""


class Ids(NamedTuple):
  """Ids of a lookup, with the steps of scans in front."""

  to: jax.Array  # rows that the gradient belongs to
  read: jax.Array  # rows that are read


@dataclasses.dataclass(kw_only=True)
class Run:
  """One evaluation of a program in which tables are views.

  Attributes:
    given: The tap of each lookup, or the rows themselves for sharded tables,
      and results of callbacks that have run already. It is empty in the first
      run, which finds the lookups.
    replays: True if callbacks must not run twice.
    sites: The lookups, in the order of the program.
    refusals: The first other use of each parameter.
    told: Ids of each lookup; with `replays` also results of callbacks.
    lengths: Lengths of the scans around the program.
  """

  given: dict[Path, Any] = dataclasses.field(default_factory=dict)
  replays: bool = False
  sites: dict[Path, Site] = dataclasses.field(default_factory=dict)
  refusals: dict[int, Refusal] = dataclasses.field(default_factory=dict)
  told: dict[Path, Any] = dataclasses.field(default_factory=dict)
  lengths: tuple[int, ...] = ()

  def run(
    self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], path: Path
  ) -> list:
    """Returns the program's outputs, of which tables are still views."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def read(atom):
      is_literal = isinstance(atom, jex_core.Literal)
      return atom.val if is_literal else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
      values = [read(atom) for atom in eqn.invars]
      at = (*path, i)
      if any([isinstance(x, View) for x in values]):
        outs = self._with_views(eqn, values, at)
      elif self.replays and _calls_back(eqn):
        outs = self._called_back(eqn, values, at)
      else:
        outs = jaxprs.bind(eqn, values)
      env.update(zip(eqn.outvars, outs))
    return [read(atom) for atom in jaxpr.outvars]

  def _with_views(self, eqn, values, at) -> list:
    name = eqn.primitive.name
    views = [i for i, x in enumerate(values) if isinstance(x, View)]
    first = views[0]
    view, others = values[first], [*values[:first], *values[first + 1 :]]
    if [i for i in views if values[i].found is not None]:
      if name == "reshard":
        return self._spread(eqn, view, view.found, at)
      return self._refuse(eqn, values, _ON_AUTOMATIC_AXES)
    if name in INSIDE:
      return INSIDE[name](self, eqn, values, at)
    if len(views) > 1:
      return self._refuse(eqn, values, f"is used by `{name}` with other tables")
    if name == "stop_gradient" and not view.away:
      return jaxprs.bind(eqn, [view.whole()])  # There is no gradient.
    if name in PLACES:
      (table,) = jaxprs.bind(eqn, [view.table])
      return _seen(eqn, values, [view._replace(table=table)])
    if name in STEPS:
      step = step_of(eqn, first, others, view.place)
      if isinstance(step, str):
        return self._refuse(eqn, values, step)
      is_changed = view.is_changed or name != "convert_element_type"
      steps = (*view.steps, step)
      changed = view._replace(steps=steps, is_changed=is_changed)
      return _seen(eqn, values, [changed])
    if first == 0 and name in look_ups.CUTS:
      places = look_ups.cut(eqn, view.table, view.place, others)
      if places is not None:
        tables = jaxprs.bind(eqn, [view.table, *others])
        parts = zip(tables, places, strict=True)
        cuts = [view._replace(table=x, place=place) for x, place in parts]
        return _seen(eqn, values, cuts)
    if first == 0 and name in look_ups.FORMS:
      return self._look_up(eqn, view, values, at)
    return self._refuse(eqn, values, f"is used by `{name}`")

  def _look_up(self, eqn, view, values, at) -> list:
    read = look_ups.FORMS[eqn.primitive.name]
    with eqn.ctx.manager:
      found = read(eqn, view.table, view.place, values[1:])
    if isinstance(found, str):
      return self._refuse(eqn, values, found)
    if compat.explicit_axes() and not compat.explicit_axes(found.out):
      return _seen(eqn, values, [view._replace(found=found)])
    return [self._tapped(view, found, at)]

  def _spread(self, eqn, view, found, at) -> list:
    """Reshards ids and rows as the lookup asks for."""
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
    self.told[at] = Ids(found.ids, found.read)
    if at in self.given:
      rows = self.given[at] if view.away else rows + self.given[at]
    return found.restored(view.rows(found, rows))

  def _called(self, eqn, values, at) -> list:
    return self.run(*jaxprs.opened(jaxprs.called(eqn)), values, at)

  def _scan(self, eqn, values, at) -> list:
    consts, carry, xs = jaxprs.scan_parts(eqn, values)
    stacks = {
      i: x for i, x in enumerate(xs) if isinstance(x, View) and x.place.strides
    }
    plain = [stacks[i].table if i in stacks else x for i, x in enumerate(xs)]
    reason = "is carried or cut up by a `scan`"
    carry = self._used(eqn, carry, reason)
    plain = self._used(eqn, plain, reason)
    length = eqn.params["length"]
    turns = jnp.arange(length, dtype=jnp.int32) if stacks else None

    def turn(carry, inputs):
      xs, number, given = inputs
      xs = list(xs)
      for i, view in stacks.items():
        whole = lambda view=view: view.whole()[number]
        place = view.place.at(number)
        xs[i] = view._replace(table=xs[i], place=place, whole=whole)
      args = [*consts, *carry, *xs]
      outs, told = self._inside(eqn, args, at, given, length)
      outs = self._returned(eqn, outs)
      return outs[: len(carry)], (outs[len(carry) :], told)

    carry, (ys, told) = lax.scan(
      turn,
      carry,
      (plain, turns, self._given(at)),
      length=length,
      reverse=eqn.params["reverse"],
      unroll=eqn.params["unroll"],
    )
    self.told |= told
    return [*carry, *ys]

  def _rematerialized(self, eqn, values, at) -> list:
    views = {i: x for i, x in enumerate(values) if isinstance(x, View)}
    same: dict[int, View] = {}  # Tables that come out unchanged.

    def inside(given, plain):
      args = [views.get(i, x) for i, x in enumerate(plain)]
      outs, told = self._inside(eqn, args, at, given)
      for k, out in enumerate(outs):
        if any(out is view for view in views.values()):
          same[k], outs[k] = out, None
      return self._returned(eqn, outs), told

    inside = jax.checkpoint(
      inside,
      policy=eqn.params["policy"],
      prevent_cse=eqn.params["prevent_cse"],
    )
    plain = [None if i in views else x for i, x in enumerate(values)]
    outs, told = inside(self._given(at), plain)
    self.told |= told
    return [same.get(k, out) for k, out in enumerate(outs)]

  def _given(self, at: Path) -> dict[Path, Any]:
    """Returns the taps inside the program of an equation."""
    return {p: x for p, x in self.given.items() if p[: len(at)] == at}

  def _inside(self, eqn, args, at, given, *length):
    """Runs the program of an equation inside a trace of its own.

    Returns:
      Its results, and `told` for its lookups and callbacks.
    """
    lengths = (*self.lengths, *length)
    inner = dataclasses.replace(self, given=given, told={}, lengths=lengths)
    body, consts = jaxprs.opened(eqn.params["jaxpr"])
    return inner.run(body, consts, args, at), inner.told

  def _returned(self, eqn, outs) -> list:
    return self._used(eqn, outs, f"is returned by a `{eqn.primitive.name}`")

  def _called_back(self, eqn, values, at) -> list:
    """Returns a callback's results, which are reused if it has run."""
    if eqn.primitive.name in INSIDE:
      return INSIDE[eqn.primitive.name](self, eqn, values, at)
    outs = self.given[at] if at in self.given else jaxprs.bind(eqn, values)
    self.told[at] = outs
    return outs

  def _refuse(self, eqn, values, reason) -> list:
    return jaxprs.bind(eqn, self._used(eqn, values, reason))

  def _used(self, eqn, values, reason) -> list:
    """Returns whole tables in place of views, and notes that they are used."""
    for value in values:
      if isinstance(value, View):
        refusal = Refusal(reason, jaxprs.source_place(eqn))
        self.refusals.setdefault(value.param, refusal)
    return wholes(values)


# Equations that run another program, which may look up rows or call the host.
INSIDE: dict[str, Callable[..., list]] = {
  **dict.fromkeys(jaxprs.CALLS, Run._called),
  **dict.fromkeys(("checkpoint", "remat", "remat2"), Run._rematerialized),
  "scan": Run._scan,
}

_ON_AUTOMATIC_AXES = (
  "is looked up on automatic axes by more than `.at[ids].get(out_sharding=..)`"
)


def _calls_back(eqn) -> bool:
  """Returns True if an equation, or a program inside, calls the host."""
  if eqn.primitive.name in ("pure_callback", "io_callback"):
    return True
  programs = jex_core.jaxprs_in_params(eqn.params)
  inside = eqn.primitive.name in INSIDE
  return inside and any(
    _calls_back(x)
    for program in programs
    for x in jaxprs.opened(program)[0].eqns
  )


def _seen(eqn, values, views: Sequence[View]) -> list[View]:
  """Returns the views of an equation's results, computed only if needed."""
  results = lambda: jaxprs.bind(eqn, wholes(values))
  return [
    view._replace(whole=lambda i=i: results()[i])
    for i, view in enumerate(views)
  ]


def wholes(values: Sequence[Any]) -> list:
  """Returns the values with whole tables in place of views."""
  return [v.whole() if isinstance(v, View) else v for v in values]
