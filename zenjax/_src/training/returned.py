"""Makes what a step returns beside its state one of all devices'."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows

# Which rows of each table a device touched, as a step hands them out.


@jax.tree_util.register_pytree_with_keys_class
class RowSets(dict[str, jax.Array]):
  """Table -> `[n, ceil(R / 8)] uint8`: a bit for each row, of `n` devices.

  A type of its own: from `data_parallel` those of all devices come out.
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
  """`aux_specs`, if it says what can be said."""
  named = isinstance(aux_specs, Mapping)
  for word in aux_specs.values() if named else (aux_specs,):
    if word not in _WORDS and (named or word is not None):
      raise ValueError(
        "`aux_specs` must be one of 'mean', 'sum', 'batch' and 'same' for all"
        " leaves of `aux`, or map names of leaves to these words, got"
        f" {aux_specs!r}; leave out the leaves that need no word."
      )
  return aux_specs


def of_all(
  aux: Any, aux_specs: AuxSpecs, axes: Axes
) -> tuple[list[Any], list[str], Any]:
  """Averages and sums leaves of one device's `aux`.

  Returns:
    The leaves; "batch" for each whose parts are to be joined, "same" for each
    that all devices have in common; and the structure.
  """
  is_node = lambda x: isinstance(x, RowSets) or is_rows(x)
  as_array = lambda x: x if leaf_util.is_array(x) else jnp.asarray(x)
  aux = jax.tree.map(as_array, aux)
  named = leaf_util.named_leaves(aux, is_node)
  asked = _asked([name for name, _ in named], aux_specs)
  words: list[Any] = [
    word or _usual(leaf) for (_, leaf), word in zip(named, asked)
  ]
  _require_declared([x for x, word in zip(named, words) if word is None])
  leaves = []
  for (name, leaf), word in zip(named, words):
    _require_fits(name, leaf, word)
    if word == "mean":
      leaf = collectives.pmean(leaf, axes)
    elif word == "sum":
      leaf = collectives.psum(_wide(leaf), axes)
    leaves.append(leaf)
  words = ["batch" if word == "batch" else "same" for word in words]
  return leaves, words, jax.tree.structure(aux, is_leaf=is_node)


def _fitting(leaf: Any) -> list[str]:
  """The words that a leaf may have, the likeliest first."""
  if isinstance(leaf, RowSets):
    return ["batch"]
  if is_rows(leaf):
    return ["same"]
  joined = ["batch"] if leaf.ndim else []
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    return ["same", *joined]
  mean = ["mean"] if jnp.issubdtype(leaf.dtype, jnp.inexact) else []
  return [*joined, "sum", "same", *mean]


def _usual(leaf: Any) -> str | None:
  """The word for a leaf of which `aux_specs` says nothing."""
  if isinstance(leaf, RowSets):
    return "batch"
  words = _fitting(leaf)
  return "mean" if "mean" in words and "batch" not in words else None


def _require_declared(leaves: Sequence[tuple[str, Any]]) -> None:
  if not leaves:
    return
  named = ", ".join(f"{name!r}: {_fitting(leaf)[0]!r}" for name, leaf in leaves)
  shown = ", ".join(f"{name!r} ({_shown(leaf)})" for name, leaf in leaves)
  raise ValueError(
    f"`aux_specs` must say what becomes of {shown} in `aux`, since only"
    " floating scalars are averaged by themselves. Write"
    f" `aux_specs={{{named}}}`: 'mean' and 'sum' are over devices, 'batch'"
    " joins the devices' parts along the first dimension, and 'same' takes one"
    " device's value because all have the same."
  )


def _require_fits(name: str, leaf: Any, word: str) -> None:
  words = _fitting(leaf)
  if word not in words:
    remedy = " Average it by `zenjax.sparse_pmean(rows, axis_name)` before."
    raise ValueError(
      f"`aux_specs` gives {word!r} for leaf {name!r} of `aux`, which is"
      f" {_shown(leaf)} and can only be {' or '.join(map(repr, words))}."
      f"{remedy if is_rows(leaf) else ''}"
    )


def _shown(x: Any) -> str:
  if isinstance(x, RowSets):
    return "row sets"
  kind = "SparseRows of " if is_rows(x) else ""
  return f"{kind}{x.dtype}[{','.join(map(str, x.shape))}]"


def _asked(names: Sequence[str], aux_specs: AuxSpecs) -> list[str | None]:
  """The word for each leaf, None where there is none."""
  if not isinstance(aux_specs, Mapping):
    return [aux_specs] * len(names)
  used, found = set(), []
  for name in names:
    fits = [k for k in aux_specs if name == k or name.startswith(f"{k}.")]
    used.update(fits)
    # The longest says most.
    found.append(aux_specs[max(fits, key=len)] if fits else None)
  unknown = [name for name in aux_specs if name not in used]
  if unknown:
    raise ValueError(
      f"`aux_specs` must name leaves of `aux`, got {unknown[0]!r}; those are"
      f" {', '.join(map(repr, names)) or 'none'}."
    )
  return found


def _wide(x: jax.Array) -> jax.Array:
  """Integers of less than 32 bits would soon be too large."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    return x
  if x.dtype != bool and x.dtype.itemsize >= 4:
    return x
  unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
  return x.astype(jnp.uint32 if unsigned else jnp.int32)
