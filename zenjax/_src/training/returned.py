"""Combines the `aux` of all devices' steps, as `aux_specs` says."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows


@jax.tree_util.register_pytree_with_keys_class
class RowSets(dict[str, jax.Array]):
  """Maps tables to touched rows: a bit for each row, `[n, ceil(R / 8)] uint8`.

  `data_parallel` joins row sets of all devices by their type.
  """

  def tree_flatten_with_keys(self):
    keyed = [(jax.tree_util.DictKey(name), self[name]) for name in sorted(self)]
    return keyed, tuple(sorted(self))

  @classmethod
  def tree_unflatten(cls, names, packed):
    return cls(zip(names, packed))


AuxSpecs = str | Mapping[str, str] | None

_WORDS = ("mean", "sum", "batch", "same")


def check(aux_specs: Any) -> AuxSpecs:
  """Returns `aux_specs`; raises `ValueError` if it holds other words."""
  named = isinstance(aux_specs, Mapping)
  for word in aux_specs.values() if named else (aux_specs,):
    if word not in _WORDS and (named or word is not None):
      raise ValueError(
        "`aux_specs` must be one of 'mean', 'sum', 'batch' and 'same', or map"
        f" names of leaves of `aux` to these words, got {aux_specs!r}."
      )
  return aux_specs


def as_array(x: Any) -> Any:
  """Returns numbers of Python as arrays of JAX."""
  return x if leaf_util.is_array(x) else jnp.asarray(x)


def of_all(
  aux: Any, aux_specs: AuxSpecs, axes: Axes
) -> tuple[list[Any], list[str], Any]:
  """Averages and sums leaves of one device's `aux`.

  Returns:
    The leaves; for each, "batch" if the devices' parts are to be joined or
    "same" if it is equal on all devices; and the structure.
  """
  is_node = lambda x: isinstance(x, RowSets) or is_rows(x)
  aux = jax.tree.map(as_array, aux)
  named = leaf_util.named_leaves(aux, is_node)
  given = _given([name for name, _ in named], aux_specs)
  words = [_word(leaf, word) for (_, leaf), word in zip(named, given)]
  _require_declared([x for x, word in zip(named, words) if word is None])
  leaves, kinds = [], []
  for (name, leaf), word in zip(named, words):
    _require_fits(name, leaf, word)
    if word == "mean":
      leaf = collectives.pmean(leaf, axes)
    elif word == "sum":
      leaf = collectives.psum(_wide(leaf), axes)
    leaves.append(leaf)
    kinds.append("batch" if word == "batch" else "same")
  return leaves, kinds, jax.tree.structure(aux, is_leaf=is_node)


def _fitting(leaf: Any) -> list[str]:
  """Returns the words that a leaf may have, the likeliest first."""
  if is_rows(leaf):
    return ["same"]
  joined = ["batch"] if leaf.ndim else []
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    return ["same", *joined]
  mean = ["mean"] if jnp.issubdtype(leaf.dtype, jnp.inexact) else []
  return [*joined, "sum", "same", *mean]


def _word(leaf: Any, given: str | None) -> str | None:
  """Returns the word for a leaf: the given one, a default, or None."""
  if isinstance(leaf, RowSets):
    return "batch"
  words = _fitting(leaf)
  mean = "mean" in words and "batch" not in words
  return given or ("mean" if mean else None)


def _require_declared(leaves: Sequence[tuple[str, Any]]) -> None:
  if not leaves:
    return
  named = ", ".join(f"{name!r}: {_fitting(leaf)[0]!r}" for name, leaf in leaves)
  shown = ", ".join(f"{name!r} ({_shown(leaf)})" for name, leaf in leaves)
  raise ValueError(
    f"`aux_specs` must say what becomes of {shown} in `aux`; only floating"
    f" scalars are averaged by default. Write `aux_specs={{{named}}}`: 'mean'"
    " and 'sum' are over devices, 'batch' joins their parts along the first"
    " dimension, and 'same' takes the value of one device."
  )


def _require_fits(name: str, leaf: Any, word: str | None) -> None:
  words = ["batch"] if isinstance(leaf, RowSets) else _fitting(leaf)
  if word not in words:
    remedy = " Average it with `zenjax.sparse_pmean(rows, axis_name)` before."
    raise ValueError(
      f"`aux_specs` gives {word!r} for leaf {name!r} of `aux`, which is"
      f" {_shown(leaf)} and can only be {' or '.join(map(repr, words))}."
      f"{remedy if is_rows(leaf) else ''}"
    )


def _shown(x: Any) -> str:
  kind = "SparseRows of " if is_rows(x) else ""
  return f"{kind}{x.dtype}[{','.join(map(str, x.shape))}]"


def _given(names: Sequence[str], aux_specs: AuxSpecs) -> list[str | None]:
  """Returns the word for each leaf in `aux_specs`, or None."""
  if not isinstance(aux_specs, Mapping):
    return [aux_specs] * len(names)
  fitting = [
    [k for k in aux_specs if name == k or name.startswith(f"{k}.")]
    for name in names
  ]
  for name in aux_specs:
    if not any(name in fits for fits in fitting):
      raise ValueError(
        f"`aux_specs` names {name!r}, which is not a leaf of `aux`. Its leaves"
        f" are {', '.join(map(repr, names)) or 'none'}."
      )
  # The longest name is the most specific.
  return [aux_specs[max(x, key=len)] if x else None for x in fitting]


def _wide(x: jax.Array) -> jax.Array:
  """Converts small integers to 32 bits, because their sums would overflow."""
  if jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.itemsize >= 4:
    return x
  unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
  return x.astype(jnp.uint32 if unsigned else jnp.int32)
