"""`lazy_rows`: an optimizer that touches the rows of its updates only."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax import _select
from zenjax._rows import _trees
from zenjax._rows._sparse_rows import is_rows


def lazy_rows(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Runs `inner` on the rows of SparseRows instead of on whole tables.

  Rows of one index are added up, the touched rows of every state leaf and of
  the parameters gathered, `inner` sees arrays `[K, D]`, and what it makes of
  the state is written back: a step costs by the rows, not by the table. Arrays
  in the tree go through `inner` as they are. Donate parameters and state, and
  apply what comes out with `zenjax.apply_updates`.

  Rows that a step does not touch keep their state and their parameters. For
  SGD, Adagrad and all else that does nothing where the gradient is zero, this
  equals `inner` on dense gradients to rounding. Adam and momentum would go on
  decaying moments and moving such rows; here moments wait as they are for the
  row's next gradient, and Adam corrects their bias by the number of all steps
  (LazyAdam). Weight decay acts on touched rows only. Norms over all updates
  (`optax.clip_by_global_norm`) are the same: rows left out are zero.

  Args:
    inner: Any transformation that updates a row by that row's gradient, state
      and parameters; `chain` as usual.

  Returns:
    A transformation of trees that may hold SparseRows. Its state is that of
    `inner`, made for dense parameters.

  Raises:
    ValueError: `inner` updates rows by others (LAMB, Adafactor): found by
      trying it on small arrays in `init`. Not tried where it needs more
      arguments than updates and parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> table = jnp.zeros((1000, 1))
    >>> tx = zenjax.lazy_rows(optax.adagrad(1.0, initial_accumulator_value=0.0))
    >>> state = tx.init(table)
    >>> grads = zenjax.SparseRows(jnp.array([7]), jnp.array([[4.0]]), 1000)
    >>> updates, state = tx.update(grads, state, table)
    >>> zenjax.apply_updates(table, updates)[6:8].round(3).tolist()
    [[0.0], [-1.0]]
  """
  inner = optax.with_extra_args_support(inner)

  def init(params):
    _require_row_by_row(inner, params)
    return inner.init(params)

  def update(updates, state, params=None, **extra):
    merged = _trees.combined(updates)
    at = jax.tree.map(_at, merged, is_leaf=is_rows)
    if params is not None:
      _require_shapes(merged, params)
    tags = optax.tree_utils.tree_map_params(
      inner, lambda _, at: at, state, at, transform_non_params=lambda _: _ALL
    )
    few = jax.tree.map(_gather, state, tags)
    few_params = None if params is None else jax.tree.map(_gather, params, at)
    out, few = inner.update(_trees.values(merged), few, few_params, **extra)
    state = jax.tree.map(_scatter, state, few, tags)
    return _trees.with_values(merged, out), state

  return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
  """`optax.apply_updates` for updates that may hold SparseRows.

  Args:
    params: A tree of arrays.
    updates: The same with SparseRows for tables, or None for what stays.

  Returns:
    The sums, in the dtypes of `params`; in place where these are donated.

  Raises:
    ValueError: SparseRows of another shape than the parameter.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> rows = zenjax.SparseRows(jnp.array([1, 1]), jnp.ones((2, 1)), 2)
    >>> zenjax.apply_updates(jnp.array([[5.0], [5.0]]), rows).tolist()
    [[5.0], [7.0]]
  """
  _require_shapes(updates, params)

  def apply(u, p):
    if u is None:
      return p
    if is_rows(u):
      return p.at[u.indices].add(u.values.astype(p.dtype), mode="drop")
    return optax.apply_updates(p, u)

  return jax.tree.map(
    apply, updates, params, is_leaf=lambda x: x is None or is_rows(x)
  )


@dataclasses.dataclass(frozen=True, eq=False)
class _At:
  """Which rows of a leaf are touched; None for all of it."""

  ids: jax.Array | None = None
  num_rows: int = -1

  def has(self, leaf: jax.Array) -> bool:
    """Whether `leaf` holds something for each row of the table."""
    shape = jnp.shape(leaf)
    return self.ids is not None and shape[:1] == (self.num_rows,)


_ALL = _At()


def _at(leaf):
  if not is_rows(leaf):
    return _ALL
  ids, num_rows = leaf.indices, leaf.num_rows
  # Padding is out of range and all different: every index stands once.
  beyond = num_rows + jnp.arange(len(ids), dtype=jnp.int32)
  return _At(jnp.where(ids < num_rows, ids, beyond), num_rows)


def _gather(leaf, at):
  if not at.has(leaf):
    return leaf
  return leaf.at[at.ids].get(mode="fill", fill_value=0, unique_indices=True)


def _scatter(leaf, few, at):
  if not at.has(leaf):
    return few
  return leaf.at[at.ids].set(few, mode="drop", unique_indices=True)


def _require_shapes(updates, params):
  for (name, u), p in zip(
    _select.named_leaves(updates, is_rows), jax.tree.leaves(params)
  ):
    if is_rows(u) and u.shape != jnp.shape(p):
      raise ValueError(
        f"SparseRows of {name!r} must be rows of the parameter: it is"
        f" {jnp.shape(p)}, they are of {u.shape}; `num_rows` is the"
        " parameter's first dimension."
      )


def _require_row_by_row(inner, params):
  """Compares a step on two of four rows with one on all, the others zero."""
  rng = np.random.default_rng(0)
  with jax.ensure_compile_time_eval():
    small = [4, 3]
    leaves, structure = jax.tree.flatten(params)
    draw = lambda x: jnp.array(
      rng.standard_normal(small if jnp.ndim(x) == 2 else [1] * jnp.ndim(x)),
      jnp.result_type(x),
    )
    full = jax.tree.unflatten(structure, [draw(x) for x in leaves])
    grads = jax.tree.map(
      lambda x: x.at[2:].set(0) if jnp.ndim(x) == 2 else x, full
    )
    half = lambda tree: jax.tree.map(
      lambda x: x[:2] if jnp.shape(x)[:1] == (4,) else x, tree
    )
    try:
      state = inner.init(full)
      want, _ = inner.update(grads, state, full)
      got, _ = inner.update(half(grads), half(state), half(full))
    except TypeError:
      return  # It needs arguments that only the user has.
    pairs = zip(jax.tree.leaves(half(want)), jax.tree.leaves(got))
    alike = all(np.allclose(w, g, rtol=1e-3, atol=1e-6) for w, g in pairs)
  if not alike:
    raise ValueError(
      "`inner` must update a row by that row alone, but it gave two rows other"
      " updates than with the rest of the table beside them (as LAMB and"
      " Adafactor do); use it on dense gradients, or another optimizer for"
      " tables through `optax.multi_transform`."
    )
