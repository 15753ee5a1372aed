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
  """`[] int32`, never positive, known once all these words have arrived.

  Elsewhere than on TPUs it is known at once, and nothing waits.
  """
  number = lax.bitcast_convert_type(received.reshape(-1)[0], jnp.int32)
  return lax.platform_dependent(number, tpu=_unseen, default=_zero)


def _unseen(number: jax.Array) -> jax.Array:
  return jnp.minimum(number, 0)


def _zero(number: jax.Array) -> jax.Array:
  return number & 0


def of_all(marks: Sequence[jax.Array]) -> jax.Array:
  """One that is known when all of them are."""
  return functools.reduce(jnp.maximum, marks)


def wait(
  arrays: Sequence[jax.Array], count: jax.Array, marked: jax.Array
) -> list[jax.Array]:
  """Words as they are, but not before `marked` is known.

  Args:
    arrays: What waits.
    count: `[] int32`, never negative, which only who calls this knows.
    marked: Of `mark`.
  """
  zero = jnp.maximum(count, marked) - count
  return [x + zero.astype(x.dtype) for x in arrays]
