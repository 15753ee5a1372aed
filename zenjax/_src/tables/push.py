"""Pushes gradient rows to the devices that own them, who sum them.

The mirror image of `fetch`: rows that a device has sorted by owner go there, as
many as buffers hold, in rounds until all have come. A round brings complete
sums of some rows: each owner says up to which slot all devices have sent, and
the next round starts there.

Letters as in `fetch`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core import wire
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.tables import fetch
from zenjax._src.tables.fetch import LookUps
from zenjax._src.tables.sharded_table import ShardedTable


class Sums(NamedTuple):
  """Gradient rows of some slots of a table, at their owner."""

  slots: jax.Array  # [k] int32, each once, the first of them; S after these
  rows: jax.Array  # [k, D], summed over devices


class Counts(NamedTuple):
  """Counts of a table in a round, of all devices that share a batch."""

  start: Any  # slot at which the next round starts, of each owner: [n]
  most: Any  # distinct rows of the fullest pair of devices
  rows: Any  # distinct rows of a device, summed over devices
  beyond: Any  # rows that the first round's buffers have no room for, summed
  union: Any  # rows that owners have summed in this round: [n]


@dataclasses.dataclass(frozen=True, slots=True)
class Push:
  """The gradient rows of a device, on their way to their owners.

  Attributes:
    tables: Parts, inside a `shard_map`.
    asked: Their rows, by owner.
    rows: `[K, D]` of each, every row summed over its lookups.
    sizes: `C` of each.
  """

  tables: Sequence[ShardedTable]
  asked: Sequence[LookUps]
  rows: Sequence[jax.Array]
  sizes: Sequence[int]

  @classmethod
  def of(
    cls, tables: Sequence[ShardedTable], grads: Sequence[SparseRows]
  ) -> "Push":
    """Sorts the SparseRows of a device by owner, if they are not yet."""
    asked, rows, sizes = [], [], []
    for table, grad in zip(tables, grads):
      layout = table.layout
      ids, values = grad.indices, grad.values
      if not grad.capacity:
        ids = jnp.full(1, table.num_rows, jnp.int32)
        values = jnp.zeros((1, *values.shape[1:]), grad.dtype)
      ids = jnp.where(ids < 0, ids + table.num_rows, ids)
      ids = jnp.where(ids < 0, table.num_rows, ids)
      a = fetch.look_ups(ids, layout)
      wide = values.astype(collectives.accumulator(grad.dtype))
      # What stands for no row may hold anything, NaN included.
      wide = jnp.where((ids < table.num_rows)[:, None], wide, 0)
      values = jnp.zeros_like(wide).at[a.number].add(wide)
      asked.append(a)
      rows.append(values.astype(table.dtype))
      sizes.append(fetch.buffer_size(len(ids), layout, table.sizes))
    return cls(tables, asked, rows, sizes)

  @property
  def first(self) -> jax.Array:
    """Slots at which the first round starts, `[T, n]`."""
    return jnp.zeros((len(self.tables), self.tables[0].devices), jnp.int32)

  @property
  def ends(self) -> jax.Array:
    """Slots at which nothing is left, `[T, 1]`."""
    return jnp.array([[t.layout.slots] for t in self.tables], jnp.int32)

  @property
  def most(self) -> list[int]:
    """Rows of each table that an owner may have to sum in a step."""
    devices = collectives.size(self.tables[0].batch_axes)
    each = zip(self.tables, self.asked)
    return [min(t.layout.slots, devices * len(a.places)) for t, a in each]

  def round(self, starts: jax.Array) -> tuple[list[Sums], list[Counts]]:
    """Sums rows from `starts: [T, n]` on, as many as buffers hold."""
    sent, axes = [], self.tables[0].axes
    every = zip(self.tables, self.asked, self.rows, self.sizes, starts)
    for table, a, rows, size, start in every:
      layout = table.layout
      owner = jnp.arange(layout.groups, dtype=jnp.int32)
      begin = jnp.searchsorted(a.places, owner * layout.slots + start)
      begin = begin.astype(jnp.int32)
      at, slots = fetch.buffer_of(a, begin, size, layout)
      values = jnp.where(
        (slots < layout.slots)[..., None], indexing.take_or(rows, at, 0), 0
      )
      # The first that is not sent: what is below has been.
      _, limit = fetch.buffer_of(a, begin + size, 1, layout)
      sent.append([slots, values, limit])
    came = wire.exchange(sent, collectives.all_to_all, axes)
    limits = jnp.stack([jnp.min(limit) for *_, limit in came])
    if self.tables[0].replicas:
      limits = -collectives.pmax(-limits, self.tables[0].replicas)
    sums = self._of_replicas(
      [
        self._sum(k, jnp.where(slots < limit, slots, end), values)
        for k, ((slots, values, _), limit, (end,)) in enumerate(
          zip(came, limits, self.ends)
        )
      ]
    )
    return sums, self._counts(limits, sums)

  def _sum(self, k: int, slots: jax.Array, values: jax.Array) -> Sums:
    """Sums what came of a table, in the order of devices."""
    end = self.tables[k].layout.slots
    flat = values.reshape(-1, *values.shape[2:])
    flat = flat.astype(collectives.accumulator(flat.dtype))
    rows = SparseRows(slots.reshape(-1), flat, end)
    if len(slots) == 1:  # Of one device, whose rows are distinct.
      rows = rows.as_unique()
    rows = rows.combine()
    return Sums(rows.indices, rows.values)

  def _of_replicas(self, sums: list[Sums]) -> list[Sums]:
    """Sums what owners of the same rows have, in the order of replicas."""
    replicas = self.tables[0].replicas
    if not replicas:
      return sums
    sent = [[x.slots[None], x.rows[None]] for x in sums]
    came = wire.exchange(sent, collectives.all_gather, replicas)
    return [self._sum(k, *x) for k, x in enumerate(came)]

  def _counts(self, limits: jax.Array, sums: list[Sums]) -> list[Counts]:
    """Has all devices tell each other what they count."""
    own = []
    every = zip(self.tables, self.asked, self.sizes, limits, sums)
    for table, a, size, limit, x in every:
      each = jnp.diff(a.first)
      beyond = jnp.maximum(each - size, 0)
      numbers = Counts(
        start=limit,
        most=jnp.max(each),
        rows=a.first[-1],
        beyond=jnp.sum(beyond, dtype=jnp.int32),
        union=jnp.sum(x.slots < table.layout.slots, dtype=jnp.int32),
      )
      own.append(jnp.stack(numbers))
    axes, n = self.tables[0].batch_axes, self.tables[0].devices
    told = collectives.all_gather(jnp.stack(own), axes)
    told = compat.agreed(told, axes)
    found = []
    for k in range(len(own)):
      each = Counts(*[told[:, k, i] for i in range(len(Counts._fields))])
      found.append(
        Counts(
          # Copies of an owner, the last axis of the devices, agree.
          start=each.start[:n],
          most=jnp.max(each.most),
          rows=wire.sum_counts(each.rows),
          beyond=wire.sum_counts(each.beyond),
          union=each.union[:n],
        )
      )
    return found
