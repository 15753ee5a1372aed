"""Defines the update of a sharded table: some rows of each device's part."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import sparse_rows
from zenjax._src.rows.sparse_rows import NoArray
from zenjax._src.rows.sparse_rows import SparseRows


@jax.tree_util.register_pytree_node_class
class TableUpdate(NoArray):
  """The update of a sharded table: each device adds rows to its own part.

  It takes the place of an array in a tree of updates: `part + update` adds it,
  and zeros in its place add nothing. It is a pytree of slots and rows. The
  slots have a dtype that refuses arithmetic, so a transformation that scales or
  sums all leaves of a tree raises TypeError.

  Attributes:
    slots: `[k] int32` of each device, all different; `S` for padding.
    rows: `[k, D]`, zeros for padding.
    size: `S`, the slots of a device.
    axes: Mesh axes over which the table is sharded.
  """

  __slots__ = ("_slots", "rows", "size", "axes")
  _NO_ARITHMETIC = (
    "The update of a ShardedTable takes no arithmetic. Put transformations that"
    " change updates into the optimizer that you pass to"
    " `zenjax.sharded_optimizer`."
  )

  def __init__(self, slots: jax.Array, rows: Any, size: int, axes: Axes):
    self._slots = sparse_rows.seal(slots)
    self.rows, self.size, self.axes = rows, size, axes

  @property
  def slots(self) -> Any:
    return sparse_rows.unseal(self._slots)

  @property
  def dtype(self) -> Any:
    return self.rows.dtype

  def __radd__(self, table: Any) -> jax.Array:
    """Returns `table + self`, for `optax.apply_updates`."""
    slots, rows = self.slots, self.rows
    mesh = collectives.mesh_around(self.axes, [table, rows], None)
    split = PartitionSpec(self.axes)
    added = on_devices(self._added, mesh, self.axes, split, split)
    return added(jnp.asarray(table), slots, rows)

  def _added(self, part, slots, rows):
    # A transformation may have replaced the slots, for example by zeros. Their
    # unsealed form is then negative, and nothing is added.
    slots = jnp.where(slots < 0, self.size, slots)
    rows = SparseRows(slots, rows, self.size).as_unique()
    return sparse_rows.added(part, rows)

  def _not_added(self, other: Any) -> NoReturn:
    raise TypeError(
      "The update of a ShardedTable can only be added to the table, got"
      f" {type(other).__name__}. Apply updates one after another with"
      " `optax.apply_updates`. Put transformations that change updates into the"
      " optimizer that you pass to `zenjax.sharded_optimizer`."
    )

  __add__ = _not_added

  def tree_flatten(self):
    return (self._slots, self.rows), (self.size, self.axes)

  @classmethod
  def tree_unflatten(cls, aux, children) -> "TableUpdate":
    self = object.__new__(cls)
    self._slots, self.rows = children
    self.size, self.axes = aux
    return self


def on_devices(
  f: Callable[..., Any], mesh: Any, axes: Axes, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
  """Returns `f` mapped over devices along `axes`; `f` itself without a mesh.

  It binds the explicit axes of the mesh too, because the types of arrays would
  not fit a `shard_map` over automatic axes alone.
  """
  if mesh is None:
    return f
  return jax.shard_map(
    f,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={*axes, *compat.explicit_of(mesh)},
    check_vma=False,
  )
