"""Thresholds that follow the density got: the published rule and another."""

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

# Below this a threshold is no more: subnormals are zero on some backends.
_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
# A count this many times what is wanted, or less, tells that a threshold is of
# no use.
_FAR = 4
# Elements looked at for a first threshold: so many, and enough of them above
# it that their number is right to an eighth.
_SAMPLES = 8192
_ABOVE = 64


class Place(NamedTuple):
  """Where a controller is, `[] float32` each."""

  threshold: jax.Array  # 0 stands for one still to be sampled
  drift: jax.Array  # what its logarithm moves by a step, whatever is selected


@dataclasses.dataclass(frozen=True, slots=True)
class Paper:
  """Online threshold scaling, the same in ExDyna and MiCRO; no clamps."""

  k: int
  samples: bool = False  # whether a threshold of 0 is to be sampled
  forces: bool = True  # whether a device that selects nothing sends an element

  @property
  def start(self) -> float:
    return 1 / (2 * math.sqrt(self.k))

  def moved(self, last: Place, count: jax.Array) -> Place:
    """The next place, from what all devices selected at the last."""
    # 1.1 and 0.909 times k, in integers.
    above, inside = self.k * 11 // 10, self.k * 909 // 1000
    low = jnp.where(count > inside, np.float32(1.00125), np.float32(0.995))
    factor = jnp.where(count > above, np.float32(1.005), low)
    return last._replace(threshold=last.threshold * factor)


@dataclasses.dataclass(frozen=True, slots=True)
class Damped:
  """`log threshold += clip(0.03 log(ratio) + drift, -0.05, 0.05)`.

  `ratio` is count over k. A higher gain oscillates. The drift adds up `0.001
  clip(ratio - 1, -0.25, 0.25)` where the step was not cut: without it gradients
  that shrink 0.9 % a step get 0.74 to 0.79 of the density wanted, with it 0.99
  to 1.00 (simulated, 1 and 5 %, steps 100 to 1,000); 2 % a step get 0.95 to
  0.99, with half that gain 0.73 to 0.97. Residuals grow in the first steps, and
  what is learned there has to be forgotten: steps 50 to 200 of gradients of one
  scale select 0.94 of it, and 0.87 if the ratio is not clipped.

  A threshold that is far off is sampled again: residuals double from the first
  step to the second where gradients are alike, and the threshold is to double
  with them. A drift that outlives this winds up: up to 40 % were lost.
  """

  k: int
  samples: bool = True
  forces: bool = False
  start: float = 0.0

  def moved(self, last: Place, count: jax.Array) -> Place:
    count = count.astype(jnp.float32)
    ratio = count / np.float32(self.k)
    wanted = 0.03 * jnp.log(ratio) + last.drift
    step = jnp.clip(wanted, -0.05, 0.05)
    threshold = jnp.minimum(last.threshold * jnp.exp(step), _HUGE)
    more = 0.001 * jnp.clip(ratio - 1, -0.25, 0.25)
    more = jnp.where(jnp.abs(wanted) <= 0.05, more, 0.0)
    # The last: one that came to nothing.
    again = (ratio > _FAR) | (ratio < 1 / _FAR) | (threshold < _TINY)
    return Place(
      threshold=jnp.where(again, 0.0, threshold),
      drift=jnp.where(again, 0.0, last.drift + more),
    )


Controller = Paper | Damped

KINDS: dict[str, type[Controller]] = {"damped": Damped, "paper": Paper}


def bar(threshold: jax.Array, controller: Controller) -> jax.Array:
  """Returns the number that magnitudes are compared with.

  Where not even a sample found a threshold, most elements are zero: all others
  are selected.
  """
  return jnp.maximum(threshold, _TINY) if controller.samples else threshold


def sampled(
  acc: jax.Array, start: jax.Array, end: jax.Array, k: int, axes: Axes
) -> jax.Array:
  """A threshold that about `k` elements reach, `[] float32`, equal on all.

  Each device looks at elements of its own partition, as in a selection. What
  is not finite is no guide to the rest.

  Args:
    acc: `[N]` on a device.
    start: Where its partition begins, `[] int32`.
    end: Where it ends.
    k: How many of all elements are to reach it.
    axes: Of the devices.
  """
  size = acc.shape[0]
  stride = size // max(_SAMPLES, -(-_ABOVE * size // k))
  # Odd, so that no column of a matrix of 2^i columns is left out.
  stride = max(1, stride - 1 + stride % 2)
  values = jnp.abs(acc[::stride]).astype(jnp.float32)
  at = jnp.arange(values.shape[0], dtype=jnp.int32) * stride
  own = (at >= start) & (at < end) & (values < jnp.inf)
  values = collectives.psum(jnp.where(own, values, 0.0), axes)
  rank = max(1, round(k * values.shape[0] / size))
  found = jnp.sort(values)[values.shape[0] - rank]
  return jnp.where(found < _TINY, 0.0, found)


def begun(
  threshold: jax.Array,
  controller: Controller,
  sample: Callable[[], jax.Array],
) -> jax.Array:
  """`threshold`, or that of a sample if it is still to be sampled.

  A loop that turns once or not at all: devices agree on whether.
  """
  if not controller.samples:
    return threshold
  turn = lambda carry: (jnp.zeros_like(carry[0]), sample())
  carry = (threshold == 0, threshold)
  return lax.while_loop(lambda carry: carry[0], turn, carry)[1]
