"""Traced programs, as far as their make differs between JAX versions."""

from collections.abc import Sequence
import pathlib
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval as pe

_LIBRARY = pathlib.Path(jax.__file__).parent
_ZENJAX = pathlib.Path(__file__).parents[1]


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """A jaxpr, closed or not, as `(jaxpr, consts)`.

  Before JAX 0.12 they were two classes.
  """
  return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


# What runs another program as a part of its own.
CALLS = ("jit", "pjit", "closed_call", "core_call")


def called(eqn: jex_core.JaxprEqn) -> Any:
  """The program that a call runs."""
  keys = {"jaxpr", "call_jaxpr", "fun_jaxpr"}
  (key,) = keys.intersection(eqn.params)
  return eqn.params[key]


def scan_parts(
  eqn: jex_core.JaxprEqn, values: Sequence[Any]
) -> list[list[Any]]:
  """Returns the constants, the carry and the inputs of a scan.

  Counted by `num_consts` and `num_carry` before JAX 0.12, then by `ft_in`.
  """
  if "ft_in" in eqn.params:
    return [list(part) for part in eqn.params["ft_in"].update(values).unpack()]
  consts = eqn.params["num_consts"]
  carry = consts + eqn.params["num_carry"]
  values = list(values)
  return [values[:consts], values[consts:carry], values[carry:]]


