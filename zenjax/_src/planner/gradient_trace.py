"""Gradients of a traced function: their leaves, and when each is complete.

A program is taken to run in the order in which it was traced: that of autodiff,
whose backward pass goes from the loss to the inputs. The cost of an equation is
that of a roofline, by the bytes it moves and the numbers it multiplies. Only
shares of the whole matter: seconds are measured elsewhere.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax
from jax.extend import core
import numpy as np

from zenjax._src.core import jaxprs
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows

# Multiplications and additions in the time of a byte moved: an A100 has 200 in
# 16 bits, a TPU v5e 240, a CPU with AVX2 about 10. The part of a step before a
# gradient depends little on it.
INTENSITY = 100.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
  """A gradient as a step makes it.

  Attributes:
    name: Name of the leaf.
    shape: Shape of the parameter.
    dtype: Dtype of its elements.
    look_ups: Rows that a device brings as SparseRows; None for an array.
    ready: The part of the step's work until it is complete, in [0, 1].
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  look_ups: int | None
  ready: float


def gradients(value_and_grad: Callable[..., Any], *args: Any) -> list[Gradient]:
  """Returns gradients in the order in which the program completes them.

  Args:
    value_and_grad: `jax.value_and_grad(loss)` or zenjax's; traced, not run.
    *args: Its arguments, arrays or shapes.

  Raises:
    TypeError: It does not return a pair.
  """
  closed, shape = jax.make_jaxpr(value_and_grad, return_shape=True)(*args)
  if not isinstance(shape, tuple) or len(shape) != 2:
    raise TypeError(
      "`value_and_grad` must return a pair (value, gradients), got"
      f" {type(shape).__name__}; give `jax.value_and_grad(loss)` or"
      " `zenjax.value_and_grad(loss)`."
    )
  total, times = _walk(closed.jaxpr, 0.0)
  skipped = len(jax.tree.leaves(shape[0]))
  ready = times[skipped:]
  found, at = [], 0
  for name, leaf in leaf_util.named_leaves(shape[1], is_rows):
    parts = len(jax.tree.leaves(leaf))
    done = max(ready[at : at + parts])
    at += parts
    found.append(
      Gradient(
        name=name,
        shape=tuple(leaf.shape),
        dtype=np.dtype(leaf.dtype),
        look_ups=leaf.capacity if is_rows(leaf) else None,
        ready=done / total if total else 1.0,
      )
    )
  return sorted(found, key=lambda g: g.ready)


def _walk(jaxpr: Any, start: float) -> tuple[float, list[float]]:
  """Returns when a program from `start` ends, and each output is complete."""
  known: dict[Any, float] = {}
  now = start
  for eqn in jaxpr.eqns:
    inner = _called(eqn)
    if inner is None:
      now += _cost(eqn)
      done = [now] * len(eqn.outvars)
    else:
      now, done = _walk(inner, now)
    # An output that is an argument handed through is complete with it.
    known |= dict(zip(eqn.outvars, done))
  outputs = [
    start if isinstance(v, core.Literal) else known.get(v, start)
    for v in jaxpr.outvars
  ]
  return now, outputs


# Calls whose program is a part of the one around it.
_CALLS = {
  "checkpoint",
  "closed_call",
  "custom_jvp_call",
  "custom_vjp_call",
  "jit",
  "pjit",
  "remat",
  "remat2",
}


def _called(eqn: core.JaxprEqn) -> Any:
  if eqn.primitive.name not in _CALLS:
    return None
  found = _inside(eqn.params)
  return found[0] if len(found) == 1 else None


def _inside(params: Mapping[str, Any]) -> list[Any]:
  """Returns all programs in the parameters of an equation."""
  found = []
  for value in params.values():
    for x in value if isinstance(value, tuple | list) else (value,):
      program = jaxprs.opened(x)[0]
      if hasattr(program, "eqns"):
        found.append(program)
  return found


def _cost(eqn: core.JaxprEqn) -> float:
  """Returns the bytes that an equation moves, or could while it multiplies."""
  name = eqn.primitive.name
  inside = [_walk(jaxpr, 0.0)[0] for jaxpr in _inside(eqn.params)]
  if name == "scan":
    return eqn.params["length"] * sum(inside)
  if name == "cond":
    return max(inside)
  if inside and name not in _ELEMENTWISE:
    return sum(inside)
  moved = sum(_bytes(v) for v in (*eqn.invars, *eqn.outvars))
  if name in _GATHERS:
    # Reads or writes as much as it looks up, never the table around it.
    sizes = sorted(_bytes(v) for v in (*eqn.invars, *eqn.outvars))
    moved = sum(sizes[:-1]) if name == "gather" else 2 * sum(sizes[:-2])
  return max(moved, _flops(eqn) / INTENSITY)


# Equations whose inner program joins two elements.
_ELEMENTWISE = {"reduce", "reduce_window", "scatter", "scatter-add", "sort"}
_GATHERS = {"gather", "scatter", "scatter-add"}


def _flops(eqn: core.JaxprEqn) -> float:
  name = eqn.primitive.name
  if name == "dot_general":
    ((contracted, _), _) = eqn.params["dimension_numbers"]
    shape = _shape(eqn.invars[0])
    inner = math.prod(shape[d] for d in contracted)
    return 2.0 * inner * math.prod(_shape(eqn.outvars[0]))
  if name == "conv_general_dilated":
    kernel = _shape(eqn.invars[1])
    out = eqn.params["dimension_numbers"].rhs_spec[0]
    inner = math.prod(kernel) // kernel[out]
    return 2.0 * inner * math.prod(_shape(eqn.outvars[0]))
  return 0.0


def _shape(v: Any) -> tuple[int, ...]:
  return v.aval.shape


def _bytes(v: Any) -> float:
  aval = v.aval
  size = getattr(aval, "size", 0)
  return float(size * getattr(aval.dtype, "itemsize", 4)) if size else 0.0
