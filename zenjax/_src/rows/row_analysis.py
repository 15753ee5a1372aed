"""Decides from an optimizer's program whether it treats rows apart.

`analyse` traces `update` twice, for whole tables and for tables of another
number of rows, and follows every value from the inputs to the results. One
table of primitives says what each does to rows; whatever is not in it is
refused where it meets rows. There are three kinds of optimizers:

- Rows are independent: SGD, Adagrad, Adam.
- Rows meet only in sums, as in a clip by a global norm. That is right on the
  touched rows alone if every other row adds zero. So the analysis also follows
  what each value is at a row without a gradient (`Fact.idle`).
- Anything else mixes rows, and is refused by name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.core.jaxprs import Operation
from zenjax._src.core.jaxprs import Operations
from zenjax._src.core.jaxprs import Value
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
    state_rows: For each leaf of the state, the table that it has rows of.
    refusals: Why rows are not independent, by the number of the table's leaf.
    sums: The line at which rows meet in a sum; None if they are independent.
    moves: Tables of which rows move that never had a gradient.
    rests: Tables whose rows and state stay as they are without a gradient.
    wants_more: Whether `update` needs arguments that were not given.
    update: `(grads, state, params, extra)` of some rows, as for whole tables.
  """

  state_rows: tuple[int | None, ...]
  refusals: dict[int, str]
  sums: str | None = None
  moves: frozenset[int] = frozenset()
  rests: frozenset[int] = frozenset()
  wants_more: bool = False
  update: Callable[..., tuple[Any, Any]]


def analyse(
  inner: optax.GradientTransformationExtraArgs,
  grads: Any,
  state: Any,
  params: Any,
  extra: Mapping[str, Any],
  tables: Sequence[bool],
  sizes: Mapping[int, int] | None = None,
) -> RowAnalysis:
  """Reads off `inner.update` how it treats rows.

  Args:
    inner: The optimizer.
    grads: Arrays, SparseRows or types of whole tables.
    state: Of `inner`, for whole tables: arrays or types.
    params: Arrays or types of whole tables, or None.
    extra: Further arguments of `inner.update`.
    tables: Which leaves of `grads` are tables, in order.
    sizes: How many rows `update` will be called with, by table; at least 2.
  """
  with as_optax_computes():
    whole = _Update.of(inner, grads, state, params, extra, tables)
    return whole.analysis(sizes or {})


_UNTRACED = "it cannot be traced with these arguments"
_SIZES = (
  "it does something else for tables of another size: give masks and labels"
  " that depend on sizes as trees instead of functions"
)
_STATE = "its state does not have one row for each row of a table (`init`)"


