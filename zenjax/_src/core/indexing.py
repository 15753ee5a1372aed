"""Gathers and scatters rows by indices that are never negative.

`x.at[k]` supports a negative `k`, which costs three more operations wherever
rows are moved.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from zenjax._src.core import compat


def take(x: jax.Array, at: ArrayLike) -> jax.Array:
  """Returns `x[at]` for indices that are known to be in range."""
  return x.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_or(x: jax.Array, at: jax.Array, otherwise: Any) -> jax.Array:
  """Returns `x[at]`, and `otherwise` where an index is past the end."""
  return x.at[at].get(
    mode="fill", fill_value=otherwise, wrap_negative_indices=False
  )


def put(x: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
  """Returns `x` with `new` written at `at`.

  Indices must be different. Values for an index past the end are dropped.
  """
  return x.at[at].set(
    new, mode="drop", unique_indices=True, wrap_negative_indices=False
  )


def add(x: jax.Array, at: jax.Array, more: jax.Array) -> jax.Array:
  """Returns `x` with `more` added at `at`, with the same rules as `put`."""
  return x.at[at].add(
    more, mode="drop", unique_indices=True, wrap_negative_indices=False
  )


# Bitmaps with rank and select compact and expand rows without a sort.
#
# A bitmap over `S = 32 W` slots is `W` words of uint32; bit `i` of word `w` is
# slot `32 w + i`. `rank(slot)` counts the set bits before a slot, `select(k)`
# finds the `k`-th set bit. Every function takes any number of leading batch
# dimensions, written `...`.
#
# `jnp.searchsorted` is not used: it fails inside a `shard_map` that is manual
# over some axes only (JAX 0.10 and 0.12).


class Bitmap(NamedTuple):
  """A bitmap, with the prefix sums that rank and select need."""

  words: jax.Array  # [..., W] uint32
  before: jax.Array  # [..., W] int32, set bits in the words before
  total: jax.Array  # [...] int32, all set bits


def index(words: jax.Array) -> Bitmap:
  """Returns the bitmap of `words: [..., W] uint32` with its prefix sums."""
  ones = lax.population_count(words).astype(jnp.int32)
  upto = jnp.cumsum(ones, axis=-1)
  return Bitmap(words, upto - ones, upto[..., -1])


def pack(bits: jax.Array) -> jax.Array:
  """Packs `[..., S] bool` to `[..., W] uint32`; 32 divides `S`."""
  lanes = bits.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
  position = lax.broadcasted_iota(jnp.uint32, lanes.shape, lanes.ndim - 1)
  return jnp.sum(lanes << position, axis=-1, dtype=jnp.uint32)


def from_slots(slots: jax.Array, num_slots: int) -> jax.Array:
  """Returns words whose bits are the union of `slots: [..., k] int32`.

  A slot of `num_slots` or more is padding. Duplicates are allowed, because
  writing the same byte twice gives the same result in any order.
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
  """Counts set bits before `slot: [..., k] int32` in `[0, S]`."""
  num_words = bitmap.words.shape[-1]
  # Slot S has no word, so all bits of the last word are counted for it.
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
  """Returns the slot of set bit `k: [..., c] int32 >= 0`; `S` past the last.

  It is jitted, so that all searches of one shape are lowered once.
  """
  num_words = bitmap.words.shape[-1]
  start = _starts(k, num_words)
  words, before = bitmap.words.reshape(-1), bitmap.before.reshape(-1)
  word = compat.cast_like(jnp.zeros_like(k), words)
  holds = lambda word: take(before, word + start) <= k
  word = last_where(holds, num_words - 1, word)
  at = word + start
  bit = select_in_word(take(words, at), k - take(before, at))
  found = k < bitmap.total[..., None]
  slot = jnp.where(found, word * 32 + bit, num_words * 32)
  # Without the barrier, each consumer of the slots would repeat the search.
  return lax.optimization_barrier(slot)


def select_in_word(word: jax.Array, k: jax.Array) -> jax.Array:
  """Returns the position of set bit number `k` in `word`, by bisection."""
  bit = jnp.zeros_like(k)
  for width in (16, 8, 4, 2, 1):
    low = word & np.uint32((1 << width) - 1)
    # Triton counts bits of signed integers only. At most 16 bits are left.
    ones = lax.population_count(low.astype(jnp.int32))
    upper = k >= ones
    k = lax.select(upper, k - ones, k)
    word = lax.select(upper, word >> np.uint32(width), low)
    bit = lax.select(upper, bit + width, bit)
  return bit


def _starts(like: jax.Array, size: int) -> jax.Array | int:
  """Returns where each batch of `like: [..., k]` begins: `[..., 1]`."""
  batch = like.shape[:-1]
  if math.prod(batch) == 1:
    return 0
  start = lax.broadcasted_iota(jnp.int32, (math.prod(batch),), 0) * size
  return start.reshape(*batch, 1)


# Binary search, also for kernels.


def last_where(
  holds: Callable[[jax.Array], jax.Array], last: int, start: jax.Array
) -> jax.Array:
  """Returns the largest integers in `[0, last]` where `holds`.

  Args:
    holds: True up to some integer and false after it. It is not asked about 0.
    last: The largest integer to try.
    start: Zeros of int32, with the shape and the type of the result.
  """
  steps = max(1, math.ceil(math.log2(last + 1)))

  def halve(i, at):
    # The largest power of two comes first. All steps sum to at least `last`.
    step = jnp.left_shift(jnp.int32(1), jnp.asarray(steps - 1 - i, jnp.int32))
    ahead = jnp.minimum(at + step, last)
    return lax.select(holds(ahead), ahead, at)

  # The loop is not unrolled, because searches are a third of the program.
  return lax.fori_loop(0, steps, halve, start)


def lower_bound(ascending: jax.Array, x: jax.Array) -> jax.Array:
  """Counts how many of `ascending: [k]` are less than each `x: [...]`."""
  # The loop's carry needs the type that it has after the first iteration.
  start = jnp.zeros_like(x, jnp.int32)
  start = compat.cast_like(compat.cast_like(start, ascending), x)
  all_less = lambda count: take(ascending, count - 1) < x
  return last_where(all_less, ascending.shape[0], start)
