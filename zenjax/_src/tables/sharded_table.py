"""The type of a table of which each device has the rows that it owns.

Who owns a row is decided as in an exchange, by the rotation hash of
`core/partition.py`: an id alone tells the owner and the slot.

Letters: `R` rows, `D` columns, `n` devices, `S` slots of a device.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NoReturn

import jax
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax._src.core.partition import Layout
from zenjax._src.rows.sparse_rows import NoArray


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedTable(NoArray):
  """A table `[R, D]` of which each device has the rows that it owns.

  Or a stack of them, `[T, R, D]`, as one table of `T * R` rows: row `r` of
  table `t` is row `t * R + r`. `zenjax.tables.shard` makes them, and
  `zenjax.sharded_optimizer` keeps its state of a table in this form. It is a
  pytree of one leaf, so that optax's `init` and Flax's `TrainState` take it as
  any parameter. Who owns which row is part of its type: tables of other devices
  or of another hash are other pytrees.

  Attributes:
    value: `[n * S, D]`, split over `axes` along its first dimension: the rows
      of each owner, in the order of their slots. Inside a `shard_map` over
      these axes `[S, D]`. In a gradient SparseRows of the whole table, in an
      update SparseRows of slots.
    num_rows: `R`, of a stack `T * R`.
    axes: Mesh axes over which owners lie.
    devices: `n`, along these axes; 0, without axes, where rows lie in their
      order, as `zenjax.to_checkpoint` saves them: `[R, D]`, then zeros up to
      equal ranges.
    seed: Seed of the hash.
    hash_offset: Offset of the hash, another one for each table.
    replicas: Further axes over which batches are split. Along these every
      device has the same rows.
    stack: `(T,)` of a stack, or more dimensions before that of rows.
    sizes: `(rows,)` that the buffer for one pair of devices holds; empty for
      the default.
  """

  value: Any
  num_rows: int
  axes: Axes
  devices: int
  seed: int
  hash_offset: int
  replicas: Axes = ()
  stack: tuple[int, ...] = ()
  sizes: tuple[int, ...] = ()

  @property
  def batch_axes(self) -> Axes:
    """Axes over which a batch is split, slowest first."""
    return self.replicas + self.axes

  @property
  def layout(self) -> Layout:
    """Says who owns which row."""
    return Layout(
      num_rows=self.num_rows,
      groups=self.devices,
      seed=self.seed,
      hash_offset=self.hash_offset,
    )

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the whole table, `(R, D)`, or of the stack, `(T, R, D)`."""
    return *self.shape_of_rows, *self.value.shape[1:]

  @property
  def table_shape(self) -> tuple[int, int]:
    """`(R, D)`, of a stack `(T * R, D)`: the one table that optimizers see."""
    return self.num_rows, self.value.shape[-1]

  @property
  def shape_of_rows(self) -> tuple[int, ...]:
    """`(R,)`, of a stack `(T, R)`."""
    return *self.stack, self.num_rows // math.prod(self.stack)

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    """Elements of the whole table."""
    return math.prod(self.shape)

  @property
  def dtype(self) -> Any:
    return self.value.dtype

  def has_rows(self, x: Any) -> bool:
    """Returns True if `x` has something for each row, as the value has.

    In an optimizer's state it may be a number for the whole table.
    """
    (size,) = jnp.shape(x)[:1] or (0,)
    if not self.devices:
      return size >= self.num_rows
    return size in (self.layout.slots, self.layout.slots * self.devices)

  def tree_flatten(self):
    static = tuple([getattr(self, name) for name in _STATIC])
    return (self.value,), static

  def tree_flatten_with_keys(self):
    # Checkpoints keep keys and no types: of other owners keys are others.
    key = "value"
    if self.devices:
      key += f"_on_{self.devices}_devices_{self.seed}_{self.hash_offset}"
    children, static = self.tree_flatten()
    return [(jax.tree_util.GetAttrKey(key), *children)], static

  @classmethod
  def tree_unflatten(cls, static, children) -> "ShardedTable":
    return cls(*children, *static)

  def with_value(self, value: Any) -> "ShardedTable":
    """Returns the same owners with something else in the place of the rows."""
    return dataclasses.replace(self, value=value)

  def __getitem__(self, ids: Any) -> "ShardedTable":
    if ids is Ellipsis:  # nnx has `param[...]` for what a variable holds.
      return self
    raise TypeError(
      "A ShardedTable cannot be indexed: its rows lie on the devices that own"
      " them. Inside `zenjax.value_and_grad(loss_fn)` and"
      " `zenjax.tables.apply(fun)` models index a table as ever;"
      " `zenjax.tables.unshard` gives an array."
    )

  def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
      "A ShardedTable is not an array: its rows lie on the devices that own"
      " them; `zenjax.tables.unshard` gives an array, in the order of rows."
    )

  __jax_array__ = __array__


