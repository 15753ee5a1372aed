"""Where replicas would part: what a traced step makes of a device's own data.

A value is a device's own if it was computed from that device's part of a batch.
It may still be equal on all devices if a collective was on the way; whether it
is, nobody can read from a program. Without one it is not.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core as jex_core

from zenjax._rows import _jaxprs


class Flow(NamedTuple):
  """What went into a value."""

  own: frozenset[str]  # axes that devices' own data lie along
  met: frozenset[str]  # those that a collective then brought together

  @property
  def parting(self) -> frozenset[str]:
    """Axes along which the value differs between devices."""
    return self.own - self.met


COMMON = Flow(frozenset(), frozenset())

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
  parts = tuple(set(parts))
  if len(parts) == 1:
    return parts[0]
  return Flow(
    frozenset().union(*(part.own for part in parts)),
    frozenset().union(*(part.met for part in parts)),
  )


def _through(
  eqn: jex_core.JaxprEqn, inputs: list[Flow], axes: frozenset[str]
) -> list[Flow]:
  name = eqn.primitive.name
  if name in _LOOPS:
    return _LOOPS[name](eqn, inputs, axes)
  if name == "optimization_barrier":
    return inputs
  programs = _programs(eqn)
  if _is_call(eqn, programs):
    return flows(programs[0], inputs, axes)
  joined, named = _joined(*inputs), _axes(eqn) & axes
  if name == "axis_index":
    joined = Flow(named, frozenset())
  elif name not in _LOCAL:
    # What all devices have in common is no nearer to being averaged.
    met = named.union(*map(_axes_within, programs)) & joined.own
    joined = _joined(joined, Flow(frozenset(), met))
  return [joined] * len(eqn.outvars)


def _scan(eqn, inputs, axes):
  consts, carry, given = _jaxprs.scan_parts(eqn, inputs)
  while True:
    outs = flows(eqn.params["jaxpr"], [*consts, *carry, *given], axes)
    after = [_joined(*pair) for pair in zip(carry, outs)]
    if after == carry:
      return [*carry, *outs[len(carry) :]]
    carry = after


def _while(eqn, inputs, axes):
  begin = eqn.params["cond_nconsts"]
  end = begin + eqn.params["body_nconsts"]
  asked, consts, carry = inputs[:begin], inputs[begin:end], inputs[end:]
  while True:
    (goes_on,) = flows(eqn.params["cond_jaxpr"], [*asked, *carry], axes)
    outs = flows(eqn.params["body_jaxpr"], [*consts, *carry], axes)
    after = [_joined(goes_on, *pair) for pair in zip(carry, outs)]
    if after == carry:
      return carry
    carry = after


def _cond(eqn, inputs, axes):
  chosen, *inputs = inputs
  branches = [flows(b, inputs, axes) for b in eqn.params["branches"]]
  return [_joined(chosen, *outs) for outs in zip(*branches)]


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
