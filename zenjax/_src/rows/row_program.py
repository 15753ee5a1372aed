"""An optimizer's update as a program that runs on some rows of tables.

An optimizer is written for whole tables. Given some rows instead, a norm would
be that of these rows, and a mean would be divided by their number. Here the
update is traced for whole tables, checked by `dependence`, and run on any
number of rows with the numbers of the whole: first the reductions over rows,
over all parts that rows come in (chunks, rounds, owners), then all else with
their results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.core.jaxprs import Operations
from zenjax._src.core.jaxprs import Value
from zenjax._src.rows import dependence
from zenjax._src.rows.dependence import Fact
from zenjax._src.rows.dependence import Reduction
from zenjax._src.rows.dependence import Refusal
from zenjax._src.rows.dependence import Rows
from zenjax._src.rows.sparse_rows import is_rows

# Results of reductions over rows, by the number of their operation.
Totals = Mapping[int, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RowProgram:
  """The update of whole tables, and what it asks of rows.

  Attributes:
    tables: Shapes `(R, D)` of the leaves that are tables, by number.
    state_rows: Of each leaf of the state the table whose rows lie along its
      first dimension, or None.
    refusals: Why a table cannot be updated by rows, by the leaf's number.
    depth: How many reductions over rows come one after another.
    splits_columns: Whether parts of rows can be updated apart.
    is_plain: Whether the optimizer itself, run on one row, does the same.
    wants_more: Whether it was not given all arguments that it needs.
    decays: Tables of which rows move that no step has touched yet.
    update: The update of flat lists of leaves.
    knows_size: Whether it does other things, without a reduction, where tables
      have other numbers of rows.
    whole: Its operations for whole tables.
    reductions: Those over rows, by the number of their operation.
  """

  tables: dict[int, tuple[int, ...]]
  state_rows: tuple[int | None, ...]
  refusals: dict[int, Refusal]
  update: Callable[..., Any]
  depth: int = 0
  splits_columns: bool = False
  is_plain: bool = False
  knows_size: bool = False
  whole: Operations = Operations((), (), ())
  reductions: dict[int, Reduction] = dataclasses.field(default_factory=dict)
  wants_more: bool = False
  decays: tuple[int, ...] = ()

  @property
  def fewest(self) -> int:
    """The fewest rows that it runs on, be they padding.

    JAX leaves out operations on arrays without elements.
    """
    return 0 if self.is_plain else 1

  @property
  def holds_tracers(self) -> bool:
    """True if the optimizer was made of values that are still traced."""
    reads = (x for step in self.whole.steps for x in step.reads)
    return any(isinstance(x.constant, Tracer) for x in reads)

  def refusing(self, refusals: dict[int, Refusal]) -> "RowProgram":
    """Returns the program with other refusals."""
    return dataclasses.replace(self, refusals=refusals)

  def on(self, *args: Any) -> "RowUpdate":
    """Returns the program for tables of some rows, or of none.

    Args:
      *args: Gradients, state, parameters or None, further arguments: lists of
        leaves, `[K, ...]` in the place of `[R, ...]`.
    """
    types = jax.tree.map(type_of, args)
    try:
      with _as_optax_computes():
        some = jaxprs.trace(self.update, *types)
      dependence.require_alike(self.whole, some)
    except Exception as error:  # A mask of other leaves is an error of optax.
      raise ValueError(
        "the optimizer of rows must do the same for any number of them, but it"
        " does something else for a part of a table than for the whole, of"
        f" tables of shapes {[*self.tables.values()]}; give masks and labels"
        " that depend on sizes as trees instead of functions, or take dense"
        " gradients by `jax.value_and_grad`."
      ) from error
    return RowUpdate(self, some, jax.tree.leaves(args))

  def none(self, level: int, like: jax.Array) -> dict[int, jax.Array]:
    """Returns what each reduction of a level makes of no rows.

    Args:
      level: How many reductions come before.
      like: An array that varies over the axes that rows vary over.
    """
    found = {}
    for i, reduction in self.reductions.items():
      if reduction.level == level:
        x = _type_of_total(reduction)
        x = jnp.full(x.shape, _none(reduction.kind, x.dtype), x.dtype)
        found[i] = compat.cast_like(x, like)
    return found

  def joined(self, parts: Totals, more: Totals) -> dict[int, jax.Array]:
    """Returns reductions of two sets of rows."""
    return {
      i: _JOIN[self.reductions[i].kind](x, more[i]) for i, x in parts.items()
    }

  def reduction_of(self, number: int, parts: jax.Array) -> jax.Array:
    """Returns one reduction of what several made, `[n, ...]`, in order."""
    join = _JOIN[self.reductions[number].kind]
    return functools.reduce(join, list(parts))

  def finished(
    self, parts: Totals, touched: Mapping[int, jax.Array]
  ) -> dict[int, jax.Array]:
    """Returns reductions over all rows from those over the touched ones.

    Args:
      parts: Reductions of rows that have a gradient.
      touched: How many these are, `[] int32`, by table.
    """
    found = {}
    for i, x in parts.items():
      reduction = self.reductions[i]
      table = reduction.rows.table
      left = self.tables[table][0] - touched[table]
      x = _with_rest(reduction, x, left)
      found[i] = x.astype(reduction.step.makes[0].dtype)
    return found


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowUpdate:
  """A `RowProgram` on some rows.

  Attributes:
    program: The program.
    some: Its operations for so many rows.
    args: Its arguments, flat.
  """

  program: RowProgram
  some: Operations
  args: list[Any]

  @property
  def is_plain(self) -> bool:
    """True if the optimizer itself, run on these rows, does the same."""
    return self.program.is_plain and _same_numbers(
      self.program.whole, self.some
    )

  def parts(
    self, level: int, real: Mapping[int, jax.Array], totals: Totals
  ) -> dict[int, jax.Array]:
    """Reduces these rows, and no others, in the reductions of one level.

    Args:
      level: How many reductions come before.
      real: Of each table `[K] bool`, which rows are none of padding.
      totals: Results of all levels below.
    """
    chosen = {
      i: r for i, r in self.program.reductions.items() if r.level == level
    }
    operands = [x for i in chosen for x in self.some.steps[i].reads]
    values = iter(self._values(operands, totals))
    found = {}
    for i, reduction in chosen.items():
      step = self.some.steps[i]
      reads = [next(values) for _ in step.reads]
      found[i] = _reduced(reduction, reads, real[reduction.rows.table])
    return found

  def outputs(self, totals: Totals) -> list[Any]:
    """Returns the flat results, updates and then the state."""
    return self._values(self.some.outputs, totals)

  def _values(self, wanted, totals):
    some, whole = self.some, self.program.whole
    env: dict[Value, Any] = dict(zip(some.inputs, self.args, strict=True))
    for i, total in totals.items():
      env[some.steps[i].makes[0]] = total
    # A number may hold how many rows there are: it is that of the table.
    numbers = {
      value: true.constant
      for step, other in zip(some.steps, whole.steps)
      for value, true in zip(step.reads, other.reads)
      if value.constant is not None and value.shape == true.shape
    }

    def read(value):
      if value.constant is None:
        return env[value]
      return numbers.get(value, value.constant)

    for step in some.needed(wanted, tuple(env)):
      outs = step.run(compat.cast_alike([read(x) for x in step.reads]))
      env |= zip(step.makes, outs, strict=True)
    return [read(x) for x in wanted]


def row_program(
  inner: optax.GradientTransformationExtraArgs,
  grads: Any,
  state: Any,
  params: Any,
  extra: Mapping[str, Any],
  tables: Sequence[bool],
) -> RowProgram:
  """Reads off `inner.update` how it treats rows.

  Args:
    inner: The optimizer.
    grads: Arrays, SparseRows or types of whole tables.
    state: Of `inner`, for whole tables: arrays or types.
    params: Arrays or types, or None.
    extra: Further arguments of `inner.update`.
    tables: Which leaves of `grads` are tables, in order.
  """
  reader = _Reader(inner, grads, state, params, extra, tables)
  with _as_optax_computes():
    return reader.read()


def is_elementwise(
  inner: optax.GradientTransformationExtraArgs,
  params: Any,
  tables: Sequence[bool],
) -> bool:
  """Says whether a step without gradients moves each element by itself.

  Args:
    inner: The optimizer.
    params: Arrays or types.
    tables: Which leaves are tables, in order.
  """
  types = jax.tree.map(type_of, params)
  state = jax.eval_shape(inner.init, types)
  reader = _Reader(inner, types, state, types, {}, tables)
  with _as_optax_computes():
    return all(map(reader.is_idle_apart, (0, 1)))


_UNTRACED = "it cannot be traced with these arguments"
_OTHER_ROWS = "it cannot be traced for tables of another size"


class _Reader:
  """Traces an update for tables of several sizes, and compares."""

  def __init__(self, inner, grads, state, params, extra, tables):
    self._inner = inner
    leaves, self._structure = jax.tree.flatten(grads, is_leaf=is_rows)
    self._grads = [type_of(x) for x in leaves]
    self._tables = {
      i: self._grads[i].shape for i, is_table in enumerate(tables) if is_table
    }
    leaves, self._state_structure = jax.tree.flatten(state)
    self._state = [type_of(x) for x in leaves]
    self._params = None
    if params is not None:
      self._params = [type_of(x) for x in jax.tree.leaves(params)]
    arrays, self._arguments = arguments(extra)
    self._extra = [type_of(x) for x in arrays]

  def read(self) -> RowProgram:
    rows = self._dims_that_grow(0)
    if rows is None:
      return self._refused(_UNKNOWN_STATE)
    whole = self._traced()
    more = self._traced(0, rows)
    if isinstance(whole, Refusal) or isinstance(more, Refusal):
      return self._refused(whole if isinstance(whole, Refusal) else more)
    analysis = _analysis(whole, more, self._facts(0, rows))
    if isinstance(analysis, Refusal):
      return self._refused(analysis)
    order = {step: i for i, step in enumerate(whole.steps)}
    wanted = set(whole.needed(whole.outputs))
    reductions = {
      order[step]: reduction
      for step, reduction in analysis.reductions.items()
      if step in wanted
    }
    refusals = self._judged(whole, analysis, rows)
    levels = [r.level for r in reductions.values()]
    alike = _same_numbers(whole, more) and self._is_same_of_one(whole)
    splits, knows_size = False, not alike
    if not refusals and all(r.takes_all for r in reductions.values()):
      splits, also = self._splits(whole, wanted)
      alike = alike and (also or not splits)
    return RowProgram(
      tables=self._tables,
      state_rows=tuple(r.table if r else None for r in rows),
      refusals=refusals,
      depth=1 + max(levels, default=-1),
      splits_columns=splits,
      is_plain=alike and not reductions,
      knows_size=knows_size and not reductions,
      update=self._flat,
      whole=whole,
      reductions=reductions,
      decays=tuple(
        i for i in self._tables if analysis.of(whole.outputs[i]).fresh != 0
      ),
    )

  def _is_same_of_one(self, whole):
    """Returns True if one row of each table meets the same program and numbers.

    Python may choose by a table's size, as a mask of large leaves does.
    """
    grads, state = list(self._grads), list(self._state)
    params = None if self._params is None else list(self._params)
    for i in self._tables:
      grads[i] = _of_one_row(grads[i])
      if params is not None:
        params[i] = _of_one_row(params[i])
    for i, rows in enumerate(self._dims_that_grow(0) or ()):
      if rows:
        state[i] = _of_one_row(state[i])
    one = self._traced_of(grads, state, params)
    if isinstance(one, Refusal):
      return False
    try:
      dependence.require_alike(whole, one)
    except dependence.Differs:
      return False
    return _same_numbers(whole, one)

  def is_idle_apart(self, dim: int) -> bool:
    """Says whether rows, or columns, move apart where none has a gradient."""
    where = self._dims_that_grow(dim)
    whole = self._traced()
    more = None if where is None else self._traced(dim, where)
    if not isinstance(whole, Operations) or not isinstance(more, Operations):
      return False
    analysis = _analysis(whole, more, self._facts(dim, where), idle=True)
    if isinstance(analysis, Refusal) or self._judged(whole, analysis, where):
      return False
    return not any(
      x in analysis.reductions for x in whole.needed(whole.outputs)
    )

  def _refused(self, refusal):
    rows = self._dims_that_grow(0) or [None] * len(self._state)
    return RowProgram(
      wants_more=refusal.reason == _UNTRACED,
      tables=self._tables,
      state_rows=tuple(r.table if r else None for r in rows),
      refusals={table: refusal for table in self._tables},
      update=self._flat,
    )

  def _flat(self, grads, state, params, extra):
    """The update of trees given as lists of leaves."""
    if params is not None:
      params = self._structure.unflatten(params)
    updates, state = self._inner.update(
      self._structure.unflatten(grads),
      self._state_structure.unflatten(state),
      params,
      **self._arguments(extra),
    )
    return self._structure.flatten_up_to(updates), jax.tree.leaves(state)

  def _init(self, leaves):
    return jax.tree.leaves(self._inner.init(self._structure.unflatten(leaves)))

  @property
  def _like(self):
    return self._grads if self._params is None else self._params

  def _grown(self, dim, leaves):
    """Leaves with more rows, or columns, in each table a number of its own."""
    out = list(leaves)
    for number, i in enumerate(self._tables):
      out[i] = _larger(out[i], dim, number + 1)
    return out

  def _dims_that_grow(self, dim):
    """Which leaves of the state have rows, or columns, of which table.

    None where the state follows them in another way.
    """
    more = jax.eval_shape(self._init, self._grown(dim, self._like))
    if len(more) != len(self._state):
      return None
    found: list[Rows | None] = []
    for a, b in zip(self._state, more):
      if a.shape == b.shape:
        found.append(None)
        continue
      found.append(_table_of(a.shape, b.shape, dim, self._tables))
      if found[-1] is None:
        return None
    return found

  def _traced(self, dim=0, where=None):
    """The update of whole tables, or of larger ones where `where` is given."""
    grads, state, params = self._grads, list(self._state), self._params
    if where is not None:
      numbers = {table: k for k, table in enumerate(self._tables)}
      grads = self._grown(dim, grads)
      params = None if params is None else self._grown(dim, params)
      for i, rows in enumerate(where):
        if rows:
          state[i] = _larger(state[i], dim, numbers[rows.table] + 1)
    refused = _UNTRACED if where is None else _OTHER_ROWS
    return self._traced_of(grads, state, params, refused)

  def _traced_of(self, grads, state, params, refused=_OTHER_ROWS):
    try:
      return jaxprs.trace(self._flat, grads, state, params, self._extra)
    except NameError:
      raise  # It wants an axis, and says so.
    except Exception as error:  # Whatever an optimizer raises.
      text = str(error).strip().split("\n")[0]
      return Refusal(refused, text)

  def _facts(self, dim, where):
    """Returns facts of gradients, state, parameters and further arguments."""
    table = lambda i, **known: Fact(rows=Rows(i, dim), **known)
    facts = [
      table(i, rest=0.0, fresh=0.0) if i in self._tables else Fact()
      for i in range(len(self._grads))
    ]
    made = jaxprs.trace(self._init, self._like)
    first = dependence.analyse(made, made, [Fact()] * len(made.inputs))
    for leaf, rows, fresh in zip(self._state, where, made.outputs):
      if rows:
        facts.append(Fact(rows=rows, fresh=first.of(fresh).fresh))
      else:
        counts = jnp.issubdtype(leaf.dtype, jnp.integer)
        facts.append(Fact(clocked=bool(counts)))
    for i in range(len(self._params or ())):
      facts.append(table(i) if i in self._tables else Fact())
    return facts + [Fact()] * len(self._extra)

  def _judged(self, whole, analysis, where):
    """Why tables cannot be updated apart from each other and row by row."""
    found: dict[int, Refusal] = {}
    count = len(self._grads)
    owners = [i if i in self._tables else None for i in range(count)]
    owners += [rows.table if rows else None for rows in where]
    before = [None] * count + [*whole.inputs[count : count + len(where)]]
    for output, owner, old in zip(whole.outputs, owners, before, strict=True):
      fact = analysis.of(output)
      refusal, makes = fact.refusal, fact.rows and fact.rows.table
      if (
        refusal is None
        and fact.rows
        and (makes != owner or fact.rows.inner > 1)
      ):
        refusal = Refusal(
          "it makes something else than rows of rows", "`update`"
        )
      if refusal is None and owner is not None and old is not None:
        if analysis.gates(output, old):
          refusal = _GATED
      if refusal is not None:
        hit = [x for x in (owner, makes) if x is not None] or self._tables
        for table in hit:
          found.setdefault(table, refusal)
    return found

  def _splits(self, whole, wanted):
    """Returns True if columns of tables can be updated apart from each other.

    And whether no number in the program depends on how many there are.
    """
    columns = self._dims_that_grow(1)
    more = None if columns is None else self._traced(1, columns)
    if columns is None or not isinstance(more, Operations):
      return False, False
    analysis = _analysis(whole, more, self._facts(1, columns))
    if isinstance(analysis, Refusal) or self._judged(whole, analysis, columns):
      return False, False
    # Zeros stand beside the columns of the last part.
    apart = all(
      r.takes_all and not r.needs_rest
      for step, r in analysis.reductions.items()
      if step in wanted
    )
    return apart, _same_numbers(whole, more)


def arguments(
  extra: Mapping[str, Any],
) -> tuple[list[Any], Callable[[Sequence[Any]], dict[str, Any]]]:
  """Splits further arguments into arrays and what puts them back."""
  leaves, structure = jax.tree.flatten(dict(extra))
  is_array = [
    hasattr(x, "dtype") or isinstance(x, (bool, int, float)) for x in leaves
  ]

  def back(arrays):
    given = iter(arrays)
    return structure.unflatten(
      [next(given) if a else x for a, x in zip(is_array, leaves)]
    )

  return [x for x, a in zip(leaves, is_array) if a], back


_UNKNOWN_STATE = Refusal(
  "its state does not keep rows of tables apart, one behind the other",
  "`init`",
)
_GATED = Refusal(
  "at some steps it changes the state of all rows, and a row that such a step"
  " does not touch would lose gradients that wait in it",
  "`update`",
)


def _analysis(whole, more, facts, idle=False):
  try:
    return dependence.analyse(whole, more, facts, idle)
  except dependence.Differs:
    return Refusal(
      "it does something else for tables of another size", "`update`"
    )


def _same_numbers(whole, more):
  """Returns True if no number in a program depends on the size of tables."""
  return not any(
    x.constant is not None
    and x.shape == y.shape
    and not dependence.is_opaque(x.constant)
    and np.asarray(x.constant).tobytes() != np.asarray(y.constant).tobytes()
    for a, b in zip(whole.steps, more.steps)
    for x, y in zip(a.reads, b.reads)
  )


def _larger(leaf, dim, by):
  shape = list(leaf.shape)
  shape[dim] += by
  return leaf.update(shape=tuple(shape))


def _of_one_row(leaf):
  return leaf.update(shape=(min(1, leaf.shape[0]), *leaf.shape[1:]))


def _table_of(shape, more, dim, tables):
  """Which table's rows, or columns, a leaf has along dimension `dim`."""
  if len(shape) != len(more) or len(shape) <= dim:
    return None
  for number, (i, size) in enumerate(tables.items()):
    wanted = list(shape)
    wanted[dim] += number + 1
    if shape[dim] == size[dim] and tuple(wanted) == tuple(more):
      return Rows(i, dim)
  return None


