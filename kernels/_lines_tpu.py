"""Arrays of rows as a TPU's copies want them: lines that fill whole tiles."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from zenjax._src.core import wire

LANES = 128
_TILE_ROW = 32  # bytes of a tile below one another, whatever the dtype


class Lines(NamedTuple):
  """How `[b, C, D]` rows are laid out as `[b, lines, width]`.

  A line is a row where 128 divides its width, which costs nothing; or else 128
  words of all rows in turn, for which XLA lays the array out anew.
  """

  row_bytes: int
  line_bytes: int
  tile: int  # lines: no copy begins or ends elsewhere
  piece: int  # lines of a large copy

  @classmethod
  def of(cls, rows: jax.Array | jax.ShapeDtypeStruct, piece: int) -> "Lines":
    """For large copies of about `piece` bytes."""
    size, width = rows.dtype.itemsize, rows.shape[2]
    row, line, tile = width * size, LANES * 4, _TILE_ROW // 4
    if not width % LANES:
      line, tile = row, _TILE_ROW // size
    return cls(row, line, tile, max(1, piece // (line * tile)) * tile)

  @property
  def _are_rows(self) -> bool:
    return self.line_bytes == self.row_bytes

  def encode(self, rows: jax.Array) -> jax.Array:
    """`[b, C, D]` to `[b, lines, width]`, whole tiles."""
    if not self._are_rows:
      words = wire.to_words(rows)
      words = jnp.pad(words, ((0, 0), (0, -words.shape[1] % LANES)))
      rows = words.reshape(rows.shape[0], -1, LANES)
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % self.tile), (0, 0)))

  def bytes_of(self, count: int) -> int:
    """What is sent of so many rows: whole tiles."""
    tile = self.tile * self.line_bytes
    return -(-count * self.row_bytes // tile) * tile

  def decode(self, lines: jax.Array, like: jax.Array) -> jax.Array:
    """Inverse of `encode`, of any number of parts."""
    if self._are_rows:
      return lines[:, : like.shape[1]]
    words = lines.reshape(lines.shape[0], -1)
    words = words[:, : wire.words_for(like[0].size, like.dtype)]
    return wire.from_words(words, like.shape[1:], like.dtype)

  def pieces(self, count: jax.Array, do: Callable[[pl.Slice], None]) -> None:
    """`do(slice)` for the lines of each copy that `count` rows take.

    Large ones while they last, then single tiles, the last one filled up.
    """
    lines = count
    if not self._are_rows:
      lines = _ceil(count * self.row_bytes, self.line_bytes)
    large = lax.div(lines, self.piece)
    after = large * self.piece

    def some(first, size):
      do(pl.ds(pl.multiple_of(first, self.tile), size))

    loop(large, lambda i: some(i * self.piece, self.piece))
    loop(
      _ceil(lines - after, self.tile),
      lambda i: some(after + i * self.tile, self.tile),
    )


def _ceil(x, by):
  return lax.div(x + (by - 1), by)  # `//` asks a TPU for signs


def loop(steps: jax.Array | int, do: Callable[[jax.Array], None]) -> None:
  """`do(0)` to `do(steps - 1)`, inside a kernel."""

  def body(i, carry):
    do(i)
    return carry

  lax.fori_loop(0, steps, body, 0)
