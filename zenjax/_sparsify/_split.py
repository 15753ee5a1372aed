"""An accumulated leaf in two: what is sent now and what waits.

By a bar both are written in one pass where XLA writes two arrays at once, on
GPU and TPU. On CPU it does not: there the sum is formed once and read thrice,
for each of them would form it again, from a copy of the residual.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _bitmap
from zenjax._sparsify._selectors import Bar
from zenjax._sparsify._selectors import Indices


class Split(NamedTuple):
  """All `[N]` but the count."""

  sent: jax.Array  # zero where nothing is
  kept: jax.Array  # what was not sent, and its rounding error where it was
  momentum: jax.Array | None  # zero where something was sent
  selected: jax.Array  # [] int32


def split(
  acc: jax.Array,
  momentum: jax.Array | None,
  chosen: Indices | Bar,
  wire: Callable[[jax.Array], jax.Array],
) -> Split:
  """Splits `acc: [N]`.

  Args:
    acc: What is to be sent, sooner or later.
    momentum: What is to be forgotten where it was sent, if anything is.
    chosen: Where.
    wire: Rounds values to those that can be sent.
  """
  zero = jnp.zeros((), acc.dtype)
  if isinstance(chosen, Bar):
    acc = lax.platform_dependent(
      acc, cpu=lax.optimization_barrier, default=lambda acc: acc
    )
    large = ~(jnp.abs(acc) < chosen.bar)
    sent = wire(acc)
    return Split(
      sent=jnp.where(large, sent, zero),
      kept=jnp.where(large, _error(acc, sent), acc),
      momentum=_where_not(large, momentum),
      selected=_count(large),
    )
  index = chosen.at
  into: dict[str, Any] = dict(mode="promise_in_bounds", unique_indices=True)
  values = acc.at[index].get(**into)
  sent = wire(values)
  if momentum is not None:
    momentum = momentum.at[index].set(jnp.zeros((), momentum.dtype), **into)
  return Split(
    sent=jnp.zeros_like(acc).at[index].set(sent, **into),
    kept=acc.at[index].set(_error(values, sent), **into),
    momentum=momentum,
    selected=jnp.full((), index.shape[0], jnp.int32),
  )


def _count(large: jax.Array) -> jax.Array:
  """How many of `[N] bool` are set.

  By words of 32: XLA:CPU writes an integer an element for the plain sum.
  """
  even = large.shape[0] // 32 * 32
  words = _bitmap.pack(large[:even])
  ones = jnp.sum(lax.population_count(words).astype(jnp.int32))
  return ones + jnp.sum(large[even:], dtype=jnp.int32)


def _error(values: jax.Array, sent: jax.Array) -> jax.Array:
  """What rounding took; of what is not finite nothing, or it would stay."""
  if sent is values:
    return jnp.zeros_like(values)
  error = values - sent
  return jnp.where(jnp.abs(error) < jnp.inf, error, jnp.zeros_like(error))


def _where_not(large: jax.Array, x: jax.Array | None) -> jax.Array | None:
  return None if x is None else jnp.where(large, jnp.zeros_like(x), x)


def finite(x: jax.Array) -> jax.Array:
  """`x` with zeros for what is not finite."""
  return jnp.where(lax.is_finite(x), x, jnp.zeros_like(x))
