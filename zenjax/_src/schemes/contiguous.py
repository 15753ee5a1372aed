"""Implements schemes whose owners hold contiguous ranges of rows.

They use the push and pull of `Zen`. `SplitAllGather` and `SplitDenseGather`
come from SparCML, and `BlockSparse` from OmniReduce. Letters: `n` devices; `R`
rows of `D` elements of `size` bytes; `d` the density of a device, and `dn` the
density of the union; `s` the load of the fullest range over the mean.
"""

from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import counts_of
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Number
from zenjax._src.schemes.base import Sums
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.schemes.zen import Zen


@dataclasses.dataclass(frozen=True, slots=True)
class SplitAllGather(Zen):
  """Zen with one range of rows for each owner instead of the hash.

  This is SparCML's SSAR_Split_allgather (Renggli et al., SC 2019), and a
  parameter server on the workers ("Sparse PS" in ZEN, OSDI 2025, appendix B.1).
  It does the same as zen except for the balance. If ids are sorted by
  frequency, the first range has most rows, and its owner determines the time
  with `s` times the mean load:

      bytes = (n - 1) / n * s * (d + dn) * R * (D * size + index)

  SparCML sends messages of variable size. Here all pairs have buffers of one
  size, and overflowing rows follow in further rounds.
  """

  name: str = "split_all_gather"
  contiguous: bool = True

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    del column_groups
    return sizes[-1], 1


@dataclasses.dataclass(frozen=True, slots=True)
class SplitDenseGather(SplitAllGather):
  """Pushes rows to the owners of ranges, and pulls dense ranges.

  This is SparCML's DSAR_Split_allgather (Renggli et al., SC 2019). Rows go to
  the owner of their range as in `split_all_gather`. The owner then sends its
  range as a dense array, because if the union is dense, ids would only add
  bytes.

      bytes = (n - 1) / n * (s * d * R * (D * size + index) + R * D * size)

  This is at least half of the bytes of a dense exchange. As with every scheme,
  overflowing rows follow in further rounds, and arrays above break-even take
  the dense path.
  """

  name: str = "split_dense_gather"
  break_even: float = 1.0

  def held_rows(self, plan: ExchangePlan, context: Context) -> int:
    return min(plan.most_pull, plan.push * context.devices)

  def pull(
    self, plans: Sequence[ExchangePlan], sums: Sequence[Sums], context: Context
  ) -> list[Arrived]:
    with jax.named_scope("split_dense_gather/pull"):
      sections = [
        _sections_of(own, plan, context) for own, plan in zip(sums, plans)
      ]
      came = wire.send(sections, collectives.all_gather, context.axes[-1:])
      return [_arrive(parts, plan) for parts, plan in zip(came, plans)]

  def messages(
    self, plans: Sequence[ExchangePlan], context: Context
  ) -> list[Message]:
    *pushes, _ = Zen.messages(self, plans, context)
    words = 0
    for plan in plans:
      words += len(Tally._fields) + 1 + plan.row_wire.words(plan.layout.slots)
    return [*pushes, Message("all_gather", context.axes[-1:], words)]

  def expected_messages(
    self, plan: ExchangePlan, context: Context, push: Number, pull: Number
  ) -> list[Message]:
    *pushes, _ = Zen.expected_messages(self, plan, context, push, pull)
    words = plan.layout.slots * plan.row_wire.nbytes / 4.0
    return [*pushes, Message("all_gather", context.axes[-1:], words)]


def _sections_of(
  sums: Sums, plan: ExchangePlan, context: Context
) -> list[jax.Array]:
  """Returns `[1, ...]` each: counts, with the lowest slot, and the range."""
  union, slots = sums.union, plan.layout.slots
  counts = jnp.append(counts_of(sums), union.slots[0])
  values = context.scaled(union.rows).astype(plan.table.dtype)
  sent = plan.row_wire.encode(values)
  empty = jnp.zeros((slots, sent.shape[1]), sent.dtype)
  if plan.table.look_ups is not None:
    # SparseRows must contain exactly the rows that a device holds, even if a
    # sum is zero, so all other rows are marked.
    if plan.row_wire.scaled:
      # The mark is a scale of negative zero, which no encoded row has.
      empty = empty.at[:, -1].set(np.uint32(1 << 31))
    else:
      # The mark is a row of negative zeros. Those of held rows become positive.
      sent = jnp.where(_is_negative_zero(sent), jnp.zeros_like(sent), sent)
      empty = jnp.full_like(empty, -0.0)
  dense = empty.at[union.slots].set(sent, mode="drop")
  return [counts[None], dense[None]]


def _is_negative_zero(x: jax.Array) -> jax.Array:
  """Compares bits, because XLA:CPU treats subnormals as zero."""
  bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
  return bits == np.array(1 << (8 * x.dtype.itemsize - 1), bits.dtype)


def _arrive(came: Sequence[jax.Array], plan: ExchangePlan) -> Arrived:
  counts, values = came[0], plan.row_wire.decode(came[1])
  table, layout = plan.table, plan.layout
  tally, lowest = Tally(*counts[:, :-1].T), counts[:, -1]
  slot = jnp.arange(layout.slots, dtype=jnp.int32)[None]
  group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
  # An owner knows every row between its first row and its limit: rows that it
  # does not hold are zero on all devices.
  known = (slot >= lowest[:, None]) & (slot < tally.limit[:, None])
  if table.look_ups is not None:
    marks = came[1][..., -1:] if plan.row_wire.scaled else values
    known &= ~jnp.all(_is_negative_zero(marks), axis=-1)
  row = jnp.where(known, layout.row(group, slot), table.num_rows)
  return Arrived(
    row=row.reshape(-1),
    values=values.astype(table.dtype).reshape(-1, table.width),
    tally=tally,
  )


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSparse(SplitAllGather):
  """Sends blocks of elements instead of rows, except for blocks of zeros.

  OmniReduce (Fei et al., SIGCOMM 2021) cuts a tensor into blocks of 256
  elements and streams nonzero blocks to aggregators, which own contiguous
  ranges. This scheme has the same blocks and ranges, but not the same protocol.
  OmniReduce's aggregators ask each worker for its next nonzero block, so blocks
  need no ids, and the blocks of all workers overlap in time. An XLA program
  cannot answer requests, so blocks are sent with their ids by an `all_to_all`
  and an `all_gather`:

      bytes = (n - 1) / n * s * (d_256 + dn_256) * (N * size + index)

  with `N` elements and densities of blocks. `unit=` with a number chooses
  another block size.
  """

  name: str = "block_sparse"
  unit: int | None = 256
