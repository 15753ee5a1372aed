"""Types, partition specs and placement of parameters and states."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Protocol

import jax
from jax import core
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

from zenjax._src.compress.compress_state import CompressState
from zenjax._src.compress.compress_state import Residual
from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_state
from zenjax._src.sync.device_state import PerDeviceState
from zenjax._src.sync.sync_state import ZenSyncState
from zenjax._src.tables import fetch
from zenjax._src.tables import sharded_table
from zenjax._src.tables.sharded_table import ShardedTable

# Nodes that differ between devices and know for how many they were made.
_OWN = PerDeviceState | Residual | ShardedTable


def unreduced(params: Any, axis_name: AxisName) -> Any:
  """Marks parameters so that JAX leaves their gradients unreduced.

  Use it inside `shard_map(check_vma=True)`, and in plain `jit` on explicit
  axes. There JAX adds up the gradients of replicated parameters by itself,
  before zen_sync can send less than all of them. Differentiate with respect to
  `unreduced(params, axis_name)`, and zen_sync adds them up. Under `pmap`,
  `vmap` and `check_vma=False` gradients are local anyway.

  Values do not change, and nothing is copied. Some parameters are returned
  unchanged: integers, parameters sharded over the axis itself, and in plain
  `jit` vectors of fewer than 16,384 elements, because JAX could not add a
  marked bias to a batch. If JAX complains of `reduced` where your loss adds or
  multiplies another parameter, mark only the tables:
  `params | {"table": zenjax.unreduced(params["table"], "data")}`.

  Args:
    params: Any tree of arrays.
    axis_name: The axis or axes that gradients will be synchronized over.

  Returns:
    The same values. Inside `shard_map` their types vary over the axes; in plain
    `jit` their types are reduced over the axes.

  Raises:
    NameError: No axis of that name is bound, and the mesh has none.
    ValueError: It is an automatic axis of the mesh, where XLA sums gradients.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> def local_grad(w, x):
    ...   w = zenjax.unreduced(w, "data")
    ...   return jax.grad(lambda w: jnp.sum(w * x))(w)
    >>> w, x = jnp.zeros(2), jnp.array([[1.0, 0.0], [0.0, 5.0]])
    >>> jax.vmap(local_grad, (None, 0), axis_name="data")(w, x).tolist()
    [[1.0, 0.0], [0.0, 5.0]]
  """
  axes = arguments.axes(axis_name)
  mesh = collectives.mesh_around(axes, params, None)
  if mesh is None:
    return gradient_tree.as_varying(params, axes)
  automatic = [axis for axis in axes if axis not in compat.explicit_of(mesh)]
  if automatic:
    raise ValueError(
      f"`axis_name` {automatic[0]!r} is an automatic axis, over which XLA sums"
      " gradients of arrays. Take row gradients with `zenjax.value_and_grad`,"
      " make the axis explicit, or use `zenjax.data_parallel`."
    )
  return jax.tree.map(lambda x: _reduced(x, axes), params)


def _reduced(x: Any, axes: Axes) -> Any:
  """`x` typed so that autodiff leaves its gradient unreduced over `axes`."""
  spec = PartitionSpec(*compat.explicit_spec(x))
  sharded = {*jax.tree.leaves(tuple(spec))} & {*axes}
  short = x.ndim < 2 and not leaf_util.is_table(x, "element")
  if not jnp.issubdtype(x.dtype, jnp.floating) or sharded or short:
    return x
  typed = bool(compat.explicit_axes(x))
  marked = jax.typeof(x).sharding.spec.reduced if typed else ()
  spec = PartitionSpec(*spec, reduced=frozenset([*axes, *marked]))
  return jax.sharding.reshard(x, spec)


def state_specs(state: Any, axis_name: AxisName) -> Any:
  """Returns the partition specs of a state, for `shard_map`.

  Use it for `in_specs` and `out_specs` of a per-device step. Most of a state is
  replicated. These parts differ between devices and are sharded over
  `axis_name` along their first dimension:

  - residuals and momenta of `compress.all_reduce`;
  - states of `per_device` and `local_steps`;
  - gradients that `delayed` saves;
  - gradients that `optax.MultiSteps` accumulates before they are synchronized;
  - what `zenjax.tables.prefetch` returns;
  - sharded tables, and the state that `sharded_optimizer` keeps for tables. If
    there are several axes, these are sharded over the last one.

  Args:
    state: An optimizer state, parameters, or their shapes (`jax.eval_shape`).
    axis_name: As given to `zen_sync`.

  Returns:
    A tree of `PartitionSpec` of the same structure. It also fits the state
    after `zenjax.tune`.

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
  axes = arguments.axes(axis_name)
  split, owners = PartitionSpec(axes), PartitionSpec(axes[-1:])
  same = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)

  def spec(node: Any) -> Any:
    if isinstance(node, ShardedTable):
      specs = sharded_table.specs(node, owners)
      return dataclasses.replace(specs, sizes=_AnyPlan())
    if isinstance(node, _OWN | fetch.Ahead):
      return jax.tree.map(lambda _: split, node)
    if isinstance(node, ZenSyncState):
      return same(node.replace(tuned=_AnyPlan()))
    if isinstance(node, optax.MultiStepsState):
      acc = same(node.acc_grads)
      if accumulates_local(node):
        acc = jax.tree.map(lambda x: _split_spec(x, split), node.acc_grads)
      inner = state_specs(node.inner_opt_state, axis_name)
      return same(node)._replace(acc_grads=acc, inner_opt_state=inner)
    return PartitionSpec()

  kinds = _OWN | fetch.Ahead | ZenSyncState | optax.MultiStepsState
  return jax.tree.map(spec, state, is_leaf=lambda x: isinstance(x, kinds))


