"""Gathers and scatters of rows by numbers that are never negative.

`x.at[k]` counts a negative `k` from the end, which takes three operations more
wherever rows are moved.
"""

from typing import Any

import jax
from jax.typing import ArrayLike


def take(x: jax.Array, at: ArrayLike) -> jax.Array:
  """Returns `x[at]` for numbers that are known to be in range."""
  return x.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_or(x: jax.Array, at: jax.Array, otherwise: Any) -> jax.Array:
  """Returns `x[at]`, and `otherwise` where a number is past the end."""
  return x.at[at].get(
    mode="fill", fill_value=otherwise, wrap_negative_indices=False
  )


def put(x: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
  """Returns `x` with `new` at `at`, all different, dropped past the end."""
  return x.at[at].set(
    new, mode="drop", unique_indices=True, wrap_negative_indices=False
  )


def add(x: jax.Array, at: jax.Array, more: jax.Array) -> jax.Array:
  """Returns `x` plus `more` at `at`, all different, as `put` has it."""
  return x.at[at].add(
    more, mode="drop", unique_indices=True, wrap_negative_indices=False
  )
