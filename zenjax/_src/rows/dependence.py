"""Reads off an optimizer's program which rows each of its values depends on.

The update is traced twice, for the tables as they are and for tables of some
rows more. A dimension that grew is one along which rows lie. Every value then
either holds something for each row of one table, made of that row and of values
of the whole, or is a value of the whole itself. Values of the whole come of
counters, of leaves that are no tables, and of reductions over rows, as a norm
or a flag that all is finite.

Rows that a step does not touch have gradients of zeros. `rest` is such a row's
part of a value where that is one number, whatever the row's state and
parameters are: a reduction can then be finished without reading the row.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from zenjax._src.core.jaxprs import Operation
from zenjax._src.core.jaxprs import Operations
from zenjax._src.core.jaxprs import Value


class Rows(NamedTuple):
  """Where the rows of a table lie in a value."""

  table: int
  dim: int
  # Elements of a row that lie in the dimension beside it, as `ravel` puts them.
  inner: int = 1


class Refusal(NamedTuple):
  """Why rows cannot be updated without the others."""

  reason: str
  place: str

  def __str__(self) -> str:
    return f"{self.reason} ({self.place})"


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
  """A value of the whole that is made of a table's rows.

  Attributes:
    step: The operation.
    rows: Where rows lie in its operand.
    kind: "sum", "max", "min", "and" or "or".
    rest: The operand at a row that the step does not touch.
    level: How many reductions come before it.
    dims: Where rows lie in each operand.
    takes_all: Whether it takes all elements of all rows together.
  """

  step: Operation
  rows: Rows
  kind: str
  rest: Any
  level: int
  dims: tuple[int, ...]
  takes_all: bool

  @property
  def needs_rest(self) -> bool:
    """Returns True if rows that the step does not touch make a difference."""
    if self.kind in ("max", "min"):
      return True
    return bool(self.rest) != (self.kind == "and")


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
  """Facts known of a value.

  Attributes:
    rows: Where a table's rows lie in it; None for a value of the whole.
    rest: The number that it is at a row without gradient, if that is known.
    fresh: The same of a row that no step has touched yet.
    level: How many reductions over rows it needs before it can be computed.
    clocked: Whether it depends on a counter.
    gated: Whether it depends on whether a counter fulfils a condition.
    refusal: Why it cannot be had of the touched rows alone.
  """

  rows: Rows | None = None
  rest: Any = None
  fresh: Any = None
  level: int = 0
  clocked: bool = False
  gated: bool = False
  refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Analysis:
  """Facts of all values of a program, and its reductions over rows."""

  program: Operations
  facts: dict[Value, Fact]
  reductions: dict[Operation, Reduction]

  def of(self, value: Value) -> Fact:
    """Returns the fact of a value or a constant."""
    if value.constant is not None:
      number = _number(value.constant)
      return Fact(rest=number, fresh=number)
    return self.facts[value]

  def gates(self, output: Value, before: Value) -> bool:
    """Says whether a row's state is changed at some steps and not at others.

    A step that leaves the state `before` as it is does not count: then a row
    misses nothing by being left out.
    """
    fact = self.of(output)
    if not fact.gated or output is before:
      return False
    for step in self.program.steps:
      if output in step.makes and step.name == "select_n":
        which, *cases = step.reads
        if self.of(which).rows is None:
          return any(self.gates(case, before) for case in cases)
    return True


class Differs(Exception):
  """Two programs that should be alike are not."""


def require_alike(first: Operations, second: Operations) -> None:
  """Raises `Differs` where programs do other things, shapes aside."""
  numbers: list[dict[Value, int]] = [{}, {}]

  def name(side, value):
    if value.constant is not None:
      return "constant"
    return numbers[side].setdefault(value, len(numbers[side]))

  def lines(side, program):
    yield [name(side, x) for x in program.inputs]
    for step in program.steps:
      reads = [name(side, x) for x in step.reads]
      yield [step.name, reads, [name(side, x) for x in step.makes]]
      # Shapes are tuples; a number, say an exponent, must be the same.
      yield [(k, v) for k, v in step.params.items() if _is_number(v)]
    yield [name(side, x) for x in program.outputs]

  if [*lines(0, first)] != [*lines(1, second)]:
    raise Differs


def _is_number(x: Any) -> bool:
  return isinstance(x, (bool, int, float, str))


def analyse(
  program: Operations,
  grown: Operations,
  inputs: Sequence[Fact],
  idle: bool = False,
) -> Analysis:
  """Finds a fact of every value.

  Args:
    program: The update on tables as they are.
    grown: The same on tables of more rows.
    inputs: Facts of the program's inputs.
    idle: Whether no row has a gradient.

  Raises:
    Differs: The two programs do other things.
  """
  require_alike(program, grown)
  found = Analysis(program, dict(zip(program.inputs, inputs)), {})
  for step, other in zip(program.steps, grown.steps, strict=True):
    reads = [found.of(x) for x in step.reads]
    pairs = list(zip(step.reads, other.reads))
    swollen = [a.shape != b.shape for a, b in pairs]
    made = list(zip(step.makes, other.makes))
    facts = _through(found, step, reads, swollen, made, idle)
    found.facts.update(zip(step.makes, facts, strict=True))
  return found


class _Mixed(Exception):
  """An operation makes rows of other rows."""


def _through(found, step, reads, swollen, made, idle) -> list[Fact]:
  """Facts of the results of one operation."""
  refusal = next((f.refusal for f in reads if f.refusal), None)
  rows = {f.rows for f in reads if f.rows}
  rest = _folded(step, [f.rest for f in reads])
  fresh = _folded(step, [f.fresh for f in reads])
  level = max((f.level for f in reads), default=0)
  clocked = any(f.clocked for f in reads) and rest is None
  gated = rest is None and (any(f.gated for f in reads) or _gates(step, reads))
  fact = Fact(None, rest, fresh, level, clocked, gated, refusal)
  try:
    if refusal is not None:
      pass
    elif any(
      x.constant is not None and grows for x, grows in zip(step.reads, swollen)
    ):
      raise _Mixed("it holds an array with something for every row")
    elif _names_an_axis(step):
      raise _Mixed(
        "it synchronizes devices: zen_sync goes before lazy_rows, and"
        " sharded_optimizer in the place of both"
      )
    elif not rows:
      _require_uniform(step, swollen, made)
    elif len({r.table for r in rows}) > 1:
      raise _Mixed("it mixes rows of two tables")
    elif step.name == "optimization_barrier":
      return list(reads)
    elif idle and rest is not None:
      pass  # One number in all rows: a value of the whole.
    elif step.name in _REDUCTIONS and _takes_rows(step, reads[0].rows):
      found.reductions[step] = _reduction(step, reads[0], level)
      fact = dataclasses.replace(fact, level=level + 1, rest=None, fresh=None)
    elif step.name == "dot_general":
      fact = _product(found, step, reads, fact)
    else:
      place = _moved(step, reads)
      return [dataclasses.replace(fact, rows=place(*pair)) for pair in made]
  except _Mixed as error:
    fact = dataclasses.replace(fact, refusal=Refusal(str(error), step.place))
  return [fact] * len(made)


def _gates(step, reads):
  """True if a condition on a counter becomes a number, or chooses rows."""
  if step.name == "convert_element_type":
    return step.reads[0].dtype == bool and reads[0].clocked
  if step.name == "select_n":
    return reads[0].clocked and any(f.rows for f in reads[1:])
  return False


def _names_an_axis(step):
  if step.name == "zenjax_mark":
    return True
  named = step.params.get("axes", step.params.get("axis_name", ()))
  named = named if isinstance(named, (tuple, list)) else (named,)
  return any(isinstance(axis, str) for axis in named) and step.name not in (
    "pvary",
    "reduced_vary_cast",
  )


def _require_uniform(step, swollen, made):
  """Values of the whole may be repeated for every row, and no more."""
  grows = any(a.shape != b.shape for a, b in made)
  if not grows and not any(swollen):
    return
  if step.name in _ELEMENTWISE or step.name in ("broadcast_in_dim", "reshape"):
    return
  if step.name == "iota":
    (pair,) = made
    dim = step.params["dimension"]
    if pair[0].shape[dim] == pair[1].shape[dim]:
      return
    raise _Mixed("it numbers the rows")
  if step.name.startswith(("random_", "threefry")):
    raise _Mixed("it draws random numbers for every row")
  raise _Mixed(f"it depends on how many rows there are, by {step.name}")


def _takes_rows(step, rows):
  return rows is not None and rows.dim in step.params["axes"]


def _reduction(step, fact, level):
  kind = _REDUCTIONS[step.name]
  rest = fact.rest
  if rest is None and kind in ("and", "or"):
    # A flag of rows that no step moves: as it was when they were made.
    rest = fact.fresh if fact.fresh == (kind == "and") else None
  if rest is None or kind is None:
    raise _Mixed(
      f"it needs state or parameters of rows that a step does not touch, by"
      f" {step.name}"
      if kind
      else f"it mixes rows, by {step.name}"
    )
  takes_all = len(step.params["axes"]) == len(step.reads[0].shape)
  dims = (fact.rows.dim,)
  return Reduction(step, fact.rows, kind, rest, level, dims, takes_all)


def _product(found, step, reads, fact):
  """Reads a matrix product: a sum over rows, or rows by rows."""
  (contracted, batch) = step.params["dimension_numbers"]
  sides = [f.rows.dim if f.rows else None for f in reads]
  over = [
    dim is not None and dim in dims for dim, dims in zip(sides, contracted)
  ]
  if all(over):
    at = [dims.index(dim) for dim, dims in zip(sides, contracted)]
    same = reads[0].rows.inner == reads[1].rows.inner
    if at[0] == at[1] and same and 0 in (reads[0].rest, reads[1].rest):
      takes_all = all(
        len(dims) == len(x.shape) for dims, x in zip(contracted, step.reads)
      )
      rows, dims = reads[0].rows, tuple(f.rows.dim for f in reads if f.rows)
      found.reductions[step] = Reduction(
        step, rows, "sum", 0, fact.level, dims, takes_all
      )
      return dataclasses.replace(
        fact, level=fact.level + 1, rest=None, fresh=None
      )
  if any(over) or all(dim is not None for dim in sides):
    raise _Mixed("it mixes rows, by a matrix product")
  ((side, dim),) = [(i, dim) for i, dim in enumerate(sides) if dim is not None]
  if dim in batch[side]:
    raise _Mixed("it mixes rows, by a matrix product")
  free = [
    d
    for d in range(len(step.reads[side].shape))
    if d not in contracted[side] and d not in batch[side]
  ]
  before = len(batch[0]) + free.index(dim)
  if side == 1:
    other = len(step.reads[0].shape) - len(contracted[0]) - len(batch[0])
    before += other
  rows = reads[side].rows._replace(dim=before)
  return dataclasses.replace(fact, rows=rows)


def _moved(step, reads) -> Callable[[Value, Value], Rows | None]:
  """Where rows lie in the results of an operation that keeps them apart."""
  name, params = step.name, step.params
  (rows, *others) = {f.rows for f in reads if f.rows}
  if name in _ELEMENTWISE:
    if others:
      raise _Mixed("it mixes rows, of which it takes some in another order")
    return lambda a, b: rows
  if name == "concatenate" and not others:
    if params["dimension"] != rows.dim:
      return lambda a, b: rows
  elif name in ("reshape", "squeeze", "broadcast_in_dim"):
    return lambda a, b: _reshaped(step, rows, a, b)
  elif name == "transpose":
    dim = params["permutation"].index(rows.dim)
    return lambda a, b: rows._replace(dim=dim)
  elif name in _REDUCTIONS or name in ("argmax", "argmin"):
    less = sum(axis < rows.dim for axis in params["axes"])
    if rows.dim not in params["axes"]:
      return lambda a, b: rows._replace(dim=rows.dim - less)
  elif name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    if params["axis"] != rows.dim:
      return lambda a, b: rows
  elif name == "sort" and not others:
    if params["dimension"] != rows.dim:
      return lambda a, b: rows
  elif name == "rev":
    if rows.dim not in params["dimensions"]:
      return lambda a, b: rows
  elif name == "split":
    if params["axis"] != rows.dim:
      return lambda a, b: rows
  elif name == "pad":
    if params["padding_config"][rows.dim] == (0, 0, 0) and not reads[1].rows:
      return lambda a, b: rows
  elif name == "slice":
    strides = params["strides"] or (1,) * len(step.reads[0].shape)
    whole = params["limit_indices"][rows.dim] == step.reads[0].shape[rows.dim]
    if whole and params["start_indices"][rows.dim] == 0:
      if strides[rows.dim] == 1:
        return lambda a, b: rows
  raise _Mixed(f"it mixes rows, by {name}")


def _reshaped(step, rows, new, grown):
  """Where rows lie in other dimensions, if they still lie one after another."""
  if step.name == "broadcast_in_dim":
    return rows._replace(dim=step.params["broadcast_dimensions"][rows.dim])
  old = step.reads[0].shape
  at = [i for i, (a, b) in enumerate(zip(new.shape, grown.shape)) if a != b]
  if len(at) == 1 and old[rows.dim]:
    (dim,) = at
    number = old[rows.dim] // rows.inner
    before = math.prod(old[: rows.dim]) == math.prod(new.shape[:dim])
    if before and number and new.shape[dim] % number == 0:
      return rows._replace(dim=dim, inner=new.shape[dim] // number)
  raise _Mixed("it mixes rows, by a change of shape")


_REDUCTIONS = {
  "reduce_sum": "sum",
  "reduce_max": "max",
  "reduce_min": "min",
  "reduce_and": "and",
  "reduce_or": "or",
  "reduce_prod": None,
}

_ELEMENTWISE = frozenset(
  "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp"
  " clz complex conj convert_element_type copy copy_p cos cosh digamma div eq"
  " erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le"
  " lgamma log log1p logistic lt max min mul ne neg nextafter not or"
  " population_count pow pvary real reduce_precision rem round rsqrt select_n"
  " shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt"
  " square stop_gradient sub tan tanh xor".split()
)

# Operations that leave one number as it is, however it is repeated.
_KEEPS = frozenset(
  "broadcast_in_dim copy copy_p optimization_barrier pvary real reshape rev"
  " reduce_precision slice squeeze stop_gradient transpose".split()
)


def _folded(step: Operation, numbers: Sequence[Any]) -> Any:
  """The number that an operation makes of numbers, None where it is not known.

  What a zero is multiplied with need not be known.
  """
  name, reads = step.name, list[Any](numbers)
  if name == "select_n":
    which, *cases = reads
    if which is not None:
      return cases[int(which)]
    same = all(x is not None and x == cases[0] for x in cases)
    return cases[0] if same else None
  if name in _ABSORBED and any(x is not None and x == 0 for x in reads):
    return next(x for x in reads if x is not None and x == 0)
  if name == "or" and any(x is True for x in reads):
    return True
  if name == "div" and reads[0] is not None and reads[0] == 0:
    return reads[0]
  if not reads or any(x is None for x in reads):
    return None
  if name in _KEEPS or (name == "concatenate" and len(set(reads)) == 1):
    return reads[0]
  if name == "reduce_sum":
    axes = step.params["axes"]
    first: Any = reads[0]
    return first * math.prod(step.reads[0].shape[a] for a in axes)
  if name == "convert_element_type":
    return _converted(reads[0], step.params["new_dtype"])
  integers = any(type(x) is int for x in reads)
  if name == "integer_pow" and not integers:
    return _computed(lambda x: np.float64(x) ** step.params["y"], reads)
  if name in _NUMPY and not (integers and name in ("div", "not", "or", "xor")):
    return _computed(_NUMPY[name], reads)
  return None


def _converted(number, dtype):
  if jnp.issubdtype(dtype, np.bool_):
    return bool(number)
  if jnp.issubdtype(dtype, np.integer):
    return int(number) if np.isfinite(number) else None
  return float(number) if jnp.issubdtype(dtype, np.floating) else None


def _computed(fun, numbers):
  with np.errstate(all="ignore"):
    try:
      return fun(*numbers).item()
    except (TypeError, ValueError, OverflowError):
      return None


# Operations of which one zero makes a zero.
_ABSORBED = ("and", "dot_general", "mul")

# Operations that leave one number as it is, however it is repeated.
_KEEPS = frozenset(
  "broadcast_in_dim copy copy_p pvary real reshape rev reduce_and reduce_max"
  " reduce_min reduce_or reduce_precision slice squeeze stop_gradient"
  " transpose".split()
)

_NUMPY: dict[str, Any] = {
  "abs": np.abs,
  "add": np.add,
  "add_any": np.add,
  "cbrt": np.cbrt,
  "ceil": np.ceil,
  "atan": np.arctan,
  "cos": np.cos,
  "cosh": np.cosh,
  "logistic": lambda x: 1 / (1 + np.exp(-x)),
  "sin": np.sin,
  "sinh": np.sinh,
  "tan": np.tan,
  "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
  "div": np.divide,
  "eq": np.equal,
  "exp": np.exp,
  "exp2": np.exp2,
  "expm1": np.expm1,
  "floor": np.floor,
  "ge": np.greater_equal,
  "gt": np.greater,
  "imag": np.imag,
  "is_finite": np.isfinite,
  "le": np.less_equal,
  "log": np.log,
  "log1p": np.log1p,
  "lt": np.less,
  "max": np.maximum,
  "min": np.minimum,
  "mul": np.multiply,
  "ne": np.not_equal,
  "neg": np.negative,
  "not": np.logical_not,
  "or": np.logical_or,
  "pow": np.power,
  "round": np.round,
  "rsqrt": lambda x: 1 / np.sqrt(x),
  "sign": np.sign,
  "sqrt": np.sqrt,
  "square": np.square,
  "sub": np.subtract,
  "tanh": np.tanh,
  "xor": np.logical_xor,
}


def is_opaque(constant: Any) -> bool:
  """Says whether a constant's numbers are not to be had while tracing."""
  if isinstance(constant, Tracer):
    return True
  dtype = getattr(constant, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)


def _number(constant: Any) -> Any:
  """The one number that a constant holds; None where it holds several."""
  if is_opaque(constant) or np.size(constant) != 1:
    return None
  return np.asarray(constant).item()
