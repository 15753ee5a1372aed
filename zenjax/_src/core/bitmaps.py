"""Bitmaps with rank and select: compaction and expansion without a sort.

A bitmap over `S = 32 W` slots is `W` words of uint32; bit `i` of word `w` is
slot `32 w + i`. `rank(slot)` counts the set bits before a slot, `select(k)`
finds the `k`-th set bit. Every function takes any number of leading batch
dimensions, written `...`.

`jnp.searchsorted` is not used: it fails inside a `shard_map` that is manual
over some axes only (JAX 0.10 and 0.12).
"""

import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import compat
from zenjax._src.core import indexing


class Bitmap(NamedTuple):
  """A bitmap and the prefix sums that answer rank and select."""

  words: jax.Array  # [..., W] uint32
  before: jax.Array  # [..., W] int32, set bits in the words before
  total: jax.Array  # [...] int32, set bits in all

  @property
  def slots(self) -> int:
    return self.words.shape[-1] * 32


def index(words: jax.Array) -> Bitmap:
  """Prefix sums for `words: [..., W] uint32`."""
  ones = lax.population_count(words).astype(jnp.int32)
  upto = jnp.cumsum(ones, axis=-1)
  return Bitmap(words, upto - ones, upto[..., -1])


def pack(bits: jax.Array) -> jax.Array:
  """`[..., S] bool -> [..., W] uint32`, for `S` a multiple of 32."""
  lanes = bits.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
  position = lax.broadcasted_iota(jnp.uint32, lanes.shape, lanes.ndim - 1)
  return jnp.sum(lanes << position, axis=-1, dtype=jnp.uint32)


def from_slots(slots: jax.Array, num_slots: int) -> jax.Array:
  """Words whose bits are the union of `slots: [k] int32`; `>= S` is padding.

  Duplicates are allowed: presence is written as bytes, which commute.
  """
  present = jnp.zeros(num_slots, bool).at[slots].set(True, mode="drop")
  return pack(present)


def rank(bitmap: Bitmap, slot: jax.Array) -> jax.Array:
  """Set bits before `slot: [..., k] int32` in `[0, S]`; `[..., k] int32`."""
  # Slot S has no word: the last word with all its bits stands for it.
  word = jnp.minimum(slot >> 5, bitmap.words.shape[-1] - 1)
  low = _take(bitmap.words, word) & _low_bits(slot - word * 32)
  return _take(bitmap.before, word) + _popcount(low)


def select(bitmap: Bitmap, k: jax.Array) -> jax.Array:
  """Slot of set bit number `k: [..., c] int32 >= 0`; `S` past the last one."""
  num_words = bitmap.words.shape[-1]
  steps = max(1, math.ceil(math.log2(num_words)))

  def halve(i, word):
    # Largest power of two first: the steps sum to at least W - 1.
    step = jnp.left_shift(jnp.int32(1), jnp.asarray(steps - 1 - i, jnp.int32))
    ahead = jnp.minimum(word + step, num_words - 1)
    return jnp.where(_take(bitmap.before, ahead) <= k, ahead, word)

  # A loop, not unrolled: the search is a third of what there is to compile.
  start = compat.cast_like(jnp.zeros_like(k), bitmap.words)
  word = lax.fori_loop(0, steps, halve, start)
  bit = select_in_word(
    _take(bitmap.words, word), k - _take(bitmap.before, word)
  )
  found = k < bitmap.total[..., None]
  slot = jnp.where(found, word * 32 + bit, bitmap.slots)
  # Slots have several consumers; without this each would search again.
  return lax.optimization_barrier(slot)


def select_in_word(word: jax.Array, k: jax.Array) -> jax.Array:
  """Position of set bit number `k` in `word`, by halving the word."""
  bit = jnp.zeros_like(k)
  for width in (16, 8, 4, 2, 1):
    low = word & np.uint32((1 << width) - 1)
    # Signed, which Triton also counts; at most 16 bits are left.
    ones = lax.population_count(low.astype(jnp.int32))
    upper = k >= ones
    k = jnp.where(upper, k - ones, k)
    word = jnp.where(upper, word >> np.uint32(width), low)
    bit = jnp.where(upper, bit + width, bit)
  return bit


def _low_bits(count: jax.Array) -> jax.Array:
  """A word whose lowest `count` in `[0, 32]` bits are set."""
  # A shift by 32 is undefined, so the full word is chosen explicitly.
  partial = (jnp.uint32(1) << (count & 31).astype(jnp.uint32)) - jnp.uint32(1)
  return jnp.where(count >= 32, jnp.uint32(0xFFFFFFFF), partial)


def _take(x: jax.Array, at: jax.Array) -> jax.Array:
  """`x[..., at]` along the last axis, for indices known to be in range."""
  batch, size = x.shape[:-1], x.shape[-1]
  if math.prod(batch) > 1:
    base = lax.broadcasted_iota(jnp.int32, (math.prod(batch), 1), 0) * size
    at = at + base.reshape(*batch, 1)
  return indexing.take(x.reshape(-1), at.reshape(-1)).reshape(at.shape)


def _popcount(word: jax.Array) -> jax.Array:
  return lax.population_count(word).astype(jnp.int32)


# Binary search, of which `jnp.searchsorted` is not capable everywhere.
#
# It fails inside a `shard_map` that is manual over some axes only (JAX 0.10 and
# 0.12).


def lower_bound(ascending: jax.Array, x: jax.Array) -> jax.Array:
  """How many of `ascending: [k]` are less than each `x: [...]`: int32."""
  size = ascending.shape[0]
  steps = max(1, math.ceil(math.log2(size + 1)))

  def halve(i, low):
    # All before `low` are less; the largest power of two first.
    step = jnp.left_shift(jnp.int32(1), jnp.asarray(steps - 1 - i, jnp.int32))
    ahead = jnp.minimum(low + step, size)
    value = indexing.take(ascending, ahead - 1)
    return jnp.where(value < x, ahead, low)

  # What is a constant so far varies as its input does.
  start = jnp.zeros_like(x, jnp.int32)
  start = compat.cast_like(compat.cast_like(start, ascending), x)
  return lax.fori_loop(0, steps, halve, start)
