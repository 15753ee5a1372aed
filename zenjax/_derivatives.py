"""Derivatives of an exchange: those of `psum` or `pmean`, which it equals.

An exchange itself is made of bits, loops and look-ups of what is not zero:
derivatives of these are errors of JAX or, of bits, zeros without a word. A sum
is linear in its operands, whichever rows are zero: tangents are summed as
arrays, by `lax.psum`, which JAX knows how to transpose.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenjax import _collectives
from zenjax._options import Options
from zenjax._rows._sparse_rows import Facts
from zenjax._rows._sparse_rows import is_rows
from zenjax._rows._sparse_rows import SparseRows
from zenjax._schemes.base import Context


def as_of_psum(
  exchange: Callable[[Any, Any], tuple[Any, Any]],
  tree: Any,
  state: Any,
  options: Options,
  context: Context,
) -> tuple[Any, Any]:
  """`exchange(tree, state)`, linear in the leaves of `tree`.

  Args:
    exchange: Returns the synced tree and a new state; closes over no arrays.
    tree: Local gradients.
    state: What is remembered, of which nothing is differentiated.
    options: Of the transformation.
    context: Axes and operation.
  """
  known = _facts(tree)
  made: list[Facts] = []

  @jax.custom_jvp
  def call(tree, state):
    out, new = exchange(_with_facts(tree, known), state)
    made[:] = _facts(out)
    return out, new

  @call.defjvp
  def derivative(primals, tangents):
    tree, moved = primals[0], tangents[0]
    if not options.exact:
      raise NotImplementedError(
        "`on_overflow='carry'` keeps rows for later steps, by their number, and"
        " what comes out has no derivative; differentiate with"
        " `on_overflow='exact'`."
      )
    out, new = call(*primals)
    given, moved = (jax.tree.leaves(x, is_leaf=is_rows) for x in (tree, moved))
    found, structure = jax.tree.flatten(out, is_leaf=is_rows)
    left = iter(made)
    moved = [
      _moved(leaf, tangent, x, next(left) if is_rows(x) else None, context)
      for leaf, tangent, x in zip(given, moved, found)
    ]
    return (out, new), (structure.unflatten(moved), jax.tree.map(_zero, new))

  out, new = call(tree, state)
  return _with_facts(out, made), new


def _moved(
  leaf: Any,
  tangent: Any,
  out: Any,
  facts: Facts | None,
  context: Context,
) -> Any:
  """The tangent of what comes out for a leaf."""
  if not jnp.issubdtype(leaf.dtype, jnp.inexact):
    return _zero(out)
  if facts and facts.by_value:
    raise NotImplementedError(
      "SparseRows that come out hold the rows of a sum that are not zero, and"
      " derivatives of the others would be lost; differentiate with"
      " `output='dense'`."
    )
  if is_rows(leaf):
    wide = _collectives.accumulator(leaf.dtype)
    rows = SparseRows(leaf.indices, tangent.values.astype(wide), leaf.num_rows)
    tangent = rows.to_dense().astype(leaf.dtype)
  reduce = _collectives.pmean if context.mean else _collectives.psum
  total = reduce(tangent, context.axes)
  if not is_rows(out):
    return total
  values = total.at[out.indices].get(mode="fill", fill_value=0)
  ids, _ = jax.tree.leaves(out)
  return SparseRows.tree_unflatten(out.num_rows, (_zero(ids), values))


def _zero(x: Any) -> Any:
  """The tangent of what does not move."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    return jnp.zeros_like(x)
  return np.zeros(x.shape, jax.dtypes.float0)


def _facts(tree: Any) -> list[Facts]:
  """What SparseRows know of themselves and trees forget."""
  found = jax.tree.leaves(tree, is_leaf=is_rows)
  return [x.facts for x in found if is_rows(x)]


def _with_facts(tree: Any, facts: list[Facts]) -> Any:
  left = iter(facts)

  def known(x):
    return x.with_facts(next(left)) if is_rows(x) else x

  return jax.tree.map(known, tree, is_leaf=is_rows)
