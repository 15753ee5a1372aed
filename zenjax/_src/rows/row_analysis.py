"""Decides from an optimizer's program whether it treats rows apart.

`update` is traced twice, for whole tables and for tables of another number of
rows, and every value is followed from the inputs to the results. One table of
primitives says what each does to rows; whatever is not in it is refused where
it meets rows. There are three kinds of optimizers:

- Rows are independent: SGD, Adagrad, Adam.
- Rows meet only in sums, as in a clip by a global norm. That is right on the
  touched rows alone if every other row adds zero. So the analysis also follows
  what each value is at a row without a gradient (`Fact.idle`).
- Anything else mixes rows, and is refused by name.
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


class Rows(NamedTuple):
  """Where the rows of a table are in a value."""

  table: int
  dim: int
  inner: int = 1  # Elements of one row in this dimension, as after `ravel`.


class Kept(NamedTuple):
  """The value is the input of this number, unchanged."""

  number: int


class Fact(NamedTuple):
  """What is known of a value.

  Attributes:
    rows: Where a table's rows are in it. A value without rows is the same for
      all rows, however often it is repeated.
    idle: What it is at a row without a gradient: a NumPy number, `Kept`, or
      None where that is not known.
    sums: The line at which rows met in a sum, if they did.
    refusal: Why it cannot be computed from some rows alone.
  """

  rows: Rows | None = None
  idle: Any = None
  sums: str | None = None
  refusal: str | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowAnalysis:
  """How an optimizer treats the rows of some tables.

  Attributes:
    program: Its update of whole tables.
    state_rows: For each leaf of the state, the table that it has rows of.
    refusals: Why rows are not independent, by the number of the table's leaf.
    sums: The line at which rows meet in a sum; None if they are independent.
    rests: Tables whose rows and state stay as they are without a gradient.
    wants_more: Whether `update` needs arguments that were not given.
    has_numbers: Whether the program holds numbers of rows.
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
    """Updates some rows as the optimizer updates whole tables."""
    if self.has_numbers:
      return self.program.with_numbers(grads, state, params, extra)
    return self.program.inner.update(grads, state, params, **extra)


