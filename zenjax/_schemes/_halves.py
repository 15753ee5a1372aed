"""Two unions become one, alike on the two devices that exchanged them."""

import jax
import jax.numpy as jnp

from zenjax._plan import TablePlan
from zenjax._schemes import _hops
from zenjax._schemes import _sections
from zenjax._schemes.base import Held
from zenjax.kernels.operations import merge


def take(
  hop: _hops.Hop,
  rank: jax.Array,
  own: Held,
  came: Held,
  plan: TablePlan,
  room: int,
) -> Held:
  """What a device holds after a hop: `own` and what `came` with it.

  Args:
    hop: Which step it is.
    rank: Of this device along the hop's axis.
    own: Held before.
    came: Of the same shape; of no use to devices that no pair names.
    plan: Of the table.
    room: Rows to hold.
  """
  if hop.kind == "spread":
    mine = rank < hop.distance
    return jax.tree.map(lambda a, b: jnp.where(mine, a, b), own, came)
  upper = (rank & hop.distance) != 0
  if hop.kind == "fold":
    came = _empty_unless(rank < len(hop.pairs), came, plan)
    upper = jnp.zeros_like(upper)
  # Both ends add in the order of ranks: NaN keeps the same bits on both.
  lower, higher = (
    jax.tree.map(lambda a, b: jnp.where(upper, b, a), own, came),
    jax.tree.map(lambda a, b: jnp.where(upper, a, b), own, came),
  )
  return _merge(lower, higher, plan, room)


def _empty_unless(there: jax.Array, came: Held, plan: TablePlan) -> Held:
  """Nobody folds in here: no rows, and nothing incomplete."""
  past = plan.layout.slots
  came = jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), came)
  union = came.union._replace(
    slots=jnp.where(there, came.union.slots, past),
    limit=jnp.where(there, came.union.limit, past),
  )
  return came._replace(union=union)


def _merge(a: Held, b: Held, plan: TablePlan, room: int) -> Held:
  x, y = a.union, b.union
  union = merge(
    jnp.stack([x.slots, y.slots]),
    jnp.stack([x.rows, y.rows]),
    jnp.minimum(x.limit, y.limit),
    plan.layout.slots,
    room,
    x.rows.dtype,
  )
  # `merge` counts rows of unions; wanted are devices' rows. Exact unless some
  # were left out, then in proportion.
  kept = union.merged.astype(jnp.float32)
  came = jnp.maximum(x.total + y.total, 1).astype(jnp.float32)
  both = _sections.sum_counts(jnp.stack([x.merged, y.merged]))
  part = (both.astype(jnp.float32) * (kept / came)).astype(jnp.int32)
  merged = jnp.where(union.merged == x.total + y.total, both, part)
  return Held(
    union=union._replace(merged=merged),
    pushed=_sections.sum_counts(jnp.stack([a.pushed, b.pushed])),
    fullest=jnp.maximum(a.fullest, b.fullest),
    probe=a.probe + b.probe,
  )
