"""The buffer on the wire: counts, indices and rows of all tables in one.

Everything travels as uint32. XLA:CPU widens every 16-bit float collective to 32
bits and XLA:TPU turns some tiled gathers into all-reduces; integers travel as
they are, and 26 tables cost one latency instead of 26.

Row indices travel as slots (4 bytes a row) or as a bitmap (one bit a slot),
whichever is smaller for the capacity of the buffer: the hash bitmap of the
Zen paper, decided when traced.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import bitmaps


def words_for(count: int, dtype: jnp.dtype) -> int:
  """Words that `count` elements of `dtype` take."""
  return -(-count * jnp.dtype(dtype).itemsize // 4)


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
  """`x`, of which no derivative is asked: bits have none."""
  return x


@_constant.defjvp
def _refuse_derivative(primals, tangents):
  del primals, tangents
  raise NotImplementedError(
    "Rows that owner_update exchanges have no derivative; differentiate a step"
    " with `zenjax.zen_sync`, whose derivative is that of `lax.pmean`, or put"
    " jax.lax.stop_gradient around what goes into `update`."
  )


def to_words(x: jax.Array) -> jax.Array:
  """`[b, ...]` of any dtype to `[b, words] uint32`, padded with zeros."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    x = _constant(x)
  flat = x.reshape(x.shape[0], -1)
  size = flat.dtype.itemsize
  if size >= 4:
    words = lax.bitcast_convert_type(flat, jnp.uint32)
    return words.reshape(x.shape[0], -1)
  each = 4 // size
  flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % each)))
  return lax.bitcast_convert_type(
    flat.reshape(x.shape[0], -1, each), jnp.uint32
  )


def from_words(
  words: jax.Array, shape: Sequence[int], dtype: jnp.dtype
) -> jax.Array:
  """Inverse of `to_words`: `[b, words] uint32` to `[b, *shape]`."""
  batch, size = words.shape[0], jnp.dtype(dtype).itemsize
  if size == 8:
    words = words.reshape(batch, -1, 2)
  flat = lax.bitcast_convert_type(words, dtype).reshape(batch, -1)
  return flat[:, : math.prod(shape)].reshape(batch, *shape)


def exchange(
  tables: Sequence[Sequence[jax.Array]],
  collective: Callable[..., jax.Array],
  *args: Any,
) -> list[list[jax.Array]]:
  """Sends the sections of all tables in one buffer.

  Args:
    tables: Sections `[b, k] uint32` of each table.
    collective: Takes the buffer `[b, words]` and returns `[n, words]`.
    *args: Further arguments of `collective`.

  Returns:
    The sections that came, `[n, k]` each, as they were given.
  """
  sections = [section for table in tables for section in table]
  came = collective(jnp.concatenate(sections, axis=1), *args)
  parts, start = [], 0
  for table in tables:
    parts.append([])
    for section in table:
      end = start + section.shape[1]
      parts[-1].append(lax.slice_in_dim(came, start, end, axis=1))
      start = end
  return parts


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
  return to_words(rows.astype(wire_dtype))


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
