"""Inputs of the kernels: few shapes, whose programs are shared, any data."""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import indexing
from zenjax._src.core.partition import Layout
from zenjax.kernels.operations import OPERATIONS

__all__ = (
  "arguments",
  "assert_same_bits",
  "bits",
  "indexing",
  "Layout",
  "received",
  "Shape",
  "table",
)


class Shape(NamedTuple):
  """A table and how it is spread."""

  rows: int
  width: int
  groups: int
  dtype: str = "float32"
  contiguous: bool = False

  @property
  def layout(self) -> Layout:
    return Layout(
      num_rows=self.rows,
      groups=self.groups,
      seed=self.rows,
      hash_offset=self.width,
      contiguous=self.contiguous,
    )


def table(
  shape: Shape, seed: int, density: float, negative: float
) -> jax.Array:
  """Rows of any bits, of one nonzero element, of negative zeros, of zeros.

  Args:
    shape: Of the table.
    seed: Of everything that is drawn.
    density: Of the rows that are not zero.
    negative: Of the rows with a negative zero.
  """
  rng = np.random.default_rng(seed)
  bits = np.dtype(f"uint{8 * jnp.dtype(shape.dtype).itemsize}")
  raw = np.zeros((shape.rows, shape.width), bits)
  signed = rng.random(shape.rows) < negative
  column = rng.integers(0, shape.width, shape.rows)
  raw[signed, column[signed]] = 1 << (8 * bits.itemsize - 1)
  kinds = rng.integers(1, 4, shape.rows)
  kind = np.where(rng.random(shape.rows) < density, kinds, 0)
  full, single, tiny = (kind == i for i in (1, 2, 3))
  raw[full] = rng.integers(0, np.iinfo(bits).max, raw[full].shape, bits)
  raw[single, column[single]] = rng.integers(1, np.iinfo(bits).max)
  raw[tiny, column[tiny]] = 1  # the smallest subnormal
  # As integers to the device: a host may quiet a NaN.
  return _as_float(raw, shape.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _as_float(raw, dtype):
  return lax.bitcast_convert_type(raw, jnp.dtype(dtype))


def received(
  seed: int, shape: tuple[int, int, int, int, int, str], density: float
) -> tuple[jax.Array, jax.Array]:
  """Sorted slots with values; sums of subnormals are the platform's own.

  Args:
    seed: Of everything that is drawn.
    shape: Sources, rows of each, width, slots, capacity of the union, dtype.
    density: Of the rows that a source sends.
  """
  n, count, width, num_slots, _, dtype = shape
  rng = np.random.default_rng(seed)
  slots = np.full((n, count), num_slots)
  rows = np.zeros((n, count, width), np.float32)
  for source in range(n):
    some = rng.binomial(min(count, num_slots), density)
    slots[source, :some] = np.sort(rng.choice(num_slots, some, replace=False))
    # Of one source alone XLA, which interprets the kernel, makes 0 + x plain x.
    zero = -0.0 if n > 1 else 0.0
    values = [1.5, -1.5, 1e-3, zero, 0.0, 3e4, np.inf]
    rows[source, :some] = rng.choice(values, (some, width))
  return jnp.asarray(slots, jnp.int32), jnp.asarray(rows).astype(dtype)


def bits(tree: Any) -> list[np.ndarray]:
  """The leaves of a result, floats as integers: equal means equal bits.

  All NaNs are one: gathering bfloat16, XLA:CPU of JAX 0.10 quiets them.
  """

  def raw(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return np.asarray(x)
    unsigned = jnp.dtype(f"uint{x.dtype.itemsize * 8}")
    whole = np.array(lax.bitcast_convert_type(x, unsigned))
    with np.errstate(invalid="ignore"):  # of a signalling one
      whole[np.isnan(np.asarray(x))] = np.iinfo(unsigned).max
    return whole

  return [raw(x) for x in jax.tree.leaves(tree)]


def assert_same_bits(got: Any, want: Any) -> None:
  for one, other in zip(bits(got), bits(want), strict=True):
    np.testing.assert_array_equal(one, other)


def arguments(
  name: str, shape: Any, count: int = 24, sums: Any = jnp.float32
) -> tuple[Any, ...]:
  """Arguments of an operation.

  Args:
    name: Of the operation.
    shape: Of the table; for `merge`, as for `received`.
    count: Rows of the buffer.
    sums: The dtype in which rows are added up.
  """
  if name == "merge":
    slots, rows = received(1, shape, 0.9)
    return slots, rows, jnp.int32(shape[3]), *shape[3:5], sums
  given, layout = table(shape, 1, 0.1, 0.0), shape.layout
  if name == "mask_pack":
    return given, layout
  if name == "compact":
    words = OPERATIONS["mask_pack"].reference(given, layout).words
    first = jnp.zeros(shape.groups, jnp.int32)
    return given, indexing.index(words), layout, first, count
  # Neighbours, the last row and padding among them.
  row = np.random.default_rng(0).permutation(count) + shape.rows + 1 - count
  values = table(shape._replace(rows=count), 2, 1.0, 0.0)
  return given, jnp.asarray(row, jnp.int32), values
