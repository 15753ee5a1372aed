"""Which equations look up rows, and of which ids.

A look-up traces to one of four forms, each with its own rule for ids out of
range:

- `jnp.take`, Flax: a gather that fills them with NaN; no gradient.
- `table[ids]`, Haiku: one that promises there are none. XLA clips them, and
  drops their gradient.
- a scalar index under `vmap`, Equinox: one that clips them, with a second
  column of indices; the gradient goes to the row that was read.
- a scalar index, also in `scan` and `map`: a dynamic slice, clipped.

Slices of constant rows count as well.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jex_core
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import jaxprs


class LookUp(NamedTuple):
  """Rows that were read; `...` are the dimensions of ids."""

  ids: jax.Array  # [...] int32, num_rows where no gradient goes
  read: jax.Array  # [...] int32, num_rows where none was read
  out: jax.Array  # rows as the equation gives them
  fill: bool  # whether ids out of range read something else than 0 or NaN
  rows: Callable[[jax.Array], jax.Array]  # of `out`: [..., D]
  restored: Callable[[jax.Array], jax.Array]  # `out` of rows
  fill_value: Any = None  # what rows hold that were not read; None if all were


def gather(
  eqn: jex_core.JaxprEqn, table: jax.Array, others: Sequence[Any]
) -> LookUp | str:
  """Reads a `gather`; a word why not where it reads other than whole rows."""
  (indices,) = others
  num_rows, width = table.shape
  dims = eqn.params["dimension_numbers"]
  mode = jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
  clips = mode == jax.lax.GatherScatterMode.CLIP
  fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
  if dims.operand_batching_dims or 0 not in dims.start_index_map:
    return "is gathered from along other dimensions than its rows"
  if tuple(eqn.params["slice_sizes"]) != (1, width):
    return "is gathered from by other pieces than whole rows"
  if 1 in dims.start_index_map and fills:
    return "is gathered from at columns that may be out of range"
  (out,) = jaxprs.bind(eqn, [table, indices])
  batch = tuple(indices.shape[:-1])
  windows = tuple(dims.offset_dims)
  ends = tuple(range(len(batch), out.ndim))
  window_sizes = tuple(out.shape[d] for d in windows)
  row = indices[..., dims.start_index_map.index(0)]
  fill = eqn.params["fill_value"]
  return LookUp(
    ids=in_range(row, num_rows, clips),
    read=in_range(row, num_rows, not fills),
    out=out,
    fill=fills and fill is not None and fill == fill and fill != 0,
    rows=lambda out: jnp.moveaxis(out, windows, ends).reshape(*batch, width),
    restored=lambda rows: jnp.moveaxis(
      rows.reshape(*batch, *window_sizes), ends, windows
    ),
    fill_value=(np.nan if fill is None else fill) if fills else None,
  )


def dynamic_slice(
  eqn: jex_core.JaxprEqn, table: jax.Array, others: Sequence[Any]
) -> LookUp | str:
  """Reads a `dynamic_slice`."""
  count, width = eqn.params["slice_sizes"]
  if width != table.shape[1]:
    return "is sliced into other pieces than whole rows"
  start = in_range(jnp.asarray(others[0]), table.shape[0] - count + 1, True)
  ids = start + jnp.arange(count, dtype=jnp.int32)
  (rows,) = jaxprs.bind(eqn, [table, *others])
  return LookUp(ids, ids, rows, False, _same, _same)


def slice_(
  eqn: jex_core.JaxprEqn, table: jax.Array, others: Sequence[Any]
) -> LookUp | str:
  """Reads a `slice` of constant rows."""
  del others
  (first, left), (last, right) = (
    eqn.params[k] for k in ("start_indices", "limit_indices")
  )
  step, across = eqn.params["strides"] or (1, 1)
  if (left, right, across) != (0, table.shape[1], 1):
    return "is sliced into other pieces than whole rows"
  (rows,) = jaxprs.bind(eqn, [table])
  ids = jnp.arange(first, last, step, dtype=jnp.int32)
  return LookUp(ids, ids, rows, False, _same, _same)


def _same(rows: jax.Array) -> jax.Array:
  return rows


FORMS: dict[str, Callable[..., LookUp | str]] = {
  "gather": gather,
  "dynamic_slice": dynamic_slice,
  "slice": slice_,
}


def in_range(ids: jax.Array, num_rows: int, clips: bool) -> jax.Array:
  """`ids` as int32, those out of range clipped or `num_rows`."""
  if jnp.iinfo(ids.dtype).bits < 32:
    ids = ids.astype(jnp.int32)
  # In the dtype's own range: -1 and `num_rows` are as far out as any.
  low = 0 if jnp.issubdtype(ids.dtype, jnp.unsignedinteger) else -1
  ids = lax.clamp(
    jnp.asarray(low, ids.dtype), ids, jnp.asarray(num_rows, ids.dtype)
  ).astype(jnp.int32)
  if clips:
    return jnp.clip(ids, 0, num_rows - 1)
  return jnp.where(ids >= 0, ids, num_rows)
