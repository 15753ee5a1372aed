"""Exchanges a group of tables in rounds, until no rows are left.

A round has these steps:

    take    the first rows that are not done: the nonzero rows of an array, or
            all rows of SparseRows
    push    send them to their owners
    merge   sum, at each owner, the rows that all devices sent
    [owner] let the owner change the sums, as an optimizer step does
    pull    send all devices the sums of each owner
    write   write them over the array's rows, or append them to a list of rows

The first round is outside any branch, so it may overlap with the backward pass.
Rows that overflow its buffers follow in a `while_loop` of the same round. If
the rows of an array would cost more than a dense all-reduce, the array is
all-reduced instead. Every pull also returns row counts, equal on all devices,
so devices agree on whether another round is needed without a further
collective.
"""

from collections.abc import Callable, Sequence
import functools
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import compat
from zenjax._src.schemes import base
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import Sums
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.sync.sources import ArrayRows
from zenjax._src.sync.sources import ListRows

# Takes and returns the sums of a round, and a value kept from round to round.
OwnerStep = Callable[[list[Sums], Any], tuple[list[Sums], Any]]


class Counts(NamedTuple):
  """The counts of an exchange of one table, equal on all devices."""

  pushed: jax.Array  # [] f32, rows that all devices had to send
  fullest: jax.Array  # [] f32, rows of the fullest pair of device and row group
  union: jax.Array  # [p] f32, rows of the sum, of each of `plan.tables`
  owner: jax.Array  # [] f32, rows of the sum in the fullest row group
  rounds: jax.Array  # [] int32
  dense: jax.Array  # [] bool, whether it was all-reduced


class _Flow(NamedTuple):
  """The values that one round passes to the next."""

  starts: list[jax.Array]  # [m] int32, slots below are summed
  tables: list[Any]  # ArrayRows or ListRows
  unions: list[jax.Array]  # [m] int32, rows pulled so far
  owned: Any
  rounds: jax.Array  # [] int32


def exchange(
  plans: Sequence[ExchangePlan],
  gradients: Sequence[Sequence[Any]],
  scheme: Scheme,
  context: Context,
  *,
  owner: OwnerStep | None = None,
  owned: Any = (),
) -> tuple[list[Sequence[Any]], list[Counts], Any]:
  """Sums tables over devices, or averages them.

  Args:
    plans: The plan of each table.
    gradients: For each table, arrays or SparseRows of its `plan.tables`.
    scheme: How rows are moved.
    context: The devices, and the operation.
    owner: Changes the sums of a round at their owners, before they are pulled.
      With `owner` no table is all-reduced, since a dense sum has no owners.
    owned: A pytree that `owner` takes and returns in every round.

  Returns:
    The sums in the form of `gradients` and the counts of each table, equal on
    all devices, and `owned` after the last round.
  """
  with jax.named_scope("zenjax/take"):
    tables = [
      (ArrayRows if plan.table.look_ups is None else ListRows).of(x, plan)
      for plan, x in zip(plans, gradients)
    ]

  def turn(flow: _Flow) -> tuple[list[Arrived], Any]:
    outgoing = [*map(Outgoing, plans, flow.tables, flow.starts)]
    sums, kept = scheme.push(outgoing, context), flow.owned
    if owner:
      with jax.named_scope("zenjax/owner"):
        sums, kept = owner(sums, kept)
    return scheme.pull(plans, sums, context), kept

  none = [jnp.zeros(plan.layout.groups, jnp.int32) for plan in plans]
  rounds = jnp.zeros((), jnp.int32)
  first = _Flow(none, tables, unions=none, owned=owned, rounds=rounds)
  arrived, kept = turn(first)
  tallies = [came.tally for came in arrived]
  dense = [
    None if owner else _is_dense(plan, tally, scheme, context)
    for plan, tally in zip(plans, tallies)
  ]
  # A table that will be all-reduced keeps its local rows, and is done.
  flow = _after(first, [*map(_without, arrived, plans, dense)], kept, plans)
  if not all([scheme.holds_all(plan, context) for plan in plans]):
    with jax.named_scope("zenjax/rounds"):
      flow = lax.while_loop(
        functools.partial(_unfinished, plans=plans),
        lambda flow: _after(flow, *turn(flow), plans),
        flow,
      )
  sums, counts = [], []
  for plan, table, tally, union, skip in zip(
    plans, flow.tables, tallies, flow.unions, dense
  ):
    if skip is not None:
      with jax.named_scope("zenjax/dense"):
        array = dense_sum.reduce_where(table.table, skip, context)
      table = table._replace(table=array)
    sums.append(table.leaves(plan))
    counts.append(_counts(tally, union, table.total, flow.rounds, skip, plan))
  # All devices have the same sums and counts now, whatever types say.
  as_equal = functools.partial(compat.as_invariant, axes=context.axes)
  sums, counts = jax.tree.map(as_equal, (sums, counts))
  return sums, counts, flow.owned


