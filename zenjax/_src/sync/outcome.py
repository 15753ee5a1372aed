"""What an exchange showed: the dense verdict, statistics, bytes."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.schemes import dense_path
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import expected_bytes
from zenjax._src.schemes.base import received_bytes
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.sync.further_rounds import Progress
from zenjax._src.sync.further_rounds import rows_to_come
from zenjax._src.sync.further_rounds import Target
from zenjax._src.sync.further_rounds import Turns
from zenjax._src.sync.table_sources import Whole

# A table that travels dense returns to sparse below this part of break-even.
_RETURN = 0.8


class Outcome(NamedTuple):
  """What an exchange showed of one table, equal on all devices."""

  local_rows: jax.Array  # [] f32, nonzero rows of a device, mean
  union_rows: jax.Array  # [] f32, nonzero rows of the sum
  push_need: jax.Array  # [] f32, rows of the fullest (source, group) pair
  pull_need: jax.Array  # [] f32, rows of the fullest group's union
  push_mean: jax.Array  # [] f32, rows of a pair, mean
  rounds: jax.Array  # [] f32, pulls that carried rows of this table
  overflow_rows: jax.Array  # [] f32, of all devices, beyond the first push
  wire_bytes: jax.Array  # [] f32, received by a device
  went_dense: jax.Array  # [] bool, this time
  withheld: jax.Array  # [] bool, some rows wait for the next step
  above: jax.Array  # [] bool, it is one for the dense path, taken or not
  dense_next: jax.Array  # [] bool, what to remember


def above_break_even(
  tally: Tally, plan: TablePlan, scheme: Scheme, context: Context
) -> jax.Array:
  """Whether a table with more to send is better summed dense: `[] bool`.

  `tally` is that of the first pull.
  """
  pull = jnp.max(tally.total).astype(jnp.float32) + rows_to_come(tally)
  push = jnp.max(tally.fullest).astype(jnp.float32)
  above = _above(push, pull, plan, scheme, context, 1.0)
  return unfinished(tally, plan) & above


def unfinished(tally: Tally, plan: TablePlan) -> jax.Array:
  """Whether some device has rows that the first pull did not bring."""
  return jnp.any(tally.limit < plan.layout.slots)


def _above(
  push: jax.Array,
  pull: jax.Array,
  plan: TablePlan,
  scheme: Scheme,
  context: Context,
  factor: float,
) -> jax.Array:
  """Whether the sparse exchange is above `factor` times break-even."""
  dense = dense_path.received_bytes(plan.table, context.devices)
  sparse = expected_bytes(scheme, plan, push, pull, context)
  return jnp.asarray(sparse > dense * scheme.break_even * factor)


def outcome(
  target: Target,
  progress: Progress,
  first: Arrived,
  dense: jax.Array | None,
  plan: TablePlan,
  turns: Turns,
  scheme: Scheme,
  context: Context,
  exact: bool,
) -> Outcome:
  """What one table's exchange showed.

  Args:
    target: Synced.
    progress: After the last round.
    first: What the first pull brought.
    dense: Whether it took the dense path; None where it could not.
    plan: Its sizes.
    turns: Of the loops.
    scheme: How rows travelled.
    context: Axes and operation.
    exact: Whether loops sent what the first round left.
  """
  tally = first.tally
  went_dense = jnp.zeros((), bool) if dense is None else dense
  pushed = jnp.sum(tally.pushed.astype(jnp.float32))
  local = pushed / context.devices
  union = jnp.sum(progress.union.astype(jnp.float32))
  push = jnp.max(tally.fullest).astype(jnp.float32)
  pull = jnp.max(progress.union).astype(jnp.float32)
  groups, rows = plan.layout.groups, plan.table.num_rows
  if dense is not None and isinstance(target, Whole):
    table = target.table
    # A dense exchange counts no rows: a sample of them stands for all.
    scale = rows / dense_path.sample_count(rows)
    none = compat.cast_like(jnp.zeros((), jnp.int32), table)
    sampled = lax.cond(went_dense, dense_path.sample, lambda _: none, table)
    seen_union = sampled.astype(jnp.float32) * scale
    seen_local = tally.probe[0].astype(jnp.float32) * scale / context.devices
    counted = pushed > 0
    local = jnp.where(counted, local, seen_local)
    push = jnp.where(counted, push, seen_local / groups)
    union = jnp.where(went_dense, seen_union, union)
    pull = jnp.where(went_dense, seen_union / groups, pull)
  enter = _above(push, pull, plan, scheme, context, 1.0)
  stay = _above(push, pull, plan, scheme, context, _RETURN)
  return Outcome(
    local_rows=local,
    union_rows=union,
    push_need=push,
    pull_need=pull,
    push_mean=local / groups,
    rounds=progress.rounds.astype(jnp.float32),
    overflow_rows=jnp.where(
      went_dense, 0.0, pushed - jnp.sum(tally.merged.astype(jnp.float32))
    ),
    wire_bytes=_wire_bytes(
      plan,
      went_dense,
      turns,
      pushed / context.devices / groups,
      jnp.sum(progress.union.astype(jnp.float32)) / groups,
      scheme,
      context,
    ),
    went_dense=went_dense,
    withheld=unfinished(tally, plan) & (not exact),
    above=enter & (dense is not None),
    dense_next=jnp.where(went_dense, stay, enter) & (dense is not None),
  )


def _wire_bytes(
  plan: TablePlan,
  went_dense: jax.Array,
  turns: Turns,
  push_mean: jax.Array,
  pull_mean: jax.Array,
  scheme: Scheme,
  context: Context,
) -> jax.Array:
  """Bytes a device received for this table, padding included.

  By remote copies, which send none: of the rows that there are, a mean.
  """

  def push(size: int) -> float:
    messages = scheme.push_messages([plan], [size], context)
    return float(received_bytes(messages, context))

  def pull(size: int) -> float:
    messages = scheme.pull_messages([plan], [size], context)
    return float(received_bytes(messages, context))

  pushes = jnp.array([push(c.push) for c in plan.chunks], jnp.float32)
  pulls = jnp.array([pull(c.pull) for c in plan.chunks], jnp.float32)
  first = push(plan.first.push) + pull(plan.first.pull)
  turned = [t.astype(jnp.float32) for t in (turns.pushes, turns.pulls)]
  sparse = first + jnp.sum(turned[0] * pushes + turned[1] * pulls)
  if context.remote_copies:
    rows = expected_bytes(scheme, plan, push_mean, pull_mean, context)
    sparse = jnp.minimum(sparse, rows)
  dense = dense_path.received_bytes(plan.table, context.devices)
  return sparse + jnp.where(went_dense, dense, 0.0)
