"""Numbers of all devices, for a step in which everything is one device's."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.rows import norm
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_options


def global_norm(updates: Any, axis_name: AxisName | None = None) -> jax.Array:
  """`optax.global_norm` of a tree that may hold SparseRows.

  Rows of the same index are added up before they are squared.

  Inside a step gradients are one device's, and so is their norm: the mean of
  the devices' norms is larger than the norm of the mean gradient. With
  `axis_name` the gradients are averaged over devices first. That is an exchange
  of all of them, as `zen_sync` makes it with its default options, and doubles
  what the step sends. What comes out of `zen_sync` is the mean already: where
  it is at hand, as in a chain after it or where a step calls
  `zen_sync(axis_name).update` by itself, `global_norm(synced)` is the same
  number for nothing.

  Args:
    updates: A tree of arrays and SparseRows.
    axis_name: The axis or axes to average over; then `updates` are local
      gradients.

  Returns:
    A scalar, the norm of all of it as one vector; with `axis_name` equal on all
    devices.

  Raises:
    ValueError: `axis_name` is given, and a gradient was already summed by
      autodiff.
    NameError: No axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> rows = zenjax.SparseRows(
    ...   jnp.array([2, 2, 7]), jnp.array([[1.0], [3.0], [9.0]]), num_rows=7
    ... )
    >>> float(zenjax.global_norm({"table": rows, "bias": jnp.array([3.0])}))
    5.0
    >>> local = jnp.array([[3.0, 1.0], [3.0, 7.0]])  # of two devices
    >>> norm = lambda g: zenjax.global_norm(g, "data")
    >>> jax.vmap(norm, axis_name="data")(local).tolist()  # of [3, 4]
    [5.0, 5.0]
  """
  if axis_name is not None:
    options = sync_options.check(axis_name)
    updates, _ = gradient_tree.sync_tree(updates, None, options)
  return norm.global_norm(updates)


def weighted_mean(
  values: jax.Array, weights: jax.Array, axis_name: AxisName
) -> jax.Array:
  """This device's share of a weighted mean over all, as of a padded loss.

  `sum(mask * loss) / sum(mask)` in a step divides by what one device counted,
  and the mean over devices of such ratios is not the ratio of the sums where
  devices are padded unevenly. Here all divide by what all counted:

      n * sum(weights * values) / psum(sum(weights))

  The mean over the `n` devices of these shares is the weighted mean of the
  whole batch, and the mean of their gradients, as `zen_sync` or `lax.pmean`
  makes it, is its gradient, also by the weights. One device's share says
  nothing by itself. In two lines:

      losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
      loss = zenjax.weighted_mean(losses, targets != padding, "data")

  Values of weight zero count for nothing, whatever they are. Where all weights
  are zero on all devices the share is zero, and not NaN. Values of 16 bits are
  summed in float32.

  Args:
    values: Losses of any shape, real.
    weights: Weights or a mask of the same shape, not negative.
    axis_name: The axis or axes that the batch is split over.

  Returns:
    A scalar, float32 for values of less. It differs between devices: average
    it, as `data_parallel` does with a scalar in `aux`.

  Raises:
    ValueError: The shapes differ.
    TypeError: Values or weights are no real numbers.
    NameError: No axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> losses = jnp.array([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]])
    >>> mask = jnp.array([[True, True, True], [True, False, False]])
    >>> share = lambda v, w: zenjax.weighted_mean(v, w, "data")
    >>> shares = jax.vmap(share, axis_name="data")(losses, mask)
    >>> float(shares.mean()), float(losses[mask].mean())
    (2.75, 2.75)
  """
  options = sync_options.check(axis_name)
  try:
    devices = gradient_tree.context_of(options).devices
  except NameError as error:
    raise NameError(
      f"`axis_name` of `weighted_mean` must be bound, got {axis_name!r}: call"
      " it in a step inside shard_map, pmap, vmap or `zenjax.data_parallel`. To"
      " plan or explain a loss outside of one, give `zenjax.planner.plan` and"
      " `zenjax.rows.explain_tables` a loss without it."
    ) from error
  values, weights = jnp.asarray(values), jnp.asarray(weights)
  _check(values, weights)
  wide = jnp.float32
  if jnp.issubdtype(values.dtype, jnp.floating):
    wide = collectives.accumulator(values.dtype)
  values, scales = values.astype(wide), weights.astype(wide)
  # Padding may hold anything, and 0 times NaN is NaN.
  kept = jnp.where((scales != 0) | jnp.isfinite(values), values, 0)
  weighted = jnp.sum(kept * scales)
  # Counts are exact as integers.
  exact = weights.astype(jnp.int32) if weights.dtype == bool else scales
  weight = jnp.sum(exact)
  # Gradients are one device's: what all added up is a constant to them.
  total, whole = (
    lax.psum(lax.stop_gradient(x), options.axes) for x in (weight, weighted)
  )
  total = jnp.where(total == 0, 1, total).astype(wide)
  if jnp.issubdtype(weights.dtype, jnp.floating):
    # Zero, with the gradient by the weights.
    weighted -= whole / total * (weight - lax.stop_gradient(weight))
  return devices * weighted / total


def _check(values: jax.Array, weights: jax.Array) -> None:
  if values.shape != weights.shape:
    raise ValueError(
      "`weights` must have the shape of `values`, a weight for each, got"
      f" {weights.shape} and {values.shape}; give"
      " `jnp.broadcast_to(weights[..., None], values.shape)` where a weight is"
      " that of several."
    )
  for name, x in (("values", values), ("weights", weights)):
    if not any(
      jnp.issubdtype(x.dtype, kind)
      for kind in (jnp.floating, jnp.integer, jnp.bool_)
    ):
      raise TypeError(f"`{name}` must be real numbers, got dtype {x.dtype}.")
