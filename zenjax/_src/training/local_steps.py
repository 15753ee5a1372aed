"""`local_steps`: many steps on each device between two exchanges."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.sync import device_state
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_options
from zenjax._src.sync.device_state import PerDeviceState
from zenjax._src.training import per_device

_BY = "local_steps"


@dataclasses.dataclass(frozen=True)
class LocalSteps:
  """What `zenjax.local_steps` returns."""

  loss_fn: Callable[[Any, Any], jax.Array]
  inner: optax.GradientTransformationExtraArgs
  every: int
  axes: Axes

  def init(self, params: Any) -> PerDeviceState:
    """Makes the inner optimizer's state; call it by `zenjax.init_state`."""
    remedy = "Keep it replicated, because every local step would fetch rows"
    leaf_util.refuse_sharded(params, "params", _BY, remedy)
    return device_state.init(_BY, self.inner, params, self.axes)

  def __call__(
    self, params: Any, inner_state: PerDeviceState, batches: Any
  ) -> tuple[tuple[jax.Array, Any], PerDeviceState]:
    """Takes the steps of one round on this device.

    Args:
      params: Replicated parameters.
      inner_state: The state of the last round, or of `zenjax.init_state`.
      batches: This device's batches, with a leading dimension of `every`.

    Returns:
      `((loss, pseudo_gradient), inner_state)`, all of this device: the mean
      loss of its steps, and by how much its parameters became smaller.
    """
    if not isinstance(inner_state, PerDeviceState):
      raise TypeError(
        "`inner_state` of local_steps must be made by `zenjax.init_state(local,"
        f" params, mesh, {self.axes!r})`, where `local` is what local_steps"
        f" returned, got {type(inner_state).__name__}."
      )
    options = sync_options.check(self.axes)
    devices = gradient_tree.context_of(options).devices
    self._check_batches(batches)
    fresh = jax.eval_shape(self.inner.init, params)
    own = device_state.unpacked(_BY, devices, inner_state, fresh)
    varying = lambda tree: gradient_tree.as_varying(tree, self.axes)
    # Varying parameters have local gradients.
    first = varying(params)

    def step(carry, batch):
      params, state = carry
      loss, grads = jax.value_and_grad(self.loss_fn)(params, batch)
      updates, state = self.inner.update(grads, state, params)
      return varying((optax.apply_updates(params, updates), state)), loss

    (last, own), losses = lax.scan(step, (first, own), batches, self.every)
    moved = jax.tree.map(jnp.subtract, first, last)
    return (jnp.mean(losses), moved), device_state.packed(own, self.axes)

  def _check_batches(self, batches: Any) -> None:
    for name, leaf in leaf_util.named_leaves(batches):
      if np.shape(leaf)[:1] != (self.every,):
        remedy = (
          f"Split a device's examples in your step, of which {self.every} must"
          f" divide the number: `x.reshape({self.every}, -1, *x.shape[1:])`."
          " Repeat an array that all steps share:"
          f" `jnp.stack([x] * {self.every})`"
        )
        if not np.shape(leaf):
          remedy = (
            "Give each step its own: `jax.random.split(key, every)`, or"
            " `jnp.full(every, x)`"
          )
        raise ValueError(
          "`batches` must hold one batch for each of `every` steps, so leaf"
          f" {name!r} must have shape [{self.every}, ...] on each device, but"
          f" has {np.shape(leaf)}. {remedy}."
        )


def local_steps(
  loss_fn: Callable[[Any, Any], jax.Array],
  inner: optax.GradientTransformation,
  every: int,
  axis_name: AxisName,
) -> LocalSteps:
  """Trains each device alone for some steps between two exchanges.

  Use it if devices are connected by slow links, such as those between sites:
  gradients are sent only once in `every` steps. This is DiLoCo if `inner` is
  AdamW and the outer optimizer SGD with Nesterov momentum, and local SGD if
  both are plain SGD::

    inner = optax.adamw(1e-3)
    outer = optax.chain(
      zenjax.compress.all_reduce(zenjax.compress.LowBit(bits=4), "data"),
      optax.sgd(0.7, momentum=0.5, nesterov=True),
    )
    local = zenjax.local_steps(loss_fn, inner, 32, "data")
    inner_state = zenjax.init_state(local, params, mesh, "data")

  Call the result in place of `jax.value_and_grad`, inside `shard_map`, `pmap`
  or `zenjax.data_parallel`. Starting at `params`, each device takes `every`
  steps of `inner`, and returns the difference as a pseudo-gradient in the dtype
  of the parameters. Give it to the outer optimizer like a gradient::

    (loss, grads), inner_state = local(params, inner_state, batches)
    updates, outer_state = outer.update(grads, outer_state, params)

  Nothing is sent unless `loss_fn` sends it. The state of `inner` differs
  between devices and goes on in the next round. `zenjax.from_checkpoint` moves
  it to another number of devices as for `zenjax.per_device`.

  Args:
    loss_fn: `(params, batch) -> loss` of one device.
    inner: The optimizer of each device. A schedule in it counts inner steps.
    every: The number of steps between two exchanges.
    axis_name: As given to the synchronization of the outer optimizer.

  Returns:
    An object with `init(params)`, for `zenjax.init_state`, that you call with
    `(params, inner_state, batches)`. `batches` is a pytree of this device's
    batches with a leading dimension of `every`.

  Raises:
    ValueError: `every` isn't a positive integer; `inner` synchronizes;
      parameters are sharded tables; or, in a call, `batches` has another
      leading dimension, or the state wasn't made for these devices.
    NameError: In a call, no axis of that name is bound, as in plain `jit`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> def loss_fn(w, x):
    ...   return 0.5 * jnp.sum((w - x) ** 2)
    >>> local = zenjax.local_steps(loss_fn, optax.sgd(0.5), 2, "data")
    >>> outer = optax.chain(zenjax.zen_sync("data"), optax.sgd(1.0))
    >>> def one_round(w, batches):
    ...   (loss, grads), _ = local(w, local.init(w), batches)
    ...   updates, _ = outer.update(grads, outer.init(w), w)
    ...   return loss, optax.apply_updates(w, updates)
    >>> run = jax.vmap(one_round, in_axes=(None, 0), axis_name="data")
    >>> batches = jnp.array([[[4.0], [4.0]], [[8.0], [8.0]]])
    >>> loss, w = run(jnp.zeros(1), batches)
    >>> loss.tolist(), w[0].tolist()  # devices are at 3 and at 6
    ([5.0, 20.0], [4.5])

  References:
    Douillard et al., [DiLoCo: Distributed Low-Communication Training of
    Language Models](https://arxiv.org/abs/2311.08105), 2023. Stich, [Local SGD
    Converges Fast and Communicates
    Little](https://arxiv.org/abs/1805.09767), ICLR 2019.
  """
  if not arguments.is_integer(every) or every < 1:
    raise ValueError(f"`every` must be a positive integer, got {every!r}.")
  inner = per_device.checked(_BY, inner)
  return LocalSteps(loss_fn, inner, every, arguments.axes(axis_name))
