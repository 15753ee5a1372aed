"""`value_and_grad`: gradients of embedding tables as rows."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax

from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import batch_layout
from zenjax._src.rows import sparse_rows
from zenjax._src.rows import table_uses
from zenjax._src.rows import tapping
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.rows.tapping import Nest
from zenjax._src.rows.tapping import View


def value_and_grad(
  fun: Callable[..., Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  holomorphic: bool = False,
  allow_int: bool = False,
  *,
  tables: SparseSpec = None,
) -> Callable[..., tuple[Any, Any]]:
  """`jax.value_and_grad`, with gradients of embedding tables as `SparseRows`.

  The loss is traced and tables that it only looks up are found: through
  `jnp.take`, `table[ids]`, the embedding layers of Flax, Haiku and Equinox,
  inside `jit`, `vmap`, `scan`, `jax.checkpoint`, after casts, factors and a row
  set to a constant for padding. Models need no change. Their gradients are the
  rows looked up, one for each look-up: no array of the table's size is made.
  All other gradients are as `jax.value_and_grad` gives them, of tables too that
  are used in another way (as the weights of a softmax, in a norm, in a `cond`),
  or are looked up as often as they have rows; `explain_tables` says which and
  why.

  Under `shard_map(check_vma=True)` all gradients are those of the device's own
  part, as if `fun` had been given `zenjax.unsummed(params)`.

  Args:
    fun: As for `jax.value_and_grad`.
    argnums: Likewise.
    has_aux: Likewise.
    holomorphic: Likewise.
    allow_int: Likewise.
    tables: Which leaves give rows: a pytree prefix of bools or a callable
      `(name, leaf) -> bool`. None finds all that can.

  Returns:
    A function with the arguments of `fun`. It returns the value and the
    gradients, in the structure of the arguments but for SparseRows in the place
    of tables.

  Raises:
    ValueError: `tables` demands rows of a leaf that is used otherwise; the
      message says where.

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
  options = dict(holomorphic=holomorphic, allow_int=allow_int)

  @functools.wraps(fun)
  def value_and_grad_of(*args, **kwargs):
    params, loss = partial_loss(fun, argnums, args, kwargs)
    structure = jax.tree.structure(params)
    traced = table_uses.trace(loss, params)
    found = table_uses.find(traced, params, tables)
    found.require()
    out, grads = _differentiate(traced, found, options)
    value = traced.rebuild(out)
    if has_aux and not (isinstance(value, tuple) and len(value) == 2):
      raise TypeError(
        "`fun` must return a pair (loss, aux) with `has_aux=True`, got"
        f" {jax.tree.structure(value)}; return a pair or leave `has_aux` out."
      )
    return value, jax.tree.unflatten(structure, grads)

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
  """`jax.grad`, with gradients of embedding tables as `SparseRows`.

  Args:
    fun: As for `value_and_grad`, like all others.
    argnums: See there.
    has_aux: See there.
    holomorphic: See there.
    allow_int: See there.
    tables: See there.

  Returns:
    A function that returns the gradients, or with `has_aux` the pair
    `(gradients, aux)`.

  Raises:
    ValueError: See there.

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


def partial_loss(
  fun: Callable[..., Any],
  argnums: int | Sequence[int],
  args: Sequence[Any],
  kwargs: dict[str, Any],
) -> tuple[Any, Callable[[Any], Any]]:
  """The arguments to differentiate by, and the loss as a function of them."""
  one = isinstance(argnums, int)
  wanted = (argnums,) if one else tuple(argnums)
  for i in wanted:
    if not -len(args) <= i < len(args):
      raise ValueError(
        f"`argnums` must be positions of the {len(args)} positional arguments,"
        f" got {i}; pass what is differentiated by position."
      )
  at = [i % len(args) for i in wanted]

  def loss(params):
    changed = list(args)
    for i, value in zip(at, (params,) if one else params):
      changed[i] = value
    return fun(*changed, **kwargs)

  return args[at[0]] if one else tuple(args[i] for i in at), loss


def _differentiate(traced, found, options):
  """`[loss, *aux]`, and the gradient of every leaf."""
  leaves = traced.leaves
  is_table = [i in found.rows for i in range(len(leaves))]
  plain = [x for x, is_ in zip(leaves, is_table) if not is_]
  taps = [site.tap() for site in found.sites]

  def loss(plain, taps):
    left = iter(plain)
    args = [
      View(i, x) if is_ else next(left)
      for i, (x, is_) in enumerate(zip(leaves, is_table))
    ]
    run = tapping.Run(taps=taps)
    outs = run.run(traced.jaxpr, traced.consts, args)
    outs = tapping.wholes(outs)
    return outs[0], (outs, run.ids)

  both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, **options)
  (value, (outs, ids)), (dense, rows) = both(plain, taps)
  # Of a loss that is linear in the rows, gradients would not wait for the
  # look-ups, and XLA:CPU would copy a table that is updated meanwhile.
  value, rows = lax.optimization_barrier((value, rows))
  outs = [value, *outs[1:]]
  parts: dict[int, list[SparseRows]] = {i: [] for i in found.rows}
  _collect(found.sites, ids, rows, leaves, parts)
  left = iter(dense)
  grads = [
    sparse_rows.concatenated(parts[i]) if is_ else next(left)
    for i, is_ in enumerate(is_table)
  ]
  return outs, grads


def _collect(sites, ids, values, leaves, parts, turns=0):
  """Gives every table the ids and gradients of its look-ups."""
  for site, i, x in zip(sites, ids, values):
    if isinstance(site, Nest):
      inner = turns + (site.length is not None)
      _collect(site.sites, i, x, leaves, parts, inner)
    else:
      flat = batch_layout.flattened(i, x, turns)
      found = SparseRows(*flat, leaves[site.param].shape[0])
      parts[site.param].append(found)
