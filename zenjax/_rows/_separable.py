"""Whether an optimizer does to each row, or element, what it does to it alone.

Found by trying it on small arrays: a norm over all updates tells rows apart, a
mean over a row its columns, and noise both.
"""

from collections.abc import Callable, Iterator, Sequence
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
  with _as_optax_computes(), jax.ensure_compile_time_eval():
    try:
      cut = _tried(inner, tree, tables, with_params)
      by_rows = _alike(*cut(2, _COLUMNS)) and _alike(*cut(0, _COLUMNS))
      return Kinds(by_rows, _alike(*cut(_ROWS, 2)))
    except Exception:  # Whatever it is, nothing is known then.
      return Kinds(False, False)


def require_no_accumulation(state: Any, argument: str) -> None:
  """Raises ValueError where a `state` of `argument` accumulates gradients.

  A row whose gradients come in steps that only accumulate is in none that
  updates, and would never move.
  """
  accumulates = lambda node: isinstance(node, optax.MultiStepsState)
  if any(map(accumulates, jax.tree.leaves(state, is_leaf=accumulates))):
    raise ValueError(
      f"`{argument}` must not be `optax.MultiSteps`, whose steps without an"
      " update would lose the rows that they alone touch, got one; use larger"
      " batches, or put it around the chain and take array gradients by"
      " `jax.value_and_grad`."
    )


def require_row_by_row(
  inner: optax.GradientTransformationExtraArgs, params: Any
) -> None:
  """Tries `inner` with gradients of two rows, alone and beside rows without.

  A norm over all updates is the same then, and is let pass.

  Raises:
    ValueError: The updates of these rows differ, or come in some steps only.
  """
  require_no_accumulation(jax.eval_shape(inner.init, params), "inner")
  tables = [jnp.ndim(x) == 2 for x in jax.tree.leaves(params)]
  with jax.ensure_compile_time_eval():
    try:
      cut = _tried(inner, params, tables, touched=2)
      (alone, _), (beside, _) = cut(2, _COLUMNS)
    except TypeError:
      return  # It needs arguments that only the user has.
    except NameError as error:
      raise ValueError(
        "`inner` must not synchronize devices, but it wants an axis of them"
        f" ({error}); put zen_sync before lazy_rows, and owner_update in the"
        " place of both."
      ) from error
    alike = _alike(alone, beside)
  if not alike:
    raise ValueError(
      "`inner` must update a row by that row alone, but it gave two rows other"
      " updates than with the rest of the table beside them (as LAMB and"
      " Adafactor do); use it on dense gradients, or another optimizer for"
      " tables through `optax.multi_transform`."
    )


def _tried(
  inner: optax.GradientTransformationExtraArgs,
  tree: Any,
  tables: Sequence[bool],
  with_params: bool = True,
  touched: int = _ROWS,
) -> Callable[[int, int], tuple[Any, Any]]:
  """Steps of `inner` on small random tables.

  Args:
    inner: The transformation.
    tree: Gradients or parameters, or their shapes.
    tables: Which leaves are tables, in order.
    with_params: Whether it is given parameters.
    touched: How many rows have a gradient.

  Returns:
    `(rows, columns) -> (alone, beside)`: updates and state of a step on so many
    rows and columns alone, and the same part of those of a step on all.
  """
  # Numbers of Python have a shape and a dtype after it.
  tree = jax.eval_shape(lambda x: x, tree)
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_rows)
  rng = np.random.default_rng(0)

  def drawn(rows=_ROWS):
    def draw(x, is_table):
      shape = [_ROWS, _COLUMNS] if is_table else [1] * len(x.shape)
      values = rng.standard_normal(shape)
      if is_table:
        values[rows:] = 0
      return jnp.array(values, x.dtype)

    return structure.unflatten(map(draw, leaves, tables))

  grads, params = drawn(touched), drawn()
  state = inner.init(params)
  marks = structure.unflatten(list(tables))
  tags = _trees.tagged(inner, state, marks, False)
  given = params if with_params else None
  updates, new = inner.update(grads, state, given)

  def cut(rows, columns):
    part = lambda tree, marks: jax.tree.map(
      lambda x, mark: _cut(x, rows, columns) if mark else x, tree, marks
    )
    some = part(params, marks) if with_params else None
    alone = inner.update(part(grads, marks), part(state, tags), some)
    return alone, (part(updates, marks), part(new, tags))

  return cut


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
