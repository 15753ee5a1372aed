"""Defines the type of a table that is sharded by rows.

The owner of a row is the same as in an exchange. The rotation hash of
`core/partition.py` computes owner and slot from the id alone.

Letters: `R` rows, `D` columns, `n` devices, `S` slots of a device.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, ClassVar, NoReturn

import jax
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax._src.core.partition import Layout
from zenjax._src.core.row_wire import RowWire
from zenjax._src.rows.sparse_rows import NoArray
from zenjax._src.rows.sparse_rows import SparseRows


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedTable(NoArray):
  """A table `[R, D]` that is sharded by rows.

  Each device has the rows that it owns. `zenjax.tables.shard` makes it, and
  `zenjax.sharded_optimizer` keeps the state of a table in the same form. It is
  a pytree with one leaf, so optax's `init` and Flax's `TrainState` treat it
  like any parameter. The owners of rows are part of its structure: tables for
  another number of devices or another hash are different pytrees.

  A stack of tables `[T, R, D]` is one table of `T * R` rows: row `r` of table
  `t` is row `t * R + r`.

  Attributes:
    value: `[n * S, D]`, sharded over `axes` along its first dimension: the rows
      of each owner, in the order of their slots. Inside a `shard_map` over
      these axes it is `[S, D]`. In a gradient it is SparseRows of the whole
      table, in an update a `TableUpdate`.
    num_rows: `R`, or `T * R` for a stack.
    axes: Mesh axes over which rows are sharded.
    devices: `n`, the number of devices along these axes. It is 0, without axes,
      if rows are in order, as `zenjax.to_checkpoint` saves them: `[R, D]`,
      padded with zeros to equal ranges.
    seed: Seed of the hash.
    hash_offset: Offset of the hash, which differs between tables.
    replicas: Further axes over which batches are split. Along these axes every
      device has the same rows.
    stack: `(T,)` for a stack; it may have more dimensions.
    sizes: The buffer size in rows for one pair of devices, and with copies also
      the size for the union of an owner, from `zenjax.tune`; empty for the
      default.
    wire_dtype: Dtype in which rows and their gradients are sent; None for the
      dtype of the table.
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
  wire_dtype: Any = None

  _CURES: ClassVar[str] = (
    "train it with zenjax.sharded_optimizer(tx, axis_name), which clips with"
    " clip_norm=, or convert it with zenjax.tables.unshard; if the other tree"
    " has a ShardedTable, too, only one of them may be tuned: tune both, as in"
    " params, average, state = zenjax.tune((params, average, state))"
  )
  _NO_ARITHMETIC: ClassVar[str] = (
    "A ShardedTable takes no arithmetic, because its rows are on different"
    " devices. Compute with its rows inside the loss, or convert it with"
    " `zenjax.tables.unshard(table)`."
  )

  @property
  def batch_axes(self) -> Axes:
    """The axes over which a batch is split, slowest first."""
    return self.replicas + self.axes

  @property
  def layout(self) -> Layout:
    """The layout, which computes the owner of a row."""
    return Layout(
      num_rows=self.num_rows,
      groups=self.devices,
      seed=self.seed,
      hash_offset=self.hash_offset,
    )

  @property
  def row_wire(self) -> RowWire:
    """How rows are sent."""
    return RowWire.of(self.dtype, self.wire_dtype, self.value.shape[-1])

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the global table `(R, D)`, or of the stack `(T, R, D)`."""
    return *self.shape_of_rows, *self.value.shape[1:]

  @property
  def shape_of_rows(self) -> tuple[int, ...]:
    """The shape without columns: `(R,)`, or `(T, R)` for a stack."""
    return *self.stack, self.num_rows // math.prod(self.stack)

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    """The number of elements of the global table."""
    return math.prod(self.shape)

  @property
  def dtype(self) -> Any:
    return self.value.dtype

  def has_rows(self, x: Any) -> bool:
    """Returns True if `x` has an entry for each row.

    An optimizer's state may also hold a number for the table as a whole.
    """
    (size,) = jnp.shape(x)[:1] or (0,)
    if not self.devices:
      return size >= self.num_rows
    return size in (self.layout.slots, self.layout.slots * self.devices)

  def map_rows(self, f: Callable[[Any], Any]) -> Any:
    """Returns its value, with `f` applied to what has an entry for each row."""
    return jax.tree.map(lambda x: f(x) if self.has_rows(x) else x, self.value)

  def tree_flatten_with_keys(self):
    # Checkpoints keep keys but not types, so the key tells who owns the rows.
    key = "value"
    if self.devices:
      key += f"_on_{self.devices}_devices_{self.seed}_{self.hash_offset}"
    static = tuple([getattr(self, name) for name in _STATIC])
    return [(jax.tree_util.GetAttrKey(key), self.value)], static

  @classmethod
  def tree_unflatten(cls, static, children) -> "ShardedTable":
    return cls(*children, *static)

  def with_value(self, value: Any) -> "ShardedTable":
    """Returns the same table with `value` in place of its rows."""
    return dataclasses.replace(self, value=value)

  def __getitem__(self, ids: Any) -> "ShardedTable":
    if ids is Ellipsis:  # nnx reads the value of a variable by `param[...]`.
      return self
    raise TypeError(_NOT_INDEXED)

  @property
  def at(self) -> NoReturn:
    raise AttributeError(_NOT_INDEXED)

  def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
    array = ".to_dense()" if isinstance(self.value, SparseRows) else ""
    raise TypeError(
      "A ShardedTable is not an array, because its rows are on different"
      f" devices. Convert it with `zenjax.tables.unshard(table){array}`."
    )

  __jax_array__ = __array__


_NOT_INDEXED = (
  "A ShardedTable cannot be indexed, because its rows are on different devices."
  " Look up rows inside `zenjax.value_and_grad(loss_fn)` or"
  " `zenjax.tables.apply(fun)`, where models index tables as usual. Or convert"
  " the table to an array with `zenjax.tables.unshard`."
)
_STATIC = tuple([x.name for x in dataclasses.fields(ShardedTable)])[1:]


def is_sharded(node: Any) -> bool:
  """Returns True for a ShardedTable; for use as `is_leaf=`."""
  return isinstance(node, ShardedTable)


def nodes(tree: Any) -> list[ShardedTable]:
  """Returns the sharded tables in a tree, in order."""
  return list(filter(is_sharded, jax.tree.leaves(tree, is_leaf=is_sharded)))


def types_of_part(params: Any) -> Any:
  """Returns parameters with the types `[S, ...]` of one device's part."""

  def part(node: Any) -> Any:
    if not is_sharded(node):
      return node
    shape = lambda x: (node.layout.slots, *x.shape[1:])
    return node.with_value(
      node.map_rows(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype))
    )

  return jax.tree.map(part, params, is_leaf=is_sharded)


