"""`per_device`: an optax transformation of each device's own values."""

from typing import Any

import optax

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.sync import device_state
from zenjax._src.sync import sync_state
from zenjax._src.training import placement


def per_device(
  tx: optax.GradientTransformation, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Runs a transformation on each device's own gradients.

  Use it for what comes *before* gradients are averaged, and has a state. For
  example, momentum that is compressed, as in 1-bit Adam::

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
      it sees each device's part of unreduced arrays, it gets neither parameters
      nor further arguments of `update`, such as `value`.
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
  tx = checked("per_device", tx)
  return device_state.transformation("per_device", tx, axis_name)


def checked(by: str, tx: Any) -> optax.GradientTransformationExtraArgs:
  """Returns `tx`, whose `init` raises ValueError if it synchronizes."""
  name = "inner" if by == "local_steps" else "tx"
  tx = optax.with_extra_args_support(arguments.optimizer(name, tx))

  def init_fn(params: optax.Params) -> Any:
    state = tx.init(params)
    synced = sync_state.nodes(state, sync_state.ZenSyncState)
    if synced or placement.own_nodes(state):
      raise ValueError(
        f"The transformation inside `{by}` synchronizes gradients, but it must"
        " run on each device alone. Put zen_sync and compressors behind"
        f" `{by}`, not inside."
      )
    return state

  return optax.GradientTransformationExtraArgs(init_fn, tx.update)
