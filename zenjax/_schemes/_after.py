"""Has local work wait for collectives whose results it does not need.

Where several tables have an exchange each, XLA's scheduler for TPUs fills the
time of one push with the merge of another and leaves it nothing of the backward
pass, which could stand there as well; what merges then waits for is beside
nothing. Once no merge can begin before all pushes have arrived, backward work
is all that is left to stand beside them. `lax.optimization_barrier` is gone
before that scheduler runs: what waits depends on numbers that are never seen.
"""

from collections.abc import Sequence
import functools

import jax
from jax import lax
import jax.numpy as jnp


def mark(received: jax.Array) -> jax.Array:
  """`[] int32`, never positive, known once all these words have arrived."""
  number = lax.bitcast_convert_type(received.reshape(-1)[0], jnp.int32)
  return jnp.minimum(number, 0)


def of_all(marks: Sequence[jax.Array]) -> jax.Array:
  """One that is known when all of them are."""
  return functools.reduce(jnp.maximum, marks)


def wait(
  arrays: Sequence[jax.Array], count: jax.Array, marked: jax.Array
) -> list[jax.Array]:
  """Words as they are, on TPUs not before `marked` is known.

  Args:
    arrays: What waits.
    count: `[] int32`, never negative, which only who calls this knows.
    marked: Of `mark`.
  """
  zero = lax.platform_dependent(
    count, marked, tpu=_unseen_zero, default=_plain_zero
  )
  return [x + zero.astype(x.dtype) for x in arrays]


def _unseen_zero(count: jax.Array, marked: jax.Array) -> jax.Array:
  return jnp.maximum(count, marked) - count


def _plain_zero(count: jax.Array, marked: jax.Array) -> jax.Array:
  return (count & 0) | (marked & 0)
