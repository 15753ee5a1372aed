"""Cuts a table for `mask_pack` on TPUs, and makes the weights to pack bits."""

import math
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from zenjax._src.core.partition import lane_shifts
from zenjax._src.core.partition import Layout

LANES = 128
_MOST_UNITS = 64  # rows of the matrix product
# In bytes. Two blocks, the weights and intermediate values must fit in the 16
# MiB that a kernel can use on every TPU.
BLOCK = 2 << 20
_MOST_BLOCK = 4 << 20
_MOST_WEIGHTS = 5 << 20


class Sizes(NamedTuple):
  """The sizes of a cut table. A unit is packed into one row of words."""

  across: bool  # rows are along the lanes: the table is read transposed
  groups: int  # m, or 1 if rows are in order
  words: int  # words of all units, over all groups
  per_unit: int  # words of a group in a unit
  rows: int  # rows of a unit
  half: int  # lanes of a half of the product: words of 16 bits
  units: int  # units of a step
  block: int  # units read at a time

  @property
  def steps(self) -> int:
    return pl.cdiv(pl.cdiv(self.words, self.per_unit), self.units)


def sizes_of(table: jax.Array, layout: Layout) -> Sizes:
  """Returns the sizes; raises NotImplementedError if there are none."""
  width = table.shape[1]
  itemsize = table.dtype.itemsize
  if itemsize > 4 or table.dtype == jnp.float16:
    raise NotImplementedError(
      "dtypes of at most 32 bits that Mosaic loads: float32, bfloat16 and"
      f" float8, got {table.dtype}"
    )
  if table.dtype.name.endswith("fnuz"):
    raise NotImplementedError(
      f"dtypes with a negative zero, which is NaN in {table.dtype}"
    )
  m = 1 if layout.in_order else layout.groups
  words = layout.words * (layout.groups if layout.in_order else 1)
  # A unit's rows fill the lanes, for every byte of a 32-bit word.
  few = LANES * (4 // itemsize)
  least = few // math.gcd(few, 32 * m)
  fits = min((LANES - 1) // m, BLOCK // (32 * m * width * itemsize))
  per_unit = max(least, fits // least * least)
  unit = 32 * m * per_unit
  half = pl.cdiv(per_unit * m + 1, LANES) * LANES
  block, weights = unit * width * itemsize, unit * half * 2 * 2
  if block > _MOST_BLOCK or weights > _MOST_WEIGHTS:
    raise NotImplementedError(
      f"{unit} rows at a time for {layout.groups} groups, in blocks of at most"
      f" {_MOST_BLOCK} bytes with {_MOST_WEIGHTS} bytes of weights, got blocks"
      f" of {block} and weights of {weights} bytes for width {width} and"
      f" {table.dtype}"
    )
  units = min(_MOST_UNITS, pl.cdiv(pl.cdiv(words, per_unit), 8) * 8)
  together = 1
  while units % (2 * together) == 0 and 2 * together * block <= BLOCK:
    together *= 2
  return Sizes(
    across=width % LANES != 0,
    groups=m,
    words=words,
    per_unit=per_unit,
    rows=unit,
    half=half,
    units=units,
    block=together,
  )


def row_at(position, pack: int):
  """Returns the row of a unit whose mark the kernel writes to a lane."""
  if pack == 1:
    return position
  start = position & -(LANES * pack)
  part = (position >> 7) & (pack - 1)
  return start + (position & (LANES - 1)) * pack + part


def weights_of(dtype: jnp.dtype, sizes: Sizes) -> jax.Array:
  """Returns `[rows, 2 half]`: the power of two and the column of each mark."""
  row = np.arange(sizes.rows)
  if not sizes.across:
    row = row_at(row, 4 // dtype.itemsize)
  m = sizes.groups
  word, lane, column = row // (32 * m), row // m % 32, row % m
  group = (column + np.array(lane_shifts(m))[lane]) % m
  weights = np.zeros((sizes.rows, 2 * sizes.half), np.float32)
  high = lane >= 16
  weights[
    np.arange(sizes.rows), high * sizes.half + group * sizes.per_unit + word
  ] = 2.0 ** (lane % 16)
  return jnp.asarray(weights, jnp.bfloat16)
