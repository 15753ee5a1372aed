"""Rows that wait for the next step: `on_overflow="carry"`.

Where nothing waits, which is nearly always, the table is not read for it: every
pass is a loop that turns once or not at all, in place.
"""

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _compat
from zenjax import _masked
from zenjax import _outcome
from zenjax import _select
from zenjax._arguments import Unit
from zenjax._plan import TablePlan
from zenjax._schemes.base import Arrived
from zenjax._state import LeafState


def carried(leaf: LeafState, unit: Unit) -> _masked.Carried:
  """What waits from earlier steps, seen as a table."""
  residual = _residual_of(leaf)
  return _masked.Carried(_select.as_table(residual[0], unit), leaf.waiting)


def keep(
  table: jax.Array,
  leaf: LeafState,
  first: Arrived,
  plan: TablePlan,
  unit: Unit,
) -> LeafState:
  """`leaf` with the rows that were not exchanged.

  Args:
    table: `[R, D]` after the exchange, or before it: these rows are local in
      both.
    leaf: What waited until now.
    first: What the round brought; slots from its limit on were not summed.
    plan: Of the table.
    unit: How a leaf is seen as rows.
  """

  # The same shape in and out: XLA then writes in place.
  def body(carry):
    flag, late = carry
    zero = jnp.zeros((), late.dtype)
    waits = jnp.where(_done(first, plan), zero, late + table)
    return jnp.zeros_like(flag), _compat.cast_like(waits, late)

  residual = _residual_of(leaf)
  waiting = _outcome.unfinished(first.tally, plan)
  # Where nothing waits and nothing did, it is zero and stays so.
  late = _select.as_table(residual[0], unit)
  carry = (waiting | leaf.waiting, late)
  late = lax.while_loop(lambda c: c[0], body, carry)[1]
  residual = _select.from_table(late, residual)
  return leaf._replace(residual=residual)


def withhold(table: jax.Array, first: Arrived, plan: TablePlan) -> jax.Array:
  """`table` after the exchange with zeros in the rows that wait."""

  def body(carry):
    flag, table = carry
    zero = jnp.zeros((), table.dtype)
    return jnp.zeros_like(flag), jnp.where(_done(first, plan), table, zero)

  carry = (_outcome.unfinished(first.tally, plan), table)
  return lax.while_loop(lambda c: c[0], body, carry)[1]


def _residual_of(leaf: LeafState) -> jax.Array:
  if leaf.residual is None:
    raise AssertionError("carry keeps a residual for every leaf")
  return leaf.residual


def _done(first: Arrived, plan: TablePlan) -> jax.Array:
  """Rows that the round summed, `[R, 1] bool`."""
  row = jnp.arange(plan.table.num_rows, dtype=jnp.int32)
  group, slot = plan.layout.place(row)
  return (slot < first.tally.limit[group])[:, None]