def analysis_of(
  inner: optax.GradientTransformationExtraArgs,
  grads: Any,
  state: Any,
  params: Any,
  extra: Mapping[str, Any],
  tables: Mapping[int, int],
  known: dict[Any, RowAnalysis] | None = None,
) -> RowAnalysis:
  """Reads off an optimizer's `update` how it treats rows.

  Args:
    inner: The optimizer.
    grads: Arrays, SparseRows or types of whole tables.
    state: Of the optimizer, for whole tables: arrays or types.
    params: Arrays or types of whole tables, or None.
    extra: Further arguments of `update`.
    tables: Leaves of `grads` that are tables, by number, and with how many
      rows of each `update` will be called; at least 2.
    known: Earlier analyses of the same optimizer, to look up and to extend. It
      belongs to the transformation, because an optimizer may hold tracers.
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
  known = {} if known is None else known
  try:
    if program not in known:
      known[program] = program.analysis()
  except TypeError:  # An argument that has no hash.
    return program.analysis()
  return known[program]


_SYNCS = (
  "it synchronizes devices: put zen_sync before lazy_rows, and have neither"
  " with sharded_optimizer"
)
_UNTRACED = "it cannot be traced with these arguments"
_SIZES = (
  "it does something else for tables of another size: give masks and labels"
  " that depend on sizes as trees instead of functions"
)
_BY_ROW = "it holds an array with something for every row"
_STATE = "its state does not have one row for each row of a table (`init`)"


@dataclasses.dataclass(frozen=True)
class Update:
  """`inner.update` as a function of a flat list of arrays.

  Attributes:
    inner: The optimizer.
    structures: Of gradients, state, parameters and further arguments.
    leaves: Of each of these: types of arrays, anything else as it is.
    tables: Which gradients are those of tables, and of how many rows `update`
      will be called.
  """

  inner: optax.GradientTransformationExtraArgs
  structures: tuple[Any, ...]
  leaves: tuple[tuple[Any, ...], ...]
  tables: tuple[tuple[int, int], ...]

  def analysis(self) -> RowAnalysis:
    """Compares whole tables with tables of the wanted sizes."""
    if self._owners is None:
      return self._refused(_STATE)
    try:
      whole = self._trace(self._flat, self._arrays(self._whole))
    except NameError as error:
      return self._refused(f"{_SYNCS} ({_line(error)})")
    except Exception as error:  # Whatever an optimizer raises.
      return self._refused(f"{_UNTRACED} ({_line(error)})", wants_more=True)
    facts = _Facts()
    try:
      twin = self._trace(self._flat, self._arrays(self._few))
      outputs = facts.run(whole, twin, self._facts())
    except Exception as error:
      return self._refused(f"{_SIZES} ({_line(error)})")
    count, rests = len(self.leaves[0]), set(self._whole)
    refusals: dict[int, str] = {}
    for i, (table, fact) in enumerate(zip(self._owners, outputs)):
      refusal = fact.refusal or ""
      rows = None if table is None else Rows(table, 0)
      is_reshaped = (
        whole.out_avals[i].shape != whole.in_avals[i].shape
        or twin.out_avals[i].shape != twin.in_avals[i].shape
      )
      if fact.rows not in (rows, None) or is_reshaped:
        refusal = refusal or "it makes something else than rows"
      if refusal:
        for hit in self._whole if table is None else (table,):
          refusals.setdefault(hit, refusal)
      kept = _alike([fact.idle, Kept(i)])
      if not (_is_zero(fact.idle) if i < count else kept):
        rests.discard(table)
    return RowAnalysis(
      program=self,
      state_rows=tuple(self._owners[count : count + len(self.leaves[1])]),
      refusals=refusals,
      sums=_first([fact.sums for fact in outputs]),
      rests=frozenset(rests.difference(refusals)),
      has_numbers=facts.has_numbers,
    )

  def _refused(self, why, wants_more=False):
    return RowAnalysis(
      program=self,
      state_rows=(None,) * len(self.leaves[1]),
      refusals={i: why for i in self._whole},
      wants_more=wants_more,
    )

  def moving(self) -> list[int]:
    """Returns tables of which rows move that never had a gradient."""
    if not self.tables:
      return []
    like = self._like
    made = self._trace(self._init, like)
    state = _Facts().run(made, made, [Fact()] * len(like))
    whole, twin = (
      self._trace(self._flat, self._arrays(sizes))
      for sizes in (self._whole, self._few)
    )
    outputs = _Facts().run(whole, twin, self._facts([x.idle for x in state]))
    return [i for i in self._whole if not _is_zero(outputs[i].idle)]

  def with_numbers(
    self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
  ) -> tuple[Any, Any]:
    """Updates some rows with the numbers of whole tables.

    A mean divides by a number that the program holds. It is traced for whole
    tables and for these rows, and runs on the rows with the former's numbers.
    """
    leaves = jax.tree.leaves((grads, state, params, extra))
    arrays = [x for x in leaves if _is_array(x)]
    whole = self._trace(self._flat, self._arrays(self._whole))
    some = self._trace(self._flat, [type_of(x) for x in arrays])
    outs = _Numbers().run(some, whole, arrays)
    count = len(self.leaves[0])
    updates, own = self.structures[:2]
    return updates.unflatten(outs[:count]), own.unflatten(outs[count:])

  def _trace(self, fun, types) -> Any:
    """Traces as optax computes, whatever promotions a program forbids."""
    with jax.numpy_dtype_promotion("standard"):
      with jax.numpy_rank_promotion("allow"):
        return jax.make_jaxpr(fun)(types)

  def _flat(self, arrays):
    given = iter(arrays)
    grads, state, params, extra = [
      structure.unflatten(
        [next(given) if isinstance(x, ShapedArray) else x for x in leaves]
      )
      for structure, leaves in zip(self.structures, self.leaves)
    ]
    updates, state = self.inner.update(grads, state, params, **extra)
    return self.structures[0].flatten_up_to(updates), jax.tree.leaves(state)

  def _init(self, leaves):
    params = self.structures[0].unflatten(leaves)
    return jax.tree.leaves(self.inner.init(params))

  @property
  def _like(self):
    """Types as of parameters."""
    grads, _, params, _ = self.leaves
    return list(params or grads)

  @property
  def _whole(self) -> dict[int, int]:
    """Rows of whole tables.

    One where a table has none, for JAX leaves out operations on nothing.
    """
    return {i: max(1, self.leaves[0][i].shape[0]) for i, _ in self.tables}

  @property
  def _few(self) -> dict[int, int]:
    """Rows of other tables, as `update` will be called with."""
    return {i: n + (n == self._whole[i]) for i, n in self.tables}

  @functools.cached_property
  def _owners(self) -> list[int | None] | None:
    """The table whose rows each leaf has: of the state, if its size follows.

    None if a leaf of the state follows a table in another way.
    """
    grads, state, params, extra = self.leaves
    tables = [i for i, _ in self.tables]
    every = [i if i in tables else None for i in range(len(grads))]
    size = {i: grads[i].shape[0] + 1 + k for k, i in enumerate(tables)}
    grown = [
      _sized(x, size[i]) if i in size else x for i, x in enumerate(self._like)
    ]
    grown: Any = self._trace(self._init, grown).out_avals
    found: list[int | None] = []
    for leaf, more in zip(state, grown):
      follows = [
        i
        for i in tables
        if leaf.shape[:1] == grads[i].shape[:1]
        and _sized(leaf, size[i]).shape == more.shape
      ]
      found += [None] if leaf.shape == more.shape else follows[:1]
    if not len(found) == len(state) == len(grown):
      return None
    return [*every, *found, *every[: len(params)], *[None] * len(extra)]

  def _arrays(self, sizes):
    """Types of all arrays, for tables of these sizes."""
    return [
      x if table is None else _sized(x, sizes[table])
      for table, x in zip(self._owners or (), sum(self.leaves, ()))
      if isinstance(x, ShapedArray)
    ]

  def _facts(self, state: Sequence[Any] | None = None):
    """Facts of all arrays; of an idle row the gradient is zero.

    Args:
      state: What leaves of the state are at such a row, if it is known.
    """
    grads, own, *rest = self.leaves
    idle: list[Any] = [np.zeros((), x.dtype)[()] for x in grads]
    idle += state or [Kept(len(grads) + i) for i in range(len(own))]
    idle += [None] * sum(map(len, rest))
    return [
      Fact() if table is None else Fact(Rows(table, 0), known)
      for table, known, x in zip(self._owners or (), idle, sum(self.leaves, ()))
      if isinstance(x, ShapedArray)
    ]


class _Numbers(jaxprs.Pairwise):
  """Computes the first of two traces with the numbers of the second."""

  def constant(self, x, other):
    return other if np.shape(x) == np.shape(other) else x

  def equation(self, eqn, other, values):
    return jaxprs.bind(eqn, compat.cast_alike(values))

  def chosen(self, eqn, which, cases):
    last = np.int32(len(cases) - 1)
    which = lax.clamp(np.int32(0), which, last)
    return lax.select_n(which, *compat.cast_alike(cases))


# --- one value after another ---


def _first(texts: Sequence[str | None]) -> str | None:
  return next(filter(None, texts), None)


class _Mixes(Exception):
  """An operation makes rows of other rows."""


class _Facts(jaxprs.Pairwise):
  """Follows facts from the inputs of a program to its results.

  Attributes:
    has_numbers: Whether constants differ between tables of two sizes.
  """

  has_numbers = False

  def constant(self, x, other):
    if np.shape(x) != np.shape(other):
      return Fact(refusal=_BY_ROW)
    if _is_opaque(x):
      return Fact()
    number = np.asarray(x)
    self.has_numbers |= number.tobytes() != np.asarray(other).tobytes()
    return Fact(idle=number.reshape(-1)[0] if number.size == 1 else None)

  def equation(self, eqn, other, values):
    if eqn.primitive.name == "optimization_barrier":
      return values
    return [self._made(eqn.primitive.name, eqn, other, values)] * len(
      eqn.outvars
    )

  def chosen(self, eqn, which, cases):
    return self._made("select_n", eqn, eqn, [which, *cases])

  def _made(self, name, eqn, other, reads):
    sums = _first([f.sums for f in reads])
    refusal = _first([f.refusal for f in reads])
    if refusal == _BY_ROW:
      refusal = f"{refusal} ({self.place(eqn)})"
    if refusal is not None:
      return Fact(sums=sums, refusal=refusal)
    try:
      fact = _through(name, eqn, other, reads)
    except _Mixes as error:
      return Fact(sums=sums, refusal=f"{error} ({self.place(eqn)})")
    return fact._replace(sums=self.place(eqn) if fact.sums else sums)


def _through(name: str, eqn: Any, twin: Any, reads: list[Fact]) -> Fact:
  """Returns what is known of the results of one equation."""
  rows = {f.rows for f in reads if f.rows}
  if not rows:
    _require_uniform(name, eqn, twin)
    return Fact(idle=_idle(name, eqn, reads))
  if len({r.table for r in rows}) > 1:
    raise _Mixes(f"it mixes rows of two tables, by {name}")
  if name == "dot_general":
    return _product(name, eqn, reads)
  if len(rows) > 1:
    raise _Mixes(f"it takes rows in two orders, by {name}")
  (here,) = rows
  idle = _idle(name, eqn, reads)
  if name in _ELEMENTWISE:
    return Fact(here, idle)
  if name in _ALONG:
    axes = eqn.params[_ALONG[name]]
    axes = axes if isinstance(axes, tuple) else (axes,)
    if here.dim not in axes:
      less = sum(a < here.dim for a in axes) if name in _FOLDS else 0
      return Fact(here._replace(dim=here.dim - less), idle)
    if name not in _NEUTRAL:
      raise _Mixes(f"it mixes rows, by {name}")
    if not _is_number(reads[0].idle) or reads[0].idle != _NEUTRAL[name]:
      raise _Mixes(
        "it needs state or parameters of rows that a step does not touch, by"
        f" {name}"
      )
    return Fact(sums=name)
  old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  if name in ("reshape", "squeeze"):
    return Fact(_reshaped(here, old, new, twin.outvars[0].aval.shape), idle)
  if name == "transpose":
    dim = eqn.params["permutation"].index(here.dim)
    return Fact(here._replace(dim=dim), idle)
  if name in ("broadcast_in_dim", "slice"):
    dims = eqn.params.get("broadcast_dimensions", range(len(old)))
    dim = dims[here.dim]
    # Strides of a slice keep all rows only where they are one.
    if new[dim] == old[here.dim]:
      return Fact(here._replace(dim=dim), idle)
  raise _Mixes(f"it may mix rows, by {name}")


def _require_uniform(name: str, eqn: Any, twin: Any) -> None:
  """Refuses values that differ by row, and sizes that become numbers."""
  if not jaxprs.grown(eqn, twin):
    return
  if name in _ELEMENTWISE or name in ("broadcast_in_dim", "transpose"):
    return
  if name == "iota":
    dim = eqn.params["dimension"]
    if eqn.params["shape"][dim] != twin.params["shape"][dim]:
      raise _Mixes("it numbers the rows")
    return
  if name in ("reshape", "squeeze"):
    real = lambda x: [n for n in x.aval.shape if n != 1]
    if real(eqn.invars[0]) == real(eqn.outvars[0]):
      return
  if name.startswith(("random_", "threefry", "rng_")):
    raise _Mixes("it draws random numbers for every row")
  raise _Mixes(f"it depends on how many rows there are, by {name}")


def _reshaped(
  here: Rows, old: Sequence[int], new: Sequence[int], twin: Sequence[int]
) -> Rows:
  """Where rows are in other dimensions, if they still follow one another.

  Args:
    here: Where they are before.
    old: The shape before.
    new: The shape after.
    twin: The same with another number of rows.
  """
  changed = [d for d, (a, b) in enumerate(zip(new, twin)) if a != b]
  number = old[here.dim] // here.inner
  if len(changed) == 1 and number:
    (dim,) = changed
    before = math.prod(old[: here.dim]) == math.prod(new[:dim])
    if before and new[dim] % number == 0:
      return here._replace(dim=dim, inner=new[dim] // number)
  raise _Mixes("it mixes rows, by a change of shape")


def _product(name: str, eqn: Any, reads: list[Fact]) -> Fact:
  """A matrix product: by row, or a sum over rows."""
  contracted, batch = eqn.params["dimension_numbers"]
  rows: list[Any] = [f.rows for f in reads]
  sides: list[Any] = [x.dim if x else None for x in rows]
  zero = any(_is_zero(f.idle) for f in reads)
  idle = np.zeros((), eqn.outvars[0].aval.dtype)[()] if zero else None
  if None not in sides:
    same = rows[0].inner == rows[1].inner
    place = lambda dims: [
      tuple(d).index(s) if s in d else -1 for d, s in zip(dims, sides)
    ]
    summed, apart = place(contracted), place(batch)
    if same and apart[0] == apart[1] >= 0:
      return Fact(rows[0]._replace(dim=apart[0]), idle)
    if same and summed[0] == summed[1] >= 0 and zero:
      return Fact(sums=name)
    raise _Mixes("it mixes rows, by a matrix product")
  side = 0 if sides[1] is None else 1
  dim = sides[side]
  taken = {*contracted[side], *batch[side]}
  if dim in taken:
    raise _Mixes("it mixes rows, by a matrix product")
  free = [d for d in range(eqn.invars[side].aval.ndim) if d not in taken]
  new = len(batch[0]) + free.index(dim)
  if side:
    new += eqn.invars[0].aval.ndim - len(contracted[0]) - len(batch[0])
  return Fact(rows[side]._replace(dim=new), idle)


# --- what a value is at a row without a gradient ---


def _idle(name: str, eqn: Any, reads: list[Fact]) -> Any:
  """What an operation makes where its operands are known, else None.

  What zero is multiplied with, or divided by, need not be known.
  """
  values = [f.idle for f in reads]
  if not values:
    return None
  zeros = list(map(_is_zero, values))
  if name == "select_n":
    which, *cases = values
    if _is_number(which):
      return cases[int(which)]
    return cases[0] if _alike(cases) else None
  if name in _ELEMENTWISE and all(map(_is_number, values)):
    return _computed(name, eqn, values)
  if name in ("mul", "and") and any(zeros):
    return values[zeros.index(True)]
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
  """What NumPy computes of known numbers."""
  function: Any = _ELEMENTWISE[name]
  dtype = eqn.outvars[0].aval.dtype
  if name == "integer_pow":
    values = [*values, np.asarray(eqn.params["y"], dtype)]
  try:
    with np.errstate(all="ignore"):
      return np.asarray(function(*values)).astype(dtype)[()]
  except (TypeError, ValueError, OverflowError):
    return None  # Also where the table holds None.


def _alike(values: Sequence[Any]) -> bool:
  """True if values are known and the same, of one type."""
  first = values[0]
  same = [type(x) is type(first) and bool(x == first) for x in values]
  return first is not None and all(same)


def _is_number(x: Any) -> bool:
  return isinstance(x, np.generic)


def _is_zero(x: Any) -> bool:
  return _is_number(x) and bool(x == 0)


def _is_opaque(constant: Any) -> bool:
  """True where a constant's numbers are not known while tracing."""
  dtype = getattr(constant, "dtype", np.dtype(float))
  return isinstance(constant, Tracer) or jnp.issubdtype(
    dtype, jax.dtypes.extended
  )


