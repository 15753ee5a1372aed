"""The parts of a buffer on the wire: counts, indices, rows.

Row indices travel as slots (4 bytes a row) or as a bitmap (one bit a slot),
whichever is smaller for the capacity of the buffer: the hash bitmap of the
Zen paper, decided when traced.
"""

import jax
import jax.numpy as jnp

from zenjax._src.core import bitmaps
from zenjax._src.core import wire_format


def index_words(capacity: int, num_slots: int) -> int:
  """Words that the index of `capacity` rows takes."""
  return min(capacity, num_slots // 32)


def encode_index(slots: jax.Array, num_slots: int) -> jax.Array:
  """`[b, C] int32` ascending slots to `[b, index_words] uint32`."""
  capacity = slots.shape[1]
  if capacity <= num_slots // 32:
    return slots.astype(jnp.uint32)
  return jax.vmap(lambda s: bitmaps.from_slots(s, num_slots))(slots)


def decode_index(words: jax.Array, capacity: int, num_slots: int) -> jax.Array:
  """Inverse of `encode_index`: `[b, C] int32`, `num_slots` as padding."""
  if capacity <= num_slots // 32:
    return words.astype(jnp.int32)
  wanted = jnp.arange(capacity, dtype=jnp.int32)
  wanted = jnp.broadcast_to(wanted, (words.shape[0], capacity))
  return bitmaps.select(bitmaps.index(words), wanted)


def encode_counts(*counts: jax.Array) -> jax.Array:
  """`k` arrays `[b] int32` to `[b, k] uint32`."""
  return jnp.stack(counts, axis=1).astype(jnp.uint32)


def decode_counts(words: jax.Array) -> list[jax.Array]:
  """Inverse of `encode_counts`."""
  counts = words.astype(jnp.int32)
  return [counts[:, i] for i in range(counts.shape[1])]


def sum_counts(counts: jax.Array) -> jax.Array:
  """Sum of `[n] int32 >= 0`, or the largest int32 where it is more."""
  most = jnp.iinfo(jnp.int32).max
  # float32 errs by a few parts in 2^24; within those the result may saturate.
  too_many = jnp.sum(counts.astype(jnp.float32)) > most * (1 - 2.0**-20)
  return jnp.where(too_many, most, jnp.sum(counts, dtype=jnp.int32))


def encode_rows(rows: jax.Array, wire_dtype: jnp.dtype) -> jax.Array:
  """`[b, ...]` rows to `[b, words] uint32`, cast to the wire's dtype."""
  return wire_format.to_words(rows.astype(wire_dtype))


def split_columns(rows: jax.Array, groups: int) -> jax.Array:
  """`[m, C, D]` to `[m * g, C, ceil(D / g)]`: one block an owner."""
  m, capacity, width = rows.shape
  if groups == 1:
    return rows
  block = -(-width // groups)
  rows = jnp.pad(rows, ((0, 0), (0, 0), (0, block * groups - width)))
  blocks = rows.reshape(m, capacity, groups, block).transpose(0, 2, 1, 3)
  return blocks.reshape(m * groups, capacity, block)


def join_columns(blocks: jax.Array, groups: int, width: int) -> jax.Array:
  """Inverse of `split_columns`: `[m * g, U, block]` to `[m, U, D]`."""
  if groups == 1:
    return blocks
  owners, capacity, block = blocks.shape
  rows = blocks.reshape(owners // groups, groups, capacity, block)
  rows = rows.transpose(0, 2, 1, 3).reshape(owners // groups, capacity, -1)
  return rows[:, :, :width]
