"""Tables, and the optimizer's state of them, to their owners and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import leaf_util
from zenjax._src.sync import sync_state
from zenjax._src.sync.sharded_optimizer import ShardedOptimizerState
from zenjax._src.tables import sharded_table
from zenjax._src.tables import sharding
from zenjax._src.tables.sharded_table import is_sharded


def shard(
  params: Any,
  mesh: jax.sharding.Mesh,
  axis_name: AxisName,
  *,
  opt_state: Any = None,
  tables: SparseSpec = None,
  replicas: AxisName | None = None,
  hash_seed: int = 0,
) -> Any:
  """Splits tables by rows over devices, each row to the device that owns it.

  Then `zenjax.value_and_grad(loss_fn)` fetches the rows that a batch looks up
  and `zenjax.sharded_optimizer(tx, axis_name)` updates rows where they are: no
  device ever has more of a table, or of the optimizer's state, than its part.
  Models are written for the whole table.

  Inside `jit` nothing whole is made either: XLA makes each part of an
  initializer's numbers where it belongs, and rows go to their owners some MiB
  at a time. A device then has the part that is read and the part that is
  written.

  A leaf `[T, R, D]` that `tables` chooses is a stack of `T` tables: it is split
  as one of `T * R` rows. Models look up rows of its tables one by one, under
  `jax.vmap`, in `lax.scan`, or by `stack[t, ids]`, and ids are those of each
  table: one beyond `R` is out of range.

  Args:
    params: A tree of arrays, or a module that is one. A table may be NumPy's,
      in the memory of the host, or of `init_by_rows`, made where its rows
      belong.
    mesh: The mesh that steps run on.
    axis_name: The axis over which owners lie.
    opt_state: A state of the plain optimizer `tx` for `params`, to go on with
      `sharded_optimizer(tx, axis_name)`.
    tables: Which leaves to split: a pytree prefix of bools or a callable
      `(name, leaf) -> bool`. By default all that `zen_sync` takes for tables,
      and no stacks.
    replicas: Further axes over which batches are split, those of slower links.
      Tables have a copy along each, and steps add up gradient rows over them:
      lookups stay among the owners of one copy. Give `sharded_optimizer` both,
      `("pod", "chip")` where `axis_name="chip"` and `replicas="pod"`.
    hash_seed: Draws another hash; equal on all processes.

  Returns:
    `params` with a `ShardedTable` in the place of each table; with `opt_state`
    the pair of these and the state of the `sharded_optimizer`. Other leaves are
    replicated, unless they lie on the mesh already.

  Raises:
    ValueError: No leaf is chosen, or one that has fewer than two dimensions or
      2**31 rows or more; `axis_name` is not one axis of the mesh, `replicas`
      are not others of it, or `hash_seed` does not fit 32 bits; or `opt_state`
      holds the state of a `zen_sync`.
    TypeError: A chosen leaf is not floating.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> params = {"table": jnp.ones((2000, 16)), "w": jnp.ones(16)}
    >>> tx = optax.adagrad(0.1)
    >>> opt_state = tx.init(params)  # Or of a checkpoint.
    >>> params, opt_state = zenjax.tables.shard(
    ...   params, mesh, "data", opt_state=opt_state
    ... )
    >>> params["table"].shape
    (2000, 16)
    >>> [x.data.shape for x in params["table"].value.addressable_shards]
    [(1024, 16), (1024, 16)]
    >>> tx = zenjax.sharded_optimizer(tx, "data", mesh=mesh)
    >>> opt_state.inner[0].sum_of_squares["table"].shape
    (2000, 16)
  """
  found = sharding.shard_leaves(
    params,
    mesh,
    axis_name,
    tables=tables,
    replicas=replicas,
    hash_seed=hash_seed,
  )
  if opt_state is None:
    return found
  if sync_state.find(opt_state):
    raise ValueError(
      "`opt_state` must be a state of the optimizer alone, and it holds that of"
      " a zen_sync or sharded_optimizer; of `optax.chain(zen_sync(..),"
      " lazy_rows(tx))` give `opt_state[1]`."
    )
  return found, _of_optimizer(opt_state, found, mesh, axis_name)


def _of_optimizer(
  opt_state: Any, params: Any, mesh: jax.sharding.Mesh, axis_name: AxisName
) -> ShardedOptimizerState:
  """Returns a state of plain optax as that of a `sharded_optimizer`.

  Arrays belong to the table at the end of whose path they stand, if they have
  as many rows.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_sharded)
  tables = [(path, x) for path, x in leaves if is_sharded(x)]

  def moved(path, x):
    for end, table in tables:
      rows = jnp.shape(x)[: table.ndim - 1]
      if path[len(path) - len(end) :] == end and rows == table.shape_of_rows:
        return table.with_value(sharding.placed(x, table, mesh))
    return sharding.replicated(x, mesh)

  inner = jax.tree_util.tree_map_with_path(moved, opt_state)
  over = (*tables[0][1].replicas, *arguments.axes(axis_name))
  devices = math.prod(mesh.shape[axis] for axis in over)
  new = sync_state.empty_leaf(devices=devices, sharded=True)
  named = leaf_util.named_leaves(params, is_sharded)
  memory = {name: new for name, x in named if is_sharded(x)}
  none = jnp.zeros((), jnp.int32)
  sync = sync_state.ZenSyncState(none, memory, none, owners=True)
  sync = jax.tree.map(lambda x: sharding.replicated(x, mesh), sync)
  return ShardedOptimizerState(sync, inner)


def unshard(tree: Any) -> Any:
  """Undoes `shard`: tables become arrays, in the order of their rows.

  Each array is split by ranges of rows over the same axes, so that no device
  has a whole table here either. Only where the number of devices does not
  divide the rows, an array is replicated; `zenjax.to_checkpoint(params)` is the
  form to save that never is. A stack is split by its tables, or by the rows of
  each where devices divide only those.

  Args:
    tree: A tree with `ShardedTable` in it, such as parameters, a state of
      `sharded_optimizer`, or both.

  Returns:
    The same tree with arrays `[R, ...]`, of stacks `[T, R, ...]`, and with the
    state of the plain optimizer for each state of a `sharded_optimizer`.

  Raises:
    ValueError: It is called inside a `shard_map`, or no mesh is known.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> table = jnp.arange(2000.0).reshape(1000, 2)
    >>> sharded = zenjax.tables.shard(table, mesh, "data", tables=True)
    >>> bool(jnp.all(zenjax.tables.unshard(sharded) == table))
    True
  """
  is_state = lambda x: isinstance(x, ShardedOptimizerState)
  inner = lambda x: x.inner if is_state(x) else x
  tree = jax.tree.map(inner, tree, is_leaf=is_state)
  for node in sharded_table.nodes(tree):
    if node.devices and jax.tree.leaves(node):
      _require_outside(node)
  return sharding.unshard_leaves(tree)


def _require_outside(table: sharded_table.ShardedTable) -> None:
  """Raises ValueError inside a `shard_map`, where a table is not whole."""
  whole = [x for x in jax.tree.leaves(table.value) if table.has_rows(x)]
  if whole and sharded_table.mesh_under(table.with_value(whole[0])) is None:
    raise ValueError(
      "`unshard` must be called outside of shard_map, where a table is that of"
      " all devices; return the table from the step and call it there."
    )
