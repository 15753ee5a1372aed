"""Which dimension of a value is that of the examples, through an equation.

A dimension is that of the examples if its first entries are made of the first
example of the device's part, the next ones of the second, and so on: the parts
of all devices, joined along it, then stand in the order of the batch. Letters:
`B` examples of a device.

Only dimensions that are shown to be kept are kept. What no rule below knows is
taken to mix examples.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

Dims = Sequence[int | None]


def through(eqn: Any, dims: Dims, examples: int) -> list[int | None]:
  """The dimension of the examples in each output of an equation.

  Args:
    eqn: The equation; it runs no other program.
    dims: Of each input. None for those that are equal on all devices; of all
      others the dimension is known.
    examples: `B`.
  """
  name = eqn.primitive.name
  if name in _ELEMENTWISE:
    return _elementwise(eqn, dims)
  if name == "reshape":
    return [_reshape(eqn, _only(dims), examples)]
  rule = _RULES.get(name)
  found = rule(eqn, dims) if rule else None
  return [found] * len(eqn.outvars)


def sums_examples(eqn: Any, dims: Dims) -> bool:
  """Whether an equation adds up what it makes of each example."""
  name = eqn.primitive.name
  if name == "reduce_sum":
    return _only(dims) in eqn.params["axes"]
  if name == "dot_general":
    over, _ = eqn.params["dimension_numbers"]
    at = [list(s).index(d) if d in s else -1 for d, s in zip(dims, over)]
    summed = {i for i, dim in zip(at, dims) if dim is not None}
    return len(summed) == 1 and summed != {-1}
  return False


_ELEMENTWISE = frozenset(
  """
  abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
  bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex conj
  convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv
  erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le
  le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg
  nextafter not one_minus_square or polygamma population_count pow pvary
  random_fold_in real reduce_precision regularized_incomplete_beta rem round
  rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
  shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
  zeta
  zenjax_first_copy zenjax_as_invariant
  """.split()
)


def _shape(atom: Any) -> tuple[int, ...]:
  return tuple(atom.aval.shape)


def _only(dims: Dims) -> int | None:
  """That of the first input, if it is the only one that has one."""
  first, *others = dims
  return first if not any(dim is not None for dim in others) else None


def _elementwise(eqn: Any, dims: Dims) -> list[int | None]:
  different = {dim for dim in dims if dim is not None}
  if len(different) != 1:
    return [None] * len(eqn.outvars)
  (dim,) = different
  shapes = [_shape(x) for x, d in zip(eqn.invars, dims) if d is not None]
  alike = all(
    _shape(out)[: dim + 1] == shape[: dim + 1]
    for out in eqn.outvars
    for shape in shapes
  )
  return [dim if alike else None] * len(eqn.outvars)


def _reshape(eqn, dim, examples):
  """Examples stay together if the dimension is split, or joined with later."""
  given, made = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
  if dim is None or 0 in given or eqn.params.get("dimensions") is not None:
    return None
  if given[: dim + 1] == made[: dim + 1]:
    return dim
  before = math.prod(given[:dim])
  for at, size in enumerate(made):
    whole = math.prod(made[:at]) == before
    if whole and size > 1 and examples > 1 and size % examples == 0:
      return at
  return None


def _broadcast(eqn, dims):
  dim = _only(dims)
  if dim is None:
    return None
  at = eqn.params["broadcast_dimensions"][dim]
  kept = _shape(eqn.outvars[0])[at] == _shape(eqn.invars[0])[dim]
  return at if kept else None


def _without(dim: int | None, dropped: Sequence[int]) -> int | None:
  """Where a dimension is once others are dropped."""
  if dim is None or dim in dropped:
    return None
  return dim - sum(d < dim for d in dropped)


def _dropping(param: str) -> Callable[..., int | None]:
  return lambda eqn, dims: _without(_only(dims), tuple(eqn.params[param]))


def _unless_along(param: str) -> Callable[..., int | None]:
  """Of operations along one dimension, or some, on inputs of one shape."""

  def rule(eqn, dims):
    different = {dim for dim in dims if dim is not None}
    along = eqn.params[param]
    along = tuple(along) if isinstance(along, tuple | list) else (along,)
    if len(different) != 1 or different & set(along):
      return None
    return different.pop()

  return rule


def _stack(eqn, dims):
  different = {dim for dim in dims if dim is not None}
  if len(different) != 1:
    return None
  (dim,) = different
  return dim + (dim >= eqn.params["axis"])


def _unstack(eqn, dims):
  return _without(_only(dims), (eqn.params["axis"],))


def _transpose(eqn, dims):
  dim = _only(dims)
  return None if dim is None else eqn.params["permutation"].index(dim)


def _top_k(eqn, dims):
  dim, last = _only(dims), len(_shape(eqn.invars[0])) - 1
  return None if dim == eqn.params.get("axis", last) % (last + 1) else dim


def _pad(eqn, dims):
  dim = _only(dims)
  padded = dim is None or tuple(eqn.params["padding_config"][dim]) != (0, 0, 0)
  return None if padded else dim


def _whole(eqn, dims):
  """Of what cuts a part out of a value, the whole of the dimension."""
  dim = _only(dims)
  if dim is None or _shape(eqn.outvars[0])[dim] != _shape(eqn.invars[0])[dim]:
    return None
  return dim


def _written(eqn, dims):
  """Of what writes a part into a value, all examples."""
  operand, part, *where = dims
  given = {dim for dim in (operand, part) if dim is not None}
  if len(given) != 1 or any(dim is not None for dim in where):
    return None
  (dim,) = given
  full = _shape(eqn.invars[0])[dim] == _shape(eqn.invars[1])[dim]
  return dim if full else None


def _dot(eqn, dims):
  (over, batch) = eqn.params["dimension_numbers"]
  found, free = set(), len(batch[0])
  for x, dim, sums, batched in zip(eqn.invars, dims, over, batch):
    kept = [
      d for d in range(len(_shape(x))) if d not in sums and d not in batched
    ]
    if dim is not None:
      if dim in sums:
        return None
      at = list(batched).index(dim) if dim in batched else None
      found.add(free + kept.index(dim) if at is None else at)
    free += len(kept)
  return found.pop() if len(found) == 1 else None


def _conv(eqn, dims):
  numbers = eqn.params["dimension_numbers"]
  if eqn.params["batch_group_count"] != 1 or _only(dims) is None:
    return None
  return numbers.out_spec[0] if _only(dims) == numbers.lhs_spec[0] else None


def _window(eqn, dims):
  """Windows of one example each."""
  dim, params = _only(dims), eqn.params
  if dim is None:
    return None
  ones = ("window_dimensions", "window_strides")
  ones += ("base_dilation", "window_dilation")
  alone = all(params[key] is None or params[key][dim] == 1 for key in ones)
  return dim if alone and tuple(params["padding"][dim]) == (0, 0) else None


def _gather(eqn, dims):
  numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
  (operand, at), out = dims, range(len(_shape(eqn.outvars[0])))
  looked_up = [d for d in out if d not in numbers.offset_dims]
  found = set()
  if at is not None:
    if at >= len(looked_up):
      return None
    found.add(looked_up[at])
  if operand is not None:
    batched = list(numbers.operand_batching_dims)
    gone = [*numbers.collapsed_slice_dims, *batched]
    if operand in batched:
      beside = numbers.start_indices_batching_dims[batched.index(operand)]
      found.add(looked_up[beside])
    elif operand in gone or operand in numbers.start_index_map:
      return None
    elif sizes[operand] != _shape(eqn.invars[0])[operand]:
      return None
    else:
      found.add(numbers.offset_dims[_without(operand, gone) or 0])
  return found.pop() if len(found) == 1 else None


def _scatter(eqn, dims):
  """The transpose of `_gather`, each example's into rows of its own."""
  numbers = eqn.params["dimension_numbers"]
  operand, at, updates = dims
  rank = len(_shape(eqn.invars[2]))
  looked_up = [d for d in range(rank) if d not in numbers.update_window_dims]
  batched = list(numbers.operand_batching_dims)
  found = {operand} - {None}
  if at is not None:
    beside = list(numbers.scatter_indices_batching_dims)
    if at not in beside:
      return None
    found.add(batched[beside.index(at)])
  if updates is not None:
    if updates not in looked_up:
      return None
    beside = list(numbers.scatter_indices_batching_dims)
    if looked_up.index(updates) not in beside:
      return None
    found.add(batched[beside.index(looked_up.index(updates))])
  # An operand of examples must be written by examples, or nowhere else.
  return found.pop() if len(found) == 1 and found <= set(batched) else None


