"""Fetches the rows that a device looks up from the devices that own them.

Distinct ids are sorted by owner and sent to the owners, which send the rows
back. All tables share one buffer, which has the same size for each pair of
devices. If ids overflow the buffer, further rounds follow, so that the result
is exact for any ids.

Letters: `R` rows, `D` columns, `n` devices, `S` slots of a device, `K` lookups
of a device, `C` rows that a buffer for one pair of devices holds.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core import wire
from zenjax._src.core.partition import Layout
from zenjax._src.core.row_wire import RowWire
from zenjax._src.schemes import buffer_sizes
from zenjax._src.tables.sharded_table import ShardedTable

# By default, buffers hold a part of the lookups, because batches repeat ids,
# and at least a few rows.
_PART, _LEAST = 0.25, 8


def buffer_size(look_ups: int, layout: Layout, sizes: Sequence[int]) -> int:
  """Returns `C`, the rows that the buffer for one pair of devices holds.

  Args:
    look_ups: `K`.
    layout: The table's layout, which has the number of owners.
    sizes: The table's own sizes, `C` first, or empty for the default.
  """
  n = layout.groups
  if n == 1:
    return look_ups
  default = math.ceil(buffer_sizes.fullest(look_ups * _PART, n, n * n))
  size = sizes[0] if sizes else max(default, _LEAST)
  return max(1, min(size, look_ups, layout.slots))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookUps:
  """Lookups of a table on a device, the distinct ones sorted by owner."""

  # [K] int32, `owner * S + slot` of distinct rows, ascending; n * S after them.
  places: jax.Array
  first: jax.Array  # [n + 1] int32, where each owner's places begin
  number: jax.Array  # [K] int32, position of each lookup among the distinct
  layout: Layout = dataclasses.field(metadata={"static": True})
  size: int = dataclasses.field(metadata={"static": True})  # C

  @classmethod
  def of(cls, ids: jax.Array, table: ShardedTable) -> "LookUps":
    """Sorts lookups `[K]`; ids of `R` or more are padding."""
    layout = table.layout
    end = layout.groups * layout.slots
    owner, slot = layout.place(jnp.minimum(ids, layout.num_rows - 1))
    place = jnp.where(ids < layout.num_rows, owner * layout.slots + slot, end)
    iota = compat.cast_like(jnp.arange(len(ids), dtype=jnp.int32), place)
    place, order = lax.sort((place, iota), num_keys=1)
    new = jnp.concatenate([jnp.ones(1, bool), place[1:] != place[:-1]])
    number = jnp.cumsum(new, dtype=jnp.int32) - 1
    places = jnp.full_like(place, end).at[number]
    places = places.set(place, indices_are_sorted=True)
    number = indexing.put(jnp.zeros_like(number), order, number)
    ends = jnp.arange(layout.groups + 1, dtype=jnp.int32) * layout.slots
    first = indexing.lower_bound(places, ends)
    size = buffer_size(len(ids), layout, table.sizes)
    return cls(places, first, number, layout, size)

  def wanted(self, turn: Any) -> jax.Array:
    """Returns the slots `[n, C]` to ask owners for in a round; `S` as padding.

    Args:
      turn: The number of the round.
    """
    number = jnp.arange(self.size, dtype=jnp.int32)[None]
    position = self.first[:-1, None] + turn * self.size + number
    owner = jnp.arange(self.layout.groups, dtype=jnp.int32)[:, None]
    slots = indexing.take_or(self.places, position, 0)
    slots -= owner * self.layout.slots
    is_wanted = position < self.first[1:, None]
    return jnp.where(is_wanted, slots, self.layout.slots)

  def filled(self, turn: Any, came: jax.Array, before: Any) -> jax.Array:
    """Returns rows `[K, D]` of the distinct places after a round.

    Args:
      turn: The number of the round.
      came: `[n, C, D]`, the rows that owners sent in this round.
      before: `[K, D]`, the rows of earlier rounds.
    """
    n, slots, size = self.layout.groups, self.layout.slots, self.size
    owner = jnp.minimum(self.places // slots, n - 1)
    number = jnp.arange(len(owner), dtype=jnp.int32)
    at = number - self.first[owner] - turn * size
    here = (self.places < n * slots) & (at >= 0) & (at < size)
    came = came.reshape(n * size, *came.shape[2:])
    rows = indexing.take(came, owner * size + jnp.clip(at, 0, size - 1))
    return jnp.where(here[:, None], rows, before)


class Ahead(NamedTuple):
  """Lookups of a batch whose ids have been sent to the owners.

  Inside `shard_map`, it is the part of one device. Outside, every array is
  sharded along its first dimension, as the batch is.
  """

  ids: list[jax.Array]  # [K] int32 of each table
  asked: list[LookUps]
  came: list[jax.Array]  # [n, C] int32, slots that devices ask this one for
  most: jax.Array  # [1, T] int32, rows of the fullest pair of devices


def ask(tables: Sequence[ShardedTable], ids: Sequence[jax.Array]) -> Ahead:
  """Sends the first distinct ids of a device to their owners.

  Args:
    tables: Each device's part of the tables, inside a `shard_map`.
    ids: `[K] int32` of each table, in `[0, R]`; `R` is padding.
  """
  asked = list(map(LookUps.of, ids, tables))
  fullest = jnp.stack([jnp.max(jnp.diff(x.first)) for x in asked])
  sent = [[x.wanted(0)] for x in asked]
  # Every device tells all others its fullest buffer, which gives the number of
  # rounds.
  n = asked[0].layout.groups
  sent.append([jnp.broadcast_to(fullest, (n, len(tables)))])
  *came, (told,) = wire.send(sent, collectives.all_to_all, tables[0].axes)
  most = jnp.max(told, axis=0)
  if tables[0].replicas:  # All groups must run the same number of rounds.
    most = collectives.pmax(most, tables[0].replicas)
    # Rows wait for this maximum, so that all devices run collectives in the
    # same order.
    most, came = lax.optimization_barrier((most, came))
  return Ahead(list(ids), asked, [x for (x,) in came], most[None])


def fetch(tables: Sequence[ShardedTable], ahead: Ahead) -> list[jax.Array]:
  """Returns the rows `[K, D]` of all lookups of a device, for each table.

  Args:
    tables: Each device's part `[S, D]` of the tables, inside a `shard_map`.
    ahead: The lookups, as `ask` returned them.
  """
  axes, asked = tables[0].axes, ahead.asked
  most = compat.agreed(ahead.most[0], tables[0].batch_axes)

  def answered(turn: Any, came: Any, before: Sequence[Any]) -> list[jax.Array]:
    each = zip(tables, came)
    sent = [
      [table.row_wire.encode(indexing.take_or(table.value, x, 0))]
      for table, x in each
    ]
    arrived = wire.send(sent, collectives.all_to_all, axes)
    rows = [
      table.row_wire.decode(x).astype(table.dtype)
      for table, (x,) in zip(tables, arrived)
    ]
    each = zip(asked, rows, before)
    return [of.filled(turn, new, old) for of, new, old in each]

  def more(turn: Any, rows: list[jax.Array]) -> list[jax.Array]:
    sent = [[x.wanted(turn)] for x in asked]
    came = wire.send(sent, collectives.all_to_all, axes)
    return answered(turn, [x for (x,) in came], rows)

  rows = answered(0, ahead.came, [0] * len(tables))
  sizes = jnp.array([x.size for x in asked], jnp.int32)
  rows = lax.fori_loop(1, jnp.max(-(-most // sizes)), more, rows)
  return [indexing.take(x, of.number) for x, of in zip(rows, asked)]


def ask_all(
  tables: Sequence[ShardedTable], ids: Sequence[Sequence[jax.Array]]
) -> Ahead:
  """Runs `ask` for several lookups `[k]` of each table."""
  ahead = ask(tables, list(map(jnp.concatenate, ids)))
  # If nothing read the tables, `jit` would drop them, and could not know which
  # devices the program is for when ids are not placed.
  most, _ = lax.optimization_barrier(
    (ahead.most, [x.value[:1] for x in tables])
  )
  return ahead._replace(most=most)


def fetch_all(
  tables: Sequence[ShardedTable],
  ids: Sequence[Sequence[jax.Array]],
  ahead: Ahead | None = None,
) -> list[list[jax.Array]]:
  """Fetches the rows of several lookups of each table.

  Args:
    tables: Each device's part of the tables, inside a `shard_map`.
    ids: `[k] int32` for each lookup of each table.
    ahead: The result of `ask_all`, if the ids have been sent. If these differ
      from `ids`, all rows are NaN.

  Returns:
    For each table the rows `[k, D]` of each lookup.

  Raises:
    ValueError: `ahead` belongs to other tables or numbers of lookups.
  """
  joined = list(map(jnp.concatenate, ids))
  if ahead is not None:
    want = [(len(x), table.layout) for x, table in zip(joined, tables)]
    got = [(len(x), of.layout) for x, of in zip(ahead.ids, ahead.asked)]
    if got != want:
      raise ValueError(
        "`prefetched` belongs to another function or batch: expected lookups"
        f" per device and tables {want}, got {got}. Pass what"
        " `zenjax.tables.prefetch(loss_fn)` returned for this batch."
      )
  rows = fetch(tables, ahead or ask(tables, joined))
  if ahead is not None:
    same = [jnp.all(x == y) for x, y in zip(joined, ahead.ids)]
    rows = [jnp.where(ok, x, jnp.nan) for ok, x in zip(same, rows)]
  ends = [np.cumsum(list(map(len, x)))[:-1].tolist() for x in ids]
  return [jnp.split(x, at) for x, at in zip(rows, ends)]


def words_of_round(
  size: int, devices: int, row_wire: RowWire
) -> tuple[int, int, int]:
  """Returns the words of the three messages of one round."""
  rows = devices * row_wire.words(size)
  return devices * (size + 1), rows, rows + devices * (size + 1)
