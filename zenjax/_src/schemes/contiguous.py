"""Schemes whose owners hold contiguous ranges of rows, by Zen's push and pull.

`SplitAllGather` and `SplitDenseGather` are SparCML's, `BlockSparse` is
OmniReduce's idea. Letters: `n` devices; `R` rows of `D` elements, `size` bytes
each; densities `d` of a device and `dn` of the union; `s` the load of the
fullest range over the mean.
"""

from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.schemes import hierarchy
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import counts_of
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Sums
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.schemes.zen import Zen


@dataclasses.dataclass(frozen=True, slots=True)
class SplitAllGather(Zen):
  """Zen with ranges in the place of the hash, one for each owner.

  SparCML's SSAR_Split_allgather (Renggli et al., SC 2019), and a parameter
  server that is spread over the workers ("Sparse PS" in ZEN, OSDI 2025,
  appendix B.1): what zen does but for the balance. Ids sorted by frequency meet
  in the first range, whose owner's load, `s` times the mean, decides for all:

      bytes = (n - 1) / n * s * (d + dn) * R * (D * size + index)

  SparCML sends messages of the size that they have; here every pair's buffer is
  as large as the fullest one's, and what does not fit follows in rounds.
  """

  name: str = "split_all_gather"
  contiguous: bool = True

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    del column_groups
    return sizes[-1], 1


@dataclasses.dataclass(frozen=True, slots=True)
class SplitDenseGather(SplitAllGather):
  """A sparse push to ranges, and ranges as they are for a pull.

  SparCML's DSAR_Split_allgather (Renggli et al., SC 2019), whose second half
  travels dense: rows go to the owner of their range as in `split_all_gather`;
  the owner then sends its whole range, with no index, for where the union is
  dense an index is all that sparsity would add.

      bytes = (n - 1) / n * (s * d * R * (D * size + index) + R * D * size)

  which is never less than half of a dense exchange: at most twice as fast. What
  SparCML decides when it runs, which format the second half has, a static
  program decides when it is traced, by the choice of the scheme. What does not
  fit the first push follows in rounds, or takes the dense path where it is an
  array above break-even, as with every scheme.
  """

  name: str = "split_dense_gather"
  break_even: float = 1.0

  def held_rows(self, plan: TablePlan, context: Context) -> int:
    return min(plan.most_pull, plan.push * context.sizes[-1])

  def pull(
    self, plans: Sequence[TablePlan], sums: Sequence[Sums], context: Context
  ) -> list[Arrived]:
    with jax.named_scope("split_dense_gather/pull"):
      sections = [
        _sections_of(own, plan, context) for own, plan in zip(sums, plans)
      ]
      came = wire.exchange(sections, collectives.all_gather, context.axes[-1:])
      return [_arrive(parts, plan) for parts, plan in zip(came, plans)]

  def pull_messages(
    self, plans: Sequence[TablePlan], context: Context
  ) -> list[Message]:
    words = 0
    for plan in plans:
      elements = plan.layout.slots * plan.table.width
      words += len(Tally._fields) + 1
      words += wire.words_for(elements, plan.table.wire_dtype)
    return [Message("all_gather", context.axes[-1:], words)]

  def expected_messages(
    self,
    plan: TablePlan,
    context: Context,
    push: jax.Array | float,
    pull: jax.Array | float,
  ) -> list[Message]:
    axes, n = context.axes[-1:], context.sizes[-1]
    row = plan.table.width * plan.table.wire_dtype.itemsize
    slow = []
    if len(context.axes) > 1:
      slow = hierarchy.expected_messages(plan, context, pull)
    return [
      Message("all_to_all", axes, n * push * (row + 4.0) / 4),
      *slow,
      Message("all_gather", axes, plan.layout.slots * row / 4.0),
    ]


def _sections_of(
  sums: Sums, plan: TablePlan, context: Context
) -> list[jax.Array]:
  """`[1, ...]` each: counts with the lowest slot held, and the whole range."""
  union, slots = sums.union, plan.layout.slots
  counts = jnp.append(counts_of(sums), union.slots[0])
  shape = (slots, plan.table.width)
  values = context.scaled(union.rows).astype(plan.table.dtype)
  values = values.astype(plan.table.wire_dtype)
  empty = 0.0
  if plan.table.look_ups is not None:
    # Of SparseRows those that are held come back, zero or not, and no others:
    # these are rows of negative zeros, which the others then have none of.
    empty = -0.0
    values = jnp.where(
      _is_negative_zero(values), jnp.zeros_like(values), values
    )
  dense = jnp.full(shape, empty, values.dtype)
  dense = dense.at[union.slots].set(values, mode="drop")
  return [counts[None], dense[None]]


def _is_negative_zero(x: jax.Array) -> jax.Array:
  """By bits: XLA:CPU takes subnormals for zero."""
  bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
  return bits == np.array(1 << (8 * x.dtype.itemsize - 1), bits.dtype)


def _arrive(came: Sequence[jax.Array], plan: TablePlan) -> Arrived:
  counts, values = came
  table, layout = plan.table, plan.layout
  tally, lowest = Tally(*counts[:, :-1].T), counts[:, -1]
  slot = jnp.arange(layout.slots, dtype=jnp.int32)[None]
  group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
  # Between its first row and its limit an owner knows every row: those that
  # it does not hold are zero on all devices.
  known = (slot >= lowest[:, None]) & (slot < tally.limit[:, None])
  if table.look_ups is not None:
    known &= ~jnp.all(_is_negative_zero(values), axis=-1)
  row = jnp.where(known, layout.row(group, slot), table.num_rows)
  return Arrived(
    row=row.reshape(-1),
    values=values.astype(table.dtype).reshape(-1, table.width),
    tally=tally,
  )


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSparse(SplitAllGather):
  """Ranges of blocks: only those with an element that is not zero travel.

  OmniReduce (Fei et al., SIGCOMM 2021) cuts a tensor into blocks of 256
  elements and streams the nonzero ones to aggregators, which own contiguous
  ranges. The same here: blocks, ranges, nothing sent for a block of zeros. Not
  the same: its aggregators ask each worker for its next nonzero block, so
  blocks need no index and all workers' blocks overlap in time; XLA has no place
  for a server that answers, so blocks travel with their numbers, through an
  `all_to_all` and an `all_gather`. A block is sent whole where one element of
  it is not zero:

      bytes = (n - 1) / n * s * (d_256 + dn_256) * (N * size + index)

  with `N` elements and densities of blocks. `unit=` with a number gives another
  size of block.
  """

  name: str = "block_sparse"
  unit: int | None = 256
