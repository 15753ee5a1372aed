"""Thresholds that about `k` elements of all devices reach."""

import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.compress import sparsifier
from zenjax._src.compress.element_exchange import Window
from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes

# The smallest threshold: subnormals are zero on some backends.
TINY = float(np.finfo(np.float32).tiny)
# A sample has so many elements above the threshold that their number is right
# to 6 %.
_ABOVE = 256
# Elements are counted above edges near the last threshold, 2^(1/12) apart, and
# above all powers of 16.
_NEAR = np.exp2(np.arange(-24, 25) / 12).astype(np.float32)
_FAR = np.exp2(np.arange(-126, 127, 4)).astype(np.float32)
# Words that a device sends to find a threshold.
WORDS = len(_NEAR) + len(_FAR)


def paper_start(k: int) -> float:
  """Returns the first threshold of ExDyna and MiCRO."""
  return 1 / (2 * math.sqrt(k))


def paper(threshold: jax.Array, count: jax.Array, k: int) -> jax.Array:
  """Online threshold scaling, the same in ExDyna and MiCRO; no clamps.

  Args:
    threshold: The last threshold, `[] float32`.
    count: The number of elements that all devices selected by it.
    k: The number wanted.
  """
  # 1.1 and 0.909 times k, in integers.
  above, inside = k * 11 // 10, k * 909 // 1000
  low = jnp.where(count > inside, np.float32(1.00125), np.float32(0.995))
  return threshold * jnp.where(count > above, np.float32(1.005), low)


class Bar(NamedTuple):
  """The threshold of a step, equal on all devices."""

  bar: jax.Array  # [] float32, the least magnitude to select
  part: jax.Array  # [] float32, of what reaches it
  passes: jax.Array | int  # [] int32, how often elements were counted


def sampled(
  seen: Window, last: jax.Array, k: int, key: jax.Array, axes: Axes
) -> Bar:
  """Returns an edge that `k` or a few more elements reach.

  If all edges near the last threshold are wrong, as in the first step, elements
  are counted once more near a better one. Ties are all above the edge or below
  it, so devices send only a part of what reaches it. If there are fewer than
  `k` elements that are not zero, all of them are selected.

  Args:
    seen: The partition of a device.
    last: The threshold of the last step, `[] float32`, or 0.
    k: The number of elements of all devices that should be selected.
    key: A random key, equal on all devices.
    axes: The axes of the devices.
  """
  magnitude = jnp.where(seen.inside, seen.magnitude, 0)
  values, times = sparsifier.sample(magnitude, max(1, k // _ABOVE), key)

  def counted(last: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns an edge, how many reach it, and a better last threshold."""
    near = jnp.clip(last * _NEAR, TINY, float(_FAR[-1]))
    edges = jnp.append(near, _FAR)
    reach = jnp.sum(values[:, None] >= edges[None], axis=0, dtype=jnp.int32)
    reach = collectives.psum(reach.astype(jnp.float32), axes) * times
    enough = reach >= k
    bar = jnp.max(jnp.where(enough, edges, TINY))
    found = enough[0] & ~enough[len(_NEAR) - 1]
    again = jnp.where(found | ~jnp.any(enough), 0, 4 * bar)
    return bar, jnp.max(jnp.where(edges == bar, reach, 0)), again

  def turn(carry):
    passes, bar, reach, again = carry
    bar, reach, _ = counted(again)
    return passes + 1, bar, reach, jnp.zeros_like(again)

  carry = jnp.int32(1), *counted(last)
  passes, bar, reach, _ = lax.while_loop(lambda c: c[3] > 0, turn, carry)
  return Bar(bar, jnp.minimum(k / jnp.maximum(reach, 1), 1), passes)
