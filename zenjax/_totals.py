"""Leaves that travel as a whole: summed each by itself, or small ones in one.

XLA joins the sums of a step, and TPUs and GPUs then send them as one. Gloo,
which joins CPUs of several processes, takes the buffers of such a sum one after
the other, each with all its latencies: 36 leaves of a recommender between four
hosts took 220 ms more than one buffer of their size.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax import _collectives
from zenjax import _compat
from zenjax._options import Options
from zenjax._rows._sparse_rows import is_rows
from zenjax._rows._sparse_rows import SparseRows
from zenjax._schemes import DENSE
from zenjax._schemes.base import Context
from zenjax._schemes.base import DenseScheme

# A larger leaf takes longer to be copied twice than it has of latencies.
JOINED_BYTES = 1 << 20


def totals(
  leaves: Mapping[int, Any], options: Options, context: Context
) -> dict[int, Any]:
  """The sum or mean of each leaf, by `psum`, under the leaf's own key."""
  out = {}
  for at in _buffers(leaves, context):
    if len(at) == 1:
      out[at[0]] = total(leaves[at[0]], DENSE["dense"], options, context)
      continue
    joined = lax.platform_dependent(
      *(leaves[i] for i in at),
      cpu=functools.partial(_in_one, context=context),
      default=functools.partial(_each, context=context),
    )
    out |= zip(at, joined)
  return out


def _buffers(leaves: Mapping[int, Any], context: Context) -> list[list[int]]:
  """Which leaves share one: of one type, that vary over the same axes.

  Where XLA spreads programs over an axis itself, leaves lie there in ways of
  their own.
  """
  joins = buffers_in_turn() and context.devices > 1
  if not joins or _compat.automatic_axes():
    return [[i] for i in leaves]
  keys: dict[Any, list[int]] = {}
  for i, leaf in leaves.items():
    keys.setdefault(_kind(leaf) or i, []).append(i)
  return list(keys.values())


def _kind(leaf: Any) -> tuple[jnp.dtype, frozenset[str]] | None:
  """What must be alike to share a buffer, None of what has its own."""
  if is_rows(leaf):
    return None
  wide = _collectives.accumulator(leaf.dtype)
  if leaf.size * wide.itemsize > JOINED_BYTES:
    return None
  return wide, _compat.varying_axes(leaf)


def buffers_in_turn() -> bool:
  """Whether CPUs, if the program is for them, sum buffers over a network."""
  return jax.process_count() > 1


def _each(*leaves: jax.Array, context: Context) -> tuple[jax.Array, ...]:
  return tuple(DENSE["dense"].reduce(leaf, context) for leaf in leaves)


def _in_one(*leaves: jax.Array, context: Context) -> tuple[jax.Array, ...]:
  wide = _collectives.accumulator(leaves[0].dtype)
  flat = jnp.concatenate([leaf.astype(wide).reshape(-1) for leaf in leaves])
  flat = DENSE["dense"].reduce(flat, context)
  ends = np.cumsum([leaf.size for leaf in leaves])[:-1].tolist()
  parts = zip(leaves, jnp.split(flat, ends))
  return tuple(
    x.reshape(leaf.shape).astype(leaf.dtype if wide != leaf.dtype else x.dtype)
    for leaf, x in parts
  )


def total(
  leaf: Any, scheme: DenseScheme, options: Options, context: Context
) -> Any:
  """The sum or mean of a leaf that travels as a whole.

  SparseRows are made an array for it: of a table that is judged small, or for
  a scheme that knows no rows.
  """
  if not is_rows(leaf):
    return scheme.reduce(leaf, context)
  merged = leaf.combine()
  dense = options.output == "dense"
  if context.devices == 1 or not leaf.capacity:
    as_equal = lambda x: _compat.as_invariant(x, context.axes)
    row, values = as_equal(merged.indices), as_equal(merged.values)
    merged = SparseRows(row, values, leaf.num_rows).as_unique()
    return merged.to_dense() if dense else merged
  table = scheme.reduce(merged.to_dense(), context)
  return table if dense else SparseRows.in_place(table)