@dataclasses.dataclass(frozen=True, eq=False)
class _Update:
  """`inner.update` as a function of flat lists of leaves, with their types."""

  inner: optax.GradientTransformationExtraArgs
  structures: tuple[Any, Any]  # of gradients and state
  grads: list[Any]
  state: list[Any]
  params: list[Any] | None
  extra: list[Any]
  arguments: Callable[[Sequence[Any]], dict[str, Any]]
  tables: tuple[int, ...]

  @classmethod
  def of(cls, inner, grads, state, params, extra, tables):
    leaves, structure = jax.tree.flatten(grads, is_leaf=is_rows)
    own, own_structure = jax.tree.flatten(state)
    arrays, back = arguments(extra)
    types = lambda leaves: [type_of(x) for x in leaves]
    return cls(
      inner=inner,
      structures=(structure, own_structure),
      grads=types(leaves),
      state=types(own),
      params=None if params is None else types(jax.tree.leaves(params)),
      extra=types(arrays),
      arguments=back,
      tables=tuple(i for i, x in enumerate(tables) if x),
    )

  def analysis(self, wanted: Mapping[int, int]) -> RowAnalysis:
    """Compares whole tables with tables of the wanted sizes."""
    owners = self._owners()
    if owners is None:
      return self._refused(_STATE)
    size = self._sizes
    other = {i: wanted.get(i, 2) for i in size}
    other = {i: n + (n == size[i]) for i, n in other.items()}
    try:
      whole = self._traced(owners, size)
    except NameError:
      raise  # It wants an axis of devices, and says so.
    except Exception as error:  # Whatever an optimizer raises.
      return self._refused(f"{_UNTRACED} ({_line(error)})", wants_more=True)
    try:
      twin = self._traced(owners, other)
      require_alike(whole, twin)
    except Exception as error:
      return self._refused(f"{_SIZES} ({_line(error)})")
    outputs = self._outputs(whole, twin, owners, self._inputs(owners))
    fresh = self._outputs(whole, twin, owners, self._inputs(owners, True))
    plain = not any(_numbers(whole, twin))
    count = len(self.grads)
    refusals: dict[int, str] = {}
    for owner, fact in zip([*range(count), *owners], outputs):
      if fact.refusal is not None:
        hit = self.tables if owner not in self.tables else (owner,)
        refusals = {i: fact.refusal for i in hit} | refusals
    kept = {i: _is_zero(outputs[i].idle) for i in self.tables}
    for i, (owner, fact) in enumerate(zip(owners, outputs[count:]), count):
      if owner is not None:
        kept[owner] &= _same(fact.idle, Kept(i))
    return RowAnalysis(
      state_rows=owners,
      refusals=refusals,
      sums=next((fact.sums for fact in outputs if fact.sums), None),
      moves=frozenset(i for i in kept if not _is_zero(fresh[i].idle)),
      rests=frozenset(i for i in kept if kept[i] and i not in refusals),
      update=self._plainly if plain else functools.partial(self._run, owners),
    )

  def _plainly(self, grads, state, params, extra):
    return self.inner.update(grads, state, params, **extra)

  def _refused(self, why, wants_more=False):
    return RowAnalysis(
      state_rows=self._owners() or (None,) * len(self.state),
      refusals={i: str(why) for i in self.tables},
      wants_more=wants_more,
      update=self._plainly,
    )

  @property
  def _sizes(self):
    """Rows of whole tables; one where a table has none, for JAX leaves out
    operations on nothing."""
    return {i: max(1, self.grads[i].shape[0]) for i in self.tables}

  def _run(self, owners, grads, state, params, extra):
    """The update of some rows, with the numbers of whole tables.

    A mean divides by a number that the program holds. It is traced for whole
    tables and for these rows, and runs on the rows with the former's numbers.
    """
    args = _Update.of(self.inner, grads, state, params, extra, ())
    with as_optax_computes():
      whole = self._traced(owners, self._sizes)
      some = jaxprs.trace(
        self._flat, args.grads, args.state, args.params, args.extra
      )
      require_alike(whole, some)
    flat = jax.tree.leaves((grads, state, params, arguments(extra)[0]))
    values: dict[Value, Any] = dict(zip(some.inputs, flat, strict=True))
    number = dict(_numbers(some, whole))

    def read(value):
      if value.constant is None:
        return values[value]
      return number.get(value, value.constant)

    for step in some.needed(some.outputs):
      outs = step.run(compat.cast_alike([read(x) for x in step.reads]))
      values |= zip(step.makes, outs, strict=True)
    out, count = [read(x) for x in some.outputs], len(self.grads)
    updates, own = self.structures
    return updates.unflatten(out[:count]), own.unflatten(out[count:])

  def _flat(self, grads, state, params, extra):
    updates, own = self.structures
    params = None if params is None else updates.unflatten(params)
    out, state = self.inner.update(
      updates.unflatten(grads),
      own.unflatten(state),
      params,
      **self.arguments(extra),
    )
    return updates.flatten_up_to(out), jax.tree.leaves(state)

  def _init(self, leaves):
    return jax.tree.leaves(
      self.inner.init(self.structures[0].unflatten(leaves))
    )

  def _resized(self, leaves, owners, sizes):
    return [
      _sized(x, sizes[i]) if i in sizes else x
      for i, x in zip(owners, leaves, strict=True)
    ]

  def _traced(self, owners, sizes) -> Operations:
    every = range(len(self.grads))
    return jaxprs.trace(
      self._flat,
      self._resized(self.grads, every, sizes),
      self._resized(self.state, owners, sizes),
      self.params and self._resized(self.params, every, sizes),
      self.extra,
    )

  def _owners(self):
    """The table whose rows each leaf of the state has: its size follows it."""
    like = self.params or self.grads
    size = {
      i: self.grads[i].shape[0] + 1 + k for k, i in enumerate(self.tables)
    }
    grown = self._resized(like, range(len(like)), size)
    grown = jax.eval_shape(self._init, grown)
    found: list[int | None] = []
    for leaf, more in zip(self.state, grown):
      follows = [
        i
        for i in self.tables
        if leaf.shape[:1] == self.grads[i].shape[:1]
        and _sized(leaf, size[i]).shape == more.shape
      ]
      found += [None] if leaf.shape == more.shape else follows[:1]
    # None where a leaf of the state follows a table in another way.
    return tuple(found) if len(found) == len(self.state) == len(grown) else None

  def _inputs(self, owners, fresh=False):
    """Facts of gradients, state, parameters and further arguments.

    Args:
      owners: Of the leaves of the state.
      fresh: Whether no step has been taken: then the state is what `init` made.
    """
    count = len(self.grads)
    zero = [np.zeros((), x.dtype)[()] for x in self.grads]
    idle: list[Any] = [Kept(count + i) for i in range(len(owners))]
    if fresh:
      made = jaxprs.trace(self._init, self.params or self.grads)
      found = _follow(made, made, [Fact()] * len(made.inputs))
      idle = [_fact(found, x).idle for x in made.outputs]
    known = [None] * len(self.params or ())
    of = [*range(count), *owners, *range(len(known)), *[None] * len(self.extra)]
    idle = zero + idle + known + [None] * len(self.extra)
    return [
      Fact(Rows(i, 0), x) if i in self.tables else Fact()
      for i, x in zip(of, idle, strict=True)
    ]

  def _outputs(self, whole, twin, owners, inputs):
    """Facts of updates and state, refused where they are not rows of rows."""
    found = _follow(whole, twin, inputs)
    facts = []
    every = [*range(len(self.grads)), *owners]
    for i, owner in enumerate(every):
      fact = _fact(found, whole.outputs[i])
      owner = owner if owner in self.tables else None
      wanted = Rows(owner, 0) if owner is not None else None
      apart = fact.rows in (wanted, None) and all(
        x.outputs[i].shape == x.inputs[i].shape for x in (whole, twin)
      )
      if fact.refusal is None and not apart:
        fact = fact._replace(refusal="it makes something else than rows")
      facts.append(fact)
    return facts


