"""The state of rows that catch up, and what is said where they do not."""

from collections.abc import Sequence
from typing import Any, NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

_MOST = np.iinfo(np.int32).max

_REMEDY = (
  "call `params, opt_state = zenjax.catch_up(tx, params, opt_state, ids)`"
  " before the gradients of each step, with the ids of all devices,"
  " `jax.lax.all_gather(ids, axis_name)`"
)


class CatchUpState(NamedTuple):
  """State of `lazy_rows(..., catch_up=True)`.

  Attributes:
    inner: Of the optimizer within.
    current: Of each table `[R] int32`, how many steps a row has taken.
    steps: `int32`, how many steps there were.
    late: `int32`, how many rows of all updates so far were behind when `update`
      saw them, so that gradients were taken where they stood: zero if
      `zenjax.catch_up` is called as it should. Rows that have taken no step
      count only where an optimizer moves such rows too, as weight decay does.
      `zenjax.report` tells of it. It stops at `2**31 - 1`.

  Example:
    >>> import optax
    >>> import zenjax
    >>> tx = zenjax.lazy_rows(optax.sgd(0.1, 0.9), catch_up=True)
    >>> state = tx.init({"table": jnp.zeros((600, 32))})
    >>> state.current["table"].shape, int(state.steps), int(state.late)
    ((600,), 0, 0)
  """

  inner: Any
  current: Any
  steps: jax.Array
  late: jax.Array


def is_state(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, CatchUpState)


def later(late: jax.Array, more: Sequence[jax.Array]) -> jax.Array:
  """`late` and so many more, as far as `int32` counts."""
  for number in more:
    late = late + jnp.minimum(number, _MOST - late)
  return late


def warn_of_no_call() -> None:
  """For an optimizer that nobody asked to bring rows up to date."""
  warnings.warn(
    "`catch_up=True` of `lazy_rows` should come with `zenjax.catch_up`, which"
    f" was not called with this optimizer: {_REMEDY}. Otherwise gradients are"
    " taken of rows that miss steps, and parameters part from those of the"
    " dense optimizer; with `catch_up=False` rows keep what they have.",
    stacklevel=2,
  )


def late_lines(state: Any) -> list[str]:
  """What a report says of rows that were behind."""
  nodes = jax.tree.leaves(state, is_leaf=is_state)
  late = sum(int(np.asarray(node.late)) for node in nodes if is_state(node))
  if not late:
    return []
  return [
    f"lazy_rows: {late} rows were behind when `update` saw them, and gradients"
    f" had been taken where they stood: {_REMEDY}."
  ]
