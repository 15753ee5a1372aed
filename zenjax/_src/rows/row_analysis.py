"""Finds out from the traced program of an optimizer if it treats rows apart.

The update is traced twice, for tables of two different sizes. Where the two
traces differ in shape, there are rows. Every value is followed from the inputs
to the results, and a table of primitives says what each operation does to rows.
An operation that is not in the table is refused if it meets rows. There are
three kinds of optimizers:

- Rows are independent, for example in SGD, Adagrad and Adam.
- Rows meet only in sums, for example in clipping by a global norm. A sum over
  the touched rows is right if every other row would add zero. Therefore the
  analysis also follows the value at a row without a gradient (`Fact.idle`).
- Everything else mixes rows, and is refused by name.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import ShapedArray
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.rows.sparse_rows import is_rows


class Kept(NamedTuple):
  """Marks a value that equals the input of this number."""

  number: int


class Fact(NamedTuple):
  """Properties of a value in the program.

  Attributes:
    table: The table that it has rows of, in the dimension in which the two
      traces differ. A value of no table is the same for all rows.
    idle: Its value at a row without a gradient: a NumPy number, `Kept`, or None
      if that is not known.
    sums: The line at which rows met in a sum, if they did.
    refusal: Why it cannot be computed from some rows alone.
  """

  table: int | None = None
  idle: Any = None
  sums: str | None = None
  refusal: str | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowAnalysis:
  """The result: how an optimizer treats the rows of some tables.

  Attributes:
    program: The optimizer's update of whole tables.
    state_rows: For each leaf of the state, the table that it has rows of.
    refusals: Why rows are not independent, for each table that is refused.
    sums: The line at which rows meet in a sum; None if they are independent.
    rests: Tables whose rows and state do not change without a gradient.
    wants_more: True if `update` needs arguments that were not given.
    has_numbers: True if the program has constants that depend on sizes.
  """

  program: "Update"
  state_rows: tuple[int | None, ...]
  refusals: dict[int, str]
  sums: str | None = None
  rests: frozenset[int] = frozenset()
  wants_more: bool = False
  has_numbers: bool = False

  def update(
    self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
  ) -> tuple[Any, Any]:
    """Updates some rows as the optimizer updates whole tables.

    For example, a mean divides by a constant that depends on the size. Then the
    program for some rows runs with the constants of the one for whole tables.
    """
    program = self.program
    if not self.has_numbers:
      return program.inner.update(grads, state, params, **extra)
    leaves = jax.tree.leaves((grads, state, params, extra))
    some = program.trace({i: len(leaves[i]) for i in program.sizes})
    whole = program.trace(program.sizes)
    arrays = list(filter(_is_array, leaves))
    results = _WithNumbers().run(some, whole, arrays)
    return jax.tree.structure((grads, state)).unflatten(results)


def analysis_of(
  inner: optax.GradientTransformationExtraArgs,
  grads: Any,
  state: Any,
  params: Any,
  extra: Mapping[str, Any],
  tables: Mapping[int, int],
  cache: dict[Any, RowAnalysis] | None = None,
) -> RowAnalysis:
  """Analyses how the update of an optimizer treats rows.

  Args:
    inner: The optimizer.
    grads: Arrays, SparseRows or types of whole tables.
    state: Arrays or types of the optimizer's state for whole tables.
    params: Arrays or types of whole tables, or None.
    extra: Further arguments of `update`.
    tables: Numbers of the leaves of `grads` that are tables, and with how many
      rows of each `update` will be called; at least 2.
    cache: Earlier analyses of the same optimizer. It belongs to the
      transformation, because an optimizer may hold tracers.
  """
  given = grads, state, params, dict(extra)
  flat = [jax.tree.flatten(x, is_leaf=is_rows) for x in given]
  types = [[type_of(x) if _is_array(x) else x for x in xs] for xs, _ in flat]
  program = Update(
    inner=inner,
    structures=tuple([structure for _, structure in flat]),
    leaves=tuple(map(tuple, types)),
    tables=tuple(tables.items()),
  )
  cache = {} if cache is None else cache
  try:
    if program not in cache:
      cache[program] = program.analysis()
  except TypeError:  # An argument that has no hash.
    return program.analysis()
  return cache[program]


_SYNCS = (
  "it synchronizes devices. Put zen_sync before lazy_rows, and do not use it"
  " with sharded_optimizer"
)
_UNTRACED = "it cannot be traced with these arguments"
_SIZES = (
  "it is another program for tables of another size. Give masks and labels that"
  " depend on sizes as trees instead of functions"
)
_BY_ROW = "it has an array with an entry for every row"
_STATE = "its state does not have one row for each row of a table (`init`)"


@dataclasses.dataclass(frozen=True)
class Update:
  """The update of an optimizer as a function of a flat list of arrays.

  Attributes:
    inner: The optimizer.
    structures: The structures of gradients, state, parameters and further
      arguments.
    leaves: The leaves of each: types of arrays; other leaves as they are.
    tables: Numbers of the gradients that are tables, and with how many rows of
      each `update` will be called.
  """

  inner: optax.GradientTransformationExtraArgs
  structures: tuple[Any, ...]
  leaves: tuple[tuple[Any, ...], ...]
  tables: tuple[tuple[int, int], ...]

  def analysis(self) -> RowAnalysis:
    """Compares the program for whole tables with the one for some rows."""
    if self._row_leaves is None:
      return self._refused(_STATE)
    try:
      whole = self.trace(self.sizes)
    except NameError as error:
      return self._refused(f"{_SYNCS} ({_line(error)})")
    except Exception as error:  # Any error of the optimizer.
      return self._refused(f"{_UNTRACED} ({_line(error)})", wants_more=True)
    facts = _Facts(self.sizes)
    try:
      some = self.trace(self._other_sizes)
      outputs = facts.run(whole, some, self._facts())
    except Exception as error:
      return self._refused(f"{_SIZES} ({_line(error)})")
    count, rests = len(self.leaves[0]), set(self.sizes)
    refusals: dict[int, str] = {}
    for i, (table, fact) in enumerate(zip(self._row_leaves, outputs)):
      refusal = fact.refusal
      is_reshaped = [
        trace.out_avals[i].shape != trace.in_avals[i].shape
        for trace in (whole, some)
      ]
      if fact.table not in (table, None) or any(is_reshaped):
        refusal = refusal or "it returns something other than rows"
      if refusal:
        for hit in self.sizes if table is None else (table,):
          refusals.setdefault(hit, refusal)
      kept = _alike([fact.idle, Kept(i)])
      if not (_is_zero(fact.idle) if i < count else kept):
        rests.discard(table)
    return RowAnalysis(
      program=self,
      state_rows=tuple(self._row_leaves[count : count + len(self.leaves[1])]),
      refusals=refusals,
      sums=next(filter(None, [fact.sums for fact in outputs]), None),
      rests=frozenset(rests.difference(refusals)),
      has_numbers=facts.has_numbers,
    )

  def _refused(self, reason, wants_more=False):
    return RowAnalysis(
      program=self,
      state_rows=(None,) * len(self.leaves[1]),
      refusals={i: reason for i in self.sizes},
      wants_more=wants_more,
    )

  def moving(self) -> list[int]:
    """Returns the tables whose rows move even before their first gradient."""
    if not self.sizes:
      return []
    init = self._trace(self._init, self._params)
    state = _Facts({}).run(init, init, [Fact()] * len(self._params))
    traces = self.trace(self.sizes), self.trace(self._other_sizes)
    inputs = self._facts([x.idle for x in state])
    outputs = _Facts(self.sizes).run(*traces, inputs)
    return [i for i in self.sizes if not _is_zero(outputs[i].idle)]

  def trace(self, sizes: Mapping[int, int]) -> Any:
    """Traces the update for tables with so many rows."""
    types = [
      x if table is None else _sized(x, sizes[table])
      for table, x in zip(self._row_leaves or (), sum(self.leaves, ()))
      if isinstance(x, ShapedArray)
    ]

    def flat(arrays):
      given = iter(arrays)
      grads, state, params, extra = [
        structure.unflatten(
          [next(given) if isinstance(x, ShapedArray) else x for x in leaves]
        )
        for structure, leaves in zip(self.structures, self.leaves)
      ]
      updates, state = self.inner.update(grads, state, params, **extra)
      return self.structures[0].flatten_up_to(updates), jax.tree.leaves(state)

    return self._trace(flat, types)

  def _trace(self, fun, types):
    """Traces as optax computes, whatever promotions a program forbids."""
    with jax.numpy_dtype_promotion("standard"):
      with jax.numpy_rank_promotion("allow"):
        return jax.make_jaxpr(fun)(types)

  def _init(self, leaves):
    params = self.structures[0].unflatten(leaves)
    return jax.tree.leaves(self.inner.init(params))

  @property
  def _params(self):
    """Types of the parameters."""
    return list(self.leaves[2] or self.leaves[0])

  @functools.cached_property
  def sizes(self) -> dict[int, int]:
    """Rows of whole tables, at least one: JAX omits operations on nothing."""
    return {i: max(1, self.leaves[0][i].shape[0]) for i, _ in self.tables}

  @property
  def _other_sizes(self) -> dict[int, int]:
    """The rows that `update` will be called with, unlike `sizes`."""
    return {i: n + (n == self.sizes[i]) for i, n in self.tables}

  @functools.cached_property
  def _row_leaves(self) -> list[int | None] | None:
    """The table that each leaf has rows of.

    None if a leaf of the state depends on the size of a table in another way.
    """
    grads, state, params, extra = self.leaves
    larger, tables = self._params, {}
    for k, i in enumerate(self.sizes):  # Each grows by another number of rows.
      rows = grads[i].shape[0]
      larger[i] = _sized(larger[i], rows + 1 + k)
      tables[(rows,), (rows + 1 + k,)] = i
    grown: Any = self._trace(self._init, larger).out_avals
    if len(grown) != len(state):
      return None
    found: list[int | None] = []
    for leaf, more in zip(state, grown):
      sizes = leaf.shape[:1], more.shape[:1]
      if leaf.shape == more.shape:
        found.append(None)
      elif sizes in tables and leaf.shape[1:] == more.shape[1:]:
        found.append(tables[sizes])
      else:
        return None
    by_grad = [i if i in self.sizes else None for i in range(len(grads))]
    return [*by_grad, *found, *by_grad[: len(params)], *[None] * len(extra)]

  def _facts(self, state: Sequence[Any] | None = None):
    """Facts of all arrays; the gradient of an idle row is zero.

    Args:
      state: Values of the state at such a row, if they are known.
    """
    grads, own, *rest = self.leaves
    idle: list[Any] = [np.zeros((), x.dtype)[()] for x in grads]
    idle += state or [Kept(len(grads) + i) for i in range(len(own))]
    idle += [None] * sum(map(len, rest))
    leaves = zip(self._row_leaves or (), idle, sum(self.leaves, ()))
    return [
      Fact() if table is None else Fact(table, value)
      for table, value, x in leaves
      if isinstance(x, ShapedArray)
    ]


class _WithNumbers(jaxprs.Pairwise):
  """Computes the first of two traces with the constants of the second."""

  def constant(self, x, other):
    return other if np.shape(x) == np.shape(other) else x

  def equation(self, eqn, other, values):
    return jaxprs.bind(eqn, compat.cast_alike(values))

  def chosen(self, eqn, which, cases):
    last = np.int32(len(cases) - 1)
    which = lax.clamp(np.int32(0), which, last)
    return lax.select_n(which, *compat.cast_alike(cases))


# --- one value after another ---


class _Mixes(Exception):
  """An operation makes rows from other rows."""


class _Facts(jaxprs.Pairwise):
  """Follows facts from the inputs of a program to its results.

  Attributes:
    sizes: Rows of each table in the first trace.
    has_numbers: True if constants differ between the traces.
  """

  def __init__(self, sizes: Mapping[int, int]):
    self.sizes = sizes
    self.has_numbers = False

  def constant(self, x, other):
    if np.shape(x) != np.shape(other):
      return Fact(refusal=_BY_ROW)
    if isinstance(x, Tracer) or jnp.issubdtype(
      getattr(x, "dtype", float), jax.dtypes.extended
    ):
      return Fact()  # Its numbers are not known while tracing.
    number = np.asarray(x)
    self.has_numbers |= number.tobytes() != np.asarray(other).tobytes()
    return Fact(idle=number.reshape(-1)[0] if number.size == 1 else None)

  def equation(self, eqn, other, values):
    name = eqn.primitive.name
    if name == "optimization_barrier":
      return values
    return [self._made(name, eqn, other, values)] * len(eqn.outvars)

  def chosen(self, eqn, which, cases):
    return self._made("select_n", eqn, eqn, [which, *cases])

  def _made(self, name, eqn, other, reads):
    sums = next(filter(None, [f.sums for f in reads]), None)
    refusal = next(filter(None, [f.refusal for f in reads]), None)
    if refusal == _BY_ROW:
      refusal = f"{refusal} ({self.place(eqn)})"
    if refusal is not None:
      return Fact(sums=sums, refusal=refusal)
    try:
      fact = self._through(name, eqn, other, reads)
    except _Mixes as error:
      return Fact(sums=sums, refusal=f"{error} ({self.place(eqn)})")
    return fact if fact.sums else fact._replace(sums=sums)

  def _through(self, name, eqn, twin, reads) -> Fact:
    """Returns the fact of an equation's results, except for earlier sums."""
    idle = _idle(name, eqn, reads)
    tables = {f.table for f in reads if f.table is not None}
    if not tables:
      _require_uniform(name, eqn, twin)
      return Fact(idle=idle)
    if len(tables) > 1:
      raise _Mixes(f"{name} mixes rows of two tables")
    (table,) = tables
    if name in _ELEMENTWISE:
      return Fact(table, idle)
    dims = _row_dims(eqn.outvars[0], twin.outvars[0])
    if name in _NEUTRAL and not dims:
      neutral = _NEUTRAL[name]
      if any(_is_number(f.idle) and f.idle == neutral for f in reads):
        return Fact(sums=self.place(eqn))
      raise _Mixes(
        f"{name} needs state or parameters of rows that a step does not touch"
      )
    if len(dims) == 1 and self._keeps(name, eqn, twin, dims[0], table):
      return Fact(table, idle)
    raise _Mixes(f"{name} mixes rows")

  def _keeps(self, name, eqn, twin, dim, table) -> bool:
    """Returns True if rows are in order in dimension `dim` of the result."""
    if name == "dot_general":
      contracted, _ = eqn.params["dimension_numbers"]
      each = zip(eqn.invars, twin.invars, contracted)
      return not any([set(_row_dims(x, y)) & {*dims} for x, y, dims in each])
    if name in _IN_ORDER:
      return True
    if name in _ALONG:
      keys = ("axis", "dimension", "dimensions")
      (axes,) = [eqn.params[key] for key in keys if key in eqn.params]
      return dim not in (axes if isinstance(axes, tuple) else (axes,))
    if name not in ("broadcast_in_dim", "slice", "reshape", "squeeze"):
      return False
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    (before,) = _row_dims(eqn.invars[0], twin.invars[0])
    if name in ("broadcast_in_dim", "slice"):
      return old[before] == new[dim]
    is_whole = new[dim] % self.sizes[table] == 0  # No part of a row.
    return is_whole and math.prod(old[:before]) == math.prod(new[:dim])