# --- one value after another ---


class _Mixes(Exception):
  """An operation makes rows of other rows."""


def _fact(found: Mapping[Value, Fact], value: Value) -> Fact:
  if value.constant is not None:
    return Fact(idle=_number(value.constant))
  return found[value]


def _follow(
  program: Operations, twin: Operations, inputs: Sequence[Fact]
) -> dict[Value, Fact]:
  """Returns a fact of every value of a program.

  Args:
    program: The update of whole tables.
    twin: The same program for tables of another size.
    inputs: Facts of the program's inputs.
  """
  found = dict(zip(program.inputs, inputs, strict=True))
  for step, other in zip(program.steps, twin.steps, strict=True):
    reads = [_fact(found, x) for x in step.reads]
    sums = next((f.sums for f in reads if f.sums), None)
    refusal = next((f.refusal for f in reads if f.refusal), None)
    facts = [Fact()] * len(step.makes)
    if refusal is None:
      try:
        facts = _through(step, other, reads)
      except _Mixes as error:
        refusal = f"{error} ({step.place})"
    for value, fact in zip(step.makes, facts, strict=True):
      found[value] = fact._replace(sums=fact.sums or sums, refusal=refusal)
  return found


def _through(step: Operation, twin: Operation, reads: list[Fact]) -> list[Fact]:
  """Returns facts of the results of one operation."""
  name, count = step.name, len(step.makes)
  for value, other in zip(step.reads, twin.reads):
    if value.constant is not None and value.shape != other.shape:
      raise _Mixes("it holds an array with something for every row")
  rows = {f.rows for f in reads if f.rows}
  if not rows:
    _require_uniform(step, twin)
    return [Fact(idle=_idle(step, reads))] * count
  if name == "optimization_barrier":
    return reads
  if len({r.table for r in rows}) > 1:
    raise _Mixes(f"it mixes rows of two tables, by {name}")
  if name == "dot_general":
    return [_product(step, reads)]
  if len(rows) > 1:
    raise _Mixes(f"it takes rows in two orders, by {name}")
  (here,) = rows
  idle = _idle(step, reads)
  if name in _ELEMENTWISE:
    return [Fact(here, idle)] * count
  if name in _ALONG:
    axes = step.params[_ALONG[name]]
    axes = axes if isinstance(axes, tuple) else (axes,)
    if here.dim not in axes:
      less = sum(a < here.dim for a in axes) if name in _FOLDS else 0
      return [Fact(here._replace(dim=here.dim - less), idle)] * count
    if name not in _NEUTRAL:
      raise _Mixes(f"it mixes rows, by {name}")
    if not _is_number(reads[0].idle) or reads[0].idle != _NEUTRAL[name]:
      raise _Mixes(
        "it needs state or parameters of rows that a step does not touch, by"
        f" {name}"
      )
    return [Fact(sums=step.place)]
  if name in ("reshape", "squeeze"):
    return [Fact(_reshaped(step, twin, here), idle)]
  if name == "broadcast_in_dim":
    dim = step.params["broadcast_dimensions"][here.dim]
    if step.makes[0].shape[dim] == step.reads[0].shape[here.dim]:
      return [Fact(here._replace(dim=dim), idle)]
  if name == "transpose":
    dim = step.params["permutation"].index(here.dim)
    return [Fact(here._replace(dim=dim), idle)]
  if name == "slice":
    cut = step.reads[0].shape[here.dim] != step.makes[0].shape[here.dim]
    if not cut:  # Strides keep all rows only where they are one.
      return [Fact(here, idle)]
  raise _Mixes(f"it may mix rows, by {name}")


