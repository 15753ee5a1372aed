"""Whole buffers to every owner, padding and all."""

from collections.abc import Sequence

import jax

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax.kernels import _counted


def push(
  rows: Sequence[jax.Array], counts: jax.Array, axes: Axes
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """Sends every rank the first rows of its part, as many as there are.

  Args:
    rows: `[n, C, D]` of each table, `C` and `D` its own: a part for every rank.
      Rows past the count are nobody's, whatever they hold.
    counts: `[n, tables] int32`, how many rows there are; `C` where it is more.
    axes: Along which to exchange, slowest first.

  Returns:
    `[n, C, D]` of each table, from every rank, zero past the count, and
    `[n, tables] int32`.
  """
  counts = _counted.clipped(counts, rows)
  come = collectives.all_to_all(counts, axes)
  return _counted.sent(
    rows, come, lambda x: collectives.all_to_all(x, axes)
  ), come