def _after(
  flow: _Flow,
  arrived: Sequence[Arrived],
  owned: Any,
  plans: Sequence[ExchangePlan],
) -> _Flow:
  """Writes the sums of a round, and returns the values for the next."""
  with jax.named_scope("zenjax/write"):
    tables = [
      table.written(came, plan)
      for table, came, plan in zip(flow.tables, arrived, plans)
    ]
  return _Flow(
    starts=[came.tally.limit for came in arrived],
    tables=tables,
    unions=[x + came.tally.union for x, came in zip(flow.unions, arrived)],
    owned=owned,
    rounds=flow.rounds + 1,
  )


def _unfinished(flow: _Flow, plans: Sequence[ExchangePlan]) -> jax.Array:
  left = [
    jnp.any(start < plan.layout.slots)
    for start, plan in zip(flow.starts, plans)
  ]
  return functools.reduce(operator.or_, left)


def _is_dense(
  plan: ExchangePlan, tally: Tally, scheme: Scheme, context: Context
) -> jax.Array | None:
  """Returns true if rows cost more than a dense all-reduce would.

  The bytes of all rounds are estimated from the first, without padding, because
  `zenjax.tune` can remove padding, but never undoes a dense sum. None if it
  cannot be: SparseRows have no array to sum, and a table that fits one round is
  done.
  """
  if plan.table.look_ups is not None or scheme.holds_all(plan, context):
    return None
  counts = tally.union, tally.pushed, tally.summed
  union, pushed, summed = [x.astype(jnp.float32) for x in counts]
  # Rows to come are expected to overlap as much as those that came.
  to_come = union * (pushed - summed) / jnp.maximum(summed, 1)
  push = jnp.max(tally.fullest).astype(jnp.float32)
  pull = jnp.max(union + to_come)
  expected = scheme.expected_messages(plan, context, push, pull)
  nbytes = base.received_bytes(expected, context)
  if scheme.dense_push:
    nbytes *= jnp.ceil(pull / plan.pull)
  limit = scheme.break_even * base.dense_bytes(plan.table, context.devices)
  return jnp.any(tally.limit < plan.layout.slots) & (nbytes > limit)


def _without(
  arrived: Arrived, plan: ExchangePlan, dense: jax.Array | None
) -> Arrived:
  """Returns an empty pull after which no rows are left, if `dense`."""
  if dense is None:
    return arrived
  tally = arrived.tally
  limit = jnp.where(dense, plan.layout.slots, tally.limit)
  row = jnp.where(dense, plan.table.num_rows, arrived.row)
  return arrived._replace(row=row, tally=tally._replace(limit=limit))


def _counts(
  tally: Tally,
  union: jax.Array,
  total: jax.Array,
  rounds: jax.Array,
  dense: jax.Array | None,
  plan: ExchangePlan,
) -> Counts:
  """Returns the counts of a table.

  Args:
    tally: Counts of the first pull.
    union: `[m] int32`, rows of all pulls.
    total: `[p] int32`, rows that came of each of `plan.tables`.
    rounds: Number of rounds.
    dense: Whether the table was all-reduced. If so, the union is extrapolated.
    plan: The plan of the table.
  """
  pushed = jnp.sum(tally.pushed.astype(jnp.float32))
  rows, each = union.astype(jnp.float32), total.astype(jnp.float32)
  if len(plan.tables) == 1:  # Right for sums that are not pulled, too.
    each = jnp.sum(rows)[None]
  if dense is not None:
    summed, all_rows = [
      jnp.maximum(x.astype(jnp.float32), 1)
      for x in (tally.summed, tally.pushed)
    ]
    whole = jnp.minimum(rows * (all_rows / summed), plan.layout.slots)
    heights = np.array([table.num_rows for table in plan.tables], np.float32)
    shares = heights / plan.table.num_rows
    rows = jnp.where(dense, whole, rows)
    each = jnp.where(dense, jnp.sum(whole) * shares, each)
  return Counts(
    pushed=pushed,
    fullest=jnp.max(tally.fullest).astype(jnp.float32),
    union=each,
    owner=jnp.max(rows),
    rounds=rounds,
    dense=jnp.zeros((), bool) if dense is None else dense,
  )
