"""`data_parallel`: a training step mapped over the devices of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np
import optax

from zenjax import _placement
from zenjax import _replicas
from zenjax import _row_sets
from zenjax import _select
from zenjax._arguments import AxisName
from zenjax._collectives import Axes
from zenjax._row_sets import RowSets


def data_parallel(
  step: Callable[..., tuple[Any, Any, Any]],
  mesh: Mesh,
  axis_name: AxisName,
) -> Callable[..., tuple[Any, Any, Any]]:
  """Maps a training step over devices, for users of plain `jit`.

  One call gives the `shard_map`, the specs and local gradients: parameters
  are replicated, the optimizer state is placed by `state_specs`, each batch
  argument is split along its first dimension, and gradients taken inside are
  those of the device's own part until `zen_sync` averages them. So neither
  `as_varying` nor a `pmean` of the loss is needed.

  Row gradients, `zenjax.value_and_grad` for `lazy_rows` or `owner_update`, are
  taken in a step as any others; the example of `owner_update` shows one. Make
  the state with `zenjax.init`.

  Parameters and state stay equal on all devices only if gradients are averaged.
  The traced step is looked at: a leaf that it makes of the device's own part of
  the batch with no collective on the way is refused. That the collective
  averages what it should is not seen. What a batch argument says to all alike,
  as a rate in `x[0]`, needs a `lax.pmean` where a state keeps it.

  Args:
    step: `(params, opt_state, *batch) -> (params, opt_state, aux)`, written
      for one device, with `zen_sync(axis_name)` in its optimizer chain, or
      `lax.pmean`, `sparse_pmean` in itself. It may return parameters and state
      as they came, to evaluate.
    mesh: A mesh that has the axes.
    axis_name: The axis or axes of `mesh` that batches are split over.

  Returns:
    A function of the same signature on global arrays. Floating leaves of
    `aux`, as the loss, are averaged over devices, integers summed; what
    `Recorder.rows` returns is that of every device. Wrap it in `jax.jit`,
    donating parameters and state.

  Raises:
    ValueError: A batch cannot be split evenly, an axis is not the mesh's, the
      state of `optax.MultiSteps` was not made by `zenjax.init`, or the step
      would leave devices with different parameters or states.

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
  axes = _placement.mesh_axes(axis_name, mesh)
  devices = int(np.prod([mesh.shape[axis] for axis in axes]))

  def mapped(params, opt_state, *batch):
    _check_batch(batch, devices)
    _check_accumulated(opt_state, params, devices)
    same, split = PartitionSpec(), PartitionSpec(axes)
    specs = _placement.state_specs(opt_state, axis_name)
    in_specs = (same, specs, *[split] * len(batch))
    arguments = (params, opt_state, *batch)

    def local_step(params, opt_state, *batch):
      params, opt_state, aux = step(params, opt_state, *batch)
      return params, opt_state, _average(aux, axes)

    # check_vma=False leaves gradients local without a cast in the user's code.
    return jax.shard_map(
      _replicas.checked(local_step, specs, mesh, axes),
      mesh=mesh,
      in_specs=in_specs,
      out_specs=(same, specs, same),
      check_vma=False,
    )(*_placement.on_mesh(arguments, mesh, in_specs))

  return mapped


def _average(aux: Any, axes: Axes) -> Any:
  def one(leaf):
    if isinstance(leaf, RowSets):
      return _row_sets.of_all(leaf, axes)
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
      return lax.pmean(leaf, axes)
    return lax.psum(
      leaf.astype(jnp.int32) if leaf.dtype == bool else leaf, axes
    )

  is_sets = lambda node: isinstance(node, RowSets)
  return jax.tree.map(one, aux, is_leaf=is_sets)


def _check_batch(batch: tuple[Any, ...], devices: int) -> None:
  for position, argument in enumerate(batch):
    for leaf in jax.tree.leaves(argument):
      shape = np.shape(leaf)
      if not shape or shape[0] % devices:
        raise ValueError(
          f"`batch` argument {position} must have a first dimension that"
          f" {devices} devices divide, got shape {shape};"
          f" {_remedy(leaf, devices)}."
        )


def _remedy(leaf: Any, devices: int) -> str:
  if np.shape(leaf):
    return "pad or trim the batch"
  if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
    return (
      f"give every device its own, `jax.random.split(key, {devices})`, and use"
      " `key[0]` in the step"
    )
  return (
    f"give every device a copy, `jnp.full({devices}, x)`, and use `x[0]` in"
    " the step"
  )


def _check_accumulated(state: Any, params: Any, devices: int) -> None:
  """Refuses gradients accumulated as if by one device for all.

  `state_specs` splits them, and a device would find a part of its own.
  """
  shapes = {name: np.shape(x) for name, x in _select.named_leaves(params)}
  is_own = lambda node: isinstance(node, optax.MultiStepsState)
  for node in filter(is_own, jax.tree.leaves(state, is_leaf=is_own)):
    for name, leaf in _select.named_leaves(node.acc_grads):
      shape = shapes.get(name)
      if not shape or leaf.shape == (devices * shape[0], *shape[1:]):
        continue
      raise ValueError(
        "`opt_state` must hold what `optax.MultiSteps` accumulates on each of"
        f" {devices} devices, {devices} times the rows of leaf {name!r} of"
        f" shape {shape}, got shape {leaf.shape}; make the state with"
        " `zenjax.init(tx, params, mesh, axis_name)` instead of `tx.init`."
      )
