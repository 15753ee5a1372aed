"""A step of an optimizer on the touched rows of tables."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax import _select
from zenjax._rows import _trees
from zenjax._rows._sparse_rows import is_rows

# `(few_state, few_params, at) -> (few_state, few_params)`.
Before = Callable[[Any, Any, Any], tuple[Any, Any]]
_as_is: Before = lambda state, params, at: (state, params)


def update(
  inner: optax.GradientTransformationExtraArgs,
  merged: Any,
  state: Any,
  params: Any,
  extra: dict[str, Any],
  before: Before = _as_is,
) -> tuple[Any, Any]:
  """Runs `inner.update` on the rows of `merged` alone.

  Args:
    inner: The transformation.
    merged: Updates in which every index of SparseRows stands once.
    state: Of `inner`, whole.
    params: Whole, or None.
    extra: Further arguments of `inner.update`.
    before: Changes the rows of the state and the parameters first.

  Returns:
    Updates in the structure of `merged`, and the state.
  """
  at = jax.tree.map(touched, merged, is_leaf=is_rows)
  if params is not None:
    require_shapes(merged, params)
  grads, few_params = _trees.values(merged), gathered(params, at)
  out, few, tags = step(inner, at, grads, state, few_params, extra, before)
  state = jax.tree.map(scatter, state, few, tags)
  return _trees.with_values(merged, out), state


def step(
  inner: optax.GradientTransformationExtraArgs,
  at: Any,
  grads: Any,
  state: Any,
  few_params: Any,
  extra: dict[str, Any],
  before: Before = _as_is,
) -> tuple[Any, Any, Any]:
  """Runs `inner.update` on some rows of the state, and writes nothing back.

  Args:
    inner: The transformation.
    at: Which rows, in the structure of the parameters.
    grads: `[K, D]` where `at` has rows.
    state: Of `inner`, whole.
    few_params: As `grads`, or None.
    extra: Further arguments of `inner.update`.
    before: Changes the rows of the state and the parameters first.

  Returns:
    Updates like `grads`, the state of these rows, and which rows those are in
    each of its leaves: for `with_rows` and `with_rest`.
  """
  tags = of_state(inner, state, at)
  few = jax.tree.map(gather, state, tags)
  few, few_params = before(few, few_params, at)
  out, few = inner.update(grads, few, few_params, **extra)
  return out, few, tags


def of_state(inner: Any, state: Any, at: Any) -> Any:
  """Which rows are touched of each leaf of a state: those of its parameter."""
  return _trees.tagged(inner, state, at, ALL)


def gathered(params: Any, at: Any) -> Any:
  """Touched rows of all parameters, if there are any."""
  return None if params is None else jax.tree.map(gather, params, at)


def with_rows(state: Any, few: Any, tags: Any) -> Any:
  """Touched rows are written; what has no rows stays old."""
  put = lambda old, few, at: scatter(old, few, at) if at.has(old) else old
  return jax.tree.map(put, state, few, tags)


def with_rest(state: Any, few: Any, tags: Any) -> Any:
  """What has no rows becomes new; what has rows stays old."""
  put = lambda old, few, at: old if at.has(old) else few
  return jax.tree.map(put, state, few, tags)


@dataclasses.dataclass(frozen=True, eq=False)
class At:
  """Which rows of a leaf are touched; None for all of it."""

  ids: jax.Array | None = None
  num_rows: int = -1

  @property
  def pads(self) -> Any:
    """Where `ids` are of no row."""
    return self.ids is not None and self.ids >= self.num_rows

  def has(self, leaf: jax.Array) -> bool:
    """Whether `leaf` holds something for each row of the table."""
    shape = jnp.shape(leaf)
    return self.ids is not None and shape[:1] == (self.num_rows,)


ALL = At()


def touched(leaf: Any) -> At:
  """The rows that an update touches."""
  if not is_rows(leaf):
    return ALL
  return At(distinct(leaf.indices, leaf.num_rows), leaf.num_rows)


def distinct(ids: jax.Array, num_rows: int) -> jax.Array:
  """`ids` with padding that is out of range and all different.

  Every index stands once then, if every row does.
  """
  beyond = num_rows + jnp.arange(len(ids), dtype=jnp.int32)
  return jnp.where(ids < num_rows, ids, beyond)


def gather(leaf: Any, at: At) -> Any:
  """Touched rows of what has rows; zeros for padding."""
  if not at.has(leaf):
    return leaf
  return leaf.at[at.ids].get(mode="fill", fill_value=0, unique_indices=True)


def scatter(leaf: Any, few: Any, at: At) -> Any:
  """Inverse of `gather`; `few` where it took all."""
  if not at.has(leaf):
    return few
  return leaf.at[at.ids].set(few, mode="drop", unique_indices=True)


def require_shapes(updates: Any, params: Any) -> None:
  """Raises ValueError for rows of another table than the parameter."""
  for (name, u), p in zip(
    _select.named_leaves(updates, is_rows), jax.tree.leaves(params)
  ):
    if is_rows(u) and u.shape != jnp.shape(p):
      raise ValueError(
        f"SparseRows of {name!r} must be rows of the parameter: it is"
        f" {jnp.shape(p)}, they are of {u.shape}; `num_rows` is the"
        " parameter's first dimension."
      )
