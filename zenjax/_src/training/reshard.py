"""Saves states, and moves them to another number of devices."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
import optax

from zenjax._src.compress.compress_state import CompressState
from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.folding import folded
from zenjax._src.sync import sync_state
from zenjax._src.sync.delayed import DelayedState
from zenjax._src.sync.device_state import PerDeviceState
from zenjax._src.tables import reorder
from zenjax._src.tables import sharded_table
from zenjax._src.tables import sharding
from zenjax._src.tables.reorder import on_host
from zenjax._src.tables.sharded_table import is_sharded
from zenjax._src.training import placement


def to_checkpoint(state: Any, *, donate: bool = False) -> Any:
  """Brings a state into a form that any number of devices can restore.

  Replicated leaves become host arrays. Sharded tables, and optimizer state with
  a row for each of their rows, stay on their devices, each with a range of rows
  in the table's order, so that no device holds all of them and orbax writes
  them by shards. These ranges are equal, with zeros at the end: if the old or
  the new number of devices does not divide the rows, restore with
  `strict=False`. What `compress.all_reduce` keeps for later is saved
  for each device, `[devices, ..]`.

  Args:
    state: The state of a step: an optimizer state, parameters, or any pytree
      that holds them.
    donate: Whether the sharded tables of `state` are used up, one array after
      the other, so that both forms of only one array exist at a time.

  Returns:
    The same pytree in the form to save.

  Raises:
    ValueError: The state is not complete.
    TypeError: `to_checkpoint` is called inside `jit` or `jax.eval_shape`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> devices = jax.devices()
    >>> four = jax.sharding.Mesh(devices[:4], ("data",))
    >>> two = jax.sharding.Mesh(devices[:2], ("data",))
    >>> tx = zenjax.sharded_optimizer(optax.adagrad(0.1), "data", sparse=True)
    >>> state = zenjax.init_state(tx, jnp.zeros((700, 2)), four, "data")
    >>> saved = zenjax.to_checkpoint(state)
    >>> saved.inner[0].sum_of_squares.value.shape
    (700, 2)
    >>> state = zenjax.from_checkpoint(saved, two, "data")
    >>> state.inner[0].sum_of_squares.value.shape  # 352 rows a device, padded
    (704, 2)
  """

  sync_state.require_numbers(state, "to_checkpoint")

  def saved(x: Any) -> Any:
    return reorder.to_order(x, donate=donate) if is_sharded(x) else on_host(x)

  with jax.transfer_guard("allow"):
    return jax.tree.map(saved, state, is_leaf=is_sharded)


def from_checkpoint(
  saved: Any,
  mesh: Mesh,
  axis_name: AxisName,
  *,
  replicas: AxisName | None = None,
  like: Any = None,
  donate: bool = False,
) -> Any:
  """Places a saved state, or the state of a step, on the devices of a mesh.

  Use it to go on after a restart, or with another number of devices. `saved` is
  a result of `to_checkpoint`, the same restored from disk, or a state that is
  still on other devices. To restore from disk you need a target of the
  right structure: `to_checkpoint(init_state(tx, params, mesh, axis_name))`.

  Nothing that the state holds is lost:

  - The state that `sharded_optimizer` keeps for a row, and the rows of sharded
    tables, move to the new owners without any change.
  - Gradients that wait on each device will move the parameters as far as
    before. On fewer devices, each new device waits with the sum of some old
    ones. On more devices, some begin with zeros. If devices average, gradients
    are also multiplied by the new number of devices over the old one. This
    concerns residuals and momenta of `compress.all_reduce`, gradients that
    `delayed` keeps, and gradients that `optax.MultiSteps` accumulates before
    any of them or a `sharded_optimizer`.
  - States of `per_device` and `local_steps` keep their mean over devices.
  - Everything else is equal on all devices, and is only placed.

  Args:
    saved: The state, complete.
    mesh: The mesh to go on with.
    axis_name: The axis or axes that you give to `zen_sync`, or the axis that
      rows of sharded tables are distributed over.
    replicas: Further axes along which sharded tables have copies.
    like: A state of `zenjax.init_state` for `mesh`. You need it in two cases:
      if sharded tables have another `hash_seed` now than when the state was
      made, and if nothing differs between devices except for gradients that
      `MultiSteps` accumulates.
    donate: Whether the sharded tables of `saved` are used up, one array after
      the other, so that both forms of only one array exist at a time.

  Returns:
    The state, placed on `mesh`.

  Raises:
    ValueError: An axis is not one of the mesh; the state is not complete;
      column groups do not divide the devices; or `MultiSteps` accumulates, and
      nothing tells for how many devices, or whether means or sums.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> two = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = optax.chain(zenjax.zen_sync("data"), optax.adam(0.1))
    >>> saved = zenjax.to_checkpoint(tx.init(jnp.zeros((700, 2))))
    >>> state = zenjax.from_checkpoint(saved, two, "data")
    >>> len(state[1][0].mu.devices())
    2
  """
  axes = arguments.mesh_axes(axis_name, mesh)
  copies = sharding.replica_axes(replicas, axes, mesh)
  devices = math.prod([mesh.shape[axis] for axis in axes])
  others = iter(sharded_table.nodes(like))

  def on_owners(table: Any) -> Any:
    if not is_sharded(table):
      return table
    _require_readable(table, devices)
    other = next(others, table)
    hashed = dict(seed=other.seed, hash_offset=other.hash_offset)
    if {"seed": table.seed, "hash_offset": table.hash_offset} != hashed:
      table = reorder.to_order(table, donate=donate)
      table = dataclasses.replace(table, **hashed)
    return reorder.to_owners(table, mesh, axes, copies, donate=donate)

  with jax.transfer_guard("allow"):
    # Tables move last: they tell for how many devices gradients wait.
    state = _moved_to(saved, devices, like)
    state = jax.tree.map(on_owners, state, is_leaf=is_sharded)
    specs = placement.state_specs(state, axis_name)
    place = lambda x, spec: reorder.placed(x, NamedSharding(mesh, spec))
    return jax.tree.map(place, state, specs)


def _require_readable(table: Any, devices: int) -> None:
  """Raises ValueError for a table that was saved as it was on its devices."""
  on_mesh = lambda x: isinstance(getattr(x, "sharding", None), NamedSharding)
  if table.devices in (0, devices) or all(map(on_mesh, jax.tree.leaves(table))):
    return
  raise ValueError(
    f"`saved` has the rows of a table in the order of {table.devices} devices,"
    f" which {devices} devices cannot load. Save the result of"
    " `zenjax.to_checkpoint(state)` instead. If you have only this file, load"
    f" it on {table.devices} devices by `zenjax.from_checkpoint`, and save it"
    " so."
  )


def _moved_to(state: Any, devices: int, like: Any) -> Any:
  """Returns `state` for so many devices, except for sharded tables.

  Args:
    state: A state, or a part of one.
    devices: How many.
    like: As for `from_checkpoint`, the same part of it.
  """
  kinds: Any = (
    sync_state.LeafState
    | CompressState
    | DelayedState
    | PerDeviceState
    | optax.MultiStepsState
  )
  names = lambda tree: [type(x).__name__ for x in sync_state.nodes(tree, kinds)]
  if like is not None and names(like) != names(state):
    raise ValueError(
      f"`like` has {names(like)}, but `state` has {names(state)}. Make it with"
      " `zenjax.init_state(tx, params, mesh, axis_name)` for the same `tx`."
    )
  others = iter(sync_state.nodes(like, kinds))

  def moved(node: Any) -> Any:
    if not isinstance(node, kinds):
      return node
    other = next(others, None)
    if isinstance(node, sync_state.LeafState | PerDeviceState):
      return jax.tree.map(on_host, node).on_devices(devices)
    if isinstance(node, DelayedState):
      averages = _averages_all(node.inner, "delayed")
      fold = lambda x: folded(on_host(x), devices, averages=averages)
      inner = _moved_to(node.inner, devices, other and other.inner)
      return DelayedState(jax.tree.map(fold, node.saved), inner)
    if isinstance(node, CompressState):
      own = jax.tree.map(on_host, node._replace(others=()))
      inner = _moved_to(node.others, devices, None)
      return own.on_devices(devices)._replace(others=inner)
    if placement.accumulates_local(node):
      node = node._replace(acc_grads=_accumulated(node, devices, other))
    inner = other and other.inner_opt_state
    inner = _moved_to(node.inner_opt_state, devices, inner)
    return node._replace(inner_opt_state=inner)

  return jax.tree.map(moved, state, is_leaf=lambda x: isinstance(x, kinds))


def _accumulated(node: optax.MultiStepsState, devices: int, like: Any) -> Any:
  """Converts gradients `[old * R, ..]` of `old` devices to other devices."""
  leaves, structure = jax.tree.flatten(node.acc_grads)
  old = _accumulated_on(node, devices, like) if leaves else devices
  if old == devices:
    return node.acc_grads
  parts = [on_host(x).reshape(old, -1, *x.shape[1:]) for x in leaves]
  # Zeros are the same for a mean and for a sum.
  averages = any(x.any() for x in parts) and _averages_all(
    node.inner_opt_state, "optax.MultiSteps"
  )
  moved = [folded(x, devices, averages=averages) for x in parts]
  return structure.unflatten([x.reshape(-1, *x.shape[2:]) for x in moved])


def _averages_all(inner: Any, by: str) -> bool:
  """Returns True unless gradients that `by` keeps will be summed by `inner`."""
  compressed = sync_state.nodes(inner, CompressState)
  means = {bool(on_host(node.mean)) for node in compressed}
  means |= {bool(on_host(sync.mean)) for sync in sync_state.find(inner)}
  if len(means) > 1:
    raise ValueError(
      f"`state` keeps gradients in `{by}`, some for a mean and some for a sum"
      " over devices. Give all of them the same `op`, or, with"
      " `optax.MultiSteps`, take steps until `mini_step` is 0 first."
    )
  return means != {False}


def _accumulated_on(
  node: optax.MultiStepsState, devices: int, like: Any
) -> int:
  """Returns the number of devices that have accumulated gradients."""
  (first, *_) = jax.tree.leaves(node.acc_grads)
  if like is not None:
    (new, *_) = jax.tree.leaves(like.acc_grads)
    return first.shape[0] * devices // new.shape[0]
  by_nodes = {x.devices for _, x in placement.own_nodes(node)}
  shards = 1
  if isinstance(first, jax.Array):
    shards = first.shape[0] // first.sharding.shard_shape(first.shape)[0]
  by_counts = {
    sync_state.Sizes(*on_host(leaf.sizes)).devices
    for sync in sync_state.find(node)
    for leaf in sync.leaves.values()
  }
  # Saved tables and leaves before the first step say 0. One shard may be due to
  # a checkpoint that was loaded to one device.
  for counts in (by_nodes - {0}, {shards} - {1}, by_counts - {0}):
    if len(counts) == 1:
      return int(counts.pop())
  raise ValueError(
    "`like` is missing: nothing in `state` tells how many devices have"
    " accumulated the gradients of `optax.MultiSteps`. Give"
    " `like=zenjax.init_state(tx, params, mesh, axis_name)`."
  )
