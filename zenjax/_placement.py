"""Where parameters and states live: types, specs, placement."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

from zenjax import _group
from zenjax import _options
from zenjax import _state
from zenjax._collectives import Axes
from zenjax._options import AxisName


def as_varying(params: Any, axis_name: AxisName) -> Any:
  """The view of replicated parameters whose gradients stay local.

  Inside `shard_map(check_vma=True)` autodiff sums gradients of replicated
  values over devices by itself, before anyone can send less than all of
  them. Differentiate with respect to this view instead. It costs nothing,
  does nothing under `pmap`, `vmap` and `check_vma=False`, where gradients
  are local anyway, and twice is once.

  Args:
    params: Any tree of arrays.
    axis_name: The axis or axes that gradients are to be synchronized over.

  Returns:
    The same values, typed as varying over the axes.

  Raises:
    NameError: No axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> def local_grad(w, x):
    ...   w = zenjax.as_varying(w, "data")
    ...   return jax.grad(lambda w: jnp.sum(w * x))(w)
    >>> w, x = jnp.zeros(2), jnp.array([[1.0, 0.0], [0.0, 5.0]])
    >>> jax.vmap(local_grad, (None, 0), axis_name="data")(w, x).tolist()
    [[1.0, 0.0], [0.0, 5.0]]
  """
  return _group.as_varying(params, _options.axes(axis_name))


def state_specs(state: Any, axis_name: AxisName) -> Any:
  """Partition specs of an optimizer state for `shard_map` and checkpoints.

  Everything is replicated but what differs between devices: the residuals of
  `on_overflow="carry"` and the gradients that `optax.MultiSteps` accumulates
  around zen_sync. Those are split over `axis_name` along their first
  dimension.

  Args:
    state: An optimizer state, or its shapes (`jax.eval_shape`).
    axis_name: As given to `zen_sync`.

  Returns:
    A tree of `PartitionSpec` of the same structure.

  Raises:
    ValueError: `MultiSteps` accumulates a gradient without dimensions, which
      no spec can split.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> state = zenjax.zen_sync("data").init({"w": jnp.zeros(3)})
    >>> zenjax.state_specs(state, "data").step
    P()
  """
  split = PartitionSpec(_options.axes(axis_name))

  def spec(node: Any) -> Any:
    if isinstance(node, _state.LeafState):
      same = jax.tree.map(lambda _: PartitionSpec(), node)
      return same if node.residual is None else same._replace(residual=split)
    if isinstance(node, optax.MultiStepsState):
      rest = state_specs(node._replace(acc_grads=None), axis_name)
      acc = jax.tree.map(lambda leaf: _split_spec(leaf, split), node.acc_grads)
      return rest._replace(acc_grads=acc)
    return PartitionSpec()

  return jax.tree.map(spec, state, is_leaf=lambda node: _has_own(node, state))


def _has_own(node: Any, root: Any) -> bool:
  """Whether `node` decides its own specs; the root was split already."""
  if isinstance(node, _state.LeafState):
    return True
  own = isinstance(node, optax.MultiStepsState)
  return own and not (node is root and node.acc_grads is None)


def _split_spec(leaf: Any, split: PartitionSpec) -> PartitionSpec:
  if not np.ndim(leaf):
    raise ValueError(
      "`state` must not accumulate gradients without dimensions: they differ"
      " between devices and no spec can split them; give that parameter the"
      " shape (1,), or put `optax.MultiSteps` inside the chain after zen_sync."
    )
  return split


def init(
  tx: optax.GradientTransformation | optax.MultiSteps,
  params: Any,
  mesh: Mesh,
  axis_name: AxisName,
) -> Any:
  """An optimizer state, made where its axis is bound and placed on `mesh`.

  Needed for states that hold residuals or accumulated gradients; for others
  it is `tx.init(params)` placed on all devices, so that the first step
  compiles as all later ones do.

  Args:
    tx: Any chain with `zen_sync` in it.
    params: Parameters, replicated.
    mesh: The mesh that steps run on.
    axis_name: As given to `zen_sync`.

  Returns:
    The state; each leaf a global array sharded by `state_specs`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = zenjax.zen_sync("data", sparse=True, on_overflow="carry")
    >>> state = zenjax.init(tx, jnp.zeros((6, 2)), mesh, "data")
    >>> state.leaves["leaf"].residual.shape
    (2, 6, 2)
  """

  def mapped(specs):
    return jax.shard_map(
      tx.init,
      mesh=mesh,
      in_specs=PartitionSpec(),
      out_specs=specs,
      check_vma=False,
    )

  # Shapes on one device first: which leaves are split depends on them.
  local = jax.eval_shape(mapped(PartitionSpec()), params)
  return jax.jit(mapped(state_specs(local, axis_name)))(params)


def data_parallel(
  step: Callable[..., tuple[Any, Any, Any]],
  mesh: Mesh,
  axis_name: AxisName,
) -> Callable[..., tuple[Any, Any, Any]]:
  """Maps a training step over devices, for users of plain `jit`.

  One call gives the `shard_map`, the specs and local gradients: parameters
  are replicated, the optimizer state is placed by `state_specs`, each batch
  argument is split along its first dimension, and gradients taken inside are
  those of the device's own part until `zen_sync` averages them.

  Args:
    step: `(params, opt_state, *batch) -> (params, opt_state, aux)`, written
      for one device, with `zen_sync(axis_name)` in its optimizer chain.
    mesh: A mesh that has the axes.
    axis_name: The axis or axes of `mesh` that batches are split over.

  Returns:
    A function of the same signature on global arrays. Floating leaves of
    `aux` are averaged over devices, integers summed. Wrap it in `jax.jit`,
    donating parameters and state.

  Raises:
    ValueError: A batch cannot be split evenly, or an axis is not the mesh's.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = optax.chain(zenjax.zen_sync("data", sparse=True), optax.sgd(1.0))
    >>> def step(table, state, ids):
    ...   loss, grads = jax.value_and_grad(lambda t: t[ids].sum())(table)
    ...   updates, state = tx.update(grads, state, table)
    ...   return optax.apply_updates(table, updates), state, loss
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> table = jnp.zeros((4, 1))
    >>> table, _, _ = step(table, tx.init(table), jnp.array([0, 0, 1, 3]))
    >>> table[:, 0].tolist()
    [-1.0, -0.5, 0.0, -0.5]
  """
  axes = _options.axes(axis_name)
  unknown = [axis for axis in axes if axis not in mesh.axis_names]
  if unknown:
    raise ValueError(
      f"`axis_name` must name axes of the mesh, got {unknown}; it has"
      f" {mesh.axis_names}."
    )
  devices = int(np.prod([mesh.shape[axis] for axis in axes]))

  def local_step(params, opt_state, *batch):
    params, opt_state, aux = step(params, opt_state, *batch)
    return params, opt_state, _average(aux, axes)

  def mapped(params, opt_state, *batch):
    _check_batch(batch, devices)
    specs = state_specs(opt_state, axis_name)
    # check_vma=False leaves gradients local without a cast in the user's code.
    return jax.shard_map(
      local_step,
      mesh=mesh,
      in_specs=(PartitionSpec(), specs, *[PartitionSpec(axes)] * len(batch)),
      out_specs=(PartitionSpec(), specs, PartitionSpec()),
      check_vma=False,
    )(params, opt_state, *batch)

  return mapped


def _average(aux: Any, axes: Axes) -> Any:
  def one(leaf):
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
      return lax.pmean(leaf, axes)
    return lax.psum(
      leaf.astype(jnp.int32) if leaf.dtype == bool else leaf, axes
    )

  return jax.tree.map(one, aux)


def _check_batch(batch: tuple[Any, ...], devices: int) -> None:
  for position, argument in enumerate(batch):
    for leaf in jax.tree.leaves(argument):
      shape = np.shape(leaf)
      if not shape or shape[0] % devices:
        raise ValueError(
          f"`batch` argument {position} must have a first dimension that"
          f" {devices} devices divide, got shape {shape}; pad or trim the"
          " batch."
        )


def reshard(state: Any, mesh: Mesh, axis_name: AxisName) -> Any:
  """Moves a state with residuals to another number of devices.

  A checkpoint of `on_overflow="carry"` holds one residual a device. On a mesh
  with another number of devices they are added up, or joined by zeros, and
  for `op="mean"` scaled by new over old devices: what the waiting rows would
  still have added to the parameters is kept. Without residuals the state is
  only placed.

  Args:
    state: The restored state, with residuals of `[old, ...]`.
    mesh: The mesh to go on with.
    axis_name: As given to `zen_sync`.

  Returns:
    The state for `mesh`, placed.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> devices = jax.devices()
    >>> four = jax.sharding.Mesh(devices[:4], ("data",))
    >>> two = jax.sharding.Mesh(devices[:2], ("data",))
    >>> tx = zenjax.zen_sync("data", sparse=True, on_overflow="carry")
    >>> state = zenjax.init(tx, jnp.zeros((6, 2)), four, "data")
    >>> zenjax.reshard(state, two, "data").leaves["leaf"].residual.shape
    (2, 6, 2)
  """
  axes = _options.axes(axis_name)
  devices = int(np.prod([mesh.shape[axis] for axis in axes]))

  def moved(node: Any) -> Any:
    if isinstance(node, _state.LeafState) and node.residual is not None:
      return node._replace(residual=_fold(node, devices))
    return node

  is_leaf = lambda node: isinstance(node, _state.LeafState)
  state = jax.tree.map(moved, state, is_leaf=is_leaf)
  specs = state_specs(state, axis_name)
  return jax.tree.map(
    lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
    state,
    specs,
  )


def _fold(leaf: _state.LeafState, devices: int) -> np.ndarray:
  residual = np.asarray(leaf.residual)
  old = residual.shape[0]
  if old == devices:
    return residual
  # 16-bit residuals are folded in a wider dtype, rounded once.
  wide = residual.astype(np.promote_types(residual.dtype, np.float32))
  folded = np.zeros((devices, *wide.shape[1:]), wide.dtype)
  for source in range(old):
    folded[source % devices] += wide[source]
  sizes = _state.Sizes(*np.asarray(leaf.sizes))
  scale = devices / old if sizes.mean else 1.0
  return (folded * scale).astype(residual.dtype)
