"""DLRM (Naumov et al., 2019): a click model whose parameters are tables.

Letters: B rows of a log, F = 26 categories, D width, R rows of a table.
"""

from collections.abc import Sequence
import itertools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.studies.dlrm.rows import NUMBERS

_BOTTOM = (64,)  # Hidden layers over the numbers.
_TOP = (128, 64)  # Hidden layers over what the interactions give.


class Dlrm(nnx.Module):
  """Embeds the categories, pairs all embeddings, and weighs the pairs.

  Tables are only looked up, one row of each for a row of the log. Their rows
  follow each other in one parameter, which compiles faster than 26 and is
  exchanged at once.

  Args:
    tables: The rows of each table.
    width: The columns of all tables.
    rngs: Draw the initial parameters.
  """

  def __init__(self, tables: Sequence[int], width: int, *, rngs: nnx.Rngs):
    self.bottom = Mlp((NUMBERS, *_BOTTOM, width), rngs=rngs)
    self.tables = nnx.Embed(
      sum(tables), width, embedding_init=_uniform(tables), rngs=rngs
    )
    ends = itertools.accumulate(tables)
    self.first_rows = tuple(end - rows for end, rows in zip(ends, tables))
    vectors = 1 + len(tables)
    pairs = vectors * (vectors - 1) // 2
    self.top = Mlp((pairs + width, *_TOP, 1), rngs=rngs)

  def __call__(self, numbers: jax.Array, ids: jax.Array) -> jax.Array:
    """Maps [B, 13] logarithms and [B, F] int32 ids to [B] logits of a click."""
    dense = nnx.relu(self.bottom(numbers))  # [B, D]
    first = jnp.array(self.first_rows, ids.dtype)
    found = self.tables(ids + first[None])  # [B, F, D]
    vectors = jnp.concatenate([dense[:, None], found], axis=1)
    dots = vectors @ jnp.swapaxes(vectors, 1, 2)
    # Each pair once, and no vector with itself.
    one, other = np.tril_indices(vectors.shape[1], -1)
    seen = jnp.concatenate([dense, dots[:, one, other]], axis=1)
    return self.top(seen)[:, 0]


class Mlp(nnx.Module):
  """Linear layers with ReLU between them; `sizes` from input to output."""

  def __init__(self, sizes: Sequence[int], *, rngs: nnx.Rngs):
    self.layers = nnx.List(
      [nnx.Linear(a, b, rngs=rngs) for a, b in zip(sizes, sizes[1:])]
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    for layer in self.layers[:-1]:
      x = nnx.relu(layer(x))
    return self.layers[-1](x)


def log_loss(
  model: Dlrm, labels: jax.Array, numbers: jax.Array, ids: jax.Array
) -> jax.Array:
  """Returns the mean cross-entropy of [B] labels, nats a row."""
  logits = model(numbers, ids)
  return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))


def _uniform(tables: Sequence[int]):
  # As DLRM does it: larger tables start smaller.
  rows = np.array(tables)

  def init(key, shape, dtype=jnp.float32):
    bound = jnp.repeat(jnp.array(rows**-0.5, dtype), rows)[:, None]
    return jax.random.uniform(key, shape, dtype, -1, 1) * bound

  return init
