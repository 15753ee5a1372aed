"""Refuses a step after which devices would hold different replicas."""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from zenjax._src.core import jaxprs
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState
from zenjax._src.sparsify.top_k import SelectionState
from zenjax._src.sync import marking
from zenjax._src.sync import sync_state

# Which dimension of a value is that of the examples, through an equation.
#
# A dimension is that of the examples if its first entries are made of the first
# example of the device's part, the next ones of the second, and so on: the
# parts of all devices, joined along it, then stand in the order of the batch.
# Letters: `B` examples of a device.
#
# Only dimensions that are shown to be kept are kept. What no rule below knows
# is taken to mix examples.


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
  """Returns True if an equation adds up what it makes of each example."""
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
  """Returns that of the first input, if it is the only one that has one."""
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
  """Rules operations along dimensions, on inputs of one shape."""

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
  """Rules what cuts a part out of a value: the whole of the dimension."""
  dim = _only(dims)
  if dim is None or _shape(eqn.outvars[0])[dim] != _shape(eqn.invars[0])[dim]:
    return None
  return dim


def _written(eqn, dims):
  """Rules what writes a part into a value: all examples."""
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
  """Rules keys, one for each example: shapes begin with theirs."""
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


# Where replicas would part: what a traced step makes of a device's own data.
#
# A value is a device's own if it was computed from that device's part of a
# batch. It may still be equal on all devices if a collective was on the way. Of
# some collectives the result always is, and what is made of it alone; of
# anything else nobody can read it from a program. Without a collective it is
# not.
#
# What was drawn from a key of a device's own is watched more closely: one part
# of a value that met no collective is enough, as noise that is added to
# parameters after the gradients in them were averaged.
#
# Of values that may differ it is known, too, which dimension is that of the
# examples, and which are sums over them.


class Examples(NamedTuple):
  """Where a value has the examples of a device's part."""

  dim: int
  number: int  # of a device


class Flow(NamedTuple):
  """Facts on what went into a value."""

  own: frozenset[str]  # axes that devices' own data lie along
  met: frozenset[str]  # those that a collective then brought together
  differs: frozenset[str]  # those along which it is not known to be equal
  # Known of what differs: it is made example by example, or adds them up.
  examples: Examples | None = None
  counts: bool = False
  drawn: frozenset[str] = frozenset()  # of own keys, and met nothing since

  @property
  def parting(self) -> frozenset[str]:
    """Axes along which the value differs between devices for sure."""
    return (self.own - self.met) | self.drawn


def owned_values(axes: frozenset[str], examples: int | None = None) -> Flow:
  """Returns the flow of a device's data, `examples` along dimension 0."""
  rows = None if examples is None else Examples(0, examples)
  return Flow(axes, frozenset(), axes, rows)


COMMON = owned_values(frozenset())

# After them, without groups, all devices have the same.
_EQUAL = frozenset(
  "psum pmax pmin all_gather psum_invariant all_gather_invariant"
  " zenjax_first_copy zenjax_as_invariant".split()
)

# Of sums over examples they make sums over examples, of these alone.
_ADDITIVE = frozenset(
  "add add_any broadcast_in_dim concatenate convert_element_type copy neg psum"
  " reduce_sum reshape slice squeeze stack sub transpose".split()
)

# They name an axis, and bring nothing together.
_LOCAL = frozenset(
  ("pvary", "reduced_vary_cast", "vary_unreduced_cast", "zenjax_first_copy")
)


def flows(
  jaxpr: Any, inputs: Sequence[Flow], axes: frozenset[str]
) -> list[Flow]:
  """The flow of each output of a program.

  Args:
    jaxpr: The program, open or closed.
    inputs: Flows of what it is given.
    axes: Those that matter.
  """
  jaxpr, _ = jaxprs.opened(jaxpr)
  known: dict[Any, Flow] = dict(zip(jaxpr.invars, inputs, strict=True))

  def read(x) -> Flow:
    literal = isinstance(x, jex_core.Literal)
    return COMMON if literal else known.get(x, COMMON)

  for eqn in jaxpr.eqns:
    known |= zip(eqn.outvars, _through(eqn, list(map(read, eqn.invars)), axes))
  return [read(x) for x in jaxpr.outvars]


