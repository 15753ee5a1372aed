"""State that differs between devices: each leaf has one part per device."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.collectives import Axes
from zenjax._src.core.folding import spread
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_options
from zenjax._src.sync import whole_batch


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
    as step counts, are taken from the first device.
    """
    return jax.tree.map(lambda x: spread(x, devices), self)


def transformation(
  by: str, tx: optax.GradientTransformationExtraArgs, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx`, run on each device's own gradients, with a state of its own.

  Args:
    by: The name of the public function.
    tx: A transformation of arrays that sends nothing.
    axis_name: The axis or axes that devices are mapped over.
  """
  options = sync_options.check(axis_name)
  axes = options.axes

  def init_fn(params: optax.Params) -> Any:
    return init(by, tx, params, axes)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PerDeviceState]:
    _refuse_rows(updates, by)
    around = collectives.mesh_around(axes, updates, None)
    if around is not None:
      # In plain `jit`, each device has its part of unreduced arrays.
      return whole_batch.select(
        update_fn, updates, state, around, axes, by=by, sums=False
      )
    context = gradient_tree.context_of(options)
    gradient_tree.local_leaves(updates, context)
    like = updates if params is None else params
    own = unpacked(by, context.devices, state, jax.eval_shape(tx.init, like))
    updates, own = tx.update(updates, own, params, **extra_args)
    return gradient_tree.as_varying(updates, axes), packed(own, axes)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def init(by: str, tx: Any, params: Any, axes: Axes) -> PerDeviceState:
  """Returns the first state of one device, for `zenjax.init_state`."""
  collectives.size_in_init(axes, by)
  leaf_util.refuse_sharded(params, "params", by)
  return packed(tx.init(params), axes)


def packed(tree: Any, axes: Axes) -> PerDeviceState:
  """Returns the state of one device, inside of a mapping over `axes`."""
  one = lambda x: jnp.asarray(x)[None]
  return PerDeviceState(gradient_tree.as_varying(jax.tree.map(one, tree), axes))


def unpacked(by: str, devices: int, state: Any, fresh: Any) -> Any:
  """Returns the tree that `packed` was given.

  Args:
    by: The name of the public function.
    devices: The number of devices.
    state: The state of one device.
    fresh: A tree of the shapes that are needed.

  Raises:
    ValueError: The state was made for other gradients or devices.
  """
  value = state.value if isinstance(state, PerDeviceState) else ()
  require_made_for(by, devices, _shapes(value), _shapes(fresh, (1,)))
  structure = jax.tree.structure(fresh)
  return structure.unflatten([x[0] for x in jax.tree.leaves(value)])


def _shapes(tree: Any, leading: tuple[int, ...] = ()) -> dict[str, str]:
  """Returns shapes by path, behind `leading` dimensions."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = jax.tree_util.keystr
  return {f"leaf {name(path)}": str(leading + x.shape) for path, x in leaves}


def _refuse_rows(updates: Any, by: str) -> None:
  for name, leaf in leaf_util.named_leaves(updates, is_rows):
    if is_rows(leaf):
      raise TypeError(
        f"`updates` of {by} must be arrays, but leaf {name!r} is SparseRows."
        " Take all gradients with `jax.value_and_grad`, or give the table"
        " `zen_sync` and `lazy_rows` by `optax.partition`."
      )


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
        f"`state` of {by} was made for other gradients, options (such as"
        " another compressor) or devices. Make it with `zenjax.init_state(tx,"
        " params, mesh, axis_name)`, and, in your own shard_map, pass"
        " `zenjax.state_specs(state, axis_name)`. After a change of devices use"
        " `zenjax.from_checkpoint(state, mesh, axis_name)`. (What differs: its"
        f" {name} is {have}, and {devices} devices need {want}.)"
      )
