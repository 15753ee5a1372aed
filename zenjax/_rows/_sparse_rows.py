"""A table of which only some rows are held."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from zenjax import _bitmap
from zenjax._partition import Layout
from zenjax.kernels.compact.reference import compact
from zenjax.kernels.mask_pack.reference import mask_pack
from zenjax.kernels.mask_pack.reference import row_mask


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["indices", "values"],
  meta_fields=["num_rows"],
)
@dataclasses.dataclass(frozen=True)
class SparseRows:
  """Rows of a `[num_rows, D]` array; all others are zero.

  What `zen_sync(output="rows")` returns for a table.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> rows = zenjax.SparseRows(
    ...   indices=jnp.array([1, 3]), values=jnp.ones((2, 2)), num_rows=3
    ... )
    >>> rows.to_dense().tolist()
    [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]

  Attributes:
    indices: `[K] int32`; `num_rows` marks padding. An index that stands
      twice means the sum of its rows.
    values: `[K, D]`.
    num_rows: Rows of the whole table: static.
  """

  indices: jax.Array
  values: jax.Array
  num_rows: int

  def to_dense(self) -> jax.Array:
    """The whole table, `[num_rows, D]`."""
    shape = (self.num_rows, self.values.shape[-1])
    zeros = jnp.zeros(shape, self.values.dtype)
    return zeros.at[self.indices].add(self.values, mode="drop")

  @classmethod
  def in_place(cls, table: jax.Array) -> "SparseRows":
    """All rows of `table: [R, D]`, those of zeros as padding; no copy."""
    num_rows = table.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    nonzero = row_mask(table).nonzero
    return cls(jnp.where(nonzero, row, num_rows), table, num_rows)

  @classmethod
  def from_dense(cls, table: jax.Array, capacity: int) -> "SparseRows":
    """The nonzero rows of `table: [R, D]`, the first `capacity` of them."""
    layout = Layout(num_rows=table.shape[0], groups=1)
    bitmap = _bitmap.index(mask_pack(table, layout).words)
    first = jnp.zeros(1, jnp.int32)
    slots, rows = compact(table, bitmap, layout, first, capacity)
    row = layout.row(jnp.zeros_like(slots), slots)
    return cls(row[0], rows[0], table.shape[0])