# --- the table of primitives ---

# Each element by itself; NumPy computes known numbers, by the name behind `=`.
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
# Along the dimensions that a parameter names; rows of others stay apart.
_FOLDS = dict.fromkeys(
  "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod"
  " reduce_sum".split(),
  "axes",
)
_ALONG = _FOLDS | {
  "concatenate": "dimension",
  "cumlogsumexp": "axis",
  "cummax": "axis",
  "cummin": "axis",
  "cumprod": "axis",
  "cumsum": "axis",
  "rev": "dimensions",
  "sort": "dimension",
  "split": "axis",
}
# What a row must be so that a reduction over rows is right without it.
_NEUTRAL = {"reduce_sum": 0, "reduce_and": True, "reduce_or": False}
# They keep a value.
_STAYS = ("copy", "copy_p", "pvary", "stop_gradient")
# They keep a number that all operands hold, or only zero.
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

  Over which devices it may differ is left out: programs are the same then.
  """
  if is_rows(leaf):
    return ShapedArray(tuple(leaf.shape), leaf.dtype)
  if not isinstance(leaf, (ShapedArray, jax.ShapeDtypeStruct)):
    leaf = jax.typeof(leaf)
  weak = getattr(leaf, "weak_type", False)
  return ShapedArray(leaf.shape, leaf.dtype, weak_type=weak)
