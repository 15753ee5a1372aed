"""Makes what a step returns beside its state one of all devices'."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.training.replicas import Flow

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


class Outputs(NamedTuple):
  """Values that leave a device, by their specs."""

  same: Any  # a list
  batch: Any  # another

  @classmethod
  def specs(cls, axes: Axes) -> "Outputs":
    """Returns the specs of all leaves of each list."""
    return cls(PartitionSpec(), PartitionSpec(axes))


class Layout(NamedTuple):
  """How parts become the tree that they were."""

  words: list[str]
  structure: Any
  kept: Sequence[Any] = ()  # no arrays, for the word "kept"

  def whole(self, parts: Outputs) -> Any:
    """The tree, of arrays of all devices."""
    of = {"batch": iter(parts.batch), "kept": iter(self.kept)}
    same = iter(parts.same)
    return self.structure.unflatten([next(of.get(w, same)) for w in self.words])


def by_specs(
  leaves: Sequence[Any], specs: Sequence[PartitionSpec], structure: Any
) -> tuple[Outputs, Layout]:
  """Parts the leaves of a state; what is no array does not leave a device."""
  of = {"same": [], "batch": [], "kept": []}
  words = []
  for leaf, spec in zip(leaves, specs):
    word = "batch" if spec != PartitionSpec() else "same"
    words.append(word if leaf_util.is_array(leaf) else "kept")
    of[words[-1]].append(leaf)
  parts = Outputs(of["same"], of["batch"])
  return parts, Layout(words, structure, of["kept"])


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


def parted(
  aux: Any,
  flows: Sequence[Flow],
  aux_specs: AuxSpecs,
  axes: Axes,
  several: bool,
) -> tuple[Outputs, Layout]:
  """Averages, sums, and parts what goes out by which spec.

  Args:
    aux: Of one device.
    flows: Of its arrays, in order.
    aux_specs: As given by the user, checked.
    axes: Along which devices differ.
    several: Whether there is more than one device. One has nothing to tell
      apart, and what nobody can is let pass.
  """
  is_node = lambda x: isinstance(x, RowSets) or is_rows(x)
  named = leaf_util.named_leaves(aux, is_node)
  asked = _asked([name for name, _ in named], aux_specs)
  parts, words, rest = Outputs([], []), [], iter(flows)
  for (name, node), word in zip(named, asked):
    of_node = [next(rest) for _ in jax.tree.leaves(node)]
    leaf = _Leaf(name, node, of_node, axes, several)
    words.append(leaf.word(word))
    into = parts.batch if words[-1] == "batch" else parts.same
    into.append(leaf.reduced(words[-1]))
  structure = jax.tree.structure(aux, is_leaf=is_node)
  return parts, Layout(words, structure)


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


class _Leaf(NamedTuple):
  """A leaf of `aux`, or a node that is one thing."""

  name: str
  value: Any
  flows: Sequence[Flow]
  axes: Axes
  several: bool

  @property
  def differs(self) -> Axes:
    """Axes along which it may differ between devices."""
    apart = frozenset().union(*(flow.differs for flow in self.flows))
    return tuple(axis for axis in self.axes if axis in apart)

  def word(self, asked: str | None) -> str:
    """Returns what is done with it: what was asked for, or what is known."""
    if isinstance(self.value, RowSets):
      self._require(asked in (None, "batch"), asked, "is of every device")
      return "batch"
    if asked == "same":
      return asked
    if is_rows(self.value):
      self._require(asked is None, asked, "is SparseRows")
      return "same" if not self.differs else self._unknown()
    return self._allowed(asked) if asked else self._by_rule()

  def _by_rule(self) -> str:
    (flow,), dtype = self.flows, self.value.dtype
    if not self.differs:
      return "same"
    if jnp.issubdtype(dtype, jnp.inexact) and not self.value.ndim:
      return "mean"
    # A collective may have made it equal, and then nothing is to be added.
    if flow.counts and not flow.met & flow.differs:
      return "sum"
    if flow.examples is not None and flow.examples.dim == 0:
      return "batch"
    return self._unknown()

  def _allowed(self, asked: str) -> str:
    if asked != "mean":
      self._require(
        bool(self.differs) or not self.several,
        asked,
        "is equal on all devices already",
      )
    if asked == "batch":
      self._require(self.value.ndim > 0, asked, "has no dimension")
      return asked
    key = jnp.issubdtype(self.value.dtype, jax.dtypes.extended)
    exact = not jnp.issubdtype(self.value.dtype, jnp.inexact)
    self._require(not key, asked, "holds no numbers")
    self._require(
      not (exact and asked == "mean"), asked, "is of integers or booleans"
    )
    return asked

  def reduced(self, word: str) -> Any:
    """The value that leaves the device."""
    x = self.value
    if word == "mean" and self.differs:
      return collectives.pmean(x, self.differs)
    if word == "sum" and self.differs:
      return collectives.psum(_wide(x), self.differs)
    return x

  def _require(self, fits: bool, asked: Any, what: str) -> None:
    if not fits:
      raise ValueError(
        f"`aux_specs` must fit the leaves of `aux`, got {asked!r} for leaf"
        f" {self.name!r}, {self._shown}, which {what}; leave it out of"
        " `aux_specs`, or give another word."
      )

  def _unknown(self) -> str:
    if not self.several:
      return "same"
    raise ValueError(
      "`step` must return in `aux` what is equal on all devices, floating"
      " scalars, integer sums over examples or arrays with a row for each"
      f" example, and leaf {self.name!r}, {self._shown}, is not known to be"
      f" any; say what it is by `aux_specs={{{self.name!r}: word}}`: {_CHOICE}"
      + self._also
    )

  @property
  def _also(self) -> str:
    if is_rows(self.value):
      return (
        " SparseRows can only be 'same': give `zenjax.sparse_pmean(rows,"
        " axis_name)`."
      )
    return ""

  @property
  def _shown(self) -> str:
    x = self.value
    if isinstance(x, RowSets):
      return "row sets"
    shape = ",".join(map(str, x.shape))
    kind = "SparseRows of " if is_rows(x) else ""
    return f"{kind}{x.dtype}[{shape}]"


_CHOICE = (
  "'mean' or 'sum' over devices, 'batch' to join the devices' parts along the"
  " first dimension, or 'same' if it is equal on all."
)


def _wide(x: jax.Array) -> jax.Array:
  """Integers of less than 32 bits would soon be too large."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    return x
  if x.dtype != bool and x.dtype.itemsize >= 4:
    return x
  unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
  return x.astype(jnp.uint32 if unsigned else jnp.int32)
