"""`exdyna` and `micro`: sparsifiers without build-up, as optax transforms."""

from typing import Any, Literal

import optax

from zenjax._arguments import AxisName
from zenjax._sparsify import _exclusive
from zenjax._sparsify import _partitions
from zenjax._sparsify import _settings

ControllerName = Literal["damped", "paper"]


def exdyna(
  axis_name: AxisName,
  density: float,
  *,
  controller: ControllerName = "damped",
  op: str = "mean",
  start: float | None = None,
  capacity: int | None = None,
  residual_dtype: Any = None,
  wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest gradients over devices and keeps the rest for later.

  For models whose gradients are dense. All leaves are seen as one vector of
  `N` elements, to which each device adds its residual: what it did not send
  until now. The vector is cut into a partition for each device, of which
  partitions rotate with the steps. A device selects the elements of its own
  partition that are not below a threshold; all of them together are about
  `density * N`, none is selected twice. Then all devices exchange their values
  at all selected elements: the average of these is the update, and is zero
  elsewhere. All others wait in the residual.

  Partitions are of 1,024 blocks. Each step one block moves from a partition
  where too much was selected to a neighbour that had too little.

  Used as `zenjax.zen_sync` is, and in its place: first in a chain, inside
  `shard_map`, `pmap` or `vmap` with an axis name, on *local* gradients. The
  learning rate, momentum and weight decay come after it. Make its state with
  `zenjax.init`: residuals differ between devices. It refuses a chain where
  `zen_sync` averages the same leaves. `zenjax.reshard` takes the state to
  another number of devices, where what waits has the weight that it had.

  It is lossy in time, not in sum: `n` times all averages so far, and all
  residuals, are all gradients so far, to rounding. NaN and Inf are always
  selected: they come out once, within `n` steps, and leave no trace in
  residual or threshold.

  Args:
    axis_name: The axis that devices are mapped over, or a tuple of axes.
    density: The part of the model that a step is to send, of all devices
      together, in (0, 1].
    controller: What moves the threshold from step to step. `"damped"` starts
      at a quantile of a sample of the first gradients, and then multiplies by
      `(selected / wanted) ** 0.03` and by what a step has to be for gradients
      that shrink or grow, which it learns: `exp(drift)`, where the drift adds
      up `0.001 * (selected / wanted - 1)`, of which at most a quarter counts.
      Both together are 1.05 at most. After a step that was off by more than a
      factor of 4 it samples again, and forgets the drift. `"paper"` is the
      published rule: it starts at `1 / (2 sqrt(k))` for `k = int(density *
      N)`, and multiplies by 1.005, 1.00125 or 0.995; each device sends one
      element at least. It settles a little below `density`, and takes 462 steps
      for a factor of 10.
    op: `"mean"` or `"sum"`.
    start: The first threshold, instead of the controller's own.
    capacity: Indices that a device sends in one round; by default 1.25 fair
      shares. What does not fit follows in further rounds, or in a sum of the
      whole vector where that is less: a small one costs time, never a gradient.
      `zenjax.report` says what a run needed.
    residual_dtype: Of the residual. By default the leaves' own, or float32
      where they differ.
    wire_dtype: Round values and their sums to this floating dtype for the
      wire, as `jnp.bfloat16`; sums are taken in float32 at least. What rounding
      takes stays in the residual: of a value on its device, of a sum on the
      device that selected the element. Of what exceeds it (of float16 65,504)
      as much is sent as fits, and the rest stays too, where the residual's
      dtype can hold more.

  Returns:
    A transformation whose state is a `zenjax.SparsifierState`, with
    `SparsifierStats` of the last step. Updates have the shapes and dtypes of
    the gradients, and are equal on all devices.

  Raises:
    ValueError: An argument is out of range; the model has fewer than
      `1024 * 32` elements, or there are more devices than 1,024; `density * N`
      is below 1; the state was not made by `zenjax.init` for gradients of these
      names and shapes, or with another `op`; a gradient was already summed by
      autodiff.
    TypeError: A leaf is not an array of floating numbers, or a dtype not one of
      them.
    NameError: In `update`, when no axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.exdyna("data", 1 / 16_384)  # 2 of 32,768 elements
    >>> grads = jnp.ones((2, 32_768)).at[0, 5].set(6.0).at[1, 20_000].set(-9.0)
    >>> def step(g):
    ...   return tx.update(g, tx.init(g))
    >>> update, state = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    >>> jnp.flatnonzero(update[0]).tolist(), update[1, [5, 20_000]].tolist()
    ([5, 20000], [3.5, -4.0])
    >>> state.residual[:, 0, 4:7].tolist()  # the rest waits on its device
    [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]]

  References:
    Yoon and Oh, [Preserving Near-Optimal Gradient Sparsification Cost for
    Scalable Distributed Deep Learning](https://arxiv.org/abs/2402.13781),
    CCGrid 2024.
  """
  return _exclusive.transformation(
    _settings.check(
      "exdyna",
      axis_name,
      density,
      controller=controller,
      op=op,
      start=start,
      capacity=capacity,
      residual_dtype=residual_dtype,
      wire_dtype=wire_dtype,
      division=_partitions.Blocks,
    )
  )


def micro(
  axis_name: AxisName,
  density: float,
  *,
  controller: ControllerName = "damped",
  op: str = "mean",
  start: float | None = None,
  capacity: int | None = None,
  residual_dtype: Any = None,
  wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """As `zenjax.exdyna`, with partitions that are even and stay so.

  Cheaper by the little that moving them costs, and for models of any size; the
  devices' selections are as uneven as the large gradients lie.

  Args:
    axis_name: As for `zenjax.exdyna`, as all arguments.
    density: The part of the model that a step is to send.
    controller: `"damped"` or `"paper"`.
    op: `"mean"` or `"sum"`.
    start: The first threshold.
    capacity: Indices that a device sends in one round.
    residual_dtype: Of the residual.
    wire_dtype: Of values and sums on the wire.

  Returns:
    A transformation whose state is a `zenjax.SparsifierState`.

  Raises:
    ValueError: As `zenjax.exdyna`; the model may be as small as an element
      for each device.
    TypeError: A leaf is not an array of floating numbers, or a dtype not one of
      them.
    NameError: In `update`, when no axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = zenjax.micro("data", 0.25)
    >>> state = zenjax.init(tx, jnp.zeros(8), mesh, "data")
    >>> @jax.jit
    ... def step(grads, state):
    ...   specs = zenjax.state_specs(state, "data")
    ...   split, same = jax.P("data"), jax.P()
    ...   update = lambda g, state: tx.update(g[0], state)
    ...   mapped = jax.shard_map(
    ...     update, mesh=mesh, in_specs=(split, specs), out_specs=(same, specs)
    ...   )
    ...   return mapped(grads, state)
    >>> grads = jnp.ones((2, 8)).at[0, 1].set(5.0).at[1, 6].set(3.0)
    >>> update, state = step(grads, state)
    >>> update.tolist()
    [0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0]
    >>> float(state.stats.density)
    0.25

  References:
    Yoon and Oh, [MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and
    Accelerating Distributed DNN Training](https://arxiv.org/abs/2310.00967),
    HiPC 2023.
  """
  return _exclusive.transformation(
    _settings.check(
      "micro",
      axis_name,
      density,
      controller=controller,
      op=op,
      start=start,
      capacity=capacity,
      residual_dtype=residual_dtype,
      wire_dtype=wire_dtype,
      division=_partitions.Even,
    )
  )
