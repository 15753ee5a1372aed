"""`delayed`: exchanges the gradients of the step before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.sync import device_state


class DelayedState(NamedTuple):
  """State of `zenjax.delayed`."""

  saved: Any  # a PerDeviceState: gradients of the last step
  inner: Any  # the state of the synchronization


def delayed(
  tx: optax.GradientTransformation, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Synchronizes the gradients of the step before.

  Use it if your devices wait for the network: the exchange no longer depends on
  this step's forward and backward pass, so XLA can run both at the same time.
  The price is that parameters move by gradients that are one step old. Compare
  losses, and try a lower learning rate::

    optax.chain(
      zenjax.delayed(zenjax.zen_sync("data"), "data"), optax.sgd(0.1)
    )

  In each step, a device hands `tx` the gradients that it has saved in the step
  before, and saves the new ones. The first update is zero, and the last
  gradients are never applied. Everything behind `delayed` in the chain sees
  the old gradients as if they were new, so Adam, for example, counts the first
  step with its zeros.

  Each device keeps one copy of its gradients, so make the state with
  `zenjax.init_state`. `zenjax.from_checkpoint` moves it to another number of
  devices, and no gradient is lost. Gradients are saved in the dtype of their
  parameter, and come back in their own.

  Args:
    tx: `zenjax.zen_sync`, `zenjax.compress.all_reduce`, or a chain with one of
      them.
    axis_name: As given to `tx`.

  Returns:
    A transformation with a state that differs between devices.

  Raises:
    ValueError: The state was not made by `zenjax.init_state` for these
      gradients, or, in `update`, autodiff has summed a gradient already.
    TypeError: A gradient is SparseRows.
    NameError: In `update`, no axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.delayed(zenjax.zen_sync("data"), "data")
    >>> def two_steps(g):
    ...   first, state = tx.update(g, tx.init(g))
    ...   second, _ = tx.update(10 * g, state)
    ...   return first, second
    >>> grads = jnp.array([[2.0, 0.0], [4.0, 8.0]])
    >>> first, second = jax.vmap(two_steps, axis_name="data")(grads)
    >>> first[0].tolist(), second[0].tolist()
    ([0.0, 0.0], [3.0, 4.0])

  References:
    Renggli et al., [SparCML: High-Performance Sparse Communication for Machine
    Learning](https://arxiv.org/abs/1802.08021), SC 2019, with its non-blocking
    collectives.
  """
  tx = optax.with_extra_args_support(arguments.optimizer("tx", tx))
  zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
  swap = optax.GradientTransformationExtraArgs(zeros, _swapped)
  swap = device_state.transformation("delayed", swap, axis_name)

  def init_fn(params: optax.Params) -> Any:
    return DelayedState(swap.init(params), tx.init(params))

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DelayedState]:
    old, saved = swap.update(updates, state.saved)
    old, inner = tx.update(old, state.inner, params, **extra_args)
    return old, DelayedState(saved, inner)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _swapped(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
  """Returns the saved gradients as updates, and saves the new ones."""
  cast = lambda x, like: x.astype(like.dtype)
  return jax.tree.map(cast, state, updates), jax.tree.map(cast, updates, state)
