"""`delayed`: exchanges the gradients of the step before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.folding import folded
from zenjax._src.sync import device_state
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_options
from zenjax._src.sync import whole_batch
from zenjax._src.sync.device_state import PerDeviceState

_BY = "delayed"


class DelayedState(NamedTuple):
  """State of `zenjax.delayed`."""

  saved: PerDeviceState  # each device's gradients of the last step
  inner: Any  # the state of the synchronization

  def on_devices(self, devices: int, averages: bool) -> "DelayedState":
    """Converts saved gradients in host memory to other devices; none is lost.

    Args:
      devices: The number of devices.
      averages: Whether gradients will be averaged over devices, not summed.
    """
    fold = lambda x: folded(x, devices, averages=averages)
    return self._replace(saved=jax.tree.map(fold, self.saved))


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
  devices, and no gradient is lost.

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
  tx = optax.with_extra_args_support(tx)
  options = sync_options.check(axis_name)
  axes = options.axes

  def init_fn(params: optax.Params) -> Any:
    collectives.size_in_init(axes, _BY)
    nothing = jax.tree.map(jnp.zeros_like, params)
    return DelayedState(device_state.packed(nothing, axes), tx.init(params))

  def swapped(updates: Any, saved: Any) -> tuple[Any, PerDeviceState]:
    context = gradient_tree.context_of(options)
    gradient_tree.local_leaves(updates, context)
    old = device_state.unpacked(_BY, context.devices, saved, updates)
    new = jax.tree.map(lambda x, like: x.astype(like.dtype), updates, old)
    return old, device_state.packed(new, axes)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DelayedState]:
    gradient_tree.refuse_rows(updates, _BY)
    around = collectives.mesh_around(axes, updates, None)
    if around is None:
      old, saved = swapped(updates, state.saved)
    else:
      old, saved = whole_batch.select(
        swapped, updates, state.saved, around, axes, by=_BY, sums=False
      )
    old, inner = tx.update(old, state.inner, params, **extra_args)
    return old, DelayedState(saved, inner)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
