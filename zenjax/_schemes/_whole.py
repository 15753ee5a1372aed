"""Unions of which one pull brings all, or none has to bring anything."""

import jax.numpy as jnp

from zenjax._plan import TablePlan
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import Held
from zenjax._schemes.base import Tally


def tally(own: Held) -> Tally:
  """Counts of an owner from which one pull brings all, `[]` each."""
  union = own.union
  return Tally(
    limit=union.limit,
    end=union.limit,
    union=union.total,
    total=union.total,
    pending=jnp.zeros_like(union.total),
    pushed=own.pushed,
    fullest=own.fullest,
    merged=union.merged,
    probe=own.probe,
  )


def arrive(own: Held, plan: TablePlan, context: Context) -> Arrived:
  """All that is held, equal on all devices already."""
  union = own.union
  return Arrived(
    row=plan.layout.row(jnp.zeros((), jnp.int32), union.slots),
    values=context.scaled(union.rows).astype(plan.table.dtype),
    tally=Tally(*(count[None] for count in tally(own))),
  )