class _AnyPlan(tuple):
  """Metadata that is equal to every plan of `tune`."""

  def __eq__(self, other: object) -> bool:
    return True

  def __hash__(self) -> int:
    return 0


def accumulates_local(node: optax.MultiStepsState) -> bool:
  """Returns True if `MultiSteps` is around `zen_sync`, not behind it."""
  kinds: Any = ZenSyncState | PerDeviceState | CompressState
  return bool(sync_state.nodes(node.inner_opt_state, kinds))


def _split_spec(leaf: Any, split: PartitionSpec) -> PartitionSpec:
  if not np.ndim(leaf):
    raise ValueError(
      "`state` accumulates a scalar gradient in `optax.MultiSteps`, which can't"
      " be split over devices. Give that parameter the shape (1,)."
    )
  return split


def own_nodes(state: Any) -> list[tuple[str, Any]]:
  """Lists by name the nodes that know for how many devices they were made."""
  is_own = lambda node: isinstance(node, _OWN)
  named = leaf_util.named_leaves(state, is_own)
  return [(k, x) for k, x in named if is_own(x) and jax.tree.leaves(x)]


class _HasInit(Protocol):
  """What `zenjax.local_steps` returns."""

  def init(self, params: Any) -> Any: ...


def init_state(
  tx: optax.GradientTransformation | optax.MultiSteps | _HasInit,
  params: Any,
  mesh: Mesh,
  axis_name: AxisName,
) -> Any:
  """Makes an optimizer state and places it on a mesh.

  Use it in place of `tx.init` if parts of the state differ between devices:
  what `compress.all_reduce` keeps for later, gradients that
  `optax.MultiSteps` accumulates in a per-device step, what `per_device`,
  `delayed` and `local_steps` keep, and the state that `sharded_optimizer` keeps
  for the rows of each device. Other states are
  `tx.init(params)` on all devices, so the first step compiles only once.

  Args:
    tx: Any chain with `zen_sync` or `compress.all_reduce` in it, or what
      `zenjax.local_steps` returns.
    params: Replicated parameters, or tables from `zenjax.tables.shard`.
    mesh: The mesh that your steps run on.
    axis_name: The axis or axes that you gave to `zen_sync`.

  Returns:
    The state, as global arrays that are sharded by `state_specs`.

  Raises:
    TypeError: `tx` or `mesh` has a wrong type.
    ValueError: An axis is not the mesh's, or not the one that residuals are
      kept over; or a parameter is sharded over `axis_name`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = zenjax.compress.all_reduce(zenjax.compress.TopK(0.01), "data")
    >>> state = zenjax.init_state(tx, jnp.zeros((400, 80)), mesh, "data")
    >>> state.residuals["leaf"].value.shape
    (2, 400, 80)
  """
  axes = arguments.mesh_axes(axis_name, mesh)
  if not callable(getattr(tx, "init", None)):
    raise TypeError(
      "`tx` must be an optax transformation, or what local_steps returned, got"
      f" {type(tx).__name__}."
    )
  for name, table in leaf_util.named_leaves(params, sharded_table.is_sharded):
    if sharded_table.is_sharded(table) and not table.devices:
      sharded_table.require_devices(f"Table {name!r}", 0, mesh.size)
  specs = sharded_table.specs(params, PartitionSpec(axes[-1:]))
  require_replicated(params, "params", axes, jax.tree.leaves(specs))
  local = _shapes(tx.init, sharded_table.types_of_part(params), mesh, axes)
  mapped = jax.shard_map(
    tx.init,
    mesh=mesh,
    in_specs=(specs,),
    out_specs=state_specs(local, axis_name),
    check_vma=False,
  )
  return jax.jit(mapped)(params)


