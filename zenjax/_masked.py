"""Arrays of which most rows are zero, as they enter and leave an exchange.

What is not zero is sent from the array itself, and sums are written over it:
the union of all devices' nonzero rows contains the local ones, so what is not
written is zero already.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _bitmap
from zenjax import _compat
from zenjax import _dense
from zenjax._plan import TablePlan
from zenjax._schemes.base import Arrived
from zenjax.kernels.mask_pack.reference import pack_rows
from zenjax.kernels.mask_pack.reference import Packed
from zenjax.kernels.mask_pack.reference import plus_zero_where
from zenjax.kernels.operations import compact
from zenjax.kernels.operations import expand
from zenjax.kernels.operations import mask_pack


class Carried(NamedTuple):
  """Rows of one table that wait from earlier steps."""

  rows: jax.Array  # [R, D]
  some: jax.Array  # [] bool, or all of them are zero


class Masked(NamedTuple):
  """Nonzero rows of an array; see `base.Source`."""

  table: jax.Array  # [R, D]
  bitmap: _bitmap.Bitmap  # of [m, W] words
  carried: jax.Array | None  # [R, D], to be added to the table

  def rows_from(
    self, start: jax.Array, plan: TablePlan, capacity: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    first = _bitmap.rank(self.bitmap, start[:, None])[:, 0]
    layout = plan.layout
    slots, rows = compact(self.table, self.bitmap, layout, first, capacity)
    if self.carried is not None:
      group = jnp.arange(layout.groups, dtype=jnp.int32)[:, None]
      row = layout.row(group, slots)
      rows += self.carried.at[row].get(mode="fill", fill_value=0)
    return slots, rows, self.bitmap.total - first

  def after(self, target: "Whole") -> "Masked":
    """The same once sums are written over the array, for further rounds."""
    return self._replace(table=target.table, carried=None)


class Whole(NamedTuple):
  """An array over which sums are written."""

  table: jax.Array  # [R, D]

  def written(self, arrived: Arrived, plan: TablePlan) -> "Whole":
    """With sums in the place of local rows."""
    del plan
    return Whole(expand(self.table, arrived.row, arrived.values))


def enter(
  table: jax.Array,
  plan: TablePlan,
  remembered: jax.Array | None,
  carried: Carried | None,
) -> tuple[Masked, jax.Array]:
  """What a table sends, empty where it is known to be dense.

  Args:
    table: `[R, D]`.
    plan: Its sizes.
    remembered: Whether it travels dense from the start, `[] bool`.
    carried: What waited until now, if rows may wait.

  Returns:
    The rows to send, of the table without negative zeros in those that nobody
    sends, and a sampled count of those of a table known to be dense.
  """
  if remembered is None:
    packed, probe = _pack(table, plan)
  else:
    packed, probe = lax.cond(
      remembered,
      lambda t: _no_rows(t, plan),
      lambda t: _pack_unless_full(t, plan),
      table,
    )
  words, late = packed.words, None
  if carried is not None:
    words |= _late_words(carried, plan, words)
    late = carried.rows
  # All who read or write take what comes back, or XLA would keep a copy.
  cleared = plus_zero_where(packed.negative, table)
  return Masked(cleared, _bitmap.index(words), late), probe


def _late_words(late: Carried, plan: TablePlan, like: jax.Array) -> jax.Array:
  """Rows that wait, packed; nothing is read where there are none."""
  none = _compat.cast_like(jnp.zeros_like(like), late.rows)
  return lax.cond(
    late.some,
    lambda rows: mask_pack(rows, plan.layout).words,
    lambda rows: none,
    late.rows,
  )


def _pack(table: jax.Array, plan: TablePlan) -> tuple[Packed, jax.Array]:
  none = jnp.zeros((), jnp.int32)
  return mask_pack(table, plan.layout), _compat.cast_like(none, table)


def _pack_unless_full(
  table: jax.Array, plan: TablePlan
) -> tuple[Packed, jax.Array]:
  """Spares the read of a table that looks full.

  It counts as full, which shows all devices that it is above break-even; a row
  of zeros that is sent after all adds nothing.
  """
  return lax.cond(
    _dense.looks_full(table),
    lambda t: _all_rows(t, plan),
    lambda t: _pack(t, plan),
    table,
  )


def _all_rows(table: jax.Array, plan: TablePlan) -> tuple[Packed, jax.Array]:
  words = pack_rows(jnp.ones(plan.table.num_rows, bool), plan.layout)
  return _unread(table, words, jnp.zeros((), jnp.int32))


def _no_rows(table: jax.Array, plan: TablePlan) -> tuple[Packed, jax.Array]:
  """Nothing to send, and a sampled count in place of that of all rows."""
  shape = (plan.layout.groups, plan.layout.words)
  return _unread(table, jnp.zeros(shape, jnp.uint32), _dense.sample(table))


def _unread(
  table: jax.Array, words: jax.Array, probe: jax.Array
) -> tuple[Packed, jax.Array]:
  packed = Packed(words=words, negative=jnp.zeros((), bool))
  typed = [_compat.cast_like(x, table) for x in (*packed, probe)]
  return Packed(*typed[:-1]), typed[-1]
