"""Gathers nonzero rows into the send buffer on a GPU.

A Triton program fills some rows of one group's buffer. It finds their slots in
the bitmap and copies the rows immediately, so slots are not written and read
again. The same pass writes zeros after the last row.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core.partition import Layout
from zenjax.kernels._dispatch import loadable
from zenjax.kernels.gpu import tiles


def compact(
  table: jax.Array,
  bitmap: indexing.Bitmap,
  layout: Layout,
  first: jax.Array,
  capacity: int,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """See `reference.compact`."""
  tiles.check_dtype(table.dtype)
  if capacity < 1:
    raise NotImplementedError(f"a capacity of at least 1, got {capacity}")
  # A thread searches at most one slot, because a search takes registers.
  tile = tiles.tile(table.shape[1], table.dtype, tiles.THREADS)
  source = loadable(table, interpret)
  m, width = layout.groups, table.shape[1]
  slots, rows = pl.pallas_call(
    functools.partial(_kernel, layout=layout, tile=tile),
    grid=(m, pl.cdiv(capacity, tile.rows)),
    in_specs=[tiles.WHOLE] * 5,
    out_specs=[tiles.WHOLE] * 2,
    out_shape=[
      compat.struct((m, capacity), jnp.int32, table),
      compat.struct((m, capacity, width), source.dtype, table),
    ],
    compiler_params=tiles.PARAMETERS,
    interpret=interpret,
    name="zenjax_compact",
  )(source, *bitmap, first)
  return slots, lax.bitcast_convert_type(rows, table.dtype)


def _kernel(table, words, before, total, first, slots, rows, *, layout, tile):
  group, block = pl.program_id(0), pl.program_id(1)
  at = block * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
  inside = at < slots.shape[1]
  slot = _select(words, before, total[group], group, first[group] + at)
  groups = jnp.full_like(slot, 0) + group
  plgpu.store(slots.at[groups, at], slot, mask=inside)
  row = layout.row(groups, slot, look_up=False)

  def copy(column, mask, carry):
    there = tiles.mask_of(inside & (row < table.shape[0]), mask, tile.columns)
    value = plgpu.load(
      table.at[row[:, None], column[None, :]], mask=there, other=0
    )
    plgpu.store(
      rows.at[groups[:, None], at[:, None], column[None, :]],
      value,
      mask=tiles.mask_of(inside, mask, tile.columns),
    )
    return carry

  tiles.each_piece(table.shape[1], tile.columns, copy, jnp.int32(0))


def _select(words, before, total, group, k):
  """Does the same as `indexing.select`, in one group."""
  groups = jnp.full_like(k, 0) + group
  holds = lambda word: plgpu.load(before.at[groups, word]) <= k
  word = indexing.last_where(holds, words.shape[1] - 1, jnp.zeros_like(k))
  rest = k - plgpu.load(before.at[groups, word])
  bit = indexing.select_in_word(plgpu.load(words.at[groups, word]), rest)
  return jnp.where(k < total, word * 32 + bit, words.shape[1] * 32)
