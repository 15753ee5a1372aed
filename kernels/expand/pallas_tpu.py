"""Summed rows written over the local gradient in place, on a TPU."""

from typing import Any

import jax

from zenjax.kernels import _rows_tpu


def check(table: jax.Array, row: jax.Array, values: jax.Array) -> None:
  """Raises NotImplementedError where the kernel cannot serve."""
  del values
  _rows_tpu.check(table)
  if row.size < 1:
    raise NotImplementedError("at least one row to write, got none")


def expand(
  table: jax.Array,
  row: jax.Array,
  values: jax.Array,
  *,
  interpret: Any = False,
) -> jax.Array:
  """See `reference.expand`."""
  check(table, row, values)
  name = "zenjax_expand"
  return _rows_tpu.scatter(table, row, values, name, interpret=interpret)
