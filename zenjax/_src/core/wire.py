"""Packs counts, indices and rows of all tables into one buffer to send.

The buffer is uint32 for two reasons. XLA:CPU widens every 16-bit float
collective to 32 bits, and XLA:TPU turns some tiled gathers into all-reduces;
integers are sent unchanged. And with one buffer, 26 tables pay one latency
instead of 26.

Row indices are sent as slots (4 bytes per row) or as a bitmap (1 bit per slot,
the hash bitmap of the Zen paper). The smaller one for the size of the buffer is
chosen when the program is traced.
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
  """Returns the number of words that `count` elements of `dtype` take."""
  return -(-count * jnp.dtype(dtype).itemsize // 4)


@jax.custom_jvp
def constant(x: jax.Array) -> jax.Array:
  """Returns `x`, and raises if it is differentiated."""
  return x


@constant.defjvp
def _refuse_derivative(primals, tangents):
  del primals, tangents
  raise NotImplementedError(
    "You cannot differentiate through `zenjax.sharded_optimizer` or"
    " `zenjax.compress.all_reduce`. Use `zenjax.zen_sync`, which has the"
    " derivative of `lax.pmean`. If you do not need the derivative, put"
    " `jax.lax.stop_gradient` around the arguments of `update`."
  )


def send(
  tables: Sequence[Sequence[jax.Array]],
  collective: Callable[..., jax.Array],
  *args: Any,
) -> list[list[jax.Array]]:
  """Sends the sections of all tables in one buffer.

  Args:
    tables: Sections `[b, ...]` of each table, of any dtype.
    collective: Takes a buffer `[b, words] uint32`, and returns `n * words`
      words.
    *args: Further arguments of `collective`.

  Returns:
    The received sections, `[n, ...]` each, with the shape and dtype of the sent
    ones.
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


def integers(x: jax.Array) -> jax.Array:
  """Returns the bits of `x` as signed integers of the same size."""
  return lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))


def to_words(x: jax.Array) -> jax.Array:
  """Converts `[b, ...]` of any dtype to `[b, words] uint32`, zero padded."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    x = constant(x)
  flat = x.reshape(x.shape[0], -1)
  size = flat.dtype.itemsize
  if size >= 4:
    return lax.bitcast_convert_type(flat, jnp.uint32).reshape(x.shape[0], -1)
  # A bitcast of `[b, words, 4 / size]` would be simpler, but TPUs pad the last
  # dimension to 128.
  flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % (4 // size))))
  parts = lax.bitcast_convert_type(flat, f"uint{8 * size}")
  parts = parts.reshape(x.shape[0], 4 // size, -1).astype(jnp.uint32)
  return jnp.sum(parts << shifts(8 * size), axis=1, dtype=jnp.uint32)


def from_words(
  words: jax.Array, shape: Sequence[int], dtype: jnp.dtype
) -> jax.Array:
  """Inverse of `to_words`: `[b, words] uint32` to `[b, *shape]`."""
  batch, size = words.shape[0], jnp.dtype(dtype).itemsize
  if size == 8:
    words = words.reshape(batch, -1, 2)
  if size < 4:
    words = (words[:, None] >> shifts(8 * size)).astype(f"uint{8 * size}")
  flat = lax.bitcast_convert_type(words, dtype).reshape(batch, -1)
  return flat[:, : math.prod(shape)].reshape(batch, *shape)


def shifts(bits: int) -> jax.Array:
  """Returns where the parts of a word begin, `[1, 32 / bits, 1]`."""
  return jnp.arange(0, 32, bits, dtype=jnp.uint32).reshape(1, -1, 1)


def index_words(capacity: int, num_slots: int) -> int:
  """Returns the number of words that the index of `capacity` rows takes."""
  return min(capacity, num_slots // 32)


def encode_index(slots: jax.Array, num_slots: int) -> jax.Array:
  """Returns ascending slots `[b, C] int32`, or their bitmap `[b, W] uint32`."""
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
  """Sums `[n, ...] int32 >= 0` over `n`, saturating at the largest int32."""
  most = jnp.iinfo(jnp.int32).max
  # float32 has errors of a few parts in 2^24, so a sum slightly below the limit
  # may saturate too.
  about = jnp.sum(counts.astype(jnp.float32), axis=0)
  total = jnp.sum(counts, axis=0, dtype=jnp.int32)
  return jnp.where(about > most * (1 - 2.0**-20), most, total)


def split_columns(rows: jax.Array, groups: int) -> jax.Array:
  """Splits `[m, C, D]` to `[m * g, C, ceil(D / g)]`, columns by owner."""
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
  """Returns True if `wire` has the magnitudes of `dtype`; no integer has.

  The smallest ones count, too: gradients in float16 are often subnormal.
  """
  if not jnp.issubdtype(wire, jnp.floating):
    return False
  to, of = jnp.finfo(wire), jnp.finfo(dtype)
  # Numbers below 2^-126 are zero on some devices.
  least = max(float(of.smallest_subnormal), 2.0**-126)
  return to.maxexp >= of.maxexp and float(to.smallest_subnormal) <= least
