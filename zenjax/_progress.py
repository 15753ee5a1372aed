"""Where one table stands between pushes and pulls."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from zenjax._listed import Appended
from zenjax._masked import Whole
from zenjax._plan import TablePlan
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Held
from zenjax._schemes.base import Tally

# Where the sums of one table go.
Target = Whole | Appended


class Progress(NamedTuple):
  """Where one table stands; every count is equal on all devices."""

  target: Target  # synced below `start` but for what is pending
  start: jax.Array  # [m] int32, where the next push begins
  union: jax.Array  # [m] int32, rows that came back so far
  sent: jax.Array  # [] int32, capacity of the last push
  left: jax.Array  # [] int32, rows that did not fit it in the fullest pair
  to_come: jax.Array  # [] int32, rows that these will add to a union, a guess
  pulled: jax.Array  # [] int32, rows that were asked for of what is held
  pending: jax.Array  # [] int32, rows that the fullest owner has still to send
  rounds: jax.Array  # [] int32, pulls that carried rows


def begin(target: Target, plan: TablePlan) -> Progress:
  """Before the first push."""
  zero = jnp.zeros((), jnp.int32)
  none = jnp.zeros(plan.layout.groups, jnp.int32)
  return Progress(
    target=target,
    start=none,
    union=none,
    sent=jnp.full_like(zero, plan.first.push),
    left=zero,
    to_come=zero,
    pulled=zero,
    pending=zero,
    rounds=zero,
  )


def advance(
  progress: Progress, arrived: Arrived, capacity: int, plan: TablePlan
) -> Progress:
  """Writes what a pull of `capacity` rows brought."""
  tally = arrived.tally
  with jax.named_scope("zenjax/expand"):
    target = progress.target.written(arrived, plan)
  carried = (jnp.sum(tally.union) > 0).astype(jnp.int32)
  return progress._replace(
    target=target,
    # A table that took the dense path, or had no more rows, stays done.
    start=jnp.maximum(tally.end, progress.start),
    union=progress.union + tally.union,
    left=jnp.maximum(jnp.max(tally.fullest) - progress.sent, 0),
    to_come=rows_to_come(tally).astype(jnp.int32),
    pulled=progress.pulled + capacity,
    pending=jnp.max(tally.pending),
    rounds=progress.rounds + carried,
  )


def rows_to_come(tally: Tally) -> jax.Array:
  """Rows that what was not merged yet will add to the fullest union, `[] f32`.

  It is expected to overlap as much as what was merged.
  """
  pushed, merged, total = (
    x.astype(jnp.float32) for x in (tally.pushed, tally.merged, tally.total)
  )
  return jnp.max(total * (pushed - merged) / jnp.maximum(merged, 1))


def finish_where(
  skip: jax.Array | None, progress: Progress, held: Held, plan: TablePlan
) -> tuple[Progress, Held]:
  """Nothing left to push or pull where the table takes the dense path."""
  if skip is None:
    return progress, held
  past = jnp.iinfo(jnp.int32).max
  progress = progress._replace(
    start=jnp.where(skip, past, progress.start),
    left=jnp.where(skip, 0, progress.left),
    to_come=jnp.where(skip, 0, progress.to_come),
    pending=jnp.where(skip, 0, progress.pending),
  )
  union = held.union
  union = union._replace(
    slots=jnp.where(skip, plan.layout.slots, union.slots),
    total=jnp.where(skip, 0, union.total),
  )
  fullest = jnp.where(skip, 0, held.fullest)
  return progress, held._replace(union=union, fullest=fullest)
