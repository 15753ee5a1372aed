"""Clipping of one device's gradients, before anything is added to them."""

from collections.abc import Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax._rows._sparse_rows import is_rows


def scale(
  leaves: Sequence[Any], norm: float | None, devices: int
) -> jax.Array | None:
  """What scales leaves to a norm of `norm / sqrt(devices)`, `[] float32`.

  1 where theirs is smaller, None where `norm` is.
  """
  if norm is None:
    return None
  square = jnp.zeros((), jnp.float32)
  for leaf in filter(is_floating, leaves):
    square += jnp.sum(jnp.square(leaf.astype(jnp.float32)))
  have = jnp.sqrt(square)
  bound = jnp.float32(norm / math.sqrt(devices))
  # A norm that is not finite clips nothing: one NaN is not to become many.
  long = (have > bound) & (have < jnp.inf)
  return jnp.where(long, bound / have, 1.0)


def scaled(leaf: Any, factor: jax.Array | None) -> Any:
  """`leaf` times `factor`; what is no floating array stays as it is."""
  if factor is None or not is_floating(leaf):
    return leaf
  wide = leaf.astype(_collectives.accumulator(leaf.dtype))
  return (wide * factor.astype(wide.dtype)).astype(leaf.dtype)


def is_floating(leaf: Any) -> bool:
  """Whether it is an array of floating numbers."""
  return not is_rows(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
