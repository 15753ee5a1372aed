"""The dense path: the sum of a whole table, or nothing, in place.

A collective over the whole table under a conditional would hold a second copy
of it. Loops that turn zero times where the table travels sparse hold one chunk
of rows, or one share of the sum where devices share memory.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax import _compat
from zenjax._plan import Table
from zenjax._schemes.base import Context
from zenjax.kernels.mask_pack.reference import row_mask

# Elements summed at a time. Links want enough for their rate and not their
# latency to decide: 16 MiB in float32. CPU devices share memory: where that is
# not all of a table, chunks that stay in the cache are faster.
_ELEMENTS = 1 << 22
_CACHED_ELEMENTS = 1 << 18

# Rows looked at to learn the density of a table that travels dense.
_SAMPLES = 1024


def reduce_where(
  table: jax.Array, wanted: jax.Array, context: Context
) -> jax.Array:
  """`psum` or `pmean` of `table: [R, D]` where `wanted: [] bool`.

  `wanted` is equal on all devices; where it is False nothing is exchanged and
  the table comes back as it is.
  """

  def in_chunks_of(elements):
    rows = max(1, min(elements // table.shape[1], table.shape[0]))
    return functools.partial(_reduce_chunks, rows=rows, context=context)

  small = table.size <= _ELEMENTS
  cpu = in_chunks_of(_ELEMENTS if small else _CACHED_ELEMENTS)
  if _shares(table, context):
    cpu = functools.partial(_reduce_shares, context=context)
  return lax.platform_dependent(
    table, wanted, cpu=cpu, default=in_chunks_of(_ELEMENTS)
  )


def _shares(table: jax.Array, context: Context) -> bool:
  """Whether CPU devices may sum `table` share by share.

  Not over a network: gloo takes less for an all-reduce than for its halves.
  """
  alone = jax.process_count() == 1
  even = table.size % context.sizes[-1] == 0
  return alone and even and _collectives.accumulator(table.dtype) == table.dtype


def _reduce_shares(
  table: jax.Array, wanted: jax.Array, context: Context
) -> jax.Array:
  """Every device sums a share, then all gather them.

  An all-reduce could not write where it reads, and what it writes would be
  copied into the table. The gathered shares go there: nothing reads it then.
  """

  def body(carry):
    more, table = carry
    share = _collectives.sum_in_shards(table.reshape(-1), context.axes)
    shares = _collectives.all_gather(context.scaled(share), context.axes[-1:])
    whole = _compat.cast_like(shares.reshape(table.shape), table)
    return jnp.zeros_like(more), whole

  return lax.while_loop(lambda carry: carry[0], body, (wanted, table))[1]


def _reduce_chunks(
  table: jax.Array, wanted: jax.Array, rows: int, context: Context
) -> jax.Array:
  num_rows = table.shape[0]
  trips = jnp.where(wanted, -(-num_rows // rows), 0)
  offsets = jnp.arange(rows, dtype=jnp.int32)[:, None]

  def body(trip, table):
    # The last chunk overlaps the one before: its first rows are done already.
    start = jnp.minimum(trip * rows, num_rows - rows)
    chunk = lax.dynamic_slice_in_dim(table, start, rows)
    total = _reduce(chunk, context)
    if num_rows % rows:
      total = jnp.where(start + offsets >= trip * rows, total, chunk)
    return lax.dynamic_update_slice_in_dim(table, total, start, axis=0)

  return lax.fori_loop(jnp.zeros_like(trips), trips, body, table)


def received_bytes(table: Table, devices: int) -> float:
  """Bytes a device receives in a ring all-reduce of the whole table."""
  wide = _collectives.accumulator(table.dtype).itemsize
  return 2 * (devices - 1) / devices * table.num_rows * table.width * wide


def sample_count(num_rows: int) -> int:
  """Rows that `sample` looks at."""
  return -(-num_rows // _stride(num_rows))


def sample(table: jax.Array) -> jax.Array:
  """Nonzero rows among the sampled ones: `[] int32`."""
  rows = table[:: _stride(table.shape[0])]
  return jnp.sum(row_mask(rows).nonzero, dtype=jnp.int32)


def _stride(num_rows: int) -> int:
  return max(1, num_rows // _SAMPLES)


def _reduce(chunk: jax.Array, context: Context) -> jax.Array:
  total = _collectives.psum(
    chunk.astype(_collectives.accumulator(chunk.dtype)), context.axes
  )
  return context.scaled(total).astype(chunk.dtype)
