"""Computes the hash bitmap of a table by one read, on a GPU.

A Triton program computes a few words. It ORs the bits of their rows over the
width, one cache line at a time, and only then tests which rows are not zero.
Rows are read in the order of their groups, so words need no reordering
afterwards. Reordered rows are neighbors in memory, so a warp reads the same
bytes in either order.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core import wire
from zenjax._src.core.partition import LANES
from zenjax._src.core.partition import Layout
from zenjax.kernels._dispatch import loadable
from zenjax.kernels.gpu import tiles
from zenjax.kernels.reference import Packed

# The mark of a row: 0 if all bits are zero, `_NEGATIVE` if only sign bits are
# set, `_NONZERO` otherwise.
_NEGATIVE, _NONZERO = 1, 2


class _Sizes(NamedTuple):
  """The share of one program; powers of two, as Triton requires."""

  words: int  # words of one group
  groups: int
  columns: int  # columns that are read at a time

  @property
  def rows(self) -> int:
    return self.words * LANES * self.groups


def mask_pack(
  table: jax.Array, layout: Layout, *, interpret: bool = False
) -> Packed:
  """See `reference.mask_pack`."""
  tiles.check_dtype(table.dtype)
  flat = layout
  if layout.in_order:  # All words then form one group.
    words = layout.groups * layout.words
    flat = Layout(num_rows=words * LANES, groups=1)
  sizes = _sizes(table, flat)
  blocks = pl.cdiv(flat.groups, sizes.groups)
  grid = pl.cdiv(flat.words, sizes.words) * blocks
  words, negative = pl.pallas_call(
    functools.partial(_kernel, layout=flat, sizes=sizes, blocks=blocks),
    grid=(grid,),
    in_specs=[tiles.WHOLE],
    out_specs=[tiles.WHOLE] * 2,
    out_shape=[
      compat.struct((flat.groups, flat.words), jnp.uint32, table),
      compat.struct((grid,), jnp.int32, table),
    ],
    compiler_params=tiles.PARAMETERS,
    interpret=interpret,
    name="zenjax_mask_pack",
  )(loadable(table, interpret))
  return Packed(
    words=words.reshape(layout.groups, layout.words),
    negative=jnp.any(negative != 0),
  )


def _sizes(table, layout):
  rows, columns = tiles.tile(table.shape[1], table.dtype)
  groups = min(pl.next_power_of_2(layout.groups), rows // LANES)
  return _Sizes(rows // LANES // groups, groups, columns)


def _kernel(table, words, negative, *, layout, sizes, blocks):
  at = pl.program_id(0)
  index = jnp.arange(sizes.rows, dtype=jnp.int32)
  group = lax.rem(at, blocks) * sizes.groups + index % sizes.groups
  lane = index // sizes.groups % LANES
  word = lax.div(at, blocks) * sizes.words + index // (sizes.groups * LANES)
  row = layout.row(group, word * LANES + lane, look_up=False)
  there = (group < layout.groups) & (row < table.shape[0])
  mark = _marks(table, row, there, sizes.columns)
  bit = (mark == _NONZERO).astype(jnp.int32) << lane
  shape = sizes.words, LANES, sizes.groups
  packed = jnp.sum(bit.reshape(shape), axis=1)
  group = _iota(packed.shape, 1) + lax.rem(at, blocks) * sizes.groups
  word = _iota(packed.shape, 0) + lax.div(at, blocks) * sizes.words
  plgpu.store(
    words.at[group, word],
    lax.bitcast_convert_type(packed, jnp.uint32),
    mask=(group < layout.groups) & (word < layout.words),
  )
  negative[at] = jnp.max((mark == _NEGATIVE).astype(jnp.int32))


def _marks(table, row, there, columns):
  """Returns the mark of every row, by one read of it."""
  bits = jnp.dtype(f"int{8 * table.dtype.itemsize}")

  def read(at, mask, seen):
    mask = tiles.mask_of(there, mask, columns)
    raw = plgpu.load(table.at[row[:, None], at[None, :]], mask=mask, other=0)
    return seen | wire.integers(raw)

  seen = jnp.zeros((row.shape[0], columns), bits)
  seen = tiles.each_piece(table.shape[1], columns, read, seen)
  magnitude = jnp.array(jnp.iinfo(bits).max, bits)
  mark = jnp.where(seen != 0, _NEGATIVE, 0)
  mark = jnp.where((seen & magnitude) != 0, _NONZERO, mark)
  return jnp.max(mark, axis=1)


def _iota(shape, dimension):
  return lax.broadcasted_iota(jnp.int32, shape, dimension)