def _joined(*parts: Flow) -> Flow:
  """Returns the flow of a value that is one of these."""
  parts = tuple(set(parts))
  if len(parts) == 1:
    return parts[0]
  apart = [part for part in parts if part.differs]
  rows = {part.examples for part in apart}
  return Flow(
    frozenset().union(*(part.own for part in parts)),
    frozenset().union(*(part.met for part in parts)),
    frozenset().union(*(part.differs for part in parts)),
    rows.pop() if len(rows) == 1 else None,
    # What is equal on all devices would be added up as often as there are any.
    all(part.counts for part in parts),
    frozenset().union(*(part.drawn for part in parts)),
  )


def _steered(by: Flow, flow: Flow) -> Flow:
  """Returns the flow of a value that another one decides on."""
  known = Flow(
    flow.own | by.own,
    flow.met | by.met,
    flow.differs | by.differs,
    drawn=flow.drawn | by.drawn,
  )
  if by.differs:
    return known
  return known._replace(examples=flow.examples, counts=flow.counts)


def _through(
  eqn: jex_core.JaxprEqn, inputs: list[Flow], axes: frozenset[str]
) -> list[Flow]:
  name = eqn.primitive.name
  if name in _LOOPS:
    return _LOOPS[name](eqn, inputs, axes)
  if name == "optimization_barrier":
    return inputs
  if name in _EQUAL and len(inputs) == len(eqn.outvars) > 1:
    return [_of_one(eqn, [flow], axes)[0] for flow in inputs]
  programs = _programs(eqn)
  if _is_call(eqn, programs):
    if not _same_shapes(eqn, programs[0]):
      # It may split the examples once more, or be what a reduction repeats.
      inputs = [flow._replace(examples=None, counts=False) for flow in inputs]
    return flows(programs[0], inputs, axes)
  return _of_one(eqn, inputs, axes)


def _of_one(
  eqn: jex_core.JaxprEqn, inputs: list[Flow], axes: frozenset[str]
) -> list[Flow]:
  """Through an equation whose outputs are made of all its inputs."""
  name, named = eqn.primitive.name, _axes(eqn) & axes
  if name == "axis_index":
    return [owned_values(named)]
  joined = _joined(*inputs)
  met, drawn = joined.met, joined.drawn
  if name not in _LOCAL:
    together = named.union(*map(_axes_within, _programs(eqn)))
    # What all devices have in common is no nearer to being averaged.
    met |= together & joined.own
    drawn -= together
  drawn -= marking.known_equal(eqn)
  differs = joined.differs
  if name in _EQUAL and eqn.params.get("axis_index_groups") is None:
    differs -= named
  known = Flow(joined.own, met, differs, drawn=drawn)
  if not differs:
    return [known] * len(eqn.outvars)
  return [
    known._replace(examples=examples, counts=_counts(eqn, inputs, out))
    for examples, out in zip(_examples(eqn, inputs), eqn.outvars)
  ]


def _examples(
  eqn: jex_core.JaxprEqn, inputs: list[Flow]
) -> list[Examples | None]:
  rows = {flow.examples for flow in inputs if flow.differs}
  numbers = {x.number for x in rows if x is not None}
  # What is no device's alone by examples has no part in them.
  if None in rows or len(numbers) != 1:
    return [None] * len(eqn.outvars)
  (number,) = numbers
  dims = [x.examples.dim if x.examples else None for x in inputs]
  found = through(eqn, dims, number)
  return [None if dim is None else Examples(dim, number) for dim in found]


