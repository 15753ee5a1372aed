"""How a step's gradient comes about, and what it must be in float64 NumPy.

Letters: `T` look-ups a device, `R` rows, `D` width.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle
from benchmarks.workloads import Workload

Arrays = tuple[np.ndarray, np.ndarray]


class Gradient(Protocol):
  """A loss that is linear in one table, so that its gradient is known."""

  def inputs(
    self, workload: Workload, ids: np.ndarray, rng: np.random.Generator
  ) -> Arrays:
    """One device's inputs for the rows that it looks up."""
    ...

  def loss(self, table: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Scalar loss for `table: [R, D]`."""
    ...

  def expected(self, rows: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The gradient of `loss`, `[R, D] float64`."""
    ...


class ScatterAdd:
  """A look-up: autodiff adds one row for each id into zeros, `[R, D]`."""

  def inputs(self, workload, ids, rng):
    return ids, oracle.values(rng, (len(ids), workload.width))

  def loss(self, table, a, b):
    return jnp.sum(jnp.take(table, a, axis=0, mode="clip") * b)

  def expected(self, rows, a, b):
    return oracle.row_sums(a, b, rows)


class Matmul:
  """A dense layer, say a tied softmax: the gradient is a product.

  Of inner dimension 4 only: it costs little more than writing `[R, D]`, so what
  synchronization costs is not lost beside it.
  """

  def inputs(self, workload, ids, rng):
    del ids  # A dense layer touches every row.
    left = oracle.values(rng, (4, workload.rows))
    return left, oracle.values(rng, (4, workload.width))

  def loss(self, table, a, b):
    logits = jnp.einsum("rd,kd->kr", table, b, precision="highest")
    return jnp.sum(logits * a)

  def expected(self, rows, a, b):
    return a.astype(np.float64).T @ b


GRADIENTS: dict[str, Gradient] = {
  "matmul": Matmul(),
  "scatter-add": ScatterAdd(),
}
