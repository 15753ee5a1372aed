"""Unions that wait at their owners: given room, joined with what comes next."""

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._plan import TablePlan
from zenjax._schemes.base import Held
from zenjax._schemes.base import section


def resized(held: Held, room: int, plan: TablePlan) -> Held:
  """With space for `room` rows, no less than there was."""
  union = held.union
  more = room - union.slots.shape[0]
  slots = jnp.pad(union.slots, (0, more), constant_values=plan.layout.slots)
  rows = jnp.pad(union.rows, ((0, more), (0, 0)))
  return held._replace(union=union._replace(slots=slots, rows=rows))


def joined(
  old: Held, pulled: jax.Array, new: Held, kept: int, room: int, plan: TablePlan
) -> Held:
  """What `old` has still to send, then `new`, whose slots are all higher.

  Args:
    old: Held before the push.
    pulled: `[] int32`, rows of it that were asked for.
    new: What the push brought.
    kept: The most rows that may wait.
    room: Rows that there is space for; `kept` and those of `new` at least.
    plan: Of the table.
  """
  if not kept:
    return resized(new, room, plan)
  waits = section(old.union, pulled, kept)
  slots = jnp.minimum(waits.slots, plan.layout.slots)
  waits = waits._replace(slots=slots)
  both = resized(new._replace(union=waits), room, plan).union
  union = new.union._replace(
    slots=_insert(both.slots, new.union.slots, waits.total),
    rows=_insert(both.rows, new.union.rows, waits.total),
    total=waits.total + new.union.total,
  )
  return new._replace(union=union)


def _insert(x: jax.Array, part: jax.Array, at: jax.Array) -> jax.Array:
  return lax.dynamic_update_slice_in_dim(x, part, at, axis=0)
