"""Parts of a traced program: some outputs, and only what they need."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp

from zenjax._rows import _jaxprs


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """Some outputs of a trace as a function of some inputs.

  Attributes:
    strange: Further inputs that the outputs depend on, by number. They keep
      the values that the program was traced with.
    text: Equal texts are equal programs, strange inputs aside.
  """

  strange: tuple[int, ...]
  text: str
  _eqns: tuple[Any, ...]
  _inputs: tuple[Any, ...]
  _outputs: tuple[Any, ...]
  _known: dict[Any, Any]

  def __call__(self, values: Sequence[Any]) -> list[Any]:
    """The outputs; inputs are reshaped to what was traced."""
    env = dict(self._known)
    for var, value in zip(self._inputs, values, strict=True):
      env[var] = jnp.reshape(value, var.aval.shape)
    for eqn in self._eqns:
      outs = _jaxprs.bind(eqn, _read(env, eqn.invars))
      env.update(zip(eqn.outvars, outs))
    return _read(env, self._outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
  """A function as it ran on `values`; inputs and outputs are flat."""

  values: tuple[Any, ...]
  _inputs: tuple[Any, ...]
  _outputs: tuple[Any, ...]
  _eqns: tuple[Any, ...]  # those that depend on inputs
  _constants: dict[Any, Any]  # what all others gave

  def cut(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
    """What makes `outputs` of `inputs`, both by number."""
    out = [self._outputs[i] for i in outputs]
    eqns, needed = _needed(self._eqns, out)
    given = [self._inputs[i] for i in inputs]
    strange = [
      i
      for i, var in enumerate(self._inputs)
      if var in needed and i not in inputs
    ]
    constants = {v: x for v, x in self._constants.items() if v in needed}
    kept = {self._inputs[i]: self.values[i] for i in strange}
    return Program(
      strange=tuple(strange),
      text=_text(eqns, given, out, constants),
      _eqns=tuple(eqns),
      _inputs=tuple(given),
      _outputs=tuple(out),
      _known={**constants, **kept},
    )


def trace(fun: Callable[..., Any], *args: Any) -> Trace:
  """Runs `fun` on abstract arrays."""
  values = [jnp.asarray(x) for x in jax.tree.leaves(args)]
  jaxpr, consts = _jaxprs.opened(jax.make_jaxpr(fun)(*args))
  # A call needs all that it is given, for each of its outputs; what it holds
  # does not.
  flat = jax.make_jaxpr(lambda *values: _inlined(jaxpr, consts, values))
  jaxpr, consts = _jaxprs.opened(flat(*values))
  constants = dict(zip(jaxpr.constvars, consts))
  eqns = []
  for eqn in jaxpr.eqns:
    atoms = eqn.invars
    if all(isinstance(a, jex_core.Literal) or a in constants for a in atoms):
      outs = _jaxprs.bind(eqn, _read(constants, atoms))
      constants.update(zip(eqn.outvars, outs))
    else:
      eqns.append(eqn)
  return Trace(
    values=tuple(values),
    _inputs=tuple(jaxpr.invars),
    _outputs=tuple(jaxpr.outvars),
    _eqns=tuple(eqns),
    _constants=constants,
  )


def _inlined(jaxpr, consts, values):
  """Runs a program, and what it calls as a part of it."""
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values]))
  for eqn in jaxpr.eqns:
    args = _read(env, eqn.invars)
    if eqn.primitive.name in _jaxprs.CALLS:
      outs = _inlined(*_jaxprs.called(eqn), args)
    else:
      outs = _jaxprs.bind(eqn, args)
    env.update(zip(eqn.outvars, outs))
  return _read(env, jaxpr.outvars)


def _read(env, atoms):
  return [a.val if isinstance(a, jex_core.Literal) else env[a] for a in atoms]


def _needed(eqns, outputs):
  """Equations that `outputs` come from, and all variables these read."""
  needed = {a for a in outputs if not isinstance(a, jex_core.Literal)}
  kept = []
  for eqn in reversed(eqns):
    if not needed.isdisjoint(eqn.outvars):
      kept.append(eqn)
      needed.update(
        a for a in eqn.invars if not isinstance(a, jex_core.Literal)
      )
  return kept[::-1], needed


def _text(eqns, inputs, outputs, constants):
  """The equations with variables numbered in the order that they appear."""
  names: dict[Any, str] = {}

  def name(atom):
    if isinstance(atom, jex_core.Literal):
      return f"{atom.val!r}:{atom.aval}"
    if atom in constants:
      return f"{constants[atom]!r}:{atom.aval}"
    return names.setdefault(atom, f"{len(names)}:{atom.aval}")

  lines = [" ".join(map(name, inputs))]
  for eqn in eqns:
    read = " ".join(map(name, eqn.invars))
    made = " ".join(map(name, eqn.outvars))
    lines.append(f"{made} = {eqn.primitive.name} {eqn.params} {read}")
  lines.append(" ".join(map(name, outputs)))
  return "\n".join(lines)