def require_replicated(
  tree: Any, argument: str, axes: Sequence[str], specs: Sequence[PartitionSpec]
) -> None:
  """Refuses leaves sharded over `axes`, which `shard_map` would gather.

  Under `jit`, types tell only explicit axes.

  Args:
    tree: Any pytree.
    argument: Its name.
    axes: The axes that matter.
    specs: For each leaf, its spec: split leaves need not be replicated.
  """
  for (name, leaf), spec in zip(leaf_util.named_leaves(tree), specs):
    split = _spec_over(leaf, axes)
    if split is not None and spec == PartitionSpec():
      raise ValueError(
        f"`{argument}` must be replicated, but leaf {name!r} of shape"
        f" {np.shape(leaf)} is sharded by {split} and would be gathered."
        " Replicate it with `jax.device_put(x, jax.NamedSharding(mesh,"
        " jax.P()))`. To shard a table, use `zenjax.tables.shard`."
      )


def _spec_over(leaf: Any, axes: Sequence[str]) -> PartitionSpec | None:
  """The spec of a leaf, if it is known to be split over one of `axes`."""
  traced = isinstance(leaf, core.Tracer)
  placed = jax.typeof(leaf) if traced else leaf
  sharding = getattr(placed, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return None
  sizes = sharding.mesh.shape
  named = jax.tree.leaves(tuple(sharding.spec))
  over = any(axis in axes and sizes[axis] > 1 for axis in named)
  return sharding.spec if over else None


def _shapes(
  init: Callable[[Any], Any], params: Any, mesh: Mesh, axes: Axes
) -> Any:
  """Returns the shapes of one device's state.

  Only `axes` are bound, so a residual over another axis is refused.
  """
  try:
    return collectives.shapes_on_device(init, params, mesh, axes)
  except ValueError as error:
    if isinstance(error.__cause__, NameError):  # Another axis is not bound.
      raise ValueError(
        "`axis_name` of init_state must name the axes that you gave to `tx`,"
        f" got {axes}. {error}"
      ) from error
    raise


def on_mesh(tree: Any, mesh: Mesh, specs: Any) -> Any:
  """Places `tree` by `specs`, as `shard_map` requires over explicit axes."""
  if AxisType.Explicit not in mesh.axis_types:
    return tree
  place = lambda spec, part: jax.reshard(part, NamedSharding(mesh, spec))
  return jax.tree.map(place, specs, tree)