def _require_uniform(step: Operation, twin: Operation) -> None:
  """Refuses values that differ by row, and sizes that become numbers."""
  name = step.name
  changes = lambda values, others: [
    {d for d, (a, b) in enumerate(zip(x.shape, y.shape)) if a != b}
    for x, y in zip(values, others)
  ]
  read, made = changes(step.reads, twin.reads), changes(step.makes, twin.makes)
  if not any(read) and not any(made):
    return
  if name in _ELEMENTWISE or name in ("broadcast_in_dim", "transpose"):
    return
  if name == "optimization_barrier":
    return
  if name == "iota":
    if step.params["dimension"] in made[0]:
      raise _Mixes("it numbers the rows")
    return
  if name in ("reshape", "squeeze"):
    real = lambda x: [n for n in x.shape if n != 1]
    if real(step.reads[0]) == real(step.makes[0]):
      return
  if name.startswith(("random_", "threefry", "rng_")):
    raise _Mixes("it draws random numbers for every row")
  raise _Mixes(f"it depends on how many rows there are, by {name}")


def _reshaped(step: Operation, twin: Operation, here: Rows) -> Rows:
  """Where rows are in other dimensions, if they still follow one another."""
  old, new = step.reads[0].shape, step.makes[0].shape
  changed = [
    d for d, (a, b) in enumerate(zip(new, twin.makes[0].shape)) if a != b
  ]
  if len(changed) == 1 and old[here.dim]:
    (dim,) = changed
    number = old[here.dim] // here.inner
    before = math.prod(old[: here.dim]) == math.prod(new[:dim])
    if before and number and new[dim] % number == 0:
      return here._replace(dim=dim, inner=new[dim] // number)
  raise _Mixes("it mixes rows, by a change of shape")


def _product(step: Operation, reads: list[Fact]) -> Fact:
  """A matrix product: by row, or a sum over rows."""
  contracted, batch = step.params["dimension_numbers"]
  rows: list[Any] = [f.rows for f in reads]
  sides: list[Any] = [x.dim if x else None for x in rows]
  zero = any(_is_zero(f.idle) for f in reads)
  idle = np.zeros((), step.makes[0].dtype)[()] if zero else None
  if None not in sides:
    same = rows[0].inner == rows[1].inner
    place = lambda dims: [
      tuple(d).index(s) if s in d else -1 for d, s in zip(dims, sides)
    ]
    summed, apart = place(contracted), place(batch)
    if same and apart[0] == apart[1] >= 0:
      return Fact(rows[0]._replace(dim=apart[0]), idle)
    if same and summed[0] == summed[1] >= 0 and zero:
      return Fact(sums=step.place)
    raise _Mixes("it mixes rows, by a matrix product")
  side = 0 if sides[1] is None else 1
  dim = sides[side]
  taken = {*contracted[side], *batch[side]}
  if dim in taken:
    raise _Mixes("it mixes rows, by a matrix product")
  shape = step.reads[side].shape
  free = [d for d in range(len(shape)) if d not in taken]
  new = len(batch[0]) + free.index(dim)
  if side:
    new += len(step.reads[0].shape) - len(contracted[0]) - len(batch[0])
  return Fact(rows[side]._replace(dim=new), idle)


# --- what a value is at a row without a gradient ---


def _idle(step: Operation, reads: list[Fact]) -> Any:
  """What an operation makes where its operands are known, else None.

  What zero is multiplied with, or divided by, need not be known.
  """
  name, values = step.name, [f.idle for f in reads]
  zeros = [_is_zero(x) for x in values]
  alike = bool(values) and all(_same(x, values[0]) for x in values)
  numbers = bool(values) and all(map(_is_number, values))
  dtype = step.makes[0].dtype if step.makes else None
  if name == "select_n":
    which, *cases = values
    if _is_number(which):
      return cases[int(which)]
    return cases[0] if all(_same(x, cases[0]) for x in cases) else None
  if name in _ELEMENTWISE and numbers:
    function: Any = _ELEMENTWISE[name]
    if name == "integer_pow":
      values = [*values, np.asarray(step.params["y"], dtype)]
    try:
      with np.errstate(all="ignore"):
        return np.asarray(function(*values)).astype(dtype)[()]
    except (TypeError, ValueError, OverflowError):
      return None  # Also where the table holds None.
  if name in ("mul", "and") and any(zeros):
    return values[zeros.index(True)]
  if name == "div" and zeros[0]:
    return values[0]
  if name in ("add", "add_any", "sub") and zeros[1]:
    return values[0]
  if name in ("add", "add_any") and zeros[0]:
    return values[1]
  if name == "mul" and any(_is_number(x) and x == 1 for x in values):
    return values[1] if _is_number(values[0]) else values[0]
  if name in _STAYS:
    return values[0]
  if name in _SPREADS or (name in _ALONG and alike and name not in _OTHERS):
    repeated = name not in _ADDS or zeros[0]
    return values[0] if _is_number(values[0]) and repeated else None
  return None


def _same(a: Any, b: Any) -> bool:
  if _is_number(a) and _is_number(b):
    return bool(a == b)
  return isinstance(a, Kept) and a == b


def _is_number(x: Any) -> bool:
  return isinstance(x, np.generic)


def _is_zero(x: Any) -> bool:
  return _is_number(x) and bool(x == 0)


def _number(constant: Any) -> Any:
  """The one number that a constant holds, or None."""
  if _is_opaque(constant) or np.size(constant) != 1:
    return None
  return np.asarray(constant).reshape(())[()]


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
# Of equal numbers they make others, unless these are zero; or always.
_ADDS = ("reduce_sum", "reduce_prod", "cumsum", "cumprod")
_OTHERS = ("argmax", "argmin", "cumlogsumexp")
# They keep a value; they keep a number, wherever its elements go.
_STAYS = ("copy", "copy_p", "pvary", "stop_gradient")
_SPREADS = ("broadcast_in_dim", "reshape", "slice", "squeeze", "transpose")


# --- two programs ---


class _Differs(Exception):
  """Two programs do not do the same."""


def require_alike(first: Operations, second: Operations) -> None:
  """Raises an error where programs do different things, shapes aside."""
  steps = [*zip(first.steps, second.steps)]
  grows = [
    any(
      x.shape != y.shape for x, y in zip(a.reads + a.makes, b.reads + b.makes)
    )
    for a, b in steps
  ]
  left, right = _lines(first, grows), _lines(second, grows)
  for (a, _), x, y in zip(steps, left[1:], right[1:]):
    if x != y:
      raise _Differs(f"{a.name} at {a.place}")
  if left != right:
    raise _Differs("`update`")


def _lines(program: Operations, grows: Sequence[bool]) -> list[Any]:
  """What a program does, line by line; shapes only where they do not grow."""
  numbers: dict[Value, int] = {}

  def names(values):
    new = lambda x: numbers.setdefault(x, len(numbers))
    return [new(x) if x.constant is None else None for x in values]

  lines: list[Any] = [names(program.inputs)]
  for step, is_larger in zip(program.steps, grows):
    settings = _settings(step, is_larger)
    lines.append((step.name, names(step.reads), names(step.makes), settings))
  return [*lines, names(program.outputs), len(program.steps)]


def _settings(step: Operation, grows: bool) -> list[Any]:
  """What must be equal: numbers, and programs such as the body of a loop.

  Where shapes grow, sizes differ too, and loops are refused by the analysis.
  """
  found = []
  # A `cond` has become a selection, and its branches are compared already.
  params = {} if step.name == "select_n" else step.params
  for key, value in params.items():
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if not grows or isinstance(value, (bool, int, float, str)):
      plain = all(isinstance(x, (bool, int, float, str)) for x in parts)
      found += [(key, parts)] * plain
    for jaxpr, consts in map(jaxprs.opened, parts):
      if hasattr(jaxpr, "eqns") and not grows:
        known = [x for x in consts if not _is_opaque(x)]
        found.append((str(jaxpr), [np.asarray(x).tobytes() for x in known]))
  return found


def _numbers(
  first: Operations, second: Operations
) -> Iterator[tuple[Value, Any]]:
  """Yields constants of the first that differ in the second, and the latter."""
  for step, other in zip(first.steps, second.steps, strict=True):
    for x, y in zip(step.reads, other.reads, strict=True):
      if x.constant is None or x.shape != y.shape or _is_opaque(x.constant):
        continue
      a, b = np.asarray(x.constant), np.asarray(y.constant)
      if a.tobytes() != b.tobytes():
        yield x, y.constant


# --- types ---


def _sized(leaf: Any, size: int) -> Any:
  return leaf.update(shape=(size, *leaf.shape[1:]))


def _line(error: Exception) -> str:
  return str(error).strip().split("\n")[0] or type(error).__name__


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


def arguments(
  extra: Mapping[str, Any],
) -> tuple[list[Any], Callable[[Sequence[Any]], dict[str, Any]]]:
  """Splits further arguments into arrays and what puts them back."""
  leaves, structure = jax.tree.flatten(dict(extra))
  is_array = [
    hasattr(x, "dtype") or isinstance(x, (bool, int, float)) for x in leaves
  ]
  others = [None if a else x for a, x in zip(is_array, leaves)]

  def back(arrays):
    given = iter(arrays)
    return structure.unflatten(
      [next(given) if a else x for a, x in zip(is_array, others)]
    )

  return [x for x, a in zip(leaves, is_array) if a], back


@contextlib.contextmanager
def as_optax_computes() -> Iterator[None]:
  """Promotes dtypes and ranks, whatever a program forbids itself."""
  with jax.numpy_dtype_promotion("standard"):
    with jax.numpy_rank_promotion("allow"):
      yield
