"""Norms and means over all devices, for a per-device step."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.rows import norm
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_options


def global_norm(updates: Any, axis_name: AxisName | None = None) -> jax.Array:
  """Computes the norm of a tree that may hold SparseRows.

  Use it in place of `optax.global_norm`: rows of the same index are added up
  before they are squared.

  To log the norm, put `optax.snapshot("grad_norm", zenjax.global_norm)` right
  behind `zen_sync` in the chain. It costs no communication, and after a step
  `optax.tree.get(opt_state, "grad_norm")` is the norm.

  Before `zen_sync`, communication is necessary. In plain `jit`, XLA exchanges
  the gradients of all lookups, which can be several times what `zen_sync`
  sends. In a per-device step, gradients belong to one device, and so does their
  norm. With `axis_name` they are averaged over devices first, which exchanges
  all gradients once more.

  Args:
    updates: A tree of arrays and SparseRows.
    axis_name: The axis or axes to average over; then `updates` are local
      gradients.

  Returns:
    A scalar, the norm of all leaves as one vector; with `axis_name` equal on
    all devices.

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
  """Returns this device's share of a weighted mean over all devices.

  Use it for padded losses in a per-device step. `sum(mask * loss) / sum(mask)`
  divides by the count of one device, and the mean of such ratios is wrong if
  devices are padded unevenly. `weighted_mean` divides by the count of all:

      n * sum(weights * values) / psum(sum(weights))

  The mean of these shares over the `n` devices is the weighted mean of the
  whole batch, and `zen_sync` averages their gradients to its gradient. In two
  lines:

      losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
      loss = zenjax.weighted_mean(losses, targets != padding, "data")

  Values of weight zero are ignored, also NaN. If all weights on all devices are
  zero, the share is zero. Values of 16 bits are summed in float32.

  Args:
    values: Losses of any shape, real.
    weights: Weights or a mask of the same shape, not negative.
    axis_name: The axis or axes that the batch is split over.

  Returns:
    A scalar of at least float32. It differs between devices: average it, as
    `data_parallel` does with a scalar in `aux`.

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
  axes = arguments.axes(axis_name)
  devices = collectives.size(axes)
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
  # Each device has its own gradient, so sums over devices are constants.
  total, whole = (
    lax.psum(lax.stop_gradient(x), axes) for x in (weight, weighted)
  )
  total = jnp.where(total == 0, 1, total).astype(wide)
  if jnp.issubdtype(weights.dtype, jnp.floating):
    # Zero, with the gradient by the weights.
    weighted -= whole / total * (weight - lax.stop_gradient(weight))
  return devices * weighted / total


def _check(values: jax.Array, weights: jax.Array) -> None:
  if values.shape != weights.shape:
    raise ValueError(
      f"`weights` of shape {weights.shape} must have the shape of `values`,"
      f" {values.shape}. Broadcast them, for example with"
      " `jnp.broadcast_to(weights[..., None], values.shape)`."
    )
  for name, x in (("values", values), ("weights", weights)):
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
      raise TypeError(f"`{name}` must be real numbers, got dtype {x.dtype}.")
