"""Which leaves travel sparse, and how a leaf is seen as a table of rows."""

import collections
from collections.abc import Callable, Sequence
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core.arguments import SparseSpec
from zenjax._src.core.arguments import Unit
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import NoArray

# The default rule: embedding tables are tall. Flax, Haiku, Equinox and Keras
# lay them out as [vocabulary, width]; kernels of dense layers are rarely more
# than four times as tall as wide, the down-projection of a transformer being
# just that. Below 16,384 elements latency decides, and one psum has less. Their
# dtype does not count: `zenjax.check_step` runs a step in float64 too.
_TALL = 4
_MIN_ROWS = 512
_MIN_ELEMENTS = 1 << 14

# The name of the leaf of a tree that is one leaf.
ONLY = "leaf"
# Names that a message holds.
_SHOWN = 12


def named_leaves(
  tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
  """`(name, leaf)` for each leaf; names are keys with dots, and unique.

  A box around an array, as a variable of nnx is, has the name of the array.
  Where keys that hold dots make two names equal, as in `{"a.b": x, "a":
  {"b": y}}`, these leaves are named by their keys in full: `['a.b']` and
  `['a']['b']`.
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
  names = []
  for path, _ in flat:
    while path and _is_box(path[-1]):  # A table may be in two, as in nnx.
      path = path[:-1]
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    names.append(name or ONLY)
  often = collections.Counter(names)
  return [
    (jax.tree_util.keystr(path) if often[name] > 1 else name, leaf)
    for name, (path, leaf) in zip(names, flat)
  ]


def _is_box(key: Any) -> bool:
  """Returns True for the key of what a variable or a sharded table holds."""
  name = getattr(key, "name", None)
  return name == "value" or str(name).startswith("value_on_")


def refuse_sharded(tree: Any, argument: str, by: str) -> None:
  """Raises ValueError where a tree holds a sharded table, or its update.

  Args:
    tree: Any pytree.
    argument: Its name.
    by: Who takes replicated tables only.
  """
  is_sharded = lambda x: isinstance(x, NoArray) and not is_rows(x)
  for name, leaf in named_leaves(tree, is_sharded):
    if is_sharded(leaf):
      raise ValueError(
        f"`{argument}` of {by} must not hold a ShardedTable, and leaf {name!r}"
        " is one, whose rows lie on the devices that own them; use"
        " `zenjax.sharded_optimizer(tx, axis_name)` instead of zen_sync and"
        " lazy_rows, or `zenjax.tables.unshard`."
      )


def is_array(x: Any) -> bool:
  """Returns True for an array of JAX or NumPy, which a program computes with.

  Numbers of Python are none, nor is what a module holds beside arrays.
  """
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


def arrays_of(
  tree: Any, is_array: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
  """Takes arrays, or other nodes, out of a tree.

  Returns:
    These, and a function that puts others in their place.
  """
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_array)
  arrays = [x for x in leaves if is_array(x)]
  rest = [_TAKEN if is_array(x) else x for x in leaves]

  def back(arrays: Sequence[Any]) -> Any:
    left = iter(arrays)
    return structure.unflatten([next(left) if x is _TAKEN else x for x in rest])

  return arrays, back


_TAKEN = object()


def shapes(
  leaves: Sequence[tuple[str, Any]],
) -> dict[str, tuple[tuple[int, ...], str]]:
  """`(shape, dtype)` of each `(name, leaf)`, of SparseRows the table's."""
  return {
    name: (tuple(leaf.shape), jnp.dtype(leaf.dtype).name)
    for name, leaf in leaves
  }


def select(
  tree: Any,
  sparse: SparseSpec,
  unit: Unit,
  argument: str = "sparse",
) -> list[bool]:
  """For each leaf of `tree`, in order, whether it travels sparse.

  Args:
    tree: Arrays and SparseRows.
    sparse: As given to `zen_sync`.
    unit: What of a leaf is sent as a whole.
    argument: Name of `sparse` where users give it.

  Raises:
    ValueError: `sparse` is no prefix of the tree, or holds other than bools.
    TypeError: A leaf chosen explicitly is not floating.
  """
  found, structure = jax.tree.flatten(tree, is_leaf=is_rows)
  # SparseRows as the arrays that they stand for.
  tree = structure.unflatten(
    [jax.ShapeDtypeStruct(x.shape, x.dtype) if is_rows(x) else x for x in found]
  )
  leaves = named_leaves(tree)
  if sparse is None:
    return [is_table(leaf, unit) for _, leaf in leaves]
  chosen = explicit(tree, sparse, argument)
  for (name, leaf), wanted in zip(leaves, chosen):
    if wanted and not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise TypeError(
        f"`{argument}` chose leaf {name!r}, which must be floating to travel"
        f" sparse, got dtype {leaf.dtype}; leave it out of `{argument}`."
      )
  # A leaf without elements has no row to send.
  return [wanted and leaf.size > 0 for (_, leaf), wanted in zip(leaves, chosen)]


def explicit(tree: Any, sparse: SparseSpec, argument: str) -> list[bool]:
  """Returns what `argument` says of each leaf: a prefix, or a callable."""
  leaves = named_leaves(tree)
  if callable(sparse):
    return [bool(sparse(name, leaf)) for name, leaf in leaves]
  try:
    chosen = jax.tree.leaves(jax.tree.broadcast(sparse, tree))
  except ValueError as error:
    raise ValueError(
      f"`{argument}` must be a pytree prefix of the leaves: it has structure"
      f" {jax.tree.structure(sparse)}, they have {jax.tree.structure(tree)};"
      " give a bool for every subtree, or a callable (name, leaf) -> bool."
    ) from error
  for (name, _), wanted in zip(leaves, chosen):
    if not isinstance(wanted, bool):
      raise ValueError(
        f"`{argument}` must give a bool for every leaf, got {wanted!r} for leaf"
        f" {name!r}; give True, False or a callable (name, leaf) -> bool."
      )
  return chosen


def warn_of_none(
  tree: Any, sparse: SparseSpec, chosen: Sequence[Any], argument: str
) -> None:
  """Warns of a callable that chooses no leaf of `tree`.

  Silent for a part of a tree, whose other parts it may be meant for.
  """
  is_out = lambda node: isinstance(node, optax.MaskedNode)
  parts = jax.tree.leaves(tree, is_leaf=lambda x: is_out(x) or is_rows(x))
  if not callable(sparse) or any(chosen) or any(map(is_out, parts)):
    return
  names = [name for name, _ in named_leaves(tree, is_rows)]
  if names:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    warnings.warn(
      f"`{argument}` should choose a leaf, and it is False for all: {shown}"
      f"{more}; compare with these names, or leave it out.",
      stacklevel=3,
    )


def is_table(leaf: Any, unit: Unit = "row") -> bool:
  """Returns True if a leaf travels sparse where the user does not say."""
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    return False
  if leaf.size < _MIN_ELEMENTS:
    return False
  if unit != "row":
    return True
  rows, width = leaf.shape[0], leaf.shape[-1]
  return leaf.ndim == 2 and rows >= _MIN_ROWS and rows > _TALL * width


def table_shape(leaf: Any, unit: Unit) -> tuple[int, int]:
  """`(R, D)` of a leaf: rows fold all dimensions but the last.

  With `unit="row"` a leaf of one dimension has rows of one element.
  """
  if unit == "element":
    return leaf.size, 1
  if isinstance(unit, int):
    return -(-leaf.size // unit), unit
  width = leaf.shape[-1] if leaf.ndim > 1 else 1
  return leaf.size // width if width else 0, width


def as_table(leaf: Any, unit: Unit) -> Any:
  """`leaf` as `[R, D]`, the last block padded with zeros; SparseRows stay."""
  if is_rows(leaf):
    return leaf
  rows, width = table_shape(leaf, unit)
  if rows * width != leaf.size:
    flat = jnp.pad(leaf.reshape(-1), (0, rows * width - leaf.size))
    return flat.reshape(rows, width)
  return leaf.reshape(rows, width)


def from_table(table: jax.Array, like: jax.Array) -> jax.Array:
  """Inverse of `as_table`."""
  return table.reshape(-1)[: like.size].reshape(like.shape)