def _counts(eqn: jex_core.JaxprEqn, inputs: list[Flow], out: Any) -> bool:
  if not jnp.issubdtype(out.aval.dtype, jnp.integer):
    return False
  apart = [flow for flow in inputs if flow.differs]
  if all(flow.counts for flow in apart):
    name = eqn.primitive.name
    if name == "mul":
      return len(apart) == 1
    # One more on each device would be many more in the sum.
    return name in _ADDITIVE and len(apart) == len(inputs)
  if any(flow.examples is None for flow in apart):
    return False
  dims = [x.examples.dim if x.examples else None for x in inputs]
  return sums_examples(eqn, dims)


def _scan(eqn, inputs, axes):
  consts, carry, given = jaxprs.scan_parts(eqn, inputs)
  given = [_moved(flow, -1) for flow in given]
  while True:
    outs = flows(eqn.params["jaxpr"], [*consts, *carry, *given], axes)
    after = [_joined(*pair) for pair in zip(carry, outs)]
    if after == carry:
      if eqn.params["length"]:  # Of the last turn, and not as it began.
        pairs = zip(carry, outs)
        carry = [flow._replace(drawn=out.drawn) for flow, out in pairs]
      return [*carry, *(_moved(flow, 1) for flow in outs[len(after) :])]
    carry = after


def _moved(flow: Flow, by: int) -> Flow:
  """Into a scan, or out of it; what is scanned over is no dimension inside."""
  if flow.examples is None:
    return flow
  dim, number = flow.examples
  rows = Examples(dim + by, number) if dim + by >= 0 else None
  return flow._replace(examples=rows)


def _while(eqn, inputs, axes):
  begin = eqn.params["cond_nconsts"]
  end = begin + eqn.params["body_nconsts"]
  asked, consts, carry = inputs[:begin], inputs[begin:end], inputs[end:]
  while True:
    (goes_on,) = flows(eqn.params["cond_jaxpr"], [*asked, *carry], axes)
    outs = flows(eqn.params["body_jaxpr"], [*consts, *carry], axes)
    after = [_steered(goes_on, _joined(*pair)) for pair in zip(carry, outs)]
    if after == carry:
      return carry
    carry = after


def _cond(eqn, inputs, axes):
  chosen, *inputs = inputs
  branches = [flows(b, inputs, axes) for b in eqn.params["branches"]]
  return [_steered(chosen, _joined(*outs)) for outs in zip(*branches)]


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


def _programs(eqn: jex_core.JaxprEqn) -> list[Any]:
  """Programs that an equation runs, opened."""
  found = []
  for value in eqn.params.values():
    for part in value if isinstance(value, (tuple, list)) else (value,):
      if hasattr(part, "eqns"):
        found.append(jaxprs.opened(part)[0])
  return found


def _is_call(eqn: jex_core.JaxprEqn, programs: Sequence[Any]) -> bool:
  """Returns True if its one program takes and gives what the equation does.

  As of `jit`, `remat`, `custom_jvp`, `custom_vjp` and `shard_map`.
  """
  if len(programs) != 1:
    return False
  (body,) = programs
  alike = len(body.invars) == len(eqn.invars)
  return alike and len(body.outvars) == len(eqn.outvars)


def _same_shapes(eqn: jex_core.JaxprEqn, body: Any) -> bool:
  atoms = zip([*eqn.invars, *eqn.outvars], [*body.invars, *body.outvars])
  return all(
    getattr(x.aval, "shape", None) == getattr(y.aval, "shape", None)
    for x, y in atoms
  )


def _axes(eqn: jex_core.JaxprEqn) -> frozenset[str]:
  """Axes that a collective names."""
  named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
  named = named if isinstance(named, (tuple, list)) else (named,)
  return frozenset(axis for axis in named if isinstance(axis, str))


def _axes_within(program: Any) -> frozenset[str]:
  """Axes of all collectives in a program."""
  found: frozenset[str] = frozenset()
  for eqn in program.eqns:
    if eqn.primitive.name not in (*_LOCAL, "axis_index"):
      found |= _axes(eqn)
    found = found.union(*map(_axes_within, _programs(eqn)))
  return found


