"""Reads, runs and compares traced programs, for all supported JAX versions."""

from collections.abc import Sequence
import pathlib
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval as pe

_LIBRARY = pathlib.Path(jax.__file__).parent
_ZENJAX = pathlib.Path(__file__).parents[1]


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """Returns a jaxpr, closed or not, as `(jaxpr, consts)`.

  Before JAX 0.12, closed and open jaxprs were two classes.
  """
  return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


# Primitives that call another program.
CALLS = ("jit", "pjit", "closed_call", "core_call")


def called(eqn: jex_core.JaxprEqn) -> Any:
  """Returns the program that a call runs."""
  keys = {"jaxpr", "call_jaxpr", "fun_jaxpr"}
  (key,) = keys.intersection(eqn.params)
  return eqn.params[key]


def scan_parts(
  eqn: jex_core.JaxprEqn, values: Sequence[Any]
) -> list[list[Any]]:
  """Returns the constants, the carry and the inputs of a scan.

  Before JAX 0.12, `num_consts` and `num_carry` tell them apart; then `ft_in`.
  """
  if "ft_in" in eqn.params:
    return [list(part) for part in eqn.params["ft_in"].update(values).unpack()]
  consts = eqn.params["num_consts"]
  carry = consts + eqn.params["num_carry"]
  values = list(values)
  return [values[:consts], values[consts:carry], values[carry:]]


def bind(eqn: jex_core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
  """Runs an equation on `values`."""
  params = eqn.primitive.get_bind_params(eqn.params)
  with eqn.ctx.manager:
    result = eqn.primitive.bind(*values, **params)
  return list(result) if eqn.primitive.multiple_results else [result]


def needed(
  closed: Any, outputs: Sequence[bool] | None = None, effects: bool = True
) -> tuple[Any, list[bool]]:
  """Removes the equations of a traced program that no output needs.

  Args:
    closed: The result of `jax.make_jaxpr`.
    outputs: Which outputs are wanted, by default all.
    effects: Whether to keep equations that only have effects, such as
      `jax.debug.print`.

  Returns:
    The program, and for each input whether it is still needed.
  """
  jaxpr, consts = opened(closed)
  if not effects:
    # Writes to references stay, because later reads need them.
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
  """Returns the innermost line outside JAX and zenjax that made an equation."""
  traceback = eqn.source_info.traceback
  for frame in traceback.frames if traceback is not None else ():
    path = pathlib.Path(frame.file_name)
    if _LIBRARY not in path.parents and _ZENJAX not in path.parents:
      return f"{path.name}:{frame.line_num} ({frame.function_name})"
  return UNKNOWN


# Calls whose results are the results of the program that they run.
_OPENED = (
  *CALLS,
  "checkpoint",
  "custom_jvp_call",
  "custom_vjp_call",
  "custom_vjp_call_jaxpr",
  "remat",
  "remat2",
)
# Primitives that change the type of a value (over which axes it varies) only.
_CASTS = ("pvary", "pcast", "reduced_vary_cast")


class Differs(Exception):
  """Two traces are not the same program."""


class Pairwise:
  """Interprets two traces of one function, for two sizes, in parallel.

  A subclass defines the values of constants and equations. Calls are
  interpreted inside, and so are all branches of a `cond`. Loops are therefore
  the only nested programs that a subclass sees.
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
    """Returns the line of the user's code, or of optax, of an equation."""
    places = map(source_place, (eqn, *reversed(self._callers)))
    return next((place for place in places if place != UNKNOWN), UNKNOWN)

  def run(self, first: Any, second: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the values of the results.

    Args:
      first: The trace to interpret.
      second: The trace for another size.
      inputs: Values of the inputs.

    Raises:
      Differs: The traces differ by more than sizes.
    """
    (one, one_consts), (two, two_consts) = opened(first), opened(second)
    env = dict(zip(one.invars, inputs, strict=True))
    for var, x, y in zip(one.constvars, one_consts, two_consts, strict=True):
      env[var] = self.constant(x, y)
    # Maps a variable of the first trace to the same variable of the second.
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
      return values  # A subclass that runs equations casts types itself.
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
  """Returns the parameters that must be equal: numbers, and bodies of loops.

  If shapes grow, tuples of numbers may be sizes, so these are left out.
  """
  grows = grown(eqn, other)
  compared: list[Any] = []
  for key, value in eqn.params.items():
    parts = value if isinstance(value, (tuple, list)) else (value,)
    plain = [x for x in parts if isinstance(x, (bool, int, float, str))]
    if len(plain) == len(parts) and (parts is not value or not grows):
      compared.append((key, plain))
    if not grows:
      compared += [str(x) for x in parts if hasattr(opened(x)[0], "eqns")]
  return compared


def grown(eqn: Any, other: Any) -> bool:
  """Returns True if the two traces have different shapes in an equation."""
  here, there = eqn.invars + eqn.outvars, other.invars + other.outvars
  return bool([x for x, y in zip(here, there) if x.aval.shape != y.aval.shape])
