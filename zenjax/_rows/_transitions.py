"""Powers and products of the small matrices that idle steps are.

`k` is the number of rows, `n` that of what an element of a row holds.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

_BITS = 6  # of an exponent, looked up at once
_DIGITS = -(-31 // _BITS)
_CHUNK = 512  # steps whose matrices are made at once


def precision() -> Any:
  """The dtype of matrices: float32, or float64 where JAX has it."""
  return jnp.result_type(float)


def precise(x: jax.Array) -> jax.Array:
  """`x` in the dtype of matrices."""
  return x.astype(precision())


def tables(matrix: np.ndarray) -> np.ndarray:
  """`matrix ** (d * 64 ** i)` as `[i, d, n, n]`, in float64."""
  base, found = np.asarray(matrix, np.float64), []
  with np.errstate(all="ignore"):
    for _ in range(_DIGITS):
      powers = [np.eye(len(matrix))]
      for _ in range(1 << _BITS):
        powers.append(powers[-1] @ base)
      found.append(powers[:-1])
      base = powers[-1]
  return np.array(found)


def powers(digits: np.ndarray, exponents: jax.Array) -> jax.Array:
  """`matrix ** exponents` as `[k, n, n]`, to some roundings.

  Squaring in float32 would double the error at every turn; one product of
  numbers rounded once for each digit does not.
  """
  result = jnp.asarray(digits[0], precision())[exponents & (1 << _BITS) - 1]
  for i in range(1, _DIGITS):
    digit = (exponents >> (_BITS * i)) & (1 << _BITS) - 1
    factor = jnp.asarray(digits[i], precision())[digit]
    result = _times(factor, result)
  return result


def products(
  change: Callable[[jax.Array], jax.Array], first: jax.Array, end: jax.Array
) -> jax.Array:
  """For each row, the matrices of steps `first` to `end - 1` multiplied.

  All rows end at one step, so one product from the end backwards passes
  through what every row asks for: the cost is that of the longest, in numbers
  and not in rows of a table. Matrices are held by what they differ from one,
  for a decay of 1e-8 a step would be lost in float32.

  Args:
    change: Of steps `[c] int32`, `[c, n, n]`: their matrices less one.
    first: `[k] int32`.
    end: `int32`, not before any of `first`.

  Returns:
    `[k, n, n]`, less one as well.
  """
  total = jnp.zeros_like(change(end[None])[0])
  out = total + jnp.zeros_like(first, precision())[:, None, None]

  def chunk(carry):
    end, total, out = carry
    start = end - _CHUNK
    steps = start + jnp.arange(_CHUNK, dtype=jnp.int32)
    suffix = lax.associative_scan(_then, change(steps), reverse=True)
    suffix = _then(jnp.broadcast_to(total, suffix.shape), suffix)
    at = first - start
    here = (at >= 0) & (at < _CHUNK)
    found = suffix.at[at].get(mode="clip")
    return start, suffix[0], jnp.where(here[:, None, None], found, out)

  earliest = jnp.min(first)
  carry = (end, total, out)
  return lax.while_loop(lambda c: c[0] > earliest, chunk, carry)[-1]


def _then(later, earlier):
  """Both steps, each less one."""
  return later + earlier + _times(later, earlier)


def _times(a, b):
  # Accelerators round the operands of a matrix product to fewer bits.
  return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
