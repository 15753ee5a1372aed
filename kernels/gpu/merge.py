"""Sums received rows into their union in rank order, on a GPU.

A Triton program computes some rows of the union. It searches their slots among
the sorted slots of each source, and adds the rows that it finds, source by
source. Sums stay in registers and are written once. No atomics are needed, and
the order of summation is the order of ranks.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax.kernels import reference
from zenjax.kernels.gpu import tiles

_COLUMNS = 128  # columns of a sum that a program computes
_SUMS = tiles.THREADS * 32  # registers of a thread


def merge(
  slots: jax.Array,
  rows: jax.Array,
  limit: jax.Array,
  num_slots: int,
  capacity: int,
  dtype: jnp.dtype,
  *,
  interpret: bool = False,
) -> reference.Union:
  """See `reference.merge`."""
  tiles.check_dtype(rows.dtype)
  if jnp.dtype(dtype) != jnp.float32:
    raise NotImplementedError(f"sums in float32, got {jnp.dtype(dtype)}")
  if capacity < 1 or slots.size < 1:
    raise NotImplementedError(
      f"at least one row sent and one to hold, got slots of {slots.shape} and"
      f" a capacity of {capacity}"
    )
  # The positions are unused, so XLA does not compute them.
  union, _ = reference.place(slots, limit, num_slots, capacity)
  width = rows.shape[2]
  columns = min(pl.next_power_of_2(width), _COLUMNS)
  tile = tiles.Tile(min(tiles.THREADS, _SUMS // columns), columns)
  sums = pl.pallas_call(
    functools.partial(_kernel, num_slots=num_slots, tile=tile),
    grid=(pl.cdiv(capacity, tile.rows), pl.cdiv(width, columns)),
    in_specs=[tiles.WHOLE] * 3,
    out_specs=tiles.WHOLE,
    out_shape=compat.struct((capacity, width), dtype, rows),
    compiler_params=tiles.PARAMETERS,
    interpret=interpret,
    name="zenjax_merge",
  )(union.slots, slots, rows)
  return union._replace(rows=sums)


def _kernel(union, slots, rows, sums, *, num_slots, tile):
  block, piece = pl.program_id(0), pl.program_id(1)
  at = block * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
  column = piece * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
  inside = at < union.shape[0]
  wanted = plgpu.load(union.at[at], mask=inside, other=num_slots)
  columns = (column < sums.shape[1])[None, :]

  def add(source, total):
    found, there = _find(slots, source, wanted)
    mask = (there & (wanted < num_slots))[:, None] & columns
    source = jnp.full_like(found, 0) + source
    row = plgpu.load(
      rows.at[source[:, None], found[:, None], column[None, :]],
      mask=mask,
      other=0,
    )
    # A missing row must not be added as zero, because -0.0 + 0 is 0.
    return jnp.where(mask, total + row.astype(total.dtype), total)

  total = jnp.zeros((tile.rows, tile.columns), sums.dtype)
  total = lax.fori_loop(0, slots.shape[0], add, total)
  plgpu.store(
    sums.at[at[:, None], column[None, :]],
    total,
    mask=inside[:, None] & columns,
  )


def _find(slots, source, wanted):
  """Returns where `wanted` is among the slots of a source, and if it is."""
  sources = jnp.full_like(wanted, 0) + source
  holds = lambda at: plgpu.load(slots.at[sources, at]) <= wanted
  last, zeros = slots.shape[1] - 1, jnp.zeros_like(wanted)
  found = indexing.last_where(holds, last, zeros)
  return found, plgpu.load(slots.at[sources, found]) == wanted
