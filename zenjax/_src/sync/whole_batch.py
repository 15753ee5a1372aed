"""Row gradients of a whole batch, summed where XLA spreads the program.

In plain `jit` a loss is that of the whole batch, and XLA has summed every
array of its gradient. Rows of looked-up tables it has not: `SparseRows` hold a
row for each look-up of the batch, and lie on devices as the batch does. Each
device's part of them is exchanged in a `shard_map` of its own.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import Facts
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.sync import gradient_tree
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_state import ZenSyncState


def mesh_around(
  axes: Axes, updates: Any, given: jax.sharding.Mesh | None
) -> Any:
  """Returns the mesh over whose axes XLA spreads the program.

  Args:
    axes: Of the transformation.
    updates: Gradients; their types tell a mesh.
    given: By the user, if any.

  Returns:
    A mesh that has all `axes`; None where one of them is bound, as `shard_map`,
    `pmap` and `vmap` bind them, or no mesh with them is known.
  """
  if any(_is_bound(axis) for axis in axes):
    return None
  known = [given, jax.sharding.get_abstract_mesh()]
  for leaf in jax.tree.leaves(updates, is_leaf=is_rows):
    x = leaf.values if is_rows(leaf) else leaf
    placed = x if not isinstance(x, Tracer) else jax.typeof(x)
    known.append(getattr(getattr(placed, "sharding", None), "mesh", None))
  for mesh in known:
    if mesh is not None and set(axes) <= set(mesh.axis_names):
      return mesh
  return None


def _is_bound(axis: str) -> bool:
  try:
    lax.axis_size(axis)
  except NameError:
    return False
  return True


def sync(
  update: Callable[..., Any],
  updates: Any,
  state: ZenSyncState,
  mesh: Any,
  options: Options,
) -> tuple[Any, ZenSyncState]:
  """Sums row gradients of the whole batch; arrays stay as they are.

  Args:
    update: Sums what devices hold, where the axes are bound.
    updates: Gradients of the whole batch.
    state: Of the transformation.
    mesh: Has the axes.
    options: Of the transformation.

  Raises:
    ValueError: No gradient is SparseRows, or an option is for arrays.
    NotImplementedError: The axes are of explicit sharding.
  """
  named = leaf_util.named_leaves(updates, is_rows)
  _require(named, state, mesh, options)
  names = [name for name, leaf in named if is_rows(leaf)]
  own = {name: x for name, x in state.leaves.items() if name in names}
  devices = math.prod([mesh.shape[axis] for axis in options.axes])
  rows = jax.tree.map(
    lambda x: _padded(x, devices) if is_rows(x) else None,
    updates,
    is_leaf=is_rows,
  )
  facts: list[Facts] = []

  def exchanged(rows, own):
    out, new = update(rows, own)
    facts[:] = [
      x.facts for x in jax.tree.leaves(out, is_leaf=is_rows) if is_rows(x)
    ]
    return out, new

  all_of = PartitionSpec()
  out, new = jax.shard_map(
    exchanged,
    mesh=mesh,
    in_specs=(PartitionSpec(options.axes), all_of),
    out_specs=(all_of, all_of),
    axis_names=set(options.axes),
    check_vma=False,
  )(rows, state._replace(leaves=own))
  out = gradient_tree.with_facts(out, facts)
  summed = iter(jax.tree.leaves(out, is_leaf=is_rows))
  synced = jax.tree.map(
    lambda x: next(summed) if is_rows(x) else x, updates, is_leaf=is_rows
  )
  return synced, new._replace(leaves=state.leaves | new.leaves)


def _require(
  named: list[tuple[str, Any]],
  state: ZenSyncState,
  mesh: Any,
  options: Options,
) -> None:
  """Raises where a sum over the whole batch's rows is not what is meant."""
  kinds: Mapping[str, Any] = dict(zip(mesh.axis_names, mesh.axis_types))
  for axis in options.axes:
    if kinds[axis] != jax.sharding.AxisType.Auto:
      raise NotImplementedError(
        f"`axis_name` must be an automatic axis of the mesh outside of"
        f" shard_map, and {axis!r} is {kinds[axis]}; make the mesh with"
        f" `axis_types=(jax.sharding.AxisType.Auto, ..)`, or wrap the step in"
        " `zenjax.data_parallel`."
      )
  if not any(is_rows(leaf) for _, leaf in named):
    raise ValueError(
      "`updates` must hold SparseRows outside of shard_map, and all are arrays,"
      f" which XLA has summed over {options.axes!r} already: nothing is left to"
      " save. Take gradients of `zenjax.value_and_grad(loss_fn)`, which are"
      " SparseRows for tables that the loss only looks up, or wrap the step in"
      " `zenjax.data_parallel`, where gradients are those of one device."
    )
  for name, leaf in named:
    if is_rows(leaf):
      require_one(f"leaf {name!r} of `updates`", leaf)
  if not options.exact:
    raise ValueError(
      "`on_overflow` must be 'exact' outside of shard_map, got 'carry', which"
      " keeps rows of arrays on each device; leave it out."
    )
  if options.plan is not None or state.selected:
    what = "`plan`" if options.plan is not None else "a sparsifier before it"
    raise NotImplementedError(
      f"{what} is for gradients of one device each, inside shard_map; leave it"
      " out, or wrap the step in `zenjax.data_parallel`."
    )


def _padded(rows: SparseRows, devices: int) -> SparseRows:
  """The same with as many rows for each device; the last are padding."""
  missing = -rows.capacity % devices
  if not missing:
    return rows
  ids = jnp.pad(rows.indices, (0, missing), constant_values=rows.num_rows)
  values = jnp.pad(rows.values, ((0, missing), (0, 0)))
  return SparseRows(ids, values, rows.num_rows)