class Stepped(NamedTuple):
  """Values that a step of a device returned."""

  state: list[Any]  # leaves, in order; those that are no arrays as they are
  aux: Any
  flows: list[Flow]  # of the arrays of `aux`


def checked(
  step: Callable[..., tuple[Any, Any]],
  specs: Sequence[PartitionSpec],
  mesh: Mesh,
  axes: Axes,
) -> Callable[..., Stepped]:
  """`step`, looked at when it is traced.

  Args:
    step: `(state, *batch) -> (state, aux)` of a device.
    specs: Of the leaves of `state`, in order.
    mesh: That it is mapped over.
    axes: Along which batches, and parts of the state, are split.

  Returns:
    The same, with what went into each array of `aux` beside it.
  """
  several = frozenset(axis for axis in axes if mesh.shape[axis] > 1)
  # Where there is one device only, what comes out is as for several.
  looked_at = several or frozenset(axes)
  split = [spec != PartitionSpec() for spec in specs]
  own = owned_values(looked_at)

  def traced(state, *batch):
    leaves, structure = jax.tree.flatten(state)
    arrays = [i for i, x in enumerate(leaves) if leaf_util.is_array(x)]
    made: list[tuple[list[int], list[Any], Any]] = []

    def flat(given, *batch):
      whole = list(leaves)
      for i, x in zip(arrays, given):
        whole[i] = x
      out, aux = _pair(step(structure.unflatten(whole), *batch))
      _require_structure(out, state)
      after = jax.tree.leaves(out)
      mapped = _mapped(after, state)
      found, of_aux = jax.tree.flatten(aux)
      made.append((mapped, after, of_aux))
      return [*(after[i] for i in mapped), *found]

    # Traced once: the program is read, then run in the place of the step.
    given = [leaves[i] for i in arrays]
    program = jax.make_jaxpr(flat)(given, *batch)
    ((mapped, after, of_aux),) = made
    flow_of = [own if split[i] else COMMON for i in arrays]
    flow_of += [_given(x, looked_at) for x in jax.tree.leaves(batch)]
    found = flows(program, flow_of, looked_at)
    names = [name for name, _ in leaf_util.named_leaves(state)]
    counted = _counted(state)
    parting = []
    for i, flow in zip(mapped, found):
      missing = flow.own - flow.met if counted[i] else flow.parting
      if missing & several and not split[i]:
        parting.append((names[i], flow._replace(drawn=missing & flow.drawn)))
    _require_equal(parting, axes, _selecting(state))
    run = jex_core.jaxpr_as_fun(program)
    values = run(*given, *jax.tree.leaves(batch))
    for i, x in zip(mapped, values):
      after[i] = x if leaf_util.is_array(x) else jnp.asarray(x)
    aux = of_aux.unflatten(values[len(mapped) :])
    return Stepped(after, aux, found[len(mapped) :])

  return traced


def _given(x: Any, axes: frozenset[str]) -> Flow:
  """The flow of an array of the batch; a single key is of no example."""
  if x.ndim:
    return owned_values(axes, examples=x.shape[0])
  return owned_values(axes)._replace(drawn=axes)


def _counted(state: Any) -> list[bool]:
  """Which leaves of a state zen_sync counts, of itself equal on all devices."""
  is_sync = lambda node: isinstance(node, sync_state.ZenSyncState)
  mask = lambda node: jax.tree.map(lambda _: is_sync(node), node)
  return jax.tree.leaves(jax.tree.map(mask, state, is_leaf=is_sync))


def _pair(out: Any) -> tuple[Any, Any]:
  if isinstance(out, tuple) and len(out) == 2:
    return out
  remedy = "return `()` as `aux` if there is nothing to tell"
  shown = type(out).__name__
  if isinstance(out, tuple):
    shown = f"{len(out)} values"
    if len(out) > 2:
      remedy = (
        "make one of all that goes from step to step, `params, opt_state ="
        " state` first in `step` and `return (params, opt_state), aux` last"
      )
  raise TypeError(f"`step` must return `(state, aux)`, got {shown}; {remedy}.")