def _random(eqn, dims):
  """Of keys, one for each example: shapes begin with theirs."""
  dim = _only(dims)
  if dim is None:
    return None
  given, made = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
  return dim if given[: dim + 1] == made[: dim + 1] else None


_RULES: dict[str, Callable[..., int | None]] = {
  "argmax": _dropping("axes"),
  "argmin": _dropping("axes"),
  "broadcast_in_dim": _broadcast,
  "concatenate": _unless_along("dimension"),
  "conv_general_dilated": _conv,
  "cumlogsumexp": _unless_along("axis"),
  "cummax": _unless_along("axis"),
  "cummin": _unless_along("axis"),
  "cumprod": _unless_along("axis"),
  "cumsum": _unless_along("axis"),
  "dot_general": _dot,
  "dynamic_slice": _whole,
  "dynamic_update_slice": _written,
  "gather": _gather,
  "pad": _pad,
  "random_bits": _random,
  "random_split": _random,
  "random_unwrap": _random,
  "random_wrap": _random,
  "reduce_and": _dropping("axes"),
  "reduce_max": _dropping("axes"),
  "reduce_min": _dropping("axes"),
  "reduce_or": _dropping("axes"),
  "reduce_prod": _dropping("axes"),
  "reduce_sum": _dropping("axes"),
  "reduce_window_max": _window,
  "reduce_window_min": _window,
  "reduce_window_sum": _window,
  "reduce_xor": _dropping("axes"),
  "rev": _unless_along("dimensions"),
  "scatter": _scatter,
  "scatter-add": _scatter,
  "scatter-max": _scatter,
  "scatter-min": _scatter,
  "scatter-mul": _scatter,
  "scatter-sub": _scatter,
  "slice": _whole,
  "sort": _unless_along("dimension"),
  "split": _unless_along("axis"),
  "squeeze": _dropping("dimensions"),
  "stack": _stack,
  "top_k": _top_k,
  "transpose": _transpose,
  "unstack": _unstack,
}
