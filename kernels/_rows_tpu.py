"""Rows moved one by one between a table and a buffer, on a TPU.

A copy of one row costs an instruction and its latency, which the others of a
block hide; nothing but these rows moves. Rows must be whole tiles of lanes and
stand alone in their words, or the hardware could not move one of them.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from zenjax import _compat

_LANES = 128
_BLOCK = 1 << 20  # bytes of rows that are under way at once
_MOST_ROWS = 256
_LEAST_ROWS = 8


def check(table: jax.Array) -> None:
  """Raises NotImplementedError where rows cannot be moved one by one."""
  if table.dtype.itemsize != 4 or table.shape[1] % _LANES:
    raise NotImplementedError(
      "float32 rows of a width that 128 divides, which alone can be moved one"
      f" by one, got {table.dtype} of width {table.shape[1]}"
    )
  if table.shape[1] * 4 * _LEAST_ROWS > _BLOCK:
    raise NotImplementedError(
      f"a width of at most {_BLOCK // 4 // _LEAST_ROWS}, got {table.shape[1]}"
    )


def gather(
  table: jax.Array, row: jax.Array, name: str, *, interpret: Any
) -> jax.Array:
  """`[m, C, D]` rows of `table` at `row: [m, C]`; zeros where it is `R`."""
  m, count = row.shape
  width, size = table.shape[1], _block_rows(table)
  blocks = pl.cdiv(count, size)
  return pl.pallas_call(
    functools.partial(_gather, num_rows=table.shape[0]),
    grid=(m, blocks),
    in_specs=[_rows_of(size), pl.BlockSpec(memory_space=pl.ANY)],
    out_specs=pl.BlockSpec((1, size, width), lambda g, b: (g, b, 0)),
    out_shape=_compat.struct((m, count, width), table.dtype, table),
    scratch_shapes=[pltpu.SemaphoreType.DMA],
    interpret=interpret,
    name=name,
  )(_in_blocks(row, size, table.shape[0]), table)


def scatter(
  table: jax.Array,
  row: jax.Array,
  values: jax.Array,
  name: str,
  *,
  interpret: Any,
) -> jax.Array:
  """`table` with `values: [C, D]` at `row: [C]`, in place; `R` is nowhere."""
  width, size = table.shape[1], _block_rows(table)
  return pl.pallas_call(
    functools.partial(_scatter, num_rows=table.shape[0]),
    grid=(1, pl.cdiv(row.size, size)),
    in_specs=[
      _rows_of(size),
      pl.BlockSpec((size, width), lambda g, b: (b, 0)),
      pl.BlockSpec(memory_space=pl.ANY),
    ],
    out_specs=pl.BlockSpec(memory_space=pl.ANY),
    out_shape=_compat.struct(table.shape, table.dtype, table),
    scratch_shapes=[pltpu.SemaphoreType.DMA],
    input_output_aliases={2: 0},
    interpret=interpret,
    name=name,
  )(_in_blocks(row[None], size, table.shape[0]), values, table)


def _block_rows(table):
  fits = _BLOCK // (table.shape[1] * 4) // _LEAST_ROWS * _LEAST_ROWS
  return min(_MOST_ROWS, fits)


def _rows_of(size):
  return pl.BlockSpec(
    (1, 1, 1, size), lambda g, b: (g, b, 0, 0), memory_space=pltpu.SMEM
  )


def _in_blocks(row, size, nowhere):
  """`[m, blocks, 1, size]`, the last block filled up with `nowhere`."""
  m, count = row.shape
  blocks = pl.cdiv(count, size)
  row = jnp.pad(
    row, ((0, 0), (0, blocks * size - count)), constant_values=nowhere
  )
  return row.reshape(m, blocks, 1, size)


def _gather(row, table, out, done, *, num_rows):
  out[...] = jnp.zeros(out.shape, out.dtype)
  move = lambda i, at: pltpu.make_async_copy(
    table.at[pl.ds(at, 1)], out.at[0, pl.ds(i, 1)], done
  )
  _all_at_once(row, num_rows, move)


def _scatter(row, values, _, table, done, *, num_rows):
  move = lambda i, at: pltpu.make_async_copy(
    values.at[pl.ds(i, 1)], table.at[pl.ds(at, 1)], done
  )
  _all_at_once(row, num_rows, move)


def _all_at_once(row, num_rows, move):
  """Starts a copy for every row that is one, then awaits them all."""

  def each(do):
    def one(i, carry):
      at = row[0, 0, 0, i]

      @pl.when(at < num_rows)
      def _():
        do(move(i, at))

      return carry

    lax.fori_loop(0, row.shape[3], one, 0)

  each(lambda copy: copy.start())
  each(lambda copy: copy.wait())
