"""Packs narrow tables for TPUs: several rows in one row of 128 columns.

Use it on TPUs for tables with fewer than 128 columns whose rows you update
sparsely. CPUs and GPUs update rows of any width in place, so packing gains
nothing there.

A TPU stores arrays in tiles of 128 columns. Unless 128 divides the width `D` of
a table, XLA stores the table transposed, and every step that updates rows
converts the table and each of its moments to another layout and back. In a
packed table, `128 // D` rows make one row of 128 columns, and rows are updated
in place. The memory of a step of `lazy_rows(adam)` on a table with `R` rows in
float32, as compiled for TPU v5e:

| table | `R` | stored | parameters and state | temporary |
|---|---|---|---|---|
| 16 wide | 400,000 | plain | 77 MB | 617 MB |
| | | explicit layout | 614 MB | 2 MB |
| | | packed | 77 MB | 2 MB |
| 64 wide | 400,000 | plain | 307 MB | 618 MB |
| | | explicit layout | 614 MB | 2 MB |
| | | packed | 307 MB | 2 MB |
| 192 wide | 400,000 | plain | 922 MB | 1,237 MB |
| | | explicit layout | 1,229 MB | 2 MB |

XLA moves a packed table that fits in the chip's fast memory there and back, as
it did with one of 26 MB. It updated a packed table of 205 MB in place.

Packing has two costs:

- Row gradients consist of packed rows, 128 wide and mostly zeros. They send up
  to `128 / D` times as many bytes, or fewer if a batch looks up several rows of
  a packed row.
- The rows of a packed row are updated together, also those whose gradient is
  zero. With `lazy_rows`, SGD and Adagrad do not change such rows. Adam and
  momentum decay their moments and move them, and weight decay acts on them, as
  with dense gradients. `rowwise_adagrad` keeps one accumulator for a packed
  row, which makes it another optimizer. `zen_sync(output="dense")` keeps the
  dense optimizer.

Tables wider than 128 columns can have an explicit layout instead. They then
take as much memory as if their columns were rounded up to a multiple of 128
(the rows "explicit layout" of the table above). The parameters, and all leaves
of the state with the same shape, must be placed in this layout, and must keep
it as arguments and results of `jit`:

    from jax.experimental.layout import Format, Layout

    rows_first = Format(Layout((0, 1)), NamedSharding(mesh, PartitionSpec()))
    table = jax.device_put(table, rows_first)
    jax.jit(step, in_shardings=..., out_shardings=..., donate_argnums=(0, 1))

Give `rows_first` in place of their shardings.

Letters: `R` rows of width `D`, `Q` packed rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.gradients import look_ups
from zenjax._src.rows import sparse_rows

__all__ = ("pack", "packed_shape", "take", "unpack")

_LANES = 128


def packed_shape(shape: tuple[int, ...]) -> tuple[int, int]:
  """Returns the shape of a packed table.

  Use it to draw initial values for a packed table directly.

  Args:
    shape: `(R, D)` of the table, `D` from 1 to 128.

  Returns:
    `(Q, 128)`, where each packed row holds `128 // D` rows. Some columns are
    unused unless `D` divides 128, and the last packed row may not be full.

  Raises:
    ValueError: `D` is not 1 to 128.

  Example:
    >>> from zenjax import packed
    >>> packed.packed_shape((1000, 16))
    (125, 128)
  """
  return -(-shape[0] // _rows_per_packed_row(shape)), _LANES


def pack(table: jax.Array) -> jax.Array:
  """Packs a table.

  Args:
    table: `[R, D]`, `D` from 1 to 128.

  Returns:
    The packed table `[Q, 128]`, with the shape that `packed_shape` returns.
    Unused elements are zero.

  Raises:
    ValueError: `table` does not have two dimensions, or is too wide.

  Example:
    >>> import jax.numpy as jnp
    >>> from zenjax import packed
    >>> packed.pack(jnp.ones((1000, 16))).shape
    (125, 128)
  """
  num_packed, _ = packed_shape(table.shape)
  num_rows, width = table.shape
  per_row = _rows_per_packed_row(table.shape)
  table = jnp.pad(table, ((0, num_packed * per_row - num_rows), (0, 0)))
  rows = table.reshape(num_packed, per_row * width)
  return jnp.pad(rows, ((0, 0), (0, _LANES - per_row * width)))


def unpack(table: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Unpacks a table: the inverse of `pack`.

  Use it before an evaluation or a checkpoint that needs the plain table.

  Args:
    table: The packed table, `[Q, 128]`.
    shape: `(R, D)` of the table before it was packed.

  Returns:
    The table, `[R, D]`.

  Raises:
    ValueError: `table` is not a packed table of this shape.

  Example:
    >>> import jax.numpy as jnp
    >>> from zenjax import packed
    >>> table = jnp.arange(30.0).reshape(10, 3)
    >>> bool(jnp.all(packed.unpack(packed.pack(table), (10, 3)) == table))
    True
  """
  _require_packed(table, shape)
  num_rows, width = shape
  per_row = _rows_per_packed_row(shape)
  return table[:, : per_row * width].reshape(-1, width)[:num_rows]


