"""Defines Adagrad with one accumulator per row, for recommenders."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class RowwiseAdagradState(NamedTuple):
  """State of `rowwise_adagrad`.

  Attributes:
    sum_of_squares: The accumulators, `[R, 1]` for every parameter of two
      dimensions, and a number for each row of sharded stacks. Other parameters
      have accumulators of their own shape.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> params = {"table": jnp.zeros((600, 32))}
    >>> state = zenjax.rows.rowwise_adagrad(0.1).init(params)
    >>> state[0].sum_of_squares["table"].shape
    (600, 1)
  """

  sum_of_squares: Any


def rowwise_adagrad(
  learning_rate: optax.ScalarOrSchedule,
  initial_accumulator_value: float = 0.0,
  eps: float = 1e-8,
) -> optax.GradientTransformation:
  """Scales updates by Adagrad with one accumulator per row.

  Use it to save memory: the state of a table with 128 columns is 128 times
  smaller than Adagrad's. Recommenders train their tables with it ("row-wise
  Adagrad", Mudigere et al., ISCA 2022). Inside `lazy_rows` it is exact.

      G_r += mean_j g_rj ** 2
      update_rj = -learning_rate * g_rj / (sqrt(G_r) + eps)

  Parameters that do not have two dimensions get plain Adagrad.

  Args:
    learning_rate: A number or a schedule.
    initial_accumulator_value: The first value of `G`.
    eps: Avoids a division by zero for rows that were never touched.

  Returns:
    A transformation.

  Raises:
    ValueError: `initial_accumulator_value` or `eps` is negative.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.rows.rowwise_adagrad(1.0)
    >>> grads = jnp.array([[3.0, 3.0], [0.0, 0.0]])
    >>> updates, state = tx.update(grads, tx.init(grads))
    >>> updates[0].round(3).tolist(), state[0].sum_of_squares.tolist()
    ([-1.0, -1.0], [[9.0], [0.0]])
  """
  given = dict(initial_accumulator_value=initial_accumulator_value, eps=eps)
  for name, value in given.items():
    if not value >= 0:
      raise ValueError(f"`{name}` must not be negative, got {value!r}.")

  def init(params):
    start = lambda x: jnp.full_like(_of_rows(x), initial_accumulator_value)
    return RowwiseAdagradState(jax.tree.map(start, params))

  def update(updates, state, params=None):
    del params
    total = jax.tree.map(
      lambda g, s: s + _of_rows(g**2), updates, state.sum_of_squares
    )
    scaled = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), updates, total)
    return scaled, RowwiseAdagradState(total)

  scale = optax.scale_by_learning_rate(learning_rate)
  return optax.chain(optax.GradientTransformation(init, update), scale)


def _of_rows(x: jax.Array) -> jax.Array:
  return jnp.mean(x, axis=1, keepdims=True) if jnp.ndim(x) == 2 else x
