"""What may be done to a whole table so that it is done to its rows instead.

A cast, a factor, a row set to a constant: such a step gives the same rows
whether the table takes it before rows are looked up or the rows do after.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp

from zenjax._rows import _look_ups

# `(rows [..., D], ids [...]) -> rows`.
Step = Callable[[jax.Array, jax.Array], jax.Array]


class Operand(NamedTuple):
  """What goes into an equation beside the table."""

  value: Any
  # What it was broadcast from, and to which dimensions; None if it was not.
  source: tuple[Any, tuple[int, ...]] | None


def cast(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """To another floating dtype."""
  del at, others
  dtype = eqn.params["new_dtype"]
  if not jnp.issubdtype(dtype, jnp.floating):
    return f"is cast to {jnp.dtype(dtype).name}"
  return lambda rows, ids: rows.astype(dtype)


def negative(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """Minus the table."""
  del eqn, at, others
  return lambda rows, ids: -rows


def times(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """By a scalar, or a factor for each column."""
  del at
  factor = _of_a_row(others[0], eqn)
  if factor is None:
    return "is multiplied by more than a factor or a row of factors"
  return lambda rows, ids: rows * _beside(factor, rows)


def over(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """Divided by a scalar, or a divisor for each column."""
  divisor = _of_a_row(others[0], eqn)
  if at != 0 or divisor is None:
    return "is in a quotient other than over a scalar or a row"
  return lambda rows, ids: rows / _beside(divisor, rows)


def row_set(
  eqn: jex_core.JaxprEqn, at: int, others: Sequence[Operand]
) -> Step | str:
  """One row replaced, as for padding: `table.at[0].set(0)`."""
  dims = eqn.params["dimension_numbers"]
  indices, row = (other.value for other in others)
  one = jnp.size(indices) == 1 and tuple(dims.inserted_window_dims) == (0,)
  num_rows, width = _shape(eqn)
  if at != 0 or not one or jnp.size(row) != width:
    return "is written to at more than one row"
  mode = jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
  clips = mode == jax.lax.GatherScatterMode.CLIP
  at_row = _look_ups.in_range(jnp.reshape(indices, ()), num_rows, clips)
  # Out of range nothing is written, and look-ups out of range are `num_rows`.
  at_row = jnp.where(at_row < num_rows, at_row, -1)
  row = jnp.reshape(row, width)
  return lambda rows, ids: jnp.where(
    (ids == at_row)[..., None], _beside(row, rows), rows
  )


STEPS: dict[str, Callable[..., Step | str]] = {
  "convert_element_type": cast,
  "neg": negative,
  "mul": times,
  "div": over,
  "scatter": row_set,
}

# What changes the values that a fill stands for, unless it is 0 or NaN.
SCALES = ("neg", "mul", "div")

# What changes types or places only is done to the table as it is.
TYPES = ("copy", "copy_p", "pvary", "pcast")
PLACES = (*TYPES, "sharding_constraint", "reshard")


def _of_a_row(operand: Operand, eqn: jex_core.JaxprEqn) -> Any | None:
  """A scalar or `[D]`, if that is all that the operand is."""
  _, width = _shape(eqn)
  candidates: list[tuple[Any, Any]] = [(operand.value, None)]
  if operand.source is not None:
    candidates.append(operand.source)
  for value, dims in candidates:
    shape = jnp.shape(value)
    if shape == ():
      return value
    across = dims in (None, (0, 1)) and shape == (1, width)
    if across or (dims == (1,) and shape in [(width,), (1,)]):
      return jnp.reshape(value, -1)
  return None


def _beside(row: Any, rows: jax.Array) -> jax.Array:
  """A scalar or `[D]` with as many dimensions as `rows: [..., D]`."""
  return jnp.reshape(row, (*[1] * (rows.ndim - 1), -1))


def _shape(eqn: jex_core.JaxprEqn) -> tuple[int, int]:
  aval: Any = eqn.outvars[0].aval
  return aval.shape
