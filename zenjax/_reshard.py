"""A state that goes on with another number of devices."""

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
import numpy as np

from zenjax import _owned
from zenjax import _placement
from zenjax import _state
from zenjax._arguments import AxisName
from zenjax._sparsify import _reshard as _moved
from zenjax._sparsify._state import FeedbackLeaf
from zenjax._sparsify._state import SparsifierState


def reshard(state: Any, mesh: Mesh, axis_name: AxisName) -> Any:
  """Moves a state with residuals to another number of devices.

  A checkpoint of `on_overflow="carry"` holds one residual a device. On a mesh
  with another number of devices they are added up, or joined by zeros, and
  for `op="mean"` scaled by new over old devices: what the waiting rows would
  still have added to the parameters is kept. Those of sparsifiers and of
  `error_feedback`, its momenta too, are added up and not scaled: their sum,
  what is still to be sent, is kept. Without residuals the state is only placed.

  Args:
    state: The restored state, with residuals of `[old, ...]`.
    mesh: The mesh to go on with.
    axis_name: As given to `zen_sync`.

  Returns:
    The state for `mesh`, placed.

  Raises:
    ValueError: An axis is not the mesh's, or the state is one of
      `owner_update` for another number of devices, whose owners are others.

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
  axes = _placement.mesh_axes(axis_name, mesh)
  devices = int(np.prod([mesh.shape[axis] for axis in axes]))
  _require_same_owners(state, devices)

  def moved(node: Any) -> Any:
    if isinstance(node, _state.LeafState) and node.residual is not None:
      return node._replace(residual=_fold(node, devices))
    if isinstance(node, SparsifierState):
      return _moved.on_devices(node, devices)
    if isinstance(node, FeedbackLeaf):
      return _moved.leaf_on_devices(node, devices)
    return node

  own = _state.LeafState | FeedbackLeaf | SparsifierState
  is_leaf = lambda node: isinstance(node, own)
  state = jax.tree.map(moved, state, is_leaf=is_leaf)
  specs = _placement.state_specs(state, axis_name)
  return jax.tree.map(
    lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
    state,
    specs,
  )


def _require_same_owners(state: Any, devices: int) -> None:
  parts = jax.tree.leaves(state, is_leaf=_owned.is_owned)
  if not any(_owned.is_owned(part) for part in parts):
    return
  sizes = [
    _state.Sizes(*np.asarray(leaf.sizes))
    for node in _state.find(state)
    for leaf in node.leaves.values()
  ]
  if any(known.devices != devices for known in sizes):
    raise ValueError(
      f"`state` of owner_update must be of {devices} devices to be placed on"
      f" them, got one of {[int(known.devices) for known in sizes]} (0 before"
      " the first step): rows have other owners there. Make a new state with"
      " `zenjax.init`."
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