_STATIC = tuple([x.name for x in dataclasses.fields(ShardedTable)])[1:]


def is_sharded(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, ShardedTable)


def nodes(tree: Any) -> list[ShardedTable]:
  """Returns the sharded tables in a tree, in order."""
  return list(filter(is_sharded, jax.tree.leaves(tree, is_leaf=is_sharded)))


def types_of_part(params: Any) -> Any:
  """Returns parameters with types `[S, ...]` in place of all devices' rows."""

  def part(node: Any) -> Any:
    if not is_sharded(node):
      return node
    return jax.tree.map(
      lambda x: (
        jax.ShapeDtypeStruct((node.layout.slots, *x.shape[1:]), x.dtype)
        if node.has_rows(x)
        else x
      ),
      node,
    )

  return jax.tree.map(part, params, is_leaf=is_sharded)


def specs(tree: Any, split: PartitionSpec) -> Any:
  """Returns specs of a tree: `split` for rows of tables, `P()` for the rest."""

  def spec(node: Any) -> Any:
    if not is_sharded(node):
      return PartitionSpec()
    lie = lambda x: split if node.has_rows(x) else PartitionSpec()
    return node.with_value(jax.tree.map(lie, node.value))

  return jax.tree.map(spec, tree, is_leaf=is_sharded)


def require_devices(what: str, had: int, devices: int) -> None:
  """Raises ValueError where `what` is not on the devices that it was made for.

  Args:
    what: A table or a state.
    had: For how many it was made; 0 in the order of rows.
    devices: How many there are.
  """
  if not had:
    raise ValueError(
      f"{what} must lie on the devices that own its rows, and it is in the"
      " order of rows, as it is saved; call `zenjax.from_checkpoint(saved,"
      " mesh, axis_name)` first."
    )
  if had != devices:
    raise ValueError(
      f"{what} must be made for the {devices} devices that it is used on, got"
      f" one made for {had}; call `zenjax.from_checkpoint(state, mesh,"
      " axis_name)`, which moves it, or use it with the mesh that it lies on,"
      " of `mesh=` too."
    )


def mesh_of(tables: Sequence[ShardedTable]) -> Any:
  """Returns the mesh over which XLA spreads the program; None in `shard_map`.

  Raises:
    ValueError: No mesh is known, tables lie over several axes, or devices or
      the form of a table do not fit where this is called.
  """
  axes = tables[0].axes
  others = sorted({table.batch_axes for table in tables})
  if len(others) > 1 or len({table.axes for table in tables}) > 1:
    raise ValueError(
      "Tables that are looked up together must be split over one axis, got"
      f" {others}; give all to one `zenjax.tables.shard`."
    )
  over = tables[0].batch_axes
  mesh = collectives.mesh_around(over, [x.value for x in tables], None)
  if mesh is None:
    try:
      devices = collectives.size(axes)
      collectives.size(over)
    except NameError as error:
      raise ValueError(
        f"A ShardedTable over {over!r} must be used where these axes are known,"
        " and no mesh has them; call `jax.set_mesh(mesh)`, or place the table"
        " by `zenjax.tables.shard`."
      ) from error
    remedy = "give `zenjax.state_specs(params, axis_name)` as `in_specs`"
  else:
    devices = math.prod([mesh.shape[axis] for axis in axes])
    remedy = "let shard_map return it by `zenjax.state_specs`"
  for table in tables:
    require_devices("A ShardedTable", table.devices, devices)
    wanted = table.layout.slots * (1 if mesh is None else devices)
    size = jnp.shape(table.value)[0]
    if size != wanted:
      raise ValueError(
        f"A ShardedTable must have {wanted} rows here, got {size}: its part"
        f" and the place that it is used in do not fit; {remedy}."
      )
  return mesh


def mesh_under(table: ShardedTable) -> Any:
  """Returns `mesh_of`, with the devices of a table that lies on some."""
  mesh = mesh_of([table])
  sharding = getattr(table.value, "sharding", None)
  if isinstance(table.value, Tracer) or not isinstance(sharding, NamedSharding):
    return mesh
  return sharding.mesh
