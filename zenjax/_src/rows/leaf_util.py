"""Names leaves, chooses the sparse ones, and reshapes them to tables."""

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
# use the layout [vocabulary, width]. Kernels of dense layers are rarely more
# than four times as tall as wide, which is the shape of a transformer's
# down-projection. Below 16,384 elements latency decides, and one psum has less.
# The dtype does not count, because `zenjax.check_step` also runs in float64.
_TALL = 4
_MIN_ROWS = 512
_MIN_ELEMENTS = 1 << 14

# The name of a tree that is a single leaf.
ONLY = "leaf"
# The most names in a message.
_SHOWN = 12


def named_leaves(
  tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
  """Returns `(name, leaf)` for each leaf; names are unique.

  A name is the leaf's keys, joined by dots. The key inside of a box, such as a
  variable of nnx, is left out. If keys with dots make two names equal, as in
  `{"a.b": x, "a": {"b": y}}`, the names are `['a.b']` and `['a']['b']`.
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
  names = []
  for path, _ in flat:
    while path and _is_box(path[-1]):  # In nnx, a table is in two boxes.
      path = path[:-1]
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    names.append(name or ONLY)
  counts = collections.Counter(names)
  return [
    (jax.tree_util.keystr(path) if counts[name] > 1 else name, leaf)
    for name, (path, leaf) in zip(names, flat)
  ]


def map_named(
  f: Callable[[str, Any], Any],
  tree: Any,
  is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
  """Returns the tree of `f(name, leaf)`, with names of `named_leaves`."""
  structure = jax.tree.structure(tree, is_leaf=is_leaf)
  return structure.unflatten([f(*x) for x in named_leaves(tree, is_leaf)])


def _is_box(key: Any) -> bool:
  """Returns True for the key inside of a variable or a sharded table."""
  name = getattr(key, "name", None)
  return name == "value" or str(name).startswith("value_on_")


def refuse_sharded(
  tree: Any,
  argument: str,
  by: str,
  remedy: str = "Use `zenjax.sharded_optimizer(tx, axis_name)` in place of"
  " zen_sync and lazy_rows. With `optax.partition`, you can use it for this"
  " table alone",
) -> None:
  """Raises ValueError if a tree has a sharded table, or an update of one.

  Args:
    tree: Any pytree.
    argument: The name of the argument.
    by: The name of the function, which takes only replicated tables.
    remedy: What to do instead.
  """
  is_sharded = lambda x: isinstance(x, NoArray) and not is_rows(x)
  for name, leaf in named_leaves(tree, is_sharded):
    if is_sharded(leaf):
      raise ValueError(
        f"`{argument}` of {by} must not hold a ShardedTable, but {name!r} is"
        f" sharded. {remedy}."
      )


def is_array(x: Any) -> bool:
  """Returns True for arrays of JAX and NumPy; false for Python's numbers."""
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


def arrays_of(
  tree: Any, is_array: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
  """Takes arrays, or other nodes, out of a tree.

  Args:
    tree: Any pytree.
    is_array: Returns True for the nodes to take.

  Returns:
    The nodes, and a function that puts other values in their place.
  """
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_array)
  taken = {i: x for i, x in enumerate(leaves) if is_array(x)}

  def back(arrays: Sequence[Any]) -> Any:
    new = dict(zip(taken, arrays, strict=True))
    return structure.unflatten([new.get(i, x) for i, x in enumerate(leaves)])

  return list(taken.values()), back


def shapes(
  leaves: Sequence[tuple[str, Any]],
) -> dict[str, tuple[tuple[int, ...], str]]:
  """Returns `(shape, dtype)` by name; for SparseRows, the table's."""
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
  """Tells for each leaf of `tree` if it is synchronized sparsely.

  Args:
    tree: Arrays and SparseRows.
    sparse: The user's choice, as `zen_sync` takes it.
    unit: The part of a leaf that is sent as a whole, as `zen_sync` takes it.
    argument: The name by which users give `sparse`.

  Raises:
    ValueError: `sparse` is not a prefix of the tree, or not of bools.
    TypeError: An explicitly chosen leaf is not floating.
  """
  whole = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_rows(x) else x
  tree = jax.tree.map(whole, tree, is_leaf=is_rows)
  leaves = named_leaves(tree)
  if sparse is None:
    return [is_table(leaf, unit) for _, leaf in leaves]
  chosen = explicit(tree, sparse, argument)
  for (name, leaf), wanted in zip(leaves, chosen):
    if wanted and not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise TypeError(
        f"`{argument}` chose leaf {name!r}, which is not floating, got dtype"
        f" {leaf.dtype}. Leave it out of `{argument}`."
      )
  # A leaf without elements has no row to send.
  return [wanted and leaf.size > 0 for (_, leaf), wanted in zip(leaves, chosen)]


def explicit(tree: Any, sparse: SparseSpec, argument: str) -> list[bool]:
  """Returns the user's choice for each leaf, from a prefix or a callable."""
  leaves = named_leaves(tree)
  if callable(sparse):
    return [bool(sparse(name, leaf)) for name, leaf in leaves]
  strings = [x for x in jax.tree.leaves(sparse) if isinstance(x, str)]
  by_name = (
    " To choose by name, write"
    f" `{argument}=lambda name, leaf: name in {strings or ['table']!r}`."
  )
  try:
    chosen = jax.tree.leaves(jax.tree.broadcast(sparse, tree))
  except ValueError as error:
    raise ValueError(
      f"`{argument}` must be a pytree prefix of bools, or a function of name"
      f" and leaf, got {sparse if strings else jax.tree.structure(sparse)} for"
      f" parameters {[name for name, _ in leaves]}.{by_name}"
    ) from error
  for (name, _), wanted in zip(leaves, chosen):
    if not isinstance(wanted, bool | np.bool_):
      raise ValueError(
        f"`{argument}` must be True or False for every leaf, got {wanted!r} for"
        f" leaf {name!r}.{by_name}"
      )
  return list(map(bool, chosen))


def warn_of_none(
  tree: Any, sparse: SparseSpec, chosen: Sequence[Any], argument: str
) -> None:
  """Warns of a callable that chooses no leaf of `tree`.

  It does not warn for masked trees, whose other parts may be chosen.
  """
  is_masked = lambda node: isinstance(node, optax.MaskedNode)
  named = named_leaves(tree, lambda x: is_masked(x) or is_rows(x))
  is_part = any(is_masked(leaf) for _, leaf in named)
  if not named or not callable(sparse) or any(chosen) or is_part:
    return
  shown = ", ".join([repr(name) for name, _ in named[:_SHOWN]])
  more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
  warnings.warn(
    f"`{argument}` should choose a leaf, but it is False for all: {shown}"
    f"{more}. Compare it with these names, or leave it out.",
    stacklevel=3,
  )


def is_table(leaf: Any, unit: Unit = "row") -> bool:
  """Returns True if a leaf is synchronized sparsely by default."""
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    return False
  if leaf.size < _MIN_ELEMENTS:
    return False
  if unit != "row":
    return True
  rows, width = leaf.shape[0], leaf.shape[-1]
  return leaf.ndim == 2 and rows >= _MIN_ROWS and rows > _TALL * width


def table_shape(leaf: Any, unit: Unit) -> tuple[int, int]:
  """Returns `(R, D)` of a leaf, with all dimensions except the last as rows.

  With `unit="row"`, a leaf of one dimension has rows of one element.
  """
  if unit == "element":
    return leaf.size, 1
  if isinstance(unit, int):
    return -(-leaf.size // unit), unit
  width = leaf.shape[-1] if leaf.ndim > 1 else 1
  return leaf.size // width if width else 0, width


def as_table(leaf: Any, unit: Unit) -> Any:
  """Reshapes `leaf` to `[R, D]`, padded with zeros; keeps SparseRows."""
  if is_rows(leaf):
    return leaf
  rows, width = table_shape(leaf, unit)
  if rows * width != leaf.size:
    flat = jnp.pad(leaf.reshape(-1), (0, rows * width - leaf.size))
    return flat.reshape(rows, width)
  return leaf.reshape(rows, width)


def from_table(table: jax.Array, like: jax.Array) -> jax.Array:
  """Reshapes a table to the leaf that it was made from."""
  return table.reshape(-1)[: like.size].reshape(like.shape)
