"""Sums of whole leaves: by `psum`, by a ring, or in place where it is better.

`psum` is what JAX gives its users today and what every scheme is measured
against. A ring moves `2 (n - 1) / n` times the table to every device.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.buffer_sizes import Table
from zenjax.kernels.reference import row_mask


@dataclasses.dataclass(frozen=True, slots=True)
class Dense:
  """One all-reduce of the leaf as it is."""

  name: str = "dense"

  def reduce(self, leaf: jax.Array, context: Context) -> jax.Array:
    reduce = collectives.pmean if context.mean else collectives.psum
    return reduce(leaf, context.axes)

  def messages(self, table: Table, context: Context) -> list[Message]:
    wide = collectives.accumulator(table.dtype).itemsize
    words = table.num_rows * _columns(table) * wide // 4
    return [Message("all_reduce", context.axes, words)]

  def loop_messages(
    self, table: Table, context: Context
  ) -> list[tuple[int, Message]]:
    del table, context
    return []


def _columns(table: Table) -> int:
  """Columns that are summed; of SparseRows one more counts who holds a row."""
  return table.width + (table.look_ups is not None)


# The ring all-reduce, step by step: a control for the dense exchange.
#
# Every device sends one of `n` chunks to the next device, `n - 1` times to sum
# and `n - 1` times to spread the sums (Patarasuk and Yuan, 2009). It moves the
# same bytes as a `psum` that is built as a ring, so what differs in time
# between the two is the library underneath and not the algorithm.
#
#     bytes = 2 (n - 1) ceil(N / n) * size,    2 (n - 1) messages one by one


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
  """A ring along each axis, the fastest first."""

  name: str = "ring"

  def reduce(self, leaf: jax.Array, context: Context) -> jax.Array:
    total = leaf.astype(collectives.accumulator(leaf.dtype))
    for axis, size in reversed([*zip(context.axes, context.sizes)]):
      total = _around(total, axis, size)
    total = context.scaled(total).astype(leaf.dtype)
    return compat.as_invariant(total, context.axes)

  def messages(self, table: Table, context: Context) -> list[Message]:
    del table, context
    return []

  def loop_messages(
    self, table: Table, context: Context
  ) -> list[tuple[int, Message]]:
    """A loop to sum and one to spread along every axis, with their turns."""
    elements = table.num_rows * _columns(table)
    each = collectives.accumulator(table.dtype).itemsize // 4
    loops = []
    for axis, size in reversed([*zip(context.axes, context.sizes)]):
      words = -(-elements // size) * each
      hop = (size - 1, Message("collective_permute", (axis,), words))
      loops += [hop, hop] if size > 1 else []
    return loops


def _around(x: jax.Array, axis: str, size: int) -> jax.Array:
  """The sum of `x` over `axis`; every chunk is summed on one device."""
  if size == 1:
    return x
  flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
  chunks = flat.reshape(size, -1)
  rank = lax.axis_index(axis)

  def step(first, add):
    def body(turn, chunks):
      sent = (rank + first - turn) % size
      chunk = lax.dynamic_index_in_dim(chunks, sent, keepdims=False)
      chunk = collectives.shift(chunk, axis, 1)
      at = (sent - 1) % size
      if add:
        chunk += lax.dynamic_index_in_dim(chunks, at, keepdims=False)
      return lax.dynamic_update_index_in_dim(chunks, chunk, at, axis=0)

    return body

  # After the first loop a device holds the sum of the chunk after its own.
  chunks = lax.fori_loop(0, size - 1, step(0, add=True), chunks)
  chunks = lax.fori_loop(0, size - 1, step(1, add=False), chunks)
  return chunks.reshape(-1)[: x.size].reshape(x.shape)


# The dense path: the sum of a whole table, or nothing, in place.
#
# A collective over the whole table under a conditional would hold a second copy
# of it. Loops that turn zero times where the table travels sparse hold one
# chunk of rows, or one share of the sum where devices share memory.

# Elements summed at a time. Links want enough for their rate and not their
# latency to decide: 16 MiB in float32. CPU devices of one process share memory:
# where that is not all of a table, chunks that stay in the cache are faster.
# Those of several processes meet in gloo, which starts every sum anew: between
# four hosts of 1 Gbit/s a full table of 26 MB took 1.14 times psum in chunks of
# 1 MiB, 1.06 in two and 1.03 in one; between eight 1.9, 1.15 and 1.06 times.
_ELEMENTS = 1 << 22
_CACHED_ELEMENTS = 1 << 18
_HOSTS_ELEMENTS = 1 << 25

# Rows looked at to learn the density of a table that travels dense.
_SAMPLES = 1024

# Rows looked at to guess that a table is full, before all of it is read.
_RUNS, _RUN = 16, 16
_NEARLY_ALL = 0.9


def reduce_where(
  table: jax.Array, wanted: jax.Array, context: Context
) -> jax.Array:
  """`psum` or `pmean` of `table: [R, D]` where `wanted: [] bool`.

  `wanted` is equal on all devices; where it is False nothing is exchanged and
  the table comes back as it is.
  """
  num_rows, width = table.shape

  cpu, default = [
    functools.partial(
      _reduce_chunks,
      rows=_chunk_rows(num_rows, width, platform),
      context=context,
    )
    for platform in ("cpu", "default")
  ]
  if _in_shares(table.size, table.dtype, context, "cpu"):
    cpu = functools.partial(_reduce_shares, context=context)
  return lax.platform_dependent(table, wanted, cpu=cpu, default=default)


def _in_shares(
  elements: int, dtype: jnp.dtype, context: Context, platform: str
) -> bool:
  """True if devices sum a share each: those of one process that are CPUs.

  Not over a network: gloo takes less for an all-reduce than for its halves.
  """
  alone = platform == "cpu" and jax.process_count() == 1
  even = elements % context.sizes[-1] == 0
  return alone and even and collectives.accumulator(dtype) == dtype


def _chunk_rows(num_rows: int, width: int, platform: str) -> int:
  elements = _ELEMENTS
  if platform == "cpu" and jax.process_count() > 1:
    elements = _HOSTS_ELEMENTS
  elif platform == "cpu" and num_rows * width > _ELEMENTS:
    elements = _CACHED_ELEMENTS
  chunks = -(-num_rows // max(1, elements // width))
  # Chunks are alike, for rows that the last two share are sent twice.
  return -(-num_rows // chunks)


def messages(table: Table, context: Context, platform: str) -> list[Message]:
  """The collectives of one turn, in order."""
  elements = table.num_rows * table.width
  each = collectives.accumulator(table.dtype).itemsize // 4
  if not _in_shares(elements, table.dtype, context, platform):
    rows = _chunk_rows(table.num_rows, table.width, platform)
    return [Message("all_reduce", context.axes, rows * table.width * each)]
  words = elements * each
  share = words // context.sizes[-1]
  slow, fast = context.axes[:-1], context.axes[-1:]
  return [
    Message("reduce_scatter", fast, words),
    *([Message("all_reduce", slow, share)] if slow else []),
    Message("all_gather", fast, share),
  ]


def _reduce_shares(
  table: jax.Array, wanted: jax.Array, context: Context
) -> jax.Array:
  """Every device sums a share, then all gather them.

  An all-reduce could not write where it reads, and what it writes would be
  copied into the table. The gathered shares go there: nothing reads it then.
  """

  def body(table):
    share = collectives.sum_in_shards(table.reshape(-1), context.axes)
    shares = collectives.all_gather(context.scaled(share), context.axes[-1:])
    return compat.cast_like(shares.reshape(table.shape), table)

  return once_where(wanted, body, table)


def once_where(
  wanted: jax.Array, body: Callable[[Any], Any], tables: Any
) -> Any:
  """`body(tables)` where it is wanted, in place; else the tables as they are.

  A flag, not a count: nothing is compiled to add to it and to compare it.
  """

  def turn(carry):
    flag, tables = carry
    return jnp.zeros_like(flag), body(tables)

  return lax.while_loop(lambda carry: carry[0], turn, (wanted, tables))[1]


def _reduce_chunks(
  table: jax.Array, wanted: jax.Array, rows: int, context: Context
) -> jax.Array:
  num_rows = table.shape[0]

  def summed(chunk):
    wide = chunk.astype(collectives.accumulator(chunk.dtype))
    total = context.scaled(collectives.psum(wide, context.axes))
    return total.astype(chunk.dtype)

  if rows == num_rows:
    whole = lambda table: compat.cast_like(summed(table), table)
    return once_where(wanted, whole, table)
  trips = jnp.where(wanted, -(-num_rows // rows), 0)
  offsets = jnp.arange(rows, dtype=jnp.int32)[:, None]

  def body(trip, table):
    # The last chunk overlaps the one before: its first rows are done already.
    start = jnp.minimum(trip * rows, num_rows - rows)
    chunk = lax.dynamic_slice_in_dim(table, start, rows)
    total = summed(chunk)
    if num_rows % rows:
      total = jnp.where(start + offsets >= trip * rows, total, chunk)
    return lax.dynamic_update_slice_in_dim(table, total, start, axis=0)

  return lax.fori_loop(jnp.zeros_like(trips), trips, body, table)


def received_bytes(table: Table, devices: int) -> float:
  """Bytes a device receives in a ring all-reduce of the whole table."""
  wide = collectives.accumulator(table.dtype).itemsize
  return 2 * (devices - 1) / devices * table.num_rows * table.width * wide


def sample_count(num_rows: int) -> int:
  """Rows that `samples` looks at."""
  return -(-num_rows // max(1, num_rows // _SAMPLES))


def samples(tables: Sequence[jax.Array]) -> jax.Array:
  """Counts the nonzero rows among the sampled ones: `[p] int32`."""
  most = max([sample_count(table.shape[0]) for table in tables])
  found = []
  for table in tables:
    rows = table[:: max(1, table.shape[0] // _SAMPLES)]
    found.append(jnp.pad(rows, ((0, most - rows.shape[0]), (0, 0))))
  nonzero = row_mask(jnp.concatenate(found)).nonzero
  return jnp.sum(nonzero.reshape(len(found), -1), axis=1, dtype=jnp.int32)


def samples_where(wanted: jax.Array, tables: Sequence[jax.Array]) -> jax.Array:
  """`samples` where `wanted: [] bool`; elsewhere any numbers."""
  if not compat.for_cpus():  # They are few, and a condition is waited for.
    return samples(tables)
  none = jnp.zeros(len(tables), jnp.int32)
  return lax.cond(
    wanted,
    samples,
    lambda tables: functools.reduce(compat.cast_like, tables, none),
    tuple(tables),
  )


def looks_full(table: jax.Array) -> jax.Array:
  """Tells if nearly all of a few rows are nonzero, `[] bool`.

  The rows lie beside each other in a few places: reading them is quick.
  """
  num_rows = table.shape[0]
  start = np.linspace(0, max(0, num_rows - _RUN), _RUNS).astype(np.int32)
  row = start[:, None] + np.arange(_RUN, dtype=np.int32) % num_rows
  nonzero = row_mask(indexing.take(table, row.reshape(-1))).nonzero
  count = jnp.sum(nonzero, dtype=jnp.int32)
  return count >= int(_RUNS * _RUN * _NEARLY_ALL)
