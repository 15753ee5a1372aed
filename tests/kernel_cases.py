"""Inputs of the kernels: few shapes, whose programs are shared, any data."""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._partition import Layout


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
      first_word=self.width,
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
  kind = np.where(rng.random(shape.rows) < density, rng.integers(1, 4), 0)
  full, single, tiny = (kind == i for i in (1, 2, 3))
  raw[full] = rng.integers(0, np.iinfo(bits).max, raw[full].shape, bits)
  raw[single, column[single]] = rng.integers(1, np.iinfo(bits).max)
  raw[tiny, column[tiny]] = 1  # the smallest subnormal
  # As integers to the device: a host may quiet a NaN.
  return _as_float(raw, shape.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _as_float(raw, dtype):
  return lax.bitcast_convert_type(raw, jnp.dtype(dtype))


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
