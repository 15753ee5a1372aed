"""Distributes rows over row groups by the rotation hash, a bijection.

Rows are cut into blocks of `m`, one row for each of `m` row groups, and every
block is rotated by a pseudo-random amount. Row `r = q * m + j` belongs to

    group = (j + lane[q mod 32] + rotation(q div 32)) mod m,    slot = q,

so each group owns exactly one row of each block. The hash has no collisions,
needs no index sets in memory, and costs a few integer operations in both
directions. Lane shifts are constants, and rotations change once in 32 slots, so
a packed bitmap is rotated by whole words. Contiguous clusters of ids are
balanced perfectly. For other ids, the load of a group varies no more than with
an independent hash, unless ids were chosen by the lane shifts: then up to 32
ids stay together.

The code uses `lax.rem`, because `%` would also handle negative numbers.

Group `k` of `m` is owned by the devices of ranks `k * g` to `k * g + g - 1`
along the fastest axis, one for each of `g` column groups. The rule is written
in several places: in `Layout.place` and its inverse `Layout.row`, which share
`Layout.shift`; for packed bitmaps
in `pack_rows` of `zenjax.kernels.reference`; and in the TPU kernel of
`mask_pack`. The GPU kernel calls `Layout.row`.

Letters: `R` rows, `m` groups, `S` slots a group, `W = S / 32` words.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import indexing

LANES = 32


def fmix32(x: Any) -> Any:
  """Mixes uint32 by MurmurHash3's finalizer (Appleby, 2011), a bijection."""
  x = x ^ (x >> np.uint32(16))
  x = x * np.uint32(0x85EBCA6B)
  x = x ^ (x >> np.uint32(13))
  x = x * np.uint32(0xC2B2AE35)
  return x ^ (x >> np.uint32(16))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
  """The assignment of `num_rows` rows to `groups` row groups.

  Attributes:
    num_rows: `R`, at least 1.
    groups: `m`, at least 1.
    seed: Chooses the hash. It is mixed before use, because XOR with a small
      number would only permute the blocks.
    hash_offset: Offset added to the number of a word before it is hashed.
      Tables of one exchange have different offsets, so that their first rows
      do not all have the same owner.
    contiguous: Whether groups are ranges of rows instead of a hash's share.
  """

  num_rows: int
  groups: int
  seed: int = 0
  hash_offset: int = 0
  contiguous: bool = False

  @property
  def in_order(self) -> bool:
    """Returns True if rows follow each other from group to group."""
    return self.contiguous or self.groups == 1

  @property
  def words(self) -> int:
    """Returns `W`, the words of a group's bitmap."""
    return -(-self.num_rows // (self.groups * LANES))

  @property
  def slots(self) -> int:
    """Returns `S`, the slots of a group, a multiple of 32."""
    return self.words * LANES

  def rotation(self, word: jax.Array) -> jax.Array:
    """Returns the rotation of all slots of `word`: int32 in `[0, m)`."""
    mixed_seed = fmix32(np.array([self.seed & 0xFFFFFFFF], np.uint32))[0]
    key = (word.astype(jnp.uint32) + np.uint32(self.hash_offset)) ^ mixed_seed
    return self._rem(fmix32(key)).astype(jnp.int32)

  def row(
    self, group: jax.Array, slot: jax.Array, *, look_up: bool = True
  ) -> jax.Array:
    """Returns the row at `(group, slot)`, or `R` if there is none.

    Args:
      group: int32 in `[0, m)`.
      slot: int32 in `[0, S]`.
      look_up: Whether lane shifts are read from a table. Kernels have no such
        table, and compute lane shifts.
    """
    # Slot S is padding. The minimum keeps the products within int32.
    last = jnp.minimum(slot, self.slots - 1)
    if self.in_order:
      row = group * self.slots + last
    else:
      shift = self.shift(slot, look_up=look_up)
      row = last * self.groups + self._rem(group - shift + 2 * self.groups)
    valid = (slot < self.slots) & (row < self.num_rows)
    return jnp.where(valid, row, self.num_rows)

  def place(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `(group, slot)` of each row in `[0, R)`: the inverse of `row`."""
    if self.in_order:
      group = lax.div(row, lax.full_like(row, self.slots))
      return group, row - group * self.slots
    slot = lax.div(row, lax.full_like(row, self.groups))
    j = row - slot * self.groups
    return self._rem(j + self.shift(slot)), slot

  def shift(self, slot: jax.Array, *, look_up: bool = True) -> jax.Array:
    """Returns the rotation of the block of rows at `slot`, in `[0, 2m)`."""
    lane = slot & (LANES - 1)
    if look_up:
      shifts = jnp.asarray(lane_shifts(self.groups), jnp.int32)
      shift = indexing.take(shifts, lane)
    else:
      mixed = fmix32(lane.astype(jnp.uint32) + np.uint32(1))
      shift = self._rem(mixed).astype(jnp.int32)
    return shift + self.rotation(slot >> 5)

  def _rem(self, x: jax.Array) -> jax.Array:
    return lax.rem(x, lax.full_like(x, self.groups))


@functools.cache
def lane_shifts(groups: int) -> tuple[int, ...]:
  """Returns the 32 constant lane shifts, each in `[0, m)`."""
  lanes = fmix32(np.arange(1, LANES + 1, dtype=np.uint32)) % groups
  return tuple(lanes.tolist())
