"""`per_device`: an optax transformation of each device's own values."""

from typing import Any

import jax
import optax

from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.sync import device_state
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_options
from zenjax._src.sync import sync_state
from zenjax._src.sync import whole_batch
from zenjax._src.sync.device_state import PerDeviceState
from zenjax._src.training import placement

_BY = "per_device"


def per_device(
  tx: optax.GradientTransformation, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Runs a transformation on each device's own gradients.

  Use it for what comes *before* gradients are averaged, and has a state. For
  example, momentum that is compressed, as in 1-bit Adam and in Deep Gradient
  Compression::

    optax.chain(
      zenjax.per_device(optax.trace(0.9), "data"),
      zenjax.compress.all_reduce(zenjax.compress.LowBit(bits=4), "data"),
      optax.sgd(0.1),
    )

  Its state differs between devices, so make it with `zenjax.init_state`.
  `zenjax.from_checkpoint` moves it to another number of devices: the mean over
  devices of floating arrays stays the same, and everything else, such as step
  counts, is copied from the first device.

  The mean of what devices return is what `tx` makes of the mean gradient only
  if `tx` is linear in the gradient, as `optax.trace` is. Adam, for example,
  isn't: put it behind the exchange.

  Args:
    tx: Any transformation of arrays that sends nothing. In plain `jit`, where
      it sees each device's part of unreduced arrays, it gets no parameters.
    axis_name: As given to the synchronization that follows.

  Returns:
    A transformation whose state differs between devices.

  Raises:
    ValueError: `tx` synchronizes; the state was not made by `zenjax.init_state`
      for these gradients; or, in `update`, autodiff has summed a gradient.
    TypeError: A gradient is SparseRows.
    NameError: In `update`, no axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx = optax.chain(
    ...   zenjax.per_device(optax.trace(0.5), "data"), zenjax.zen_sync("data")
    ... )
    >>> def two_steps(g):
    ...   _, state = tx.update(g, tx.init(g))
    ...   return tx.update(g, state)
    >>> grads = jnp.array([[2.0, 0.0], [4.0, 8.0]])
    >>> update, state = jax.vmap(two_steps, axis_name="data")(grads)
    >>> update[0].tolist()
    [4.5, 6.0]
    >>> state[0].value.trace[:, 0].tolist()
    [[3.0, 0.0], [6.0, 12.0]]
  """
  tx = optax.with_extra_args_support(tx)
  options = sync_options.check(axis_name)
  axes = options.axes

  def init_fn(params: optax.Params) -> Any:
    collectives.size_in_init(axes, _BY)
    return device_state.packed(local_init(_BY, tx, params), axes)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PerDeviceState]:
    gradient_tree.refuse_rows(updates, _BY)
    around = collectives.mesh_around(axes, updates, None)
    if around is not None:
      # In plain `jit`, each device has its part of unreduced arrays.
      update = lambda updates, state: update_fn(updates, state, **extra_args)
      return whole_batch.select(
        update, updates, state, around, axes, by=_BY, sums=False
      )
    context = gradient_tree.context_of(options)
    gradient_tree.local_leaves(updates, context)
    like = updates if params is None else params
    fresh = jax.eval_shape(tx.init, like)
    own = device_state.unpacked(_BY, context.devices, state, fresh)
    updates, own = tx.update(updates, own, params, **extra_args)
    updates = gradient_tree.as_varying(updates, axes)
    return updates, device_state.packed(own, axes)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def local_init(
  by: str, tx: optax.GradientTransformation, params: optax.Params
) -> Any:
  """Returns `tx.init(params)`; raises ValueError if `tx` synchronizes."""
  state = tx.init(params)
  synced = sync_state.nodes(state, sync_state.ZenSyncState)
  if synced or placement.own_nodes(state):
    raise ValueError(
      f"The transformation inside `{by}` synchronizes gradients, but it must"
      " run on each device alone. Put zen_sync, compressors and sparsifiers"
      f" behind `{by}`, not inside."
    )
  return state
