"""Moves tables and their optimizer state to their owners, and back."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import leaf_util
from zenjax._src.sync import sync_options
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
  wire_dtype: Any = None,
) -> Any:
  """Splits tables by rows over devices, each row to the device that owns it.

  Use it for tables that don't fit one device. `zenjax.value_and_grad(loss_fn)`
  then fetches the rows that a batch looks up, and
  `zenjax.sharded_optimizer(tx, axis_name)` updates rows where they are. No
  device ever has more of a table, or of its optimizer state, than its part.
  Write your model for the replicated table.

  Inside `jit`, no device makes all of a table: XLA computes each part of an
  initializer's numbers on its device, and rows move to their owners some MiB at
  a time. Meanwhile a device needs memory for two parts.

  A leaf `[T, R, D]` that `tables` chooses is a stack of `T` tables, and is
  split like one table of `T * R` rows. Look up rows of each table under
  `jax.vmap`, in `lax.scan`, or with `stack[t, ids]`. Ids of `R` or more
  are out of range.

  Args:
    params: A tree of arrays, or a module that is one. A table may be a NumPy
      array in host memory, or come from `init_by_rows`.
    mesh: The mesh that steps run on.
    axis_name: The axis that rows are distributed over.
    opt_state: A state of the plain optimizer `tx` for `params`, to continue
      with `sharded_optimizer(tx, axis_name)`.
    tables: The leaves to split: a pytree prefix of bools, or a callable
      `(name, leaf) -> bool`. By default the leaves that `zen_sync` takes for
      tables, without stacks.
    replicas: Further axes, with slower links, that batches are split over. Each
      has a copy of the tables, so lookups stay among the owners of one copy.
      Steps add up gradient rows over all copies. Give `sharded_optimizer` all
      axes: `("pod", "chip")` for `axis_name="chip"` and `replicas="pod"`.
    hash_seed: A seed for the hash that distributes rows; equal on all
      processes.
    wire_dtype: Rounds rows that are looked up, and their gradients, to this
      dtype before they are sent, as in `zen_sync`. Owners store rows as they
      are. A device rounds its own rows, too, so lookups are the same on any
      number of devices. The derivative of a lookup ignores the rounding.

  Returns:
    `params` with a `ShardedTable` for each table; with `opt_state` a pair of
    these and the state of the `sharded_optimizer`. Other leaves are replicated,
    unless they are placed on the mesh already.

  Raises:
    ValueError: No leaf is chosen, or one that has fewer than two dimensions or
      2**30 rows or more; `axis_name` is not one axis of the mesh, `replicas`
      are not others of it, `hash_seed` does not fit 32 bits, or `wire_dtype`
      makes rows no shorter; or `opt_state` holds the state of a `zen_sync`.
    TypeError: A chosen leaf is not floating, or `wire_dtype` is neither
      floating nor int8 or int4.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> params = {"table": jnp.ones((2000, 16)), "w": jnp.ones(16)}
    >>> tx = optax.adagrad(0.1)
    >>> opt_state = tx.init(params)  # Or from a checkpoint.
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
  params = sharding.shard_leaves(
    params,
    mesh,
    axis_name,
    tables=tables,
    replicas=replicas,
    hash_seed=hash_seed,
    wire_dtype=wire_dtype,
  )
  if opt_state is None:
    return params
  if sync_state.find(opt_state):
    raise ValueError(
      "`opt_state` must be a state of the optimizer alone, got one with a"
      " zen_sync or sharded_optimizer. For `optax.chain(zen_sync(..),"
      " lazy_rows(tx))` give `opt_state[1]`."
    )
  return params, _sharded_state(opt_state, params, mesh, axis_name)


def _sharded_state(
  opt_state: Any, params: Any, mesh: jax.sharding.Mesh, axis_name: AxisName
) -> ShardedOptimizerState:
  """Converts a state of plain optax to the state of a `sharded_optimizer`.

  An array belongs to a table if its path ends with the path of the table and
  it has as many rows.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_sharded)
  tables = [(path, x) for path, x in leaves if is_sharded(x)]
  # The path of one table may end with the path of another.
  tables.sort(key=lambda table: len(table[0]), reverse=True)

  def moved(path, x):
    for end, table in tables:
      rows = jnp.shape(x)[: table.ndim - 1]
      if path[len(path) - len(end) :] == end and rows == table.shape_of_rows:
        value = sharding.placed(x, table, mesh)
        return dataclasses.replace(table, value=value, wire_dtype=None)
    return sharding.replicated(x, mesh)

  inner = jax.tree_util.tree_map_with_path(moved, opt_state)
  over = (*tables[0][1].replicas, *arguments.axes(axis_name))
  named = leaf_util.named_leaves(params, is_sharded)
  sync = sync_state.empty(
    [name for name, x in named if is_sharded(x)],
    sync_options.check(over),
    owners=True,
    devices=math.prod(mesh.shape[axis] for axis in over),
    sharded=True,
  )
  sync = jax.tree.map(lambda x: sharding.replicated(x, mesh), sync)
  return ShardedOptimizerState(sync, inner)


def unshard(tree: Any) -> Any:
  """Undoes `shard`: tables become arrays, in the order of ids.

  Use it to hand tables to code that knows nothing of zenjax. Each array is
  split by ranges of rows over the same axes, so no device has all of a table.
  But if the number of devices does not divide the rows, the array is
  replicated; `zenjax.to_checkpoint(params)` never replicates. A stack is split
  by its tables, or by the rows of each table.

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
    arrays = [x for x in jax.tree.leaves(node.value) if node.has_rows(x)]
    like = node.with_value(arrays[0]) if node.devices and arrays else None
    if like is not None and sharded_table.mesh_under(like) is None:
      raise ValueError(
        "`unshard` is called inside shard_map, where a device has only a part"
        " of the table. Return it from the step, and call `unshard` outside."
      )
  return sharding.unshard_leaves(tree)
