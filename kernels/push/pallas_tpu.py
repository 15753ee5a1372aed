"""Rows sent to their owners by remote copies, on TPUs."""

from collections.abc import Sequence
from typing import Any

import jax

from zenjax._src.core.collectives import Axes
from zenjax.kernels import _counted
from zenjax.kernels import _remote_tpu

# Of its barrier, other than of the pull: both may be in one program.
_COLLECTIVE_ID = 26


def check(rows: Sequence[jax.Array], counts: jax.Array, axes: Axes) -> None:
  """Raises NotImplementedError where the kernel cannot serve."""
  _remote_tpu.check(rows, counts, axes)


def push(
  rows: Sequence[jax.Array],
  counts: jax.Array,
  axes: Axes,
  *,
  interpret: Any = False,
  piece: int = _remote_tpu.PIECE,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """See `reference.push`."""
  check(rows, counts, axes)
  come, counts = _remote_tpu.exchange(
    rows,
    _counted.clipped(counts, rows),
    axes,
    "zenjax_push",
    collective_id=_COLLECTIVE_ID,
    interpret=interpret,
    piece=piece,
  )
  return _counted.sent(come, counts, lambda x: x), counts
