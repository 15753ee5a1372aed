"""Rows that missed steps, brought to where these would have led them."""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax import _compat
from zenjax._rows import _idle
from zenjax._rows import _on_rows
from zenjax._rows import _transitions
from zenjax._rows._law import Law

# Rows go in blocks, those together that need about as many steps one by one:
# most need few. A block below this size would not fill a machine, and more
# blocks than this would stand in line for an accelerator.
_ELEMENTS = 1 << 16
_BLOCKS = 8


def caught_up(
  law: Law,
  leaves: Sequence[jax.Array],
  ids: jax.Array | None,
  missed: jax.Array,
  end: jax.Array,
  counts: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """`leaves` with some rows where `missed` steps would have led them.

  Costs nothing where nobody missed any. Leaves are changed in place where the
  caller has no further use for them.

  Args:
    law: What such steps do.
    leaves: `[R, ...]`: the table's of the state, then its parameters.
    ids: `[K]`, all different, beyond `R` for none; None for all rows.
    missed: `[K] int32`.
    end: The step that comes next.
    counts: The counters at that step.

  Returns:
    The leaves; the steps that rows miss then, `[K]`: zeros; and how many rows
    were late, `int32`: had missed steps that would have moved them.
  """
  none = jnp.zeros((), jnp.int32)
  if law.is_nothing or not leaves[-1].size or not missed.size:
    return list(leaves), jnp.zeros_like(missed), none
  num_rows = len(leaves[-1])
  every = jnp.arange(num_rows, dtype=jnp.int32) if ids is None else ids
  *leaves, missed, every = _one_type([*leaves, missed, every])
  size = _block_size(len(every), leaves[-1].shape[1])

  def once(carry):
    leaves, missed, _ = carry
    # A row that has taken no step missed all of them.
    stood = jnp.zeros_like(missed, bool) if law.moves_new else missed == end
    late = jnp.sum((missed > 0) & ~stood, dtype=jnp.int32)
    alone = _steps_alone(law, leaves, None if ids is None else every, missed)
    # The longest first, and at the end those that missed nothing.
    order = jnp.argsort(-jnp.where(missed > 0, alone + 1, 0))
    order = jnp.pad(order, (0, -len(order) % size), constant_values=len(order))

    def block(i, leaves):
      which = lax.dynamic_slice(order, (i * size,), (size,))
      pick = lambda x, fill: x.at[which].get(mode="fill", fill_value=fill)
      at = _on_rows.At(
        _on_rows.distinct(pick(every, num_rows), num_rows), num_rows
      )
      few = [_on_rows.gather(x, at) for x in leaves]
      rows = _idle.as_rows(law.idle, few)
      rows = _go(law, rows, pick(missed, 0), pick(alone, 0), end, counts)
      rows = [y.astype(x.dtype).reshape(x.shape) for x, y in zip(few, rows)]
      return [_on_rows.scatter(x, y, at) for x, y in zip(leaves, rows)]

    blocks = -(-jnp.sum(missed > 0, dtype=jnp.int32) // size)
    return _turns(blocks, block, leaves), jnp.zeros_like(missed), late

  behind = lambda carry: jnp.any(carry[1] > 0)
  carry = leaves, missed, _compat.cast_like(none, missed)
  leaves, left, late = lax.while_loop(behind, once, carry)
  return list(leaves), left, late


def _go(law, x, missed, alone, end, counts):
  """Rows `x`, as `Idle.rows` takes them, after all steps that they missed."""

  def step(i, x):
    at = [c - (missed - i) for c in counts]
    *state, update = law.idle.rows(x, at)
    new = [*state, optax.apply_updates(x[-1], update)]
    return [jnp.where(_beside(i < alone, n), n, old) for n, old in zip(new, x)]

  x = _turns(jnp.max(alone), step, x)
  rest = missed - alone
  matrix = law.matrix(rest, end, counts)
  return [
    jnp.where(_beside(rest > 0, old), _mixed(law, matrix, i, x), old)
    for i, old in enumerate(x)
  ]


def _mixed(law, matrix, i, x):
  """What the matrices `[k, n, n]` make of leaf `i`."""
  reads = [j for j in range(len(x)) if law.mixes[i, j]]
  terms = [
    _beside(matrix[:, i, j], x[j]) * _transitions.precise(x[j]) for j in reads
  ]
  return sum(terms[1:], terms[0]).astype(x[i].dtype)


def _steps_alone(law, leaves, ids, missed):
  """How many steps each row goes one by one."""
  number = jnp.minimum(missed, law.steps)
  if not (law.steps and law.at_rest):
    return number
  moves = jnp.zeros_like(missed, bool)
  for leaf in leaves[:-1]:
    at = _on_rows.At(ids, len(leaf))
    rows = leaf if ids is None else _on_rows.gather(leaf, at)
    moves |= jnp.any((rows != 0).reshape(len(rows), -1), axis=1)
  return jnp.where(moves, number, 0)


def _turns(count, body, x):
  """`fori_loop` from 0 to a count that only the run knows."""
  turn = lambda carry: (carry[0] + 1, body(*carry))
  return lax.while_loop(lambda c: c[0] < count, turn, (count * 0, x))[1]


def _block_size(rows, width):
  least = max(_ELEMENTS // max(width, 1), -(-rows // _BLOCKS), 1)
  return min(least, rows)


def _beside(column, x):
  """`[k]` with as many dimensions as `x`."""
  return column.reshape(-1, *[1] * (x.ndim - 1))


def _one_type(values):
  """All varying over the axes that any varies over: loops carry them."""
  for like in values:
    values = [_compat.cast_like(x, like) for x in values]
  return values