def bind(eqn: jex_core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
  """Runs an equation on other values."""
  params = eqn.primitive.get_bind_params(eqn.params)
  with eqn.ctx.manager:
    found = eqn.primitive.bind(*values, **params)
  return list(found) if eqn.primitive.multiple_results else [found]


def needed(
  closed: Any, outputs: Sequence[bool] | None = None, effects: bool = True
) -> tuple[Any, list[bool]]:
  """A traced program without what no output needs, and the inputs it reads.

  Args:
    closed: Of `jax.make_jaxpr`.
    outputs: Which outputs are wanted, by default all.
    effects: Whether to keep what only has an effect, as `jax.debug.print`.

  Returns:
    The program, and for each input whether it is still one.
  """
  jaxpr, consts = opened(closed)
  if not effects:
    # Writes to references stay: what is read of them later is needed.
    writes = lambda eqn: any(hasattr(e, "input_index") for e in eqn.effects)
    eqns = [
      eqn if writes(eqn) else eqn.replace(effects=frozenset())
      for eqn in jaxpr.eqns
    ]
    jaxpr = jaxpr.replace(eqns=eqns)
  jaxpr, read = pe.dce_jaxpr(jaxpr, outputs or [True] * len(jaxpr.outvars))
  return closed.replace(jaxpr=jaxpr, consts=consts), read


UNKNOWN = "an unknown line"


def source_place(eqn: jex_core.JaxprEqn) -> str:
  """The innermost line of neither JAX nor zenjax that led to an equation."""
  traceback = eqn.source_info.traceback
  for frame in traceback.frames if traceback is not None else ():
    path = pathlib.Path(frame.file_name)
    if _LIBRARY not in path.parents and _ZENJAX not in path.parents:
      return f"{path.name}:{frame.line_num} ({frame.function_name})"
  return UNKNOWN


# Calls that mean what the program does that they run.
_OPENED = (
  *CALLS,
  "checkpoint",
  "custom_jvp_call",
  "custom_vjp_call",
  "custom_vjp_call_jaxpr",
  "remat",
  "remat2",
)
# They change over which devices a value may differ, and nothing of the value.
_CASTS = ("pvary", "pcast", "reduced_vary_cast")


class Differs(Exception):
  """Two traces are not of the same program."""


class Pairwise:
  """Interprets two traces of one function, made for other sizes, in step.

  A subclass says what constants and equations are. Calls are opened, and of a
  `cond` all branches are interpreted, so that it meets no program inside a
  program but loops.
  """

  _callers: tuple[jex_core.JaxprEqn, ...] = ()

  def constant(self, x: Any, other: Any) -> Any:
    """Returns the value of a constant of the first trace."""
    raise NotImplementedError

  def equation(
    self, eqn: jex_core.JaxprEqn, other: jex_core.JaxprEqn, values: list[Any]
  ) -> Sequence[Any]:
    """Returns the values of an equation's results."""
    raise NotImplementedError

  def chosen(
    self, eqn: jex_core.JaxprEqn, which: Any, cases: Sequence[Any]
  ) -> Any:
    """Returns the value of a `cond`, given the values of its branches."""
    raise NotImplementedError

  def place(self, eqn: jex_core.JaxprEqn) -> str:
    """Returns the line of the user's, or of optax, that led to an equation."""
    places = map(source_place, (eqn, *reversed(self._callers)))
    return next((place for place in places if place != UNKNOWN), UNKNOWN)

  def run(self, first: Any, second: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the values of the results.

    Args:
      first: The trace that is interpreted.
      second: The other one.
      inputs: Values of the inputs.

    Raises:
      Differs: The traces do not do the same, sizes aside.
    """
    (one, one_consts), (two, two_consts) = opened(first), opened(second)
    env = dict(zip(one.invars, inputs, strict=True))
    for var, x, y in zip(one.constvars, one_consts, two_consts, strict=True):
      env[var] = self.constant(x, y)
    # Maps a variable of the first trace to that of the second.
    others = dict(zip(one.constvars, two.constvars, strict=True))
    others |= zip(one.invars, two.invars, strict=True)

    def read(atoms, other_atoms):
      values = []
      for atom, other in zip(atoms, other_atoms, strict=True):
        if isinstance(atom, jex_core.Literal):
          values.append(self.constant(atom.val, other.val))
        elif others[atom] is other:
          values.append(env[atom])
        else:
          raise Differs("what operations read")
      return values

    for eqn, other in zip(one.eqns, two.eqns, strict=True):
      if eqn.primitive is not other.primitive:
        raise Differs(f"{eqn.primitive.name} at {self.place(eqn)}")
      results = self._results(eqn, other, read(eqn.invars, other.invars))
      env.update(zip(eqn.outvars, results, strict=True))
      others.update(zip(eqn.outvars, other.outvars, strict=True))
    return read(one.outvars, two.outvars)

  def _results(self, eqn, other, values):
    name = eqn.primitive.name
    if name in _CASTS:
      return values  # Whoever runs it casts what needs it.
    is_branching = name == "cond" and not eqn.effects
    if name not in _OPENED and not is_branching:
      if _settings(eqn, other) != _settings(other, eqn):
        raise Differs(f"{name} at {self.place(eqn)}")
      return self.equation(eqn, other, values)
    outside, self._callers = self._callers, (*self._callers, eqn)
    if is_branching:
      results = self._branches(eqn, other, values)
    else:
      results = self.run(called(eqn), called(other), values)
    self._callers = outside
    return results

  def _branches(self, eqn, other, values):
    which, *operands = values
    branches = zip(eqn.params["branches"], other.params["branches"])
    results = [self.run(*branch, operands) for branch in branches]
    return [
      cases[0]
      if all(case is cases[0] for case in cases)
      else self.chosen(eqn, which, cases)
      for cases in zip(*results)
    ]


def _settings(eqn: jex_core.JaxprEqn, other: jex_core.JaxprEqn) -> list[Any]:
  """What is equal where the same is done: numbers, and bodies of loops.

  Where shapes grow, some numbers are sizes, and these are left out.
  """
  grows = grown(eqn, other)
  found: list[Any] = []
  for key, value in eqn.params.items():
    parts = value if isinstance(value, (tuple, list)) else (value,)
    plain = [x for x in parts if isinstance(x, (bool, int, float, str))]
    if len(plain) == len(parts) and (parts is not value or not grows):
      found.append((key, plain))
    if not grows:
      found += [str(x) for x in parts if hasattr(opened(x)[0], "eqns")]
  return found


def grown(eqn: Any, other: Any) -> bool:
  """Returns True if operands or results have other shapes in two traces."""
  here, there = eqn.invars + eqn.outvars, other.invars + other.outvars
  return bool([x for x, y in zip(here, there) if x.aval.shape != y.aval.shape])
