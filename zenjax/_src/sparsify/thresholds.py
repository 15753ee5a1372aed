"""Controllers of the threshold: the published rule, and a damped one.

A controller moves `threshold` and `drift`, the step of its logarithm that it
has learned, by the number of elements that all devices selected. A threshold
of 0 is to be sampled.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes

# The smallest threshold: subnormals are zero on some backends.
_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
# A count that is wrong by more than this factor shows that the threshold is
# useless.
_FAR = 2
# Steps that sample a threshold in any case.
FIRST = 30
# Elements looked at for a first threshold: so many, and enough of them above
# it that their number is right to an eighth.
_SAMPLES = 8192
_ABOVE = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Paper:
  """Online threshold scaling, the same in ExDyna and MiCRO; no clamps."""

  k: int
  samples: bool = False  # True if a threshold of 0 is sampled
  forces: bool = True  # True if a device that selects nothing sends an element

  @property
  def start(self) -> float:
    return 1 / (2 * math.sqrt(self.k))

  def moved(
    self, threshold: jax.Array, drift: jax.Array, count: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the next threshold and drift, after a selection of `count`."""
    # 1.1 and 0.909 times k, in integers.
    above, inside = self.k * 11 // 10, self.k * 909 // 1000
    low = jnp.where(count > inside, np.float32(1.00125), np.float32(0.995))
    factor = jnp.where(count > above, np.float32(1.005), low)
    return threshold * factor, drift


@dataclasses.dataclass(frozen=True, slots=True)
class Damped:
  """`log threshold += clip(0.03 log(ratio) + drift, -0.05, 0.05)`.

  `ratio` is count over k; a higher gain oscillates. The drift adds up `0.001
  clip(ratio - 1, -0.25, 0.25)` in steps that are not clipped. Without it,
  gradients that shrink 0.9 % a step get 0.74 to 0.79 of the density wanted, and
  with it 0.99 to 1.00 (simulated). Half of that gain is too slow for gradients
  that shrink faster. The ratio is clipped because residuals grow in the first
  steps, and later steps have to forget what is learned there.

  A threshold that would be far off is sampled before anything is selected by
  it, so gradients may grow a thousandfold from one step to the next. If a
  selection is far off all the same, as where most elements are zero, the count
  says nothing about the drift, which starts again at zero.
  """

  k: int
  samples: bool = True
  forces: bool = False
  start: float = 0.0

  def moved(
    self, threshold: jax.Array, drift: jax.Array, count: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    count = count.astype(jnp.float32)
    ratio = count / np.float32(self.k)
    wanted = 0.03 * jnp.log(ratio) + drift
    step = jnp.clip(wanted, -0.05, 0.05)
    threshold = jnp.minimum(threshold * jnp.exp(step), _HUGE)
    more = 0.001 * jnp.clip(ratio - 1, -0.25, 0.25)
    more = jnp.where(jnp.abs(wanted) <= 0.05, more, 0.0)
    again = (ratio > _FAR) | (ratio < 1 / _FAR)
    return threshold, jnp.where(again, 0.0, drift + more)


Controller = Paper | Damped

KINDS: dict[str, type[Controller]] = {"damped": Damped, "paper": Paper}


def sampled(
  acc: jax.Array, start: jax.Array, end: jax.Array, k: int, axes: Axes
) -> jax.Array:
  """Returns a threshold that about `k` elements reach, equal on all devices.

  Each device samples its own partition, as in a selection. Elements that are
  not finite are ignored.

  Args:
    acc: The vector of a device, `[N]`.
    start: The first element of its partition, `[] int32`.
    end: The end of its partition.
    k: The number of elements on all devices that should reach the threshold.
    axes: The axes of the devices.
  """
  size = acc.shape[0]
  stride = size // max(_SAMPLES, -(-_ABOVE * size // k))
  # Odd, so that every column of a matrix of 2^i columns is sampled.
  stride = max(1, stride - 1 + stride % 2)
  values = jnp.abs(acc[::stride]).astype(jnp.float32)
  index = jnp.arange(values.shape[0], dtype=jnp.int32) * stride
  valid = (index >= start) & (index < end) & (values < jnp.inf)
  values = collectives.psum(jnp.where(valid, values, 0.0), axes)
  rank = max(1, round(k * values.shape[0] / size))
  threshold = jnp.sort(values)[values.shape[0] - rank]
  return jnp.where(threshold < _TINY, 0.0, threshold)


class Bar(NamedTuple):
  """What a step selects by; equal on all devices."""

  threshold: jax.Array  # [] float32
  bar: jax.Array  # [] float32, the least magnitude to select
  part: jax.Array  # [] float32, of what reaches it


def begun(
  threshold: jax.Array,
  k: int,
  count: Callable[[jax.Array], jax.Array],
  sample: Callable[[], jax.Array],
) -> Bar:
  """Returns the threshold of a step, sampled if it is 0 or far off.

  The loop runs once or not at all, on all devices alike. If a sample finds no
  threshold, most elements are zero, and all others are selected. If far more
  than `k` elements reach a sampled threshold, most of them are equal: then
  each device selects only a part of its own.

  Args:
    threshold: The threshold by the last step, `[] float32`.
    k: The number of elements wanted.
    count: Returns how many elements of all devices reach a bar, `[] float32`.
    sample: Returns a threshold that about `k` elements reach.
  """
  least = lambda threshold: jnp.maximum(threshold, _TINY)

  def turn(carry):
    threshold = sample()
    return jnp.zeros_like(carry[0]), threshold, count(least(threshold))

  total = count(least(threshold))
  far = (threshold == 0) | (total > _FAR * k) | (total < k / _FAR)
  carry = lax.while_loop(lambda carry: carry[0], turn, (far, threshold, total))
  _, threshold, total = carry
  part = jnp.where(total > _FAR * k, k / total, jnp.ones_like(total))
  return Bar(threshold, least(threshold), part)