def _require_structure(out: Any, state: Any) -> None:
  """Refuses another state, as where `aux` or a part of it was forgotten."""
  if jax.tree.structure(out) == jax.tree.structure(state):
    return
  got, want = (
    [name for name, _ in leaf_util.named_leaves(tree)] for tree in (out, state)
  )
  lost = [name for name in want if name not in got]
  new = [name for name in got if name not in want]
  if lost:
    shown = f"without leaf {lost[0]!r}"
  elif new:
    shown = f"with leaf {new[0]!r} besides"
  else:
    shown = f"{type(out).__name__} of other nodes or static fields"
  raise TypeError(
    "`step` must return `(state, aux)`, and a state of the structure that it"
    f" was given, got one {shown}; return all of the state, what does not"
    " change as it came, and anything else in `aux`."
  )


_NUMBERS = (bool, int, float, complex)


def _mapped(after: Sequence[Any], state: Any) -> list[int]:
  """Which leaves of a returned state are arrays; others stay as they are."""
  found = []
  for i, (x, (name, before)) in enumerate(
    zip(after, leaf_util.named_leaves(state))
  ):
    was_array = leaf_util.is_array(before)
    number = isinstance(x, _NUMBERS)
    if leaf_util.is_array(x) or (was_array and number):
      found.append(i)
    elif was_array or not (number or isinstance(x, str) or _same(x, before)):
      raise TypeError(
        f"`step` must return leaf {name!r} of the state as an array, a number"
        " or as it came, got"
        f" {x!r} for {'an array' if was_array else repr(before)}; make it"
        " outside of the step."
      )
  return found


def _same(x: Any, before: Any) -> bool:
  """Returns True for one object, and for methods bound to equal ones."""
  return x is before or (type(x) is type(before) and bool(x == before))


def _selecting(state: Any) -> str | None:
  """The sparsifier that sends nothing itself, if the state has one's."""
  if sync_state.nodes(state, ErrorFeedbackState):
    return "error_feedback"
  if sync_state.nodes(state, SelectionState):
    return "top_k, threshold or random_k"
  return None


def _require_equal(
  parting: Sequence[tuple[str, Flow]], axes: Axes, selecting: str | None
) -> None:
  if not parting:
    return
  (name, flow), *others = parting
  missing = flow.parting
  lacking = tuple(axis for axis in axes if axis in missing)
  shown = " and ".join(map(repr, lacking))
  lacking, wanted = (x[0] if len(x) == 1 else x for x in (lacking, axes))
  more = f" (and {len(others)} more)" if others else ""
  average = f"average what the leaf is made of by `lax.pmean(x, {lacking!r})`."
  if flow.drawn and not flow.own - flow.met:
    raise ValueError(
      "`step` must return a state that is equal on all devices, but in leaf"
      f" {name!r} of it{more} there is what each device draws from a key of its"
      f" own, with no collective over {shown} on the way; draw it from a key"
      f" that is kept in the state, or {average}"
    )
  place = "first in the optimizer's chain,"
  if selecting:
    place = (
      f"right behind {selecting} in the optimizer's chain, where it sends what"
      " was selected,"
    )
  note = ""
  if "acc_grads" in name.split("."):
    note = (
      " What `optax.MultiSteps` accumulates may differ between devices where"
      " its type is in the state: not in that of `nnx.split`, so take"
      " `(params, opt_state)`, made by `zenjax.init_state`."
    )
  raise ValueError(
    "`step` must return a state that is equal on all devices, but it makes"
    f" leaf {name!r} of it{more} of the device's own part of the batch with no"
    f" collective over {shown} on the way; put `zenjax.zen_sync({wanted!r})`"
    f" {place} or {average}{note}"
  )
