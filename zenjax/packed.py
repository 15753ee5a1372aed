"""Narrow tables stored packed: several rows beside each other in 128 columns.

A TPU stores arrays in tiles 128 columns wide. Unless 128 divides the width `D`
of a table, XLA lays it out transposed there, and every step that updates rows
re-lays the whole of it, and of each moment, and back. Packed, `128 // D` rows
make one row of 128 columns, and rows are updated in place. Compiled for TPU v5e
a step of `lazy_rows(adam)`, with `R` rows in float32:

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

The packed table of 26 MB was moved to the chip's own memory and back, as XLA
does with what fits there; one of 205 MB was updated where it lies.

CPUs and GPUs update rows of any width in place: nothing is to be gained there.

What packing costs:

- A gradient's row is a packed row, 128 wide and mostly zeros: up to `128 / D`
  times the bytes on the wire, less where look-ups are of rows packed together.
- Rows packed together are touched together. With `lazy_rows`, SGD and Adagrad
  do nothing to those whose gradient is zero. Adam and momentum decay the
  moments of such neighbours and move them by these, as on dense gradients;
  weight decay acts on them. `rowwise_adagrad` keeps one accumulator for all of
  them, which is another optimizer. `zen_sync(output="dense")` keeps the dense
  optimizer.

Tables wider than 128 can have an explicit layout, at the price in the table
above: memory as if their columns were a multiple of 128. Parameters, and those
leaves of the state that have their shape, must be placed in it, go into `jit`
and come out of it so:

    from jax.experimental.layout import Format, Layout

    rows_first = Format(Layout((0, 1)), NamedSharding(mesh, PartitionSpec()))
    table = jax.device_put(table, rows_first)
    jax.jit(step, in_shardings=..., out_shardings=..., donate_argnums=(0, 1))

with `rows_first` in the place of their shardings.

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
  """The shape in which a table is stored, to draw initial values in.

  Args:
    shape: `(R, D)` of the table, `D` from 1 to 128.

  Returns:
    `(Q, 128)`: `128 // D` rows in each. Columns are left over unless `D`
    divides 128, and places in the last row unless it is full.

  Raises:
    ValueError: `D` is not 1 to 128.

  Example:
    >>> from zenjax import packed
    >>> packed.packed_shape((1000, 16))
    (125, 128)
  """
  return -(-shape[0] // _beside(shape)), _LANES


def pack(table: jax.Array) -> jax.Array:
  """Stores a table packed.

  Args:
    table: `[R, D]`, `D` from 1 to 128.

  Returns:
    `[Q, 128]`, as `packed_shape` says; what is left over is zero.

  Raises:
    ValueError: `table` has other dimensions.

  Example:
    >>> import jax.numpy as jnp
    >>> from zenjax import packed
    >>> packed.pack(jnp.ones((1000, 16))).shape
    (125, 128)
  """
  num_packed, _ = packed_shape(table.shape)
  num_rows, width = table.shape
  beside = _beside(table.shape)
  table = jnp.pad(table, ((0, num_packed * beside - num_rows), (0, 0)))
  rows = table.reshape(num_packed, beside * width)
  return jnp.pad(rows, ((0, 0), (0, _LANES - beside * width)))


def unpack(table: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Inverse of `pack`, for an evaluation or a checkpoint.

  Args:
    table: `[Q, 128]`.
    shape: `(R, D)` of the table that was packed.

  Returns:
    `[R, D]`.

  Raises:
    ValueError: `table` is not a table of `shape` packed.

  Example:
    >>> import jax.numpy as jnp
    >>> from zenjax import packed
    >>> table = jnp.arange(30.0).reshape(10, 3)
    >>> bool(jnp.all(packed.unpack(packed.pack(table), (10, 3)) == table))
    True
  """
  _require_packed(table, shape)
  num_rows, width = shape
  beside = _beside(shape)
  return table[:, : beside * width].reshape(-1, width)[:num_rows]


def take(table: jax.Array, ids: Any, shape: tuple[int, ...]) -> jax.Array:
  """`jnp.take(unpack(table, shape), ids, axis=0)` by whole packed rows.

  `zenjax.value_and_grad` gives the gradient of a table that is only read by it
  as SparseRows of packed rows.

  Args:
    table: `[Q, 128]`.
    ids: `[...]` integers. Negative ones count from the end; those out of range
      read NaN (of integers the least), and no gradient goes to them.
    shape: `(R, D)` of the table that was packed.

  Returns:
    `[..., D]`. Every bit as stored.

  Raises:
    TypeError: `ids` are no integers.
    ValueError: `table` is not a table of `shape` packed.

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
  beside = _beside(shape)
  # The last packed row may hold more than the table: past its end is past it.
  at = jnp.where(row >= 0, row // beside, table.shape[0])
  return _block(jnp.take(table, at, axis=0), row % beside, beside, width)


def _block(rows: jax.Array, at: jax.Array, count: int, width: int) -> jax.Array:
  """Block `at: [...]` of `count`, each of `width`, of `rows: [..., 128]`.

  Halves are chosen from until one is left. Nothing is multiplied or added: bits
  stay as they are, and NaN in another block does not matter.
  """
  while count > 1:
    half = -(-count // 2)
    low = rows[..., : half * width]
    high = rows[..., (count - half) * width : count * width]
    upper = at >= half
    rows = jnp.where(upper[..., None], high, low)
    at = jnp.where(upper, at - (count - half), at)
    count = half
  return rows[..., :width]


def _beside(shape: tuple[int, ...]) -> int:
  """Rows in one packed row."""
  if len(shape) != 2 or not 1 <= shape[1] <= _LANES:
    raise ValueError(
      "A table to pack must be of two dimensions and have 1 to"
      f" {_LANES} columns, got shape {tuple(shape)}; for wider ones see the"
      " explicit layout in the documentation of `zenjax.packed`."
    )
  return _LANES // shape[1]


def _require_packed(table: jax.Array, shape: tuple[int, ...]) -> None:
  """Raises ValueError for a table of another shape."""
  want = packed_shape(shape)
  if table.shape != want:
    raise ValueError(
      f"`table` must be [{want[0]}, {want[1]}], a table of `shape`"
      f" {tuple(shape)} packed, got {table.shape}; `shape` is that of the table"
      " before `zenjax.packed.pack`."
    )