def _row_dims(x: Any, twin: Any) -> list[int]:
  """Returns the dimensions in which a variable of two traces differs."""
  sizes = zip(x.aval.shape, twin.aval.shape)
  return [dim for dim, (here, there) in enumerate(sizes) if here != there]


def _require_uniform(name: str, eqn: Any, twin: Any) -> None:
  """Refuses values that differ by row, and sizes that become numbers."""
  if not jaxprs.grown(eqn, twin):
    return
  if name in _ELEMENTWISE or name in ("broadcast_in_dim", "transpose"):
    return
  if name == "iota":
    if eqn.params["dimension"] in _row_dims(eqn.outvars[0], twin.outvars[0]):
      raise _Mixes("it numbers the rows")
    return
  if name in ("reshape", "squeeze"):
    sizes = lambda x: [n for n in x.aval.shape if n != 1]
    if sizes(eqn.invars[0]) == sizes(eqn.outvars[0]):
      return
  if name.startswith(("random_", "threefry", "rng_")):
    raise _Mixes("it draws random numbers for every row")
  raise _Mixes(f"{name} depends on the number of rows")


# --- the value at a row without a gradient ---


def _idle(name: str, eqn: Any, reads: list[Fact]) -> Any:
  """Returns the result of an operation if it is known, otherwise None.

  Zero times an unknown value is zero, and so is zero divided by one.
  """
  values = [f.idle for f in reads]
  if not values:
    return None
  zeros = list(map(_is_zero, values))
  dtype = eqn.outvars[0].aval.dtype
  if name == "select_n":
    which, *cases = values
    if _is_number(which):
      return cases[int(which)]
    return cases[0] if _alike(cases) else None
  if name in _ELEMENTWISE and all(map(_is_number, values)):
    return _computed(name, eqn, values)
  if name in ("mul", "and", "dot_general") and any(zeros):
    return np.zeros((), dtype)[()]
  if name == "div" and zeros[0]:
    return values[0]
  if name in ("add", "add_any", "sub") and zeros[1]:
    return values[0]
  if name in ("add", "add_any") and zeros[0]:
    return values[1]
  if name in _STAYS:
    return values[0]
  keeps = name in _REPEATS or (name in _ADDS and zeros[0])
  is_one = _is_number(values[0]) and _alike(values)
  return values[0] if is_one and keeps else None


