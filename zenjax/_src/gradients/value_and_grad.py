"""Defines `value_and_grad`, which returns gradients of tables as rows."""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core.arguments import SparseSpec
from zenjax._src.gradients import sharded_lookups
from zenjax._src.gradients import table_uses
from zenjax._src.gradients.loss import partial_loss
from zenjax._src.rows import batch_layout
from zenjax._src.rows import leaf_util
from zenjax._src.rows import sparse_rows
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.tables import fetch
from zenjax._src.tables.sharded_table import is_sharded


def value_and_grad(
  fun: Callable[..., Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  *,
  tables: SparseSpec = None,
  prefetched: fetch.Ahead | None = None,
) -> Callable[..., tuple[Any, Any]]:
  """Differentiates a loss, with gradients of embedding tables as SparseRows.

  Use it in place of `jax.value_and_grad`, without changes to your model. It
  traces the loss and finds tables that are only looked up: by `jnp.take`,
  `table[ids]`, and the embedding layers of Flax, Haiku and Equinox; inside
  `jit`, `vmap`, `scan` and `jax.checkpoint`; after casts, factors, and a
  padding row that is set to a constant. The gradient of such a table has one
  row for each lookup, so no array of the table's size is made. All other
  gradients are arrays, for example if a table is also the weights of a softmax.
  `zenjax.rows.explain_tables` tells why a gradient is an array.

  Under `shard_map(check_vma=True)`, gradients are not summed over devices, as
  if `fun` had been given `zenjax.unreduced(params)`.

  Arguments may be modules of Flax's nnx, as in `nnx.value_and_grad`. Their
  gradients are an `nnx.State`, and variables that the loss changes, such as
  dropout counts, are written back. For modules of Equinox, use
  `zenjax.rows.filter_value_and_grad`.

  Args:
    fun: The loss. Sharded tables may be in any argument.
    argnums: Positions of the arguments to differentiate by, or `nnx.DiffState`
      for a part of a module.
    has_aux: Whether `fun` returns a pair `(loss, aux)`.
    holomorphic: Whether `fun` is holomorphic, for complex parameters.
    allow_int: Whether to allow integer parameters, whose gradients are float0.
    tables: Which parameters must give rows, a pytree prefix of bools or a
      callable `(name, leaf) -> bool`. By default, all that can give rows.
    prefetched: The result of `zenjax.tables.prefetch(fun)` for the same
      arguments, if tables are sharded.

  Returns:
    A function with the arguments of `fun`. It returns the value and the
    gradients, with SparseRows in place of tables.

  Raises:
    ValueError: A table in `tables` is used for more than lookups; the message
      tells where. Or the loss adds variables to an nnx module, or two arguments
      share a variable.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> def loss(params, ids):
    ...   return jnp.sum(params["table"][ids] @ params["scale"])
    >>> params = {"table": jnp.ones((5, 2)), "scale": jnp.array([1.0, 3.0])}
    >>> value, grads = zenjax.value_and_grad(loss)(params, jnp.array([4, 0]))
    >>> grads["table"]
    SparseRows(rows [4 0] of 5, values float32[2,2])
    >>> grads["table"].values.tolist(), grads["scale"].tolist()
    ([[1.0, 3.0], [1.0, 3.0]], [2.0, 2.0])
  """
  if not callable(fun):
    raise TypeError(
      f"`fun` must be a function, got {type(fun).__name__}. Write"
      " `zenjax.value_and_grad(loss_fn)(params, batch)`."
    )
  options = dict(holomorphic=holomorphic, allow_int=allow_int)

  @functools.wraps(fun)
  def value_and_grad_of(*args, **kwargs):
    loss = partial_loss(fun, argnums, args, kwargs)
    found = table_uses.find(loss, tables).require()
    outs, grads = _differentiate(found, options, prefetched)
    value = loss.result(found.traced.rebuild(outs))
    if has_aux:
      if not (isinstance(value, tuple | list) and len(value) == 2):
        raise TypeError(
          "`fun` must return a pair (loss, aux) with `has_aux=True`, got"
          f" {jax.tree.structure(value)}."
        )
      value = tuple(value)
    structure = jax.tree.structure(loss.params, is_leaf=is_sharded)
    return value, structure.unflatten(grads)

  # The planner asks: a table that still has an array gradient uses all rows.
  value_and_grad_of.__dict__["gives_rows"] = True
  return value_and_grad_of


def grad(
  fun: Callable[..., Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  *,
  tables: SparseSpec = None,
) -> Callable[..., Any]:
  """Differentiates like `jax.grad`, with gradients of tables as SparseRows.

  Use it in place of `jax.grad`. It finds tables like `zenjax.value_and_grad`.

  Args:
    fun: The loss.
    argnums: Positions of the arguments to differentiate by.
    has_aux: Whether `fun` returns a pair `(loss, aux)`.
    holomorphic: Whether `fun` is holomorphic, for complex parameters.
    allow_int: Whether to allow integer parameters, whose gradients are float0.
    tables: Which parameters must give rows, a pytree prefix of bools or a
      callable `(name, leaf) -> bool`. By default, all that can give rows.

  Returns:
    A function that returns the gradients, or with `has_aux` the pair
    `(gradients, aux)`.

  Raises:
    ValueError: A table in `tables` is used for more than lookups.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> loss = lambda table: table[jnp.array([1])].sum()
    >>> zenjax.rows.grad(loss)(jnp.ones((3, 1)))
    SparseRows(rows [1] of 3, values float32[1,1])
  """
  both = value_and_grad(
    fun, argnums, has_aux, holomorphic, allow_int, tables=tables
  )

  @functools.wraps(fun)
  def grad_of(*args, **kwargs):
    value, grads = both(*args, **kwargs)
    return (grads, value[1]) if has_aux else grads

  return grad_of


def filter_value_and_grad(
  fun: Callable[..., Any], *, has_aux: bool = False, tables: SparseSpec = None
) -> Callable[..., tuple[Any, Any]]:
  """Differentiates Equinox modules, with gradients of tables as SparseRows.

  Use it in place of `eqx.filter_value_and_grad`. It differentiates by the
  floating arrays in the first argument. The gradients have None in place of
  everything else, such as integers, functions and Python's numbers. Apply
  updates with `zenjax.apply_updates`.

  Args:
    fun: A function whose first argument is any pytree, such as a module.
    has_aux: Whether `fun` returns a pair `(loss, aux)`.
    tables: Which parameters must give rows, a pytree prefix of bools or a
      callable `(name, leaf) -> bool`. By default, all that can give rows.

  Returns:
    A function with the arguments of `fun`, which returns the value and the
    gradients.

  Raises:
    ValueError: A table in `tables` is used for more than lookups.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> model = {"table": jnp.ones((5, 2)), "act": jnp.tanh, "rate": 0.5}
    >>> def loss(model, ids):
    ...   return model["act"](model["table"][ids]).sum() * model["rate"]
    >>> both = zenjax.rows.filter_value_and_grad(loss)
    >>> _, grads = both(model, jnp.array([4, 0]))
    >>> grads["act"], grads["rate"], grads["table"]
    (None, None, SparseRows(rows [4 0] of 5, values float32[2,2]))
  """

  @functools.wraps(fun)
  def value_and_grad_of(model, *args, **kwargs):
    is_floating = lambda x: (
      (leaf_util.is_array(x) or is_sharded(x))
      and jnp.issubdtype(x.dtype, jnp.inexact)
    )
    _, whole = leaf_util.arrays_of(model, is_floating)

    def loss(params, *args, **kwargs):
      return fun(whole(jax.tree.leaves(params)), *args, **kwargs)

    params = jax.tree.map(lambda x: x if is_floating(x) else None, model)
    both = value_and_grad(loss, has_aux=has_aux, tables=tables)
    return both(params, *args, **kwargs)

  return value_and_grad_of


def _differentiate(found, options, prefetched):
  """Returns `[loss, *aux]`, and the gradient of every leaf."""
  traced = found.traced
  leaves = traced.leaves
  plain = {i: x for i, x in enumerate(leaves) if i not in found.rows}
  taps = {path: site.tap() for path, site in found.sites.items()}
  called_back = {}
  if traced.away:
    asked = sharded_lookups.Asked.of(found)
    taps |= asked.rows(prefetched)
    called_back = asked.called_back
  elif prefetched is not None:
    raise ValueError(
      "`prefetched` was given, but no table is sharded. Call"
      " `zenjax.tables.shard` first."
    )

  def both(types, plain, taps):
    def loss(plain, taps):
      given = [plain.get(i, types[i]) for i in range(len(leaves))]
      outs, run = traced.run(given, found.rows, taps | called_back)
      return outs[0], (outs, {path: run.told[path] for path in found.sites})

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, **options)
    return both(plain, taps)

  (value, (outs, ids)), (grads, rows) = sharded_lookups.without_tables(
    traced, both, plain, taps
  )
  # If a loss is linear in the rows, its gradients do not depend on the lookups.
  # XLA:CPU could then update the table first, and would copy it.
  value, rows = lax.optimization_barrier((value, rows))
  grads |= _row_gradients(found, ids, rows)
  for i in traced.away:
    grads[i] = leaves[i].with_value(grads[i].as_by_owner())
  return [value, *outs[1:]], [grads[i] for i in range(found.wanted)]


def _row_gradients(found, ids, rows) -> dict[int, SparseRows]:
  """Returns gradients of tables by number of the leaf."""
  types = found.traced.types
  parts = {i: [] for i in found.rows}
  for path, site in found.sites.items():
    num_rows = math.prod(types[site.param].shape[:-1])
    flat = batch_layout.flattened(ids[path].to, rows[path], len(site.lengths))
    parts[site.param].append(SparseRows(*flat, num_rows))
  for i, of_lookups in parts.items():
    if not of_lookups:
      # For a sharded table, each device has a part of the gradient.
      padding = found.traced.leaves[i].devices if i in found.traced.away else 0
      of_lookups.append(sparse_rows.no_rows(types[i], padding))
  return {i: sparse_rows.concatenated(x) for i, x in parts.items()}