def take(table: jax.Array, ids: Any, shape: tuple[int, ...]) -> jax.Array:
  """Looks up rows of a packed table.

  Use it in place of `table[ids]`. It returns the same as
  `jnp.take(unpack(table, shape), ids, axis=0)`, but reads packed rows. If the
  loss reads the table only by `take`, its gradient from `zenjax.value_and_grad`
  is SparseRows of packed rows.

  Args:
    table: The packed table, `[Q, 128]`.
    ids: `[...]` integers. A negative id counts from the end. An id out of range
      reads NaN (or the least integer, in a table of integers) and receives no
      gradient.
    shape: `(R, D)` of the table before it was packed.

  Returns:
    The rows, `[..., D]`, bit-identical to the stored ones.

  Raises:
    TypeError: `ids` are not integers.
    ValueError: `table` is not a packed table of this shape.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> from zenjax import packed
    >>> table = packed.pack(jnp.arange(4000.0).reshape(1000, 4))
    >>> look_up = lambda table, ids: packed.take(table, ids, (1000, 4))
    >>> look_up(table, jnp.array([33, -1])).tolist()
    [[132.0, 133.0, 134.0, 135.0], [3996.0, 3997.0, 3998.0, 3999.0]]
    >>> loss = lambda table, ids: look_up(table, ids).sum()
    >>> zenjax.rows.grad(loss)(table, jnp.array([33, -1]))
    SparseRows(rows [ 1 31] of 32, values float32[2,128])
  """
  _require_packed(table, shape)
  num_rows, width = shape
  ids = sparse_rows.narrowed(ids, num_rows, "`ids`")
  ids = jnp.where(ids < 0, ids + num_rows, ids)
  row = look_ups.in_range(ids, num_rows, clips=False)
  per_row = _rows_per_packed_row(shape)
  # The last packed row may have unused places, so ids are compared with `R`.
  packed_row = jnp.where(row >= 0, row // per_row, table.shape[0])
  rows = jnp.take(table, packed_row, axis=0)
  return _block(rows, row % per_row, per_row, width)


def _block(
  rows: jax.Array, index: jax.Array, count: int, width: int
) -> jax.Array:
  """Returns block `index: [...]` of the `count` blocks of `rows: [..., 128]`.

  It selects one half after another until one block is left. It neither
  multiplies nor adds, so that the bits are unchanged, and NaN in another block
  has no effect.
  """
  while count > 1:
    half = -(-count // 2)
    low = rows[..., : half * width]
    high = rows[..., (count - half) * width : count * width]
    upper = index >= half
    rows = jnp.where(upper[..., None], high, low)
    index = jnp.where(upper, index - (count - half), index)
    count = half
  return rows[..., :width]


def _rows_per_packed_row(shape: tuple[int, ...]) -> int:
  """Returns how many rows a packed row holds."""
  if len(shape) != 2 or not 1 <= shape[1] <= _LANES:
    raise ValueError(
      f"A table to pack must have two dimensions and 1 to {_LANES} columns, got"
      f" shape {tuple(shape)}. Use an explicit layout for wider tables."
    )
  return _LANES // shape[1]


def _require_packed(table: jax.Array, shape: tuple[int, ...]) -> None:
  """Raises ValueError if `table` is not a packed table of this shape."""
  if table.shape != packed_shape(shape):
    raise ValueError(
      f"`table` must have shape {packed_shape(shape)} if `shape` is"
      f" {tuple(shape)}, got {table.shape}. Pass the shape before `pack`."
    )
