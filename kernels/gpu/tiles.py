"""Defines the tiles of rows that all GPU kernels use."""

from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

THREADS = 32 * 8  # threads of a program
LINE = 128  # bytes of a row that are moved at once: a cache line
TILE = THREADS * 32  # bytes: every thread makes two accesses of 16 bytes
_UNROLLED = 8

PARAMETERS = plgpu.CompilerParams(num_warps=THREADS // 32, num_stages=2)
WHOLE = pl.BlockSpec(memory_space=pl.ANY)


class Tile(NamedTuple):
  """Rows and columns at a time: powers of two, as Triton requires."""

  rows: int
  columns: int


def tile(width: int, dtype: jnp.dtype, most_rows: int = TILE) -> Tile:
  """Returns the tile for rows of `width` elements."""
  columns = min(pl.next_power_of_2(width), LINE // dtype.itemsize)
  return Tile(min(most_rows, TILE // dtype.itemsize // columns), columns)


def check_dtype(dtype: jnp.dtype) -> None:
  """Raises NotImplementedError for dtypes that Triton does not load."""
  if dtype.name not in ("float32", "bfloat16", "float16"):
    raise NotImplementedError(
      f"float32, bfloat16 and float16, which Triton loads, got {dtype}"
    )


def each_piece(width: int, columns: int, do, start=None):
  """Runs `do(at, mask, carry)` for all columns of a row, a piece at a time.

  `at: [columns] int32` are columns. `mask` is None if all of them exist.
  """

  def piece(i, carry):
    at = i * columns + jnp.arange(columns, dtype=jnp.int32)
    return do(at, at < width if width % columns else None, carry)

  pieces = pl.cdiv(width, columns)
  if pieces > _UNROLLED:
    return lax.fori_loop(0, pieces, piece, start)
  for i in range(pieces):
    start = piece(i, start)
  return start


def mask_of(rows: jax.Array, columns: jax.Array | None, width: int):
  """Returns `[rows, width] bool`: which elements of a tile exist."""
  mask = jnp.broadcast_to(rows[:, None], (rows.shape[0], width))
  return mask if columns is None else mask & columns[None, :]
