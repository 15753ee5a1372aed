"""Rows sent to everyone by remote copies, on TPUs."""

from collections.abc import Sequence
from typing import Any

import jax

from zenjax._src.core import compat
from zenjax._src.core.collectives import Axes
from zenjax.kernels import _counted
from zenjax.kernels import _remote_tpu

_COLLECTIVE_ID = 27


def check(rows: Sequence[jax.Array], counts: jax.Array, axes: Axes) -> None:
  """Raises NotImplementedError where the kernel cannot serve."""
  _remote_tpu.check([x[None] for x in rows], counts[None], axes)


def pull(
  rows: Sequence[jax.Array],
  counts: jax.Array,
  axes: Axes,
  *,
  interpret: Any = False,
  piece: int = _remote_tpu.PIECE,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """See `reference.pull`."""
  check(rows, counts, axes)
  come, counts = _remote_tpu.exchange(
    [x[None] for x in rows],
    _counted.clipped(counts, rows)[None],
    axes,
    "zenjax_pull",
    collective_id=_COLLECTIVE_ID,
    interpret=interpret,
    piece=piece,
  )
  # Everyone was sent the same.
  come, counts = jax.tree.map(
    lambda x: compat.as_invariant(x, axes), (come, counts)
  )
  return _counted.sent(come, counts, lambda x: x), counts
