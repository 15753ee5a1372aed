"""What `zen_sync` stands for, by JAX's own collectives and nothing else.

`zenjax.check` runs a step with it in the place of an exchange.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
import jax.numpy as jnp

from zenjax import _collectives
from zenjax._options import Options
from zenjax._rows._sparse_rows import is_rows
from zenjax._rows._sparse_rows import SparseRows


def means(
  leaves: Sequence[Any], like: Sequence[Any], options: Options
) -> list[Any]:
  """Returns the mean or sum of each leaf over devices, formed as `like`."""
  return [
    None if x is None else _mean(x, shape, options)
    for x, shape in zip(leaves, like)
  ]


def _mean(leaf: Any, like: Any, options: Options) -> Any:
  if is_rows(leaf) and is_rows(like):
    return _rows(leaf, like.values.shape[0], options)
  whole = leaf.combine().to_dense() if is_rows(leaf) else leaf
  reduce = lax.pmean if options.mean else lax.psum
  wide = _collectives.accumulator(whole.dtype)
  mean = reduce(whole.astype(wide), options.axes)
  if is_rows(like):
    return SparseRows.in_place(mean.astype(like.values.dtype))
  return mean.astype(like.dtype)


def _rows(rows: SparseRows, room: int, options: Options) -> SparseRows:
  """Gathers rows of all devices, each once; `room` is enough for them."""
  ids, values = rows.indices, rows.values
  for axis in reversed(options.axes):
    ids = lax.all_gather(ids, axis).reshape(-1)
    values = lax.all_gather(values, axis).reshape(-1, values.shape[-1])
  wide = _collectives.accumulator(values.dtype)
  total = SparseRows(ids, values.astype(wide), rows.num_rows).combine()
  devices = _collectives.size(options.axes) if options.mean else 1
  missing = max(0, room - total.capacity)
  ids = jnp.pad(total.indices, (0, missing), constant_values=rows.num_rows)
  values = jnp.pad(total.values / devices, ((0, missing), (0, 0)))
  values = values.astype(rows.values.dtype)
  return SparseRows(ids[:room], values[:room], rows.num_rows)