def type_of(leaf: Any) -> Any:
  """Returns the type of an array, of a shape, or of the table of SparseRows.

  Over which devices it may differ is left out: programs are the same then.
  """
  if is_rows(leaf):
    return ShapedArray(tuple(leaf.shape), leaf.dtype)
  if not isinstance(leaf, (ShapedArray, jax.ShapeDtypeStruct)):
    leaf = jax.typeof(leaf)
  weak = getattr(leaf, "weak_type", False)
  return ShapedArray(leaf.shape, leaf.dtype, weak_type=weak)


@contextlib.contextmanager
def _as_optax_computes() -> Iterator[None]:
  """Promotes dtypes and ranks, whatever a program forbids itself."""
  with jax.numpy_dtype_promotion("standard"):
    with jax.numpy_rank_promotion("allow"):
      yield


def _reduced(reduction, reads, real):
  """Reduces the real rows; 16-bit floats in float32."""
  kind, params = reduction.kind, reduction.step.params
  reads = [_wide(x) for x in reads]
  masked = []
  for x, dim in zip(reads, reduction.dims):
    rows = jnp.repeat(real, reduction.rows.inner)
    shape = [1] * x.ndim
    shape[dim] = len(rows)
    none = jnp.asarray(_none(kind, x.dtype), x.dtype)
    masked.append(jnp.where(rows.reshape(shape), x, none))
  if reduction.step.name == "dot_general":
    numbers, precision = params["dimension_numbers"], params["precision"]
    left, right = masked
    return lax.dot_general(left, right, numbers, precision=precision)
  return _OVER[kind](masked[0], axis=tuple(params["axes"]))


