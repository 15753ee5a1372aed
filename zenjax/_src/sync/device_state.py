"""State that differs between devices: each leaf has one part per device."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zenjax._src.core.collectives import Axes
from zenjax._src.core.folding import spread
from zenjax._src.sync import gradient_tree


class PerDeviceState(NamedTuple):
  """A state of which each device has its own."""

  value: Any  # leaves are [1, ...] on a device, [n, ...] globally

  @property
  def devices(self) -> int:
    """The number of devices that a global state was made for."""
    return jax.tree.leaves(self.value)[0].shape[0]

  def specs(self, split: PartitionSpec) -> "PerDeviceState":
    """Returns partition specs: each device has its own part."""
    return jax.tree.map(lambda _: split, self)

  def on_devices(self, devices: int) -> "PerDeviceState":
    """Converts a state in host memory to another number of devices.

    The mean of floating leaves over devices stays the same. Other leaves, such
    as step counts, are those of the first device.
    """
    return jax.tree.map(lambda x: spread(x, devices), self)


def packed(tree: Any, axes: Axes) -> PerDeviceState:
  """Returns the state of one device, inside of a mapping over `axes`."""
  one = lambda x: jnp.asarray(x)[None]
  return PerDeviceState(gradient_tree.as_varying(jax.tree.map(one, tree), axes))


def unpacked(by: str, devices: int, state: Any, fresh: Any) -> Any:
  """Returns the tree that `packed` was given.

  Args:
    by: The name of the transformation.
    devices: The number of devices.
    state: The state of one device.
    fresh: What the tree must have in common with, or its shapes.

  Raises:
    ValueError: The state was made for other gradients or devices.
  """
  given = isinstance(state, PerDeviceState)
  got = _facts(state.value, 0) if given else {}
  require_made_for(by, devices, got, _facts(fresh, 1))
  return jax.tree.map(lambda x: x[0], state.value)


def _facts(tree: Any, lacking: int) -> dict[str, str]:
  """Returns shapes by path, with so many leading dimensions added."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    f"leaf {jax.tree_util.keystr(path)}": str((1,) * lacking + x.shape)
    for path, x in leaves
  }


def require_made_for(
  by: str, devices: int, got: Mapping[str, Any], needed: Mapping[str, Any]
) -> None:
  """Raises if a state was made for other gradients, devices or options.

  Args:
    by: The name of the transformation.
    devices: The number of devices.
    got: Descriptions of parts of the state.
    needed: Descriptions of the same parts of a fresh state.
  """
  for name in sorted(got.keys() | needed.keys()):
    have, want = got.get(name, "nothing"), needed.get(name, "nothing")
    if have != want:
      raise ValueError(
        f"`state` of {by} was made for other gradients, options or devices: its"
        f" {name} is {have}, and {devices} devices need {want}. Make it with"
        " `zenjax.init_state(tx, params, mesh, axis_name)`, and pass"
        " `zenjax.state_specs(state, axis_name)` to shard_map. After a change"
        " of devices use `zenjax.from_checkpoint(state, mesh, axis_name)`."
      )
