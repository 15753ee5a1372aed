"""The buffer on the wire: counts, indices and rows of all tables in one.

Everything travels as uint32. XLA:CPU widens every 16-bit float collective to 32
bits and XLA:TPU turns some tiled gathers into all-reduces; integers travel as
they are, and 26 tables cost one latency instead of 26.

Row indices travel as slots (4 bytes a row) or as a bitmap (one bit a slot),
whichever is smaller for the capacity of the buffer: the hash bitmap of the
Zen paper, decided when traced.
"""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import indexing


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
    "Rows that sharded_optimizer exchanges have no derivative; differentiate a"
    " step with `zenjax.zen_sync`, whose derivative is that of `lax.pmean`, or"
    " put"
    " jax.lax.stop_gradient around what goes into `update`."
  )


def exchange(
  tables: Sequence[Sequence[jax.Array]],
  collective: Callable[..., jax.Array],
  *args: Any,
) -> list[list[jax.Array]]:
  """Sends the sections of all tables in one buffer.

  Args:
    tables: Sections `[b, ...]` of each table, of any dtype.
    collective: Takes a buffer `[b, words] uint32`; returns `n * words` of them.
    *args: Further arguments of `collective`.

  Returns:
    The sections that came, `[n, ...]` each, in shape and dtype as they left.
  """
  words = [to_words(section) for table in tables for section in table]
  buffer = jnp.concatenate(words, axis=1) if len(words) > 1 else words[0]
  came = collective(buffer, *args).reshape(-1, buffer.shape[1])
  ends = itertools.accumulate([x.shape[1] for x in words], initial=0)
  parts = iter(itertools.pairwise(ends))
  return [
    [
      from_words(
        lax.slice_in_dim(came, *next(parts), axis=1),
        section.shape[1:],
        section.dtype,
      )
      for section in table
    ]
    for table in tables
  ]


def to_words(x: jax.Array) -> jax.Array:
  """`[b, ...]` of any dtype to `[b, words] uint32`, padded with zeros."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    x = _constant(x)
  flat = x.reshape(x.shape[0], -1)
  size = flat.dtype.itemsize
  if size < 4:
    each = 4 // size
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % each)))
    flat = flat.reshape(x.shape[0], -1, each)
  return lax.bitcast_convert_type(flat, jnp.uint32).reshape(x.shape[0], -1)


def from_words(
  words: jax.Array, shape: Sequence[int], dtype: jnp.dtype
) -> jax.Array:
  """Inverse of `to_words`: `[b, words] uint32` to `[b, *shape]`."""
  batch, size = words.shape[0], jnp.dtype(dtype).itemsize
  if size == 8:
    words = words.reshape(batch, -1, 2)
  flat = lax.bitcast_convert_type(words, dtype).reshape(batch, -1)
  return flat[:, : math.prod(shape)].reshape(batch, *shape)


def index_words(capacity: int, num_slots: int) -> int:
  """Words that the index of `capacity` rows takes."""
  return min(capacity, num_slots // 32)


def encode_index(slots: jax.Array, num_slots: int) -> jax.Array:
  """`[b, C] int32` ascending slots as they are, or a bitmap `[b, W] uint32`."""
  if slots.shape[1] <= num_slots // 32:
    return slots
  return indexing.from_slots(slots, num_slots)


def decode_index(index: jax.Array, capacity: int, num_slots: int) -> jax.Array:
  """Inverse of `encode_index`: `[b, C] int32`, `num_slots` as padding."""
  if index.dtype == jnp.int32:
    return index
  wanted = jnp.arange(capacity, dtype=jnp.int32)
  wanted = jnp.broadcast_to(wanted, (index.shape[0], capacity))
  return indexing.select(indexing.index(index), wanted)


def sum_counts(counts: jax.Array) -> jax.Array:
  """Sums `[n, ...] int32 >= 0` over `n`; the largest int32 where it is more."""
  most = jnp.iinfo(jnp.int32).max
  # float32 errs by a few parts in 2^24; within those the result may saturate.
  about = jnp.sum(counts.astype(jnp.float32), axis=0)
  total = jnp.sum(counts, axis=0, dtype=jnp.int32)
  return jnp.where(about > most * (1 - 2.0**-20), most, total)


def split_columns(rows: jax.Array, groups: int) -> jax.Array:
  """`[m, C, D]` to `[m * g, C, ceil(D / g)]`: one column group an owner."""
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


def has_range_of(wire: jnp.dtype, dtype: jnp.dtype) -> bool:
  """Returns True if `wire` has every exponent of `dtype`."""
  to, of = jnp.finfo(wire), jnp.finfo(dtype)
  return to.maxexp >= of.maxexp and to.minexp <= of.minexp
