"""Computes the hash bitmap of a table by one read, on a TPU.

The kernel ORs the bits of each row over its width, places the results along the
lanes, and packs them by a small matrix product with powers of two, which also
moves every row to its group. The product is exact: factors 2**0 to 2**15 are
exact in bfloat16, and sums below 2**16 are exact in float32. The rotation of
the layout changes with the word, so XLA applies it afterwards, to words, which
are 32 times fewer than rows.

XLA stores a table by rows if 128 divides its width, and otherwise by columns.
The kernel reads either form without a copy. XLA computes popcounts, because it
can do so in the same pass as their prefix sums.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core import wire
from zenjax._src.core.partition import Layout
from zenjax.kernels._dispatch import loadable
from zenjax.kernels.reference import Packed
from zenjax.kernels.tpu import blocks

# The mark of a row: 0 if all bits are zero, `_NEGATIVE` if only sign bits are
# set, `_NONZERO` otherwise.
_NONZERO, _NEGATIVE = 1, 2


def mask_pack(
  table: jax.Array, layout: Layout, *, interpret: Any = False
) -> Packed:
  """See `reference.mask_pack`."""
  sizes = blocks.sizes_of(table, layout)
  table = loadable(table, interpret)
  out = _call(table, sizes, blocks.weights_of(table.dtype, sizes), interpret)
  width = sizes.per_unit * sizes.groups
  units = out[:, :width]
  if not layout.in_order:
    units = _rotated(units, layout, sizes)
  units = units.reshape(-1, sizes.groups, sizes.per_unit).transpose(1, 0, 2)
  words = units.reshape(sizes.groups, -1)[:, : sizes.words]
  return Packed(
    words=lax.bitcast_convert_type(
      words.reshape(layout.groups, layout.words), jnp.uint32
    ),
    negative=jnp.any(out[:, width:] != 0),
  )


def _call(table, sizes, weights, interpret):
  rows, width = table.shape
  last = pl.cdiv(rows, sizes.block * sizes.rows) - 1
  inner = sizes.units // sizes.block

  def block(i, s):
    # Blocks past the end of the table read the last block again, and are
    # masked.
    at = jnp.minimum(i * inner + s, last)
    return (0, at) if sizes.across else (at, 0)

  shape = sizes.block * sizes.rows, width
  count = sizes.steps * sizes.units
  return pl.pallas_call(
    functools.partial(_kernel, sizes=sizes, num_rows=rows),
    grid=(sizes.steps, inner),
    in_specs=[
      pl.BlockSpec(shape[::-1] if sizes.across else shape, block),
      pl.BlockSpec(memory_space=pltpu.VMEM),
    ],
    out_specs=pl.BlockSpec((sizes.units, sizes.half), lambda i, s: (i, 0)),
    out_shape=compat.struct((count, sizes.half), jnp.int32, table),
    scratch_shapes=[pltpu.VMEM((sizes.units, sizes.rows), jnp.int32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    cost_estimate=pl.CostEstimate(
      flops=4 * count * sizes.rows * sizes.half,
      transcendentals=0,
      bytes_accessed=table.nbytes + weights.nbytes + count * sizes.half * 4,
    ),
    interpret=interpret,
    name="zenjax_mask_pack",
  )(table.T if sizes.across else table, weights)


def _kernel(table, weights, words, found, *, sizes, num_rows):
  """Marks the rows of a block; the last block of a step packs all marks."""
  step, inner = pl.program_id(0), pl.program_id(1)
  mark = _mark_across if sizes.across else _mark_along
  for unit in range(sizes.block):
    mark(table, found, unit, inner * sizes.block + unit, sizes.rows)

  @pl.when(inner == pl.num_programs(1) - 1)
  def _():
    shape = found.shape
    at = lax.broadcasted_iota(jnp.int32, shape, 1)
    if not sizes.across:
      at = blocks.row_at(at, 4 // table.dtype.itemsize)
    unit = step * sizes.units + lax.broadcasted_iota(jnp.int32, shape, 0)
    mark = jnp.where(unit * sizes.rows + at < num_rows, found[...], 0)
    bits = jnp.where(mark == _NONZERO, 1.0, 0.0).astype(jnp.bfloat16)
    halves = jnp.dot(
      bits, weights[...], preferred_element_type=jnp.float32
    ).astype(jnp.int32)
    low, high = halves[:, : sizes.half], halves[:, sizes.half :]
    # The lanes after the words hold the flag for negative zeros.
    negative = jnp.max(mark, axis=1, keepdims=True) == _NEGATIVE
    lane = lax.broadcasted_iota(jnp.int32, low.shape, 1)
    width = sizes.per_unit * sizes.groups
    words[...] = jnp.where(
      lane < width, low | (high << 16), negative.astype(jnp.int32)
    )


def _mark_across(table, found, unit, to, rows):
  """Marks rows that are along lanes, by an OR over sublanes."""
  itemsize = table.dtype.itemsize
  lanes = pl.ds(unit * rows, rows)
  width, tile = table.shape[0], 32 // itemsize
  whole = width // tile * tile
  seen = None
  for start in range(0, whole, tile):
    raw = pltpu.bitcast(table[start : start + tile, lanes], jnp.int32)
    seen = raw if seen is None else seen | raw
  if seen is not None:
    for shift in (4, 2, 1):
      seen |= pltpu.roll(seen, shift, 0)
    seen = seen[:1]
    for shift in (16, 8)[: (4 // itemsize) // 2]:
      seen |= lax.shift_right_logical(seen, jnp.int32(shift))
  for start in range(whole, width):
    raw = wire.integers(table[start : start + 1, lanes]).astype(jnp.int32)
    seen = raw if seen is None else seen | raw
  nonzero, negative = _tell(seen, itemsize)
  mark = jnp.where(negative, _NEGATIVE, 0)
  found[pl.ds(to, 1), :] = jnp.where(nonzero, _NONZERO, mark)


def _mark_along(table, found, unit, to, rows):
  """Marks rows that are along sublanes; a product moves marks to lanes."""
  itemsize = table.dtype.itemsize
  pack = 4 // itemsize
  ones = jnp.ones((16, blocks.LANES), jnp.bfloat16)
  marks = []
  for start in range(0, rows, blocks.LANES * pack):
    at = pl.ds(unit * rows + start, blocks.LANES * pack)
    seen = None
    for lane in range(0, table.shape[1], blocks.LANES):
      raw = pltpu.bitcast(table[at, lane : lane + blocks.LANES], jnp.int32)
      seen = raw if seen is None else seen | raw
    assert seen is not None
    for part in range(pack):
      shifted = lax.shift_right_logical(seen, jnp.int32(part * itemsize * 8))
      nonzero, negative = _tell(shifted, itemsize)
      # 128 lanes with 1 each sum to less than a single 256.
      count = jnp.where(nonzero, 256.0, jnp.where(negative, 1.0, 0.0))
      total = lax.dot_general(
        ones,
        count.astype(jnp.bfloat16),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
      )[:1]
      mark = jnp.where(total > 0, _NEGATIVE, 0)
      marks.append(jnp.where(total >= 256, _NONZERO, mark))
  found[pl.ds(to, 1), :] = jnp.concatenate(marks, axis=1)


def _tell(seen, itemsize):
  """Returns whether the low bits have a magnitude, or only a sign."""
  sign = -1 << (itemsize * 8 - 1)
  magnitude = jnp.int32(~sign & ((1 << itemsize * 8) - 1))
  everything = jnp.int32(-1 if itemsize == 4 else (1 << itemsize * 8) - 1)
  nonzero = (seen & magnitude) != 0
  return nonzero, ~nonzero & ((seen & everything) != 0)


def _rotated(
  units: jax.Array, layout: Layout, sizes: blocks.Sizes
) -> jax.Array:
  """Rotates each word by the rotation of the layout.

  It works like a barrel shifter, with one roll for each bit of the rotations,
  so that it needs no gather of words.
  """
  at = jnp.arange(units.shape[1], dtype=jnp.int32)[None, :]
  unit = jnp.arange(units.shape[0], dtype=jnp.int32)[:, None]
  per_unit = sizes.per_unit
  word = unit * per_unit + lax.rem(at, jnp.full_like(at, per_unit))
  rotation = layout.rotation(word)
  for bit in range((layout.groups - 1).bit_length()):
    moved = jnp.roll(units, per_unit << bit, axis=1)
    units = jnp.where((rotation >> bit) & 1 == 1, moved, units)
  return units
