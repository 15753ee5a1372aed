"""Traced programs, as far as their make differs between JAX versions."""

from collections.abc import Callable, Sequence
import dataclasses
import pathlib
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval as pe
import numpy as np

_LIBRARY = pathlib.Path(jax.__file__).parent
_ZENJAX = pathlib.Path(__file__).parents[1]


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """A jaxpr, closed or not, as `(jaxpr, consts)`.

  Before JAX 0.12 they were two classes.
  """
  return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


# What runs another program as a part of its own.
CALLS = ("jit", "pjit", "closed_call", "core_call")


def called(eqn: jex_core.JaxprEqn) -> tuple[Any, Sequence[Any]]:
  """The program that an equation of `CALLS` runs, opened."""
  return opened(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))


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
    The program, not closed, and for each input whether it is still one.
  """
  jaxpr, _ = opened(closed)
  if not effects:
    # Writes to references stay: what is read of them later is needed.
    writes = lambda eqn: any(hasattr(e, "input_index") for e in eqn.effects)
    eqns = [
      eqn if writes(eqn) else eqn.replace(effects=frozenset())
      for eqn in jaxpr.eqns
    ]
    jaxpr = jaxpr.replace(eqns=eqns)
  return pe.dce_jaxpr(jaxpr, outputs or [True] * len(jaxpr.outvars))


def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
  """Runs a program that was opened."""
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

  def read(atom):
    return atom.val if isinstance(atom, jex_core.Literal) else env[atom]

  for eqn in jaxpr.eqns:
    env.update(zip(eqn.outvars, bind(eqn, [read(x) for x in eqn.invars])))
  return [read(x) for x in jaxpr.outvars]


UNKNOWN = "an unknown line"


def source_place(eqn: jex_core.JaxprEqn) -> str:
  """The innermost line of neither JAX nor zenjax that led to an equation."""
  traceback = eqn.source_info.traceback
  for frame in traceback.frames if traceback is not None else ():
    path = pathlib.Path(frame.file_name)
    if _LIBRARY not in path.parents and _ZENJAX not in path.parents:
      return f"{path.name}:{frame.line_num} ({frame.function_name})"
  return UNKNOWN


# A traced function as one list of operations, calls and branches opened.
#
# `jit`, `remat` and `custom_jvp` are replaced by what they call. A `cond` is
# replaced by all its branches and a selection between their results, so that
# what follows meets no program inside a program but loops.


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Value:
  """An input, a constant, or a result of an operation.

  Attributes:
    shape: Its shape.
    dtype: Its dtype.
    constant: A constant's number or array; None for all others.
  """

  shape: tuple[int, ...]
  dtype: Any
  constant: Any = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Operation:
  """One primitive with what it reads and makes.

  Attributes:
    name: The primitive's.
    reads: Its operands.
    makes: Its results.
    params: The primitive's parameters.
    run: Computes the results, a list, from other operands.
    eqn: The equation of the traced program.
    callers: Those of the calls that it stands in, the innermost last.
  """

  name: str
  reads: tuple[Value, ...]
  makes: tuple[Value, ...]
  params: dict[str, Any]
  run: Callable[[Sequence[Any]], list[Any]]
  eqn: jex_core.JaxprEqn
  callers: tuple[jex_core.JaxprEqn, ...]

  @property
  def place(self) -> str:
    """The line of the user's or of optax that led here."""
    places = map(source_place, (self.eqn, *reversed(self.callers)))
    known = (place for place in places if place != UNKNOWN)
    return next(known, UNKNOWN)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Operations:
  """A traced function.

  Attributes:
    inputs: Its arguments, flat.
    steps: What it does, in order.
    outputs: Its results, flat.
  """

  inputs: tuple[Value, ...]
  steps: tuple[Operation, ...]
  outputs: tuple[Value, ...]

  def needed(
    self, outputs: Sequence[Value], known: Sequence[Value] = ()
  ) -> list[Operation]:
    """Returns the steps that `outputs` come from where `known` is given."""
    wanted, kept, given = set(outputs), [], set(known)
    for step in reversed(self.steps):
      if any(x in wanted and x not in given for x in step.makes):
        kept.append(step)
        wanted.update(step.reads)
    return kept[::-1]


def trace(fun: Callable[..., Any], *args: Any) -> Operations:
  """Traces `fun` on arrays or shapes; nothing runs."""
  closed = jax.make_jaxpr(fun)(*args)
  jaxpr, consts = opened(closed)
  inputs = tuple(_new(var) for var in jaxpr.invars)
  steps: list[Operation] = []
  outputs = _open(jaxpr, consts, inputs, steps, ())
  return Operations(inputs, tuple(steps), tuple(outputs))


_CALLS = (
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


def _open(jaxpr, consts, inputs, steps, callers):
  """Appends the operations of a program; returns its results."""
  env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
  for var, const in zip(jaxpr.constvars, consts, strict=True):
    env[var] = Value(np.shape(const), _new(var).dtype, const)

  def read(atom) -> Value:
    if isinstance(atom, jex_core.Literal):
      aval: Any = atom.aval
      return Value(aval.shape, aval.dtype, atom.val)
    return env[atom]

  for eqn in jaxpr.eqns:
    reads = tuple(map(read, eqn.invars))
    called = _called(eqn)
    if called is not None:
      made = _open(*called, reads, steps, (*callers, eqn))
    elif eqn.primitive.name in _CASTS:
      made = reads  # Whoever runs it casts what needs it.
    elif eqn.primitive.name == "cond" and not eqn.effects:
      made = _selected(eqn, reads, steps, callers)
    else:
      made = [_new(var) for var in eqn.outvars]
      run = lambda values, eqn=eqn: bind(eqn, values)
      name = eqn.primitive.name
      steps.append(_operation(eqn, name, reads, made, run, callers))
    env.update(zip(eqn.outvars, made, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _called(eqn):
  if eqn.primitive.name not in _CALLS:
    return None
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    if key in eqn.params:
      return opened(eqn.params[key])
  return None


def _selected(eqn, reads, steps, callers):
  """The results of all branches of a `cond`, and which of them to take."""
  which, *operands = reads
  branches = [
    _open(*opened(branch), operands, steps, (*callers, eqn))
    for branch in eqn.params["branches"]
  ]
  last = len(branches) - 1

  def run(values):
    return [
      lax.select_n(
        lax.clamp(np.int32(0), values[0], np.int32(last)), *values[1:]
      )
    ]

  made = []
  for var, *cases in zip(eqn.outvars, *branches, strict=True):
    if all(case is cases[0] for case in cases):
      made.append(cases[0])
      continue
    made.append(_new(var))
    reads = (which, *cases)
    one = _operation(eqn, "select_n", reads, made[-1:], run, callers)
    steps.append(one)
  return made


def _operation(eqn, name, reads, made, run, callers):
  return Operation(name, reads, tuple(made), eqn.params, run, eqn, callers)


def _new(var) -> Value:
  aval: Any = var.aval
  return Value(tuple(aval.shape), aval.dtype)
