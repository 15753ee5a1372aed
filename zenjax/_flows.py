"""Where replicas would part: what a traced step makes of a device's own data.

A value is a device's own if it was computed from that device's part of a batch.
It may still be equal on all devices if a collective was on the way. Of some
collectives the result always is, and what is made of it alone; of anything else
nobody can read it from a program. Without a collective it is not.

Of values that may differ it is known, too, which dimension is that of the
examples, and which are sums over them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core as jex_core
import jax.numpy as jnp

from zenjax import _by_example
from zenjax._rows import _jaxprs


class Examples(NamedTuple):
  """Where a value has the examples of a device's part."""

  dim: int
  number: int  # of a device


class Flow(NamedTuple):
  """What went into a value."""

  own: frozenset[str]  # axes that devices' own data lie along
  met: frozenset[str]  # those that a collective then brought together
  differs: frozenset[str]  # those along which it is not known to be equal
  # Known of what differs: it is made example by example, or adds them up.
  examples: Examples | None = None
  counts: bool = False

  @property
  def parting(self) -> frozenset[str]:
    """Axes along which the value differs between devices for sure."""
    return self.own - self.met


def own(axes: frozenset[str], examples: int | None = None) -> Flow:
  """Of data of a device, `examples` along the first dimension."""
  rows = None if examples is None else Examples(0, examples)
  return Flow(axes, frozenset(), axes, rows)


COMMON = own(frozenset())

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
  jaxpr, _ = _jaxprs.opened(jaxpr)
  known: dict[Any, Flow] = dict(zip(jaxpr.invars, inputs, strict=True))

  def read(x) -> Flow:
    literal = isinstance(x, jex_core.Literal)
    return COMMON if literal else known.get(x, COMMON)

  for eqn in jaxpr.eqns:
    known |= zip(eqn.outvars, _through(eqn, list(map(read, eqn.invars)), axes))
  return [read(x) for x in jaxpr.outvars]


def _joined(*parts: Flow) -> Flow:
  """Of a value that is one of these."""
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
  )


def _steered(by: Flow, flow: Flow) -> Flow:
  """Of a value that another one decides on."""
  known = Flow(flow.own | by.own, flow.met | by.met, flow.differs | by.differs)
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
    return [own(named)]
  joined = _joined(*inputs)
  met = joined.met
  if name not in _LOCAL:
    # What all devices have in common is no nearer to being averaged.
    met |= named.union(*map(_axes_within, _programs(eqn))) & joined.own
  differs = joined.differs
  if name in _EQUAL and eqn.params.get("axis_index_groups") is None:
    differs -= named
  known = Flow(joined.own, met, differs)
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
  found = _by_example.through(eqn, dims, number)
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
  return _by_example.sums_examples(eqn, dims)


def _scan(eqn, inputs, axes):
  consts, carry, given = _jaxprs.scan_parts(eqn, inputs)
  given = [_moved(flow, -1) for flow in given]
  while True:
    outs = flows(eqn.params["jaxpr"], [*consts, *carry, *given], axes)
    after = [_joined(*pair) for pair in zip(carry, outs)]
    if after == carry:
      return [*carry, *(_moved(flow, 1) for flow in outs[len(carry) :])]
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
        found.append(_jaxprs.opened(part)[0])
  return found


def _is_call(eqn: jex_core.JaxprEqn, programs: Sequence[Any]) -> bool:
  """Whether its one program takes and gives what the equation does.

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
