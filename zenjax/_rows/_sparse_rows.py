"""A table of which only some rows are held."""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from zenjax import _bitmap
from zenjax import _collectives
from zenjax._partition import Layout
from zenjax._rows import _row_ids
from zenjax._rows._no_array import NoArray
from zenjax.kernels.mask_pack.reference import row_mask
from zenjax.kernels.operations import compact
from zenjax.kernels.operations import mask_pack


class Facts(NamedTuple):
  """What is known of rows beside what they are."""

  unique: bool = False  # every index stands once
  by_value: bool = False  # values decided which rows these are


@jax.tree_util.register_pytree_with_keys_class
class SparseRows(NoArray):
  """Rows of a `[num_rows, D]` array; all others are zero.

  What `zenjax.value_and_grad` returns for a table that is only looked up, and
  `zen_sync(output="rows")` for a table that travels sparse. A pytree of two
  leaves: ids, in a dtype that admits no arithmetic, and values. A transform
  that scales or adds up all leaves therefore raises a TypeError, where it would
  silently change plain integers. Optax goes inside `zenjax.lazy_rows`.

  Attributes:
    indices: `[K] int32`; `num_rows`, and all else beyond the table, marks
      padding. Negative ones count from the end, as where JAX indexes. An index
      that stands twice means the sum of its rows. Integers of any dtype may be
      given; those that int32 cannot hold are beyond the table.
    values: `[K, D]`.
    num_rows: Rows of the whole table: static.

  Under `jax.vmap` each of a batch is a SparseRows of its own. Outside of it
  several lie in one, with more dimensions in front, as `jax.vmap` and
  `jax.lax.scan` stack them: `to_dense` and `combine` take that too, and all
  else that needs one table raises a ValueError.

  Raises:
    TypeError: `indices` are no integers.
    ValueError: Shapes do not fit, or `num_rows` does not fit int32.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> rows = zenjax.SparseRows(
    ...   indices=jnp.array([1, 3, 1]), values=jnp.ones((3, 2)), num_rows=3
    ... )
    >>> rows
    SparseRows(rows [1 3 1] of 3, values float32[3,2])
    >>> rows.to_dense().tolist()
    [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    >>> rows.combine()
    SparseRows(rows [1 3 3] of 3, values float32[3,2])
  """

  # `facts` are no part of the pytree, or trees of the same rows would differ:
  # what is rebuilt is sorted once more.
  __slots__ = ("_ids", "values", "num_rows", "facts")

  def __init__(self, indices: Any, values: Any, num_rows: int):
    indices, values = _row_ids.given(indices), jnp.asarray(values)
    _require(indices, values, num_rows)
    self._ids = _row_ids.seal(_row_ids.narrowed(indices, num_rows))
    self.values = values
    self.num_rows = num_rows
    self.facts = Facts()

  @property
  def indices(self) -> Any:
    ids = self._ids
    return _row_ids.unseal(ids) if _row_ids.is_sealed(ids) else ids

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the whole table: `(num_rows, D)`; of a stack, of all of them."""
    *stacked, _, width = self.values.shape
    return *stacked, self.num_rows, width

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    """Elements of the whole table."""
    return math.prod(self.shape)

  @property
  def dtype(self) -> Any:
    return self.values.dtype

  @property
  def capacity(self) -> int:
    """`K`, rows that there is room for."""
    return self.values.shape[-2]

  def to_dense(self) -> jax.Array:
    """The whole table, `[num_rows, D]`."""
    if self.ndim > 2:
      return jax.vmap(SparseRows.to_dense)(self)
    zeros = jnp.zeros(self.shape, self.values.dtype)
    return zeros.at[self.indices].add(self.values, mode="drop")

  def combine(self) -> "SparseRows":
    """The same with every index once; padding is zero.

    16-bit values are summed in float32. Indices ascend after it, and it costs a
    sort of `K` ids, unless every index stands once already, as in what
    `zen_sync` and `combine` return.
    """
    if self.ndim > 2:
      return jax.vmap(SparseRows.combine)(self)
    return self if self.facts.unique or not self.capacity else combined(self)

  def as_unique(self) -> "SparseRows":
    """The same, of which the caller knows that no index stands twice.

    Padding must be zero.
    """
    return self.with_facts(self.facts._replace(unique=True))

  def with_facts(self, facts: Facts) -> "SparseRows":
    """The same, of which the caller knows `facts`."""
    rows = SparseRows.tree_unflatten(*reversed(self.tree_flatten()))
    rows.facts = facts
    return rows

  def with_values(self, values: Any) -> "SparseRows":
    """The same rows with other `values: [K, D']`."""
    rows = SparseRows(self.indices, values, self.num_rows)
    rows.facts = self.facts
    return rows

  def __add__(self, other: Any) -> "SparseRows":
    """Both, one behind the other: `K` is the sum of both.

    Raises:
      TypeError, ValueError: `other` is no SparseRows, or of another table.
    """
    if not isinstance(other, SparseRows):
      self._not_added(other)
    require_one("one that is added", self)
    return concatenated([self, other])

  @classmethod
  def in_place(cls, table: jax.Array) -> "SparseRows":
    """All rows of `table: [R, D]`, those of zeros as padding; no copy."""
    num_rows = table.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    nonzero = row_mask(table).nonzero
    rows = cls(jnp.where(nonzero, row, num_rows), table, num_rows)
    return rows.with_facts(Facts(unique=True, by_value=True))

  @classmethod
  def from_dense(cls, table: jax.Array, capacity: int) -> "SparseRows":
    """The nonzero rows of `table: [R, D]`, the first `capacity` of them."""
    if not len(table):
      return cls(
        jnp.zeros(capacity, jnp.int32),
        jnp.zeros((capacity, table.shape[1]), table.dtype),
        0,
      )
    layout = Layout(num_rows=table.shape[0], groups=1)
    bitmap = _bitmap.index(mask_pack(table, layout).words)
    first = jnp.zeros(1, jnp.int32)
    slots, rows = compact(table, bitmap, layout, first, capacity)
    row = layout.row(jnp.zeros_like(slots), slots)
    return cls(row[0], rows[0], table.shape[0])

  def __repr__(self) -> str:
    ids = self.indices
    known = isinstance(ids, jax.Array) and not isinstance(ids, Tracer)
    which = np.array2string(np.asarray(ids), threshold=8) if known else "..."
    values = self.values
    if hasattr(values, "shape"):
      values = f"{values.dtype}[{','.join(map(str, values.shape))}]"
    return f"SparseRows(rows {which} of {self.num_rows}, values {values})"

  def tree_flatten_with_keys(self):
    key = jax.tree_util.GetAttrKey
    children = ((key("indices"), self._ids), (key("values"), self.values))
    return children, self.num_rows

  def tree_flatten(self):
    return (self._ids, self.values), self.num_rows

  @classmethod
  def tree_unflatten(cls, num_rows, children) -> "SparseRows":
    # Children may be anything: specs, shapes, None. Nothing is checked here.
    self = object.__new__(cls)
    self._ids, self.values = children
    self.num_rows = num_rows
    self.facts = Facts()
    return self


def combined(rows: SparseRows) -> SparseRows:
  """See `SparseRows.combine`."""
  ids, values = rows.indices, rows.values
  # As everywhere in JAX, what is negative counts from the end.
  ids = jnp.where(ids < 0, ids + rows.num_rows, ids)
  ids = jnp.where(ids < 0, rows.num_rows, ids)
  order = jnp.argsort(ids, stable=True)
  ids = ids[order]
  starts = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
  segment = jnp.cumsum(starts, dtype=jnp.int32)[: len(ids)] - 1
  wide = _collectives.accumulator(values.dtype)
  # What stands for nothing may hold anything, NaN included.
  real = (ids < rows.num_rows)[:, None]
  sorted_values = jnp.where(real, values[order].astype(wide), 0)
  total = (
    jnp.zeros_like(sorted_values)
    .at[segment]
    .add(sorted_values, indices_are_sorted=True)
  )
  unique = (
    jnp.full_like(ids, rows.num_rows)
    .at[segment]
    .set(ids, indices_are_sorted=True)
  )
  total = total.astype(values.dtype)
  return SparseRows(unique, total, rows.num_rows).as_unique()


def concatenated(parts: Sequence[SparseRows]) -> SparseRows:
  """All parts, one behind the other.

  Raises:
    ValueError: They are not of one table.
  """
  first = parts[0]
  for part in parts[1:]:
    if part.shape != first.shape:
      raise ValueError(
        "SparseRows that are added must be rows of one table: `num_rows` and"
        f" width must agree, got {first.shape} and {part.shape}."
      )
  if len(parts) == 1:
    return first
  return SparseRows(
    jnp.concatenate([part.indices for part in parts]),
    jnp.concatenate([part.values for part in parts]),
    first.num_rows,
  )


def require_one(what: str, rows: SparseRows) -> None:
  """Raises ValueError for several SparseRows stacked in one."""
  if rows.ndim > 2:
    raise ValueError(
      f"SparseRows must be of one table, `values: [K, D]`, and {what} has"
      f" values of shape {rows.values.shape}: several in a stack, as jax.vmap"
      " and jax.lax.scan make them; use them inside jax.vmap, or give"
      " `.to_dense()`."
    )


def is_rows(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, SparseRows)


def _require(indices, values, num_rows):
  if not jnp.issubdtype(indices.dtype, jnp.integer):
    raise TypeError(
      f"`indices` of SparseRows must be integers, got {indices.dtype}; convert"
      " ids with `.astype(jnp.int32)`."
    )
  fits = values.ndim == 2 and indices.shape == values.shape[:1]
  if not fits:
    raise ValueError(
      "SparseRows takes `indices: [K]` and `values: [K, D]`, got"
      f" {indices.shape} and {values.shape}; reshape look-ups of several"
      " dimensions to one."
    )
  if not 0 <= num_rows < 2**31 - 1:
    raise ValueError(
      f"`num_rows` must be 0 to 2**31 - 2, got {num_rows!r}: indices are int32."
    )
