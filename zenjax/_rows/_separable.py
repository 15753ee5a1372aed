"""Whether an optimizer does to each row, or element, what it does to it alone.

Found by trying it on small arrays: a norm over all updates tells rows apart, a
mean over a row its columns, and noise both.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._rows import _trees
from zenjax._rows._sparse_rows import is_rows

_ROWS, _COLUMNS = 4, 3


class Kinds(NamedTuple):
  """What an optimizer goes by."""

  by_rows: bool
  by_columns: bool


def kinds(
  inner: optax.GradientTransformationExtraArgs,
  tree: Any,
  tables: Sequence[bool],
  with_params: bool = True,
) -> Kinds:
  """Tries `inner` on some rows, on none, and on some columns of all.

  Args:
    inner: The transformation.
    tree: Gradients: arrays, SparseRows, or shapes.
    tables: Which leaves are tables, in order.
    with_params: Whether it is given parameters.

  Returns:
    Both False where it cannot be tried, say for want of further arguments.
  """
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_rows)
  rng = np.random.default_rng(0)
  small = [_ROWS, _COLUMNS]
  drawn = lambda: structure.unflatten(
    [
      jnp.array(
        rng.standard_normal(small if is_ else [1] * len(x.shape)), x.dtype
      )
      for x, is_ in zip(leaves, tables)
    ]
  )
  marks = structure.unflatten(list(tables))
  with _as_optax_computes(), jax.ensure_compile_time_eval():
    grads, params = drawn(), drawn()
    try:
      state = inner.init(params)
      tags = _trees.tagged(inner, state, marks, False)

      def step(rows, columns):
        cut = lambda tree, marks: jax.tree.map(
          lambda x, mark: _cut(x, rows, columns) if mark else x, tree, marks
        )
        given = cut(params, marks) if with_params else None
        part = inner.update(cut(grads, marks), cut(state, tags), given)
        return part, (cut(whole[0], marks), cut(whole[1], tags))

      whole = inner.update(grads, state, params if with_params else None)
      by_rows = _alike(*step(2, _COLUMNS)) and _alike(*step(0, _COLUMNS))
      return Kinds(by_rows, _alike(*step(_ROWS, 2)))
    except Exception:  # Whatever it is, nothing is known then.
      return Kinds(False, False)


@contextlib.contextmanager
def _as_optax_computes() -> Iterator[None]:
  """It promotes dtypes and ranks, whatever a program forbids itself."""
  with jax.numpy_dtype_promotion("standard"):
    with jax.numpy_rank_promotion("allow"):
      yield


def _cut(x: Any, rows: int, columns: int) -> Any:
  """Of what holds something for each row, and for each column."""
  shape = jnp.shape(x)
  if shape[:1] != (_ROWS,):
    return x
  return x[:rows, :columns] if shape[1:] == (_COLUMNS,) else x[:rows]


def _alike(part: Any, whole: Any) -> bool:
  pairs = zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True)
  return all(
    p.dtype == w.dtype
    and np.allclose(p, w, rtol=1e-3, atol=1e-6, equal_nan=True)
    for p, w in pairs
  )
