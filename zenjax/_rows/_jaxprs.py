"""Traced programs, as far as their make differs between JAX versions."""

from collections.abc import Sequence
import pathlib
from typing import Any

import jax
from jax.extend import core as jex_core

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
  """What goes into a scan, as constants, carry and inputs.

  Counted by `num_consts` and `num_carry` before JAX 0.12, then by `ft_in`.
  """
  if "ft_in" in eqn.params:
    return [list(part) for part in eqn.params["ft_in"].update(values).unpack()]
  consts = eqn.params["num_consts"]
  carry = consts + eqn.params["num_carry"]
  values = list(values)
  return [values[:consts], values[consts:carry], values[carry:]]


def bind(eqn: jex_core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
  """What an equation makes of other values."""
  params = eqn.primitive.get_bind_params(eqn.params)
  with eqn.ctx.manager:
    found = eqn.primitive.bind(*values, **params)
  return list(found) if eqn.primitive.multiple_results else [found]


UNKNOWN = "an unknown line"


def place(eqn: jex_core.JaxprEqn) -> str:
  """The innermost line of neither JAX nor zenjax that led to an equation."""
  traceback = eqn.source_info.traceback
  for frame in traceback.frames if traceback is not None else ():
    path = pathlib.Path(frame.file_name)
    if _LIBRARY not in path.parents and _ZENJAX not in path.parents:
      return f"{path.name}:{frame.line_num} ({frame.function_name})"
  return UNKNOWN
