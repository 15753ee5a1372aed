"""Write summed rows over the local gradient."""

import jax
import jax.numpy as jnp

from zenjax._src.core import indexing


def expand(table: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
  """`table` with `values` at `row`; rows `>= R` are padding and dropped.

  The union of all devices' nonzero rows contains the local ones, so what is
  not written is zero already: no zero fill and no second pass over the table,
  which XLA updates in place.

  Args:
    table: `[R, D]`, the local gradient.
    row: `[k] int32`, no row twice.
    values: `[k, D]`, in the table's dtype.
  """
  num_rows = table.shape[0]
  padding = num_rows + jnp.arange(row.shape[0], dtype=jnp.int32)
  row = jnp.where(row < num_rows, row, padding)
  return indexing.put(table, row, values)
