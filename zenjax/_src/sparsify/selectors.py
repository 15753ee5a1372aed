"""Selectors: rules by which a device selects elements of a leaf.

`wanted(size, step)` is the part of a leaf that a selector is to select, `[]
float32`, or UNKNOWN. `select(acc, step, leaf)` selects from `acc: [N]`, which
has at least 32 bits, in step number `step` of leaf number `leaf`.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import compat
from zenjax._src.core.collectives import Axes
from zenjax._src.sparsify.sparsifier_state import UNKNOWN

# A part of a leaf, or an optax schedule of it.
Density = float | Callable[[Any], Any]

# The smallest threshold: subnormals are zero on some backends.
_TINY = float(np.finfo(np.float32).tiny)
# A sample for a quantile has so many elements, and so many above the quantile
# that their number is right to a tenth. With a schedule it is a part of all.
_SAMPLES = 8192
_ABOVE = 128
_PART = 64


class Selected(NamedTuple):
  """The selection of a device from a leaf."""

  mask: jax.Array  # [N] bool
  bar: jax.Array  # [] float32, the least magnitude to select, or UNKNOWN


def _at(index: jax.Array, size: int) -> Selected:
  """Selects elements by their distinct indices, `[k]`."""
  mask = jnp.zeros(size, bool)
  mask = mask.at[index].set(True, mode="promise_in_bounds", unique_indices=True)
  return Selected(mask, jnp.float32(UNKNOWN))


def _reaching(acc: jax.Array, bar: jax.Array) -> Selected:
  """Selects elements that are not below the bar, so NaN too."""
  bar = bar.astype(acc.dtype)
  return Selected(~(jnp.abs(acc) < bar), bar.astype(jnp.float32))


def count(density: float, size: int) -> int:
  """Returns `int(density * size)`, but at least one."""
  return max(1, int(density * size))


@dataclasses.dataclass(frozen=True, slots=True)
class _OfDensity:
  """A selector of a given part of a leaf."""

  density: Any  # a float, for `Sampled` also a schedule

  def wanted(self, size: int, step: jax.Array) -> jax.Array:
    if callable(self.density):
      return jnp.asarray(self.density(step)).astype(jnp.float32)
    return jnp.float32(count(self.density, size) / size)


@dataclasses.dataclass(frozen=True, slots=True)
class Exact(_OfDensity):
  """Selects the `k` largest; among equals the first, NaN before all."""

  def select(self, acc: jax.Array, step: jax.Array, leaf: int) -> Selected:
    del step, leaf
    k = count(self.density, acc.shape[0])
    return _at(lax.top_k(jnp.abs(acc), k)[1], acc.shape[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled(_OfDensity):
  """Selects elements that reach a quantile of a sample, new in each step."""

  def select(self, acc: jax.Array, step: jax.Array, leaf: int) -> Selected:
    del leaf
    size = acc.shape[0]
    part = self.wanted(size, step)
    if callable(self.density):
      least = size // _PART
    else:
      least = math.ceil(_ABOVE / self.density)
    values = sample(jnp.abs(acc), step, max(_SAMPLES, least))
    rank = jnp.round(part * np.float32(values.shape[0])).astype(jnp.int32)
    rank = jnp.clip(rank, 1, values.shape[0])
    bar = largest(values.astype(jnp.float32), rank).astype(acc.dtype)
    return _reaching(acc, jnp.where(part < 1, jnp.maximum(bar, _TINY), 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Threshold:
  """Selects elements that reach a given threshold."""

  value: float | Callable[[Any], Any]

  def wanted(self, size: int, step: jax.Array) -> jax.Array:
    del size, step
    return jnp.float32(UNKNOWN)

  def select(self, acc: jax.Array, step: jax.Array, leaf: int) -> Selected:
    del leaf
    value = self.value(step) if callable(self.value) else self.value
    return _reaching(acc, jnp.asarray(value))


@dataclasses.dataclass(frozen=True, slots=True)
class Random(_OfDensity):
  """Selects one element of each of `k` equal runs, which begin anywhere.

  So all are distinct, and each is equally likely.
  """

  seed: int
  apart: Axes  # axes over which devices draw different elements

  def select(self, acc: jax.Array, step: jax.Array, leaf: int) -> Selected:
    size = acc.shape[0]
    key = jax.random.key(self.seed)
    key = jax.random.fold_in(jax.random.fold_in(key, leaf), step)
    if self.apart:
      key = jax.random.fold_in(key, lax.axis_index(self.apart))
    within, where = jax.random.split(key)
    k = count(self.density, size)
    length, longer = divmod(size, k)
    run = jnp.arange(k, dtype=jnp.int32)
    start = run * jnp.int32(length) + jnp.minimum(run, longer)
    more = length + (run < longer).astype(jnp.int32)
    index = start + jax.random.randint(within, (k,), 0, more, jnp.int32)
    # Rotated by `shift`, without a sum above 2^31.
    shift = jax.random.randint(where, (), 0, size, jnp.int32)
    end = size - shift
    return _at(jnp.where(index < end, index + shift, index - end), size)


Selector = Exact | Sampled | Threshold | Random


def sample(values: jax.Array, step: jax.Array, least: int) -> jax.Array:
  """Samples at least `least` of `values: [N]`; zero where not finite."""
  size = values.shape[0]
  stride = max(1, size // least)
  # Odd, so that every column of a matrix of 2^i columns is sampled.
  stride -= 1 - stride % 2
  length = (size // stride - 1) * stride + 1
  # Others in every step, or some elements would never be sampled.
  places = size - length + 1
  first = lax.rem(step, jnp.int32(places))
  part = lax.dynamic_slice(values, (first,), (length,))[::stride]
  return jnp.where(part < jnp.inf, part, jnp.zeros_like(part))


def largest(values: jax.Array, rank: jax.Array) -> jax.Array:
  """Returns the `rank`-th largest of `values: [m] float32 >= 0`, from 1.

  It finds the number bit by bit, because bits are ordered as such numbers are,
  and a sort would take longer than the rest of the selection.
  """
  bits = lax.bitcast_convert_type(values, jnp.int32)

  def body(i, low):
    bit = jnp.left_shift(jnp.int32(1), jnp.int32(30) - i)
    enough = jnp.sum(bits >= (low | bit), dtype=jnp.int32) >= rank
    return jnp.where(enough, low | bit, low)

  start = compat.cast_like(jnp.int32(0), bits)
  found = lax.fori_loop(jnp.int32(0), jnp.int32(31), body, start)
  return lax.bitcast_convert_type(found, jnp.float32)
