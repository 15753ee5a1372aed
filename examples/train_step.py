"""A data-parallel training step with either form of synchronization."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import optax
from sparsified import Sparsifier
from train_loop import AXIS

import zenjax


def adagrad(learning_rate: float) -> optax.GradientTransformation:
  """Adagrad for gradients that are means over thousands of examples.

  The accumulator starts at zero: optax's default of 0.1 would drown them.
  """
  return optax.adagrad(learning_rate, initial_accumulator_value=0.0, eps=1e-10)


def pmean(axis_name: str) -> optax.GradientTransformation:
  """What most programs do: a dense mean of all gradients."""
  return optax.stateless(lambda updates, _: lax.pmean(updates, axis_name))


def transform(
  optimizer: optax.GradientTransformation,
  sync: str,
  grads: str,
  sparsifier: Sparsifier | None = None,
) -> optax.GradientTransformation:
  """Synchronization and optimizer, in the form that the gradients have.

  Args:
    optimizer: What makes updates of mean gradients.
    sync: "zen" or "pmean".
    grads: "dense", or "rows" of the tables that are only looked up.
    sparsifier: What takes the place of either, of dense gradients.
  """
  if sparsifier:
    return optax.chain(sparsifier.transformation(), optimizer)
  if sync == "pmean":
    return optax.chain(pmean(AXIS), optimizer)
  if grads == "rows":
    optimizer = zenjax.lazy_rows(optimizer)
  return optax.chain(zenjax.zen_sync(AXIS), optimizer)


def descend(
  loss_fn: Callable[[Any], jax.Array],
  tx: optax.GradientTransformation,
  params: Any,
  opt_state: Any,
  grads_are: str,
) -> tuple[Any, Any, jax.Array, Any]:
  """One step, inside `shard_map`.

  Returns:
    Parameters, the optimizer's state, the loss's mean over devices, and this
    device's gradients.
  """
  if grads_are == "rows":
    # Rows that were looked up, of the tables that only are; all are local.
    loss, grads = zenjax.value_and_grad(loss_fn)(params)
  else:
    # Of the varying view the gradients stay local: zen_sync averages them.
    varying = zenjax.as_varying(params, AXIS)
    loss, grads = jax.value_and_grad(loss_fn)(varying)
  updates, opt_state = tx.update(grads, opt_state, params)
  # As `optax.apply_updates`, and for updates that are rows.
  params = zenjax.apply_updates(params, updates)
  return params, opt_state, lax.pmean(loss, AXIS), grads