def specs(tree: Any, split: PartitionSpec) -> Any:
  """Returns specs of a tree: `split` for rows of tables, otherwise `P()`."""

  def spec(node: Any) -> Any:
    if not is_sharded(node):
      return PartitionSpec()
    place = lambda x: split if node.has_rows(x) else PartitionSpec()
    return node.with_value(jax.tree.map(place, node.value))

  return jax.tree.map(spec, tree, is_leaf=is_sharded)


def require_devices(what: str, had: int, devices: int) -> None:
  """Raises ValueError if `what` was made for another number of devices.

  Args:
    what: The table or the state, in words.
    had: The number of devices that it was made for; 0 if its rows are in order.
    devices: The number of devices that it is used on.
  """
  if not had:
    raise ValueError(
      f"{what} is in the order of rows, as it is saved, and must be placed on"
      " devices before it is used. Call `zenjax.from_checkpoint(saved, mesh,"
      " axis_name)` first."
    )
  if had != devices:
    raise ValueError(
      f"{what} was made for {had} devices, but it is used on {devices} devices."
      " Use the mesh that it was made for, also where you pass `mesh=`. Or move"
      " everything: `params, opt_state = zenjax.from_checkpoint((params,"
      " opt_state), mesh, axis_name)`."
    )


def mesh_of(tables: Sequence[ShardedTable]) -> Any:
  """Returns the mesh over which XLA partitions the program.

  Returns:
    The mesh, or None inside `shard_map`.

  Raises:
    ValueError: No mesh is known, tables are sharded over different axes, or a
      table has the wrong number of rows or devices here.
  """
  axes = tables[0].axes
  kinds = sorted({(table.replicas, table.axes) for table in tables})
  if len(kinds) > 1:
    raise ValueError(
      "Tables that one function looks up must have the same (replicas, axes),"
      f" got {kinds}. Shard them by one call of `zenjax.tables.shard`."
    )
  over = tables[0].batch_axes
  mesh = collectives.mesh_around(over, [x.value for x in tables], None)
  if mesh is None:
    try:
      devices = collectives.size(axes)
      collectives.size(over)
    except NameError as error:
      raise ValueError(
        f"A ShardedTable over {over!r} is used where no mesh has these axes."
        " Call `jax.set_mesh(mesh)`, or place the table with"
        " `zenjax.tables.shard`."
      ) from error
    here, argument = "one device", "in_specs"
  else:
    devices = math.prod([mesh.shape[axis] for axis in axes])
    here, argument = "all devices", "out_specs"
  for table in tables:
    require_devices("A ShardedTable", table.devices, devices)
    wanted = table.layout.slots * (1 if mesh is None else devices)
    size = jnp.shape(table.value)[0]
    if size != wanted:
      raise ValueError(
        f"A ShardedTable must have {wanted} rows on {here}, got {size}. Give"
        f" `zenjax.state_specs(params, axis_name)` in {argument} of shard_map."
      )
  return mesh


def mesh_under(table: ShardedTable) -> Any:
  """Returns the mesh that a placed table is on, otherwise `mesh_of` it."""
  sharding = getattr(table.value, "sharding", None)
  if isinstance(table.value, Tracer) or not isinstance(sharding, NamedSharding):
    return mesh_of([table])
  return sharding.mesh
