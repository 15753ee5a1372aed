"""Writes summed rows over the local gradient in place, on a GPU."""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax.kernels._dispatch import loadable
from zenjax.kernels.gpu import tiles


def expand(
  table: jax.Array,
  row: jax.Array,
  values: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """See `reference.expand`."""
  tiles.check_dtype(table.dtype)
  if row.size < 1:
    raise NotImplementedError("at least one row to write, got none")
  tile = tiles.tile(table.shape[1], table.dtype, tiles.THREADS)
  values, source = loadable(values, interpret), loadable(table, interpret)
  written = pl.pallas_call(
    functools.partial(_kernel, tile=tile),
    grid=(pl.cdiv(row.size, tile.rows),),
    in_specs=[tiles.WHOLE] * 3,
    out_specs=tiles.WHOLE,
    out_shape=compat.struct(table.shape, source.dtype, table),
    input_output_aliases={2: 0},
    compiler_params=tiles.PARAMETERS,
    interpret=interpret,
    name="zenjax_expand",
  )(row, values, source)
  return lax.bitcast_convert_type(written, table.dtype)


def _kernel(row, values, _, table, *, tile):
  block = pl.program_id(0)
  at = block * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
  inside = at < row.shape[0]
  to = plgpu.load(row.at[at], mask=inside, other=table.shape[0])
  # Indices are rows, or padding past the end.
  inside &= to < table.shape[0]

  def copy(column, mask, carry):
    mask = tiles.mask_of(inside, mask, tile.columns)
    value = plgpu.load(
      values.at[at[:, None], column[None, :]], mask=mask, other=0
    )
    plgpu.store(table.at[to[:, None], column[None, :]], value, mask=mask)
    return carry

  tiles.each_piece(table.shape[1], tile.columns, copy, jnp.int32(0))
