"""Gathers and scatters of rows by numbers that are never negative.

`x.at[k]` counts a negative `k` from the end, which takes three operations more
wherever rows are moved.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from zenjax._src.core import compat


def take(x: jax.Array, at: ArrayLike) -> jax.Array:
  """Returns `x[at]` for numbers that are known to be in range."""
  return x.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_or(x: jax.Array, at: jax.Array, otherwise: Any) -> jax.Array:
  """Returns `x[at]`, and `otherwise` where a number is past the end."""
  return x.at[at].get(
    mode="fill", fill_value=otherwise, wrap_negative_indices=False
  )


def put(x: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
  """Returns `x` with `new` at `at`, all different, dropped past the end."""
  return x.at[at].set(
    new, mode="drop", unique_indices=True, wrap_negative_indices=False
  )


def add(x: jax.Array, at: jax.Array, more: jax.Array) -> jax.Array:
  """Returns `x` plus `more` at `at`, all different, as `put` has it."""
  return x.at[at].add(
    more, mode="drop", unique_indices=True, wrap_negative_indices=False
  )


# Bitmaps with rank and select: compaction and expansion without a sort.
#
# A bitmap over `S = 32 W` slots is `W` words of uint32; bit `i` of word `w` is
# slot `32 w + i`. `rank(slot)` counts the set bits before a slot, `select(k)`
# finds the `k`-th set bit. Every function takes any number of leading batch
# dimensions, written `...`.
#
# `jnp.searchsorted` is not used: it fails inside a `shard_map` that is manual
# over some axes only (JAX 0.10 and 0.12).


class Bitmap(NamedTuple):
  """A bitmap and the prefix sums that answer rank and select."""

  words: jax.Array  # [..., W] uint32
  before: jax.Array  # [..., W] int32, set bits in the words before
  total: jax.Array  # [...] int32, set bits in all


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
  """Words whose bits are the union of `slots: [..., k] int32`.

  A slot from `num_slots` on is padding. Duplicates are allowed: presence is
  written as bytes, which commute.
  """
  batch = slots.shape[:-1]
  size = math.prod(batch) * num_slots
  if batch:
    slots = jnp.where(
      slots < num_slots, slots + _starts(slots, num_slots), size
    )
  present = (
    jnp.zeros(size, bool)
    .at[slots.reshape(-1)]
    .set(True, mode="drop", wrap_negative_indices=False)
  )
  return pack(present.reshape(*batch, num_slots))


def rank(bitmap: Bitmap, slot: jax.Array) -> jax.Array:
  """Set bits before `slot: [..., k] int32` in `[0, S]`; `[..., k] int32`."""
  num_words = bitmap.words.shape[-1]
  # Slot S has no word: the last word with all its bits stands for it.
  word = jnp.minimum(slot >> 5, num_words - 1)
  count = slot - word * 32
  # A shift by 32 is undefined, so the full word is chosen explicitly.
  low = (jnp.uint32(1) << (count & 31).astype(jnp.uint32)) - jnp.uint32(1)
  low = jnp.where(count >= 32, jnp.uint32(0xFFFFFFFF), low)
  at = word + _starts(word, num_words)
  low &= take(bitmap.words.reshape(-1), at)
  ones = lax.population_count(low).astype(jnp.int32)
  return take(bitmap.before.reshape(-1), at) + ones


@jax.jit
def select(bitmap: Bitmap, k: jax.Array) -> jax.Array:
  """Slot of set bit number `k: [..., c] int32 >= 0`; `S` past the last one.

  A program of its own: it is lowered once for all searches of a shape.
  """
  num_words = bitmap.words.shape[-1]
  steps = max(1, math.ceil(math.log2(num_words)))
  start = _starts(k, num_words)
  words, before = bitmap.words.reshape(-1), bitmap.before.reshape(-1)

  def halve(i, word):
    # Largest power of two first: the steps sum to at least W - 1.
    step = jnp.left_shift(jnp.int32(1), jnp.asarray(steps - 1 - i, jnp.int32))
    ahead = jnp.minimum(word + step, num_words - 1)
    return lax.select(take(before, ahead + start) <= k, ahead, word)

  # A loop, not unrolled: the search is a third of what there is to compile.
  word = compat.cast_like(jnp.zeros_like(k), words)
  word = lax.fori_loop(0, steps, halve, word)
  at = word + start
  bit = select_in_word(take(words, at), k - take(before, at))
  found = k < bitmap.total[..., None]
  slot = jnp.where(found, word * 32 + bit, num_words * 32)
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
    k = lax.select(upper, k - ones, k)
    word = lax.select(upper, word >> np.uint32(width), low)
    bit = lax.select(upper, bit + width, bit)
  return bit


def _starts(like: jax.Array, size: int) -> jax.Array | int:
  """Where each batch of `like: [..., k]` begins among all: `[..., 1]`."""
  batch = like.shape[:-1]
  if math.prod(batch) == 1:
    return 0
  start = lax.broadcasted_iota(jnp.int32, (math.prod(batch),), 0) * size
  return start.reshape(*batch, 1)


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
    value = take(ascending, ahead - 1)
    return jnp.where(value < x, ahead, low)

  # What is a constant so far varies as its input does.
  start = jnp.zeros_like(x, jnp.int32)
  start = compat.cast_like(compat.cast_like(start, ascending), x)
  return lax.fori_loop(0, steps, halve, start)
