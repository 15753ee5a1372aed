"""Rows written into the memory of other TPUs, as many as there are.

What a device does, with every other one at once:

    tell all that I am here, hear it of all   (their buffers are there)
    send each its counts, then its rows in pieces   (no padding travels)
    await all counts, then the rows that they announce
    await that my own have left   (the buffers may be used again)

Nobody leaves before it was told counts by everyone, who was then past the
barrier, so the barrier of the next exchange never meets this one's.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax.kernels._lines_tpu import LANES
from zenjax.kernels._lines_tpu import Lines
from zenjax.kernels._lines_tpu import loop

PIECE = 1 << 16  # bytes of a large copy; not measured
# What is under way is counted in 32 bits, in whole tiles.
_MOST_BYTES = (1 << 31) - (1 << 12)


def check(rows: Sequence[jax.Array], counts: jax.Array, axes: Axes) -> None:
  """Raises NotImplementedError where the kernel cannot serve."""
  mesh = jax.sharding.get_abstract_mesh()
  # An axis of `vmap` is of no mesh, and Mosaic refuses automatic ones.
  if not set(axes) <= set(mesh.axis_names) or not mesh.are_all_axes_manual:
    raise NotImplementedError(
      f"inside shard_map over all axes of a mesh, got axes {axes} and a mesh of"
      f" {mesh.axis_names}, of which {mesh.manual_axes} are manual"
    )
  if counts.shape[1] > LANES:
    raise NotImplementedError(
      f"at most {LANES} arrays of rows, got {counts.shape[1]}"
    )
  for x in rows:
    if not x.size or x.dtype.itemsize > 4:
      raise NotImplementedError(
        "at least one row, of at most 32 bits an element, got"
        f" {x.dtype}{list(x.shape)}"
      )
  n = collectives.size(axes)
  arrive = n * sum(x.nbytes // x.shape[0] for x in rows)
  if arrive >= _MOST_BYTES:
    raise NotImplementedError(f"less than 2 GiB to receive, got {arrive}")


def most_bytes(rows: Sequence[jax.ShapeDtypeStruct]) -> int:
  """Sent to one device of `[C, D]` arrays that are full, counts included."""
  parts = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in rows)
  sent = (Lines.of(x, PIECE).bytes_of(x.shape[1]) for x in parts)
  return LANES * 4 + sum(sent)


def exchange(
  rows: Sequence[jax.Array],
  counts: jax.Array,
  axes: Axes,
  name: str,
  *,
  collective_id: int,
  interpret: Any,
  piece: int,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """The first rows of every rank's arrays, as many as it counts.

  Args:
    rows: `[b, C, D]` each: `b = n`, a part for every rank, or `b = 1`, the same
      for all.
    counts: `[b, arrays] int32`, each in `0 .. C`.
    axes: Along which to exchange.
    name: Of the kernel.
    collective_id: Of its barrier.
    interpret: As `pallas_call` takes it.
    piece: Bytes of a large copy.

  Returns:
    `[n, C, D]` each, of any value past the counts, and `[n, arrays]`.
  """
  lines = tuple(Lines.of(x, piece) for x in rows)
  # Lanes in a tile of their own: the least that can be copied.
  told = jnp.pad(counts, ((0, 0), (0, LANES - counts.shape[1])))[:, None]
  sent = [told, *(line.encode(x) for line, x in zip(lines, rows))]
  n = collectives.size(axes)
  # Else XLA brings whole buffers to faster memory first, padding and all.
  there = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(sent)

  def kernel(counts, *refs):
    sources, refs = refs[: len(sent)], refs[len(sent) :]
    targets, scratch = refs[: len(sent)], refs[len(sent) :]
    Exchange(lines, axes, counts, sources, targets, *scratch).run()

  heard, *received = pl.pallas_call(
    kernel,
    in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *there],
    out_specs=there,
    out_shape=[_in_hbm((n, *x.shape[1:]), x) for x in sent],
    scratch_shapes=[
      pltpu.SMEM((n, 1, LANES), jnp.int32),
      pltpu.SemaphoreType.DMA((2, 2)),
      pltpu.SemaphoreType.DMA,
    ],
    compiler_params=pltpu.CompilerParams(collective_id=collective_id),
    interpret=interpret,
    name=name,
  )(counts, *(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in sent))
  arrays = (line.decode(x, y) for line, x, y in zip(lines, received, rows))
  return tuple(arrays), heard[:, 0, : counts.shape[1]]


def _in_hbm(shape, like):
  """What the kernel returns, varying over the axes that `like` varies over."""
  return pltpu.HBM.from_type(jax.typeof(like).update(shape=shape))


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
  """What one device does. Array 0 holds the counts, one line of them a rank."""

  lines: tuple[Lines, ...]  # of the other arrays
  axes: Axes
  counts: Any  # [b, arrays], to be read
  sources: Sequence[Any]  # [b, lines, width]
  targets: Sequence[Any]  # [n, lines, width], written by other devices
  announced: Any  # [n, 1, LANES], to be read
  done: Any  # [2, 2]: left or came, counts or rows
  looked: Any

  def run(self) -> None:
    self.meet()
    self.send()
    self.receive()
    self.drain()

  def meet(self) -> None:
    """Waits until everyone is here: nobody writes to who is not."""
    n, barrier = self._size, pltpu.get_barrier_semaphore()

    def greet(rank):
      pl.semaphore_signal(barrier, 1, device_id=_device(rank, self.axes))

    self._in_turn(greet)
    pl.semaphore_wait(barrier, n)

  def send(self) -> None:
    """Starts all copies, counts first."""
    self._in_turn(lambda rank: self._counts(rank, self._me).start())
    self._each_piece(
      self._own_count,
      lambda i, rank, at: self._copy(i, rank, at, self._me).start(),
    )

  def receive(self) -> None:
    """Waits for all counts, then for the rows that they announce."""
    self._in_turn(lambda rank: self._counts(rank, rank).wait_recv())
    look = pltpu.make_async_copy(self.targets[0], self.announced, self.looked)
    look.start()
    look.wait()
    self._each_piece(
      lambda rank, i: self.announced[rank, 0, i],
      lambda i, rank, at: self._copy(i, rank, at, rank).wait_recv(),
    )

  def drain(self) -> None:
    """Waits until all that was sent has left."""
    self._in_turn(lambda rank: self._counts(rank, self._me).wait_send())
    self._each_piece(
      self._own_count,
      lambda i, rank, at: self._copy(i, rank, at, self._me).wait_send(),
    )

  @property
  def _me(self) -> jax.Array:
    return lax.axis_index(self.axes)

  @property
  def _size(self) -> int:
    return self.announced.shape[0]

  def _part(self, rank):
    return rank if self.counts.shape[0] > 1 else 0

  def _own_count(self, rank, i):
    return self.counts[self._part(rank), i]

  def _in_turn(self, do):
    """Each device begins with itself: no two turn to the same one at once."""
    n, me = self._size, self._me
    loop(n, lambda k: do(lax.rem(me + k, n)))

  def _each_piece(self, count, do):
    def of_rank(rank):
      for i, line in enumerate(self.lines):
        line.pieces(count(rank, i), lambda at, i=i: do(1 + i, rank, at))

    self._in_turn(of_rank)

  def _counts(self, rank, place):
    return self._copy(0, rank, pl.ds(0, 1), place)

  def _copy(self, array, rank, at, place):
    """Of lines of an array, for `rank`, to `place` in its buffer."""
    left, came = (self.done.at[i, min(array, 1)] for i in range(2))
    return pltpu.make_async_remote_copy(
      self.sources[array].at[self._part(rank), at],
      self.targets[array].at[place, at],
      left,
      came,
      device_id=_device(rank, self.axes),
    )


def _device(rank, axes):
  """Where `rank` is in the mesh; other axes as here."""
  place = {}
  for axis in reversed(axes):
    size = lax.axis_size(axis)
    place[axis] = lax.rem(rank, size)
    rank = lax.div(rank, size)
  return place