def _with_rest(reduction, x, left):
  """Joins a reduction with rows that a step does not touch."""
  kind, rest = reduction.kind, reduction.rest
  if not reduction.needs_rest:
    return x
  if kind == "sum":
    step = reduction.step
    (shape,) = {y.shape for y in step.reads}
    others = [a for a in step.params["axes"] if a != reduction.rows.dim]
    each = math.prod(shape[a] for a in others) * reduction.rows.inner
    return x + (left * each).astype(x.dtype) * jnp.asarray(rest, x.dtype)
  more = jnp.where(
    left > 0, jnp.asarray(rest, x.dtype), jnp.asarray(_none(kind, x.dtype))
  )
  return _JOIN[kind](x, more.astype(x.dtype))


def _type_of_total(reduction):
  made = reduction.step.makes[0]
  dtype = made.dtype
  if jnp.issubdtype(dtype, jnp.floating):
    dtype = collectives.accumulator(dtype)
  return jax.ShapeDtypeStruct(made.shape, dtype)


def _wide(x):
  if jnp.issubdtype(x.dtype, jnp.floating):
    return x.astype(collectives.accumulator(x.dtype))
  return x


def _none(kind, dtype):
  """The number that a reduction leaves all others as they are with."""
  if kind in ("and", "or"):
    return kind == "and"
  if kind == "sum":
    return np.zeros((), dtype)
  if jnp.issubdtype(dtype, jnp.floating):
    return -np.inf if kind == "max" else np.inf
  if jnp.issubdtype(dtype, np.bool_):
    return kind == "min"
  info = jnp.iinfo(dtype)
  return info.min if kind == "max" else info.max


_OVER = {
  "sum": jnp.sum,
  "max": jnp.max,
  "min": jnp.min,
  "and": jnp.all,
  "or": jnp.any,
}
_JOIN = {
  "sum": jnp.add,
  "max": jnp.maximum,
  "min": jnp.minimum,
  "and": jnp.logical_and,
  "or": jnp.logical_or,
}