def _computed(name: str, eqn: Any, values: list[Any]) -> Any:
  """Computes an elementwise operation on known numbers with NumPy."""
  function: Any = _ELEMENTWISE[name]
  dtype = eqn.outvars[0].aval.dtype
  if name == "integer_pow":
    values = [*values, np.asarray(eqn.params["y"], dtype)]
  try:
    with np.errstate(all="ignore"):
      return np.asarray(function(*values)).astype(dtype)[()]
  except (TypeError, ValueError, OverflowError):
    return None  # For example, NumPy does not have this function.


def _alike(values: Sequence[Any]) -> bool:
  """Returns True if values are known and equal, and of one type."""
  first = values[0]
  same = [type(x) is type(first) and bool(x == first) for x in values]
  return first is not None and all(same)


def _is_number(x: Any) -> bool:
  return isinstance(x, np.generic)


def _is_zero(x: Any) -> bool:
  return _is_number(x) and bool(x == 0)


# --- the table of primitives ---

# Operations on each element; behind `=` is the NumPy function, if its name
# differs.
_ELEMENTWISE = {
  name.split("=")[0]: getattr(np, name.split("=")[-1], None)
  for name in (
    "abs acos acosh add add_any=add and=bitwise_and asin asinh atan atan2 atanh"
    " cbrt ceil clamp clz complex conj convert_element_type=copy copy"
    " copy_p=copy cos cosh digamma div=true_divide eq=equal erf erf_inv erfc"
    " exp exp2 expm1 floor ge=greater_equal gt=greater imag integer_pow=power"
    " is_finite=isfinite le=less_equal lgamma log log1p logistic lt=less"
    " max=maximum min=minimum mul=multiply ne=not_equal neg=negative nextafter"
    " not=invert or=bitwise_or population_count pow=power pvary=copy real"
    " reduce_precision rem=fmod round rsqrt select_n shift_left"
    " shift_right_arithmetic shift_right_logical sign sin sinh sqrt square"
    " stop_gradient=copy sub=subtract tan tanh xor=bitwise_xor"
  ).split()
}
# Operations that keep the order along each dimension that is left.
_IN_ORDER = frozenset(
  "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod"
  " reduce_sum transpose".split()
)
# The value at a row with which a reduction over rows is right without that row.
_NEUTRAL = {
  "dot_general": 0,
  "reduce_sum": 0,
  "reduce_and": True,
  "reduce_or": False,
}
# Operations along the dimensions in a parameter, which mix nothing else.
_ALONG = frozenset(
  "concatenate cumlogsumexp cummax cummin cumprod cumsum rev sort split".split()
)
# Operations that keep any value.
_STAYS = ("copy", "copy_p", "pvary", "stop_gradient")
# Operations that keep a number which all operands have, or only zero.
_REPEATS = frozenset(
  "broadcast_in_dim concatenate cummax cummin reduce_and reduce_max reduce_min"
  " reduce_or reshape rev slice sort split squeeze transpose".split()
)
_ADDS = ("reduce_sum", "reduce_prod", "cumsum", "cumprod")


# --- types ---


def _sized(leaf: Any, size: int) -> Any:
  return leaf.update(shape=(size, *leaf.shape[1:]))


def _line(error: Exception) -> str:
  return str(error).strip().split("\n")[0] or type(error).__name__


def _is_array(x: Any) -> bool:
  return hasattr(x, "dtype") or isinstance(x, (bool, int, float))


def type_of(leaf: Any) -> Any:
  """Returns the type of an array, of a shape, or of the table of SparseRows.

  The type does not say over which axes the array varies, because programs do
  not depend on that.
  """
  if is_rows(leaf):
    return ShapedArray(tuple(leaf.shape), leaf.dtype)
  if not isinstance(leaf, (ShapedArray, jax.ShapeDtypeStruct)):
    leaf = jax.typeof(leaf)
  weak = getattr(leaf, "weak_type", False)
  return ShapedArray(leaf.shape, leaf.dtype, weak_type=weak)
