"""Rows that wait for the next step: `on_overflow="carry"`."""

import jax
import jax.numpy as jnp

from zenjax._plan import TablePlan
from zenjax._schemes.base import Arrived


def add(table: jax.Array, residual: jax.Array | None) -> jax.Array:
  """Local gradient and what waits from earlier steps, `[R, D]`."""
  if residual is None:
    return table
  waiting = residual.reshape(-1)
  missing = table.size - waiting.size
  return table + jnp.pad(waiting, (0, missing)).reshape(table.shape)


def split(
  local: jax.Array,
  synced: jax.Array,
  plan: TablePlan,
  first: Arrived,
  named: tuple[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """What was exchanged, and what waits.

  Args:
    local: `[R, D]`, what went into the exchange.
    synced: `[R, D]`, what came out: local values in rows not exchanged.
    plan: Of the table.
    first: What the round brought; slots from its limit on were not summed.
    named: Name and leaf, for the residual's shape.

  Returns:
    The synced table with zeros in rows not exchanged, and the residual,
    `[1, *leaf.shape]`.
  """
  row = jnp.arange(plan.table.num_rows, dtype=jnp.int32)
  group, slot = plan.layout.place(row)
  done = (slot < first.tally.limit[group])[:, None]
  zero = jnp.zeros((), local.dtype)
  leaf = named[1]
  waits = jnp.where(done, zero, local).reshape(-1)[: leaf.size]
  return jnp.where(done, synced, zero), waits.reshape(1, *leaf.shape)
