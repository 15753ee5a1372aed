"""Tables of which each device has only the rows that it owns.

    shard     place tables so: a leaf of the parameters becomes `ShardedTable`
    fetch     distinct ids go to their owners, their rows come back
    unshard   the rows in their order again

Who owns a row is decided as in an exchange, by the rotation hash of
`core/partition.py`: an id alone tells the owner and the slot, and each owner
has one row of any `n` that follow each other. So rows in their order and rows
at their owners are an `all_to_all` apart, without an index or padding.

Letters: `R` rows, `D` columns, `n` devices, `S` slots of a device, `K`
look-ups of a device.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.core import wire
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.core.collectives import Axes
from zenjax._src.core.partition import Layout
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import NoArray
from zenjax._src.rows.sparse_rows import seal
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes import buffer_sizes


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("value",),
  meta_fields=(
    "num_rows",
    "axes",
    "devices",
    "seed",
    "first_word",
    "replicas",
    "stack",
  ),
)
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedTable(NoArray):
  """A table `[R, D]` of which each device has the rows that it owns.

  Or a stack of them, `[T, R, D]`, as one table of `T * R` rows: row `r` of
  table `t` is row `t * R + r`. `zenjax.tables.shard` makes them. It is a pytree
  of one leaf, so that optax's `init` and Flax's `TrainState` take it as any
  parameter.

  Attributes:
    value: `[n * S, D]`, split over `axes` along its first dimension: the rows
      of each owner, in the order of their slots. Inside a `shard_map` over
      these axes `[S, D]`. In a gradient SparseRows of the whole table.
    num_rows: `R`, of a stack `T * R`.
    axes: Mesh axes over which owners lie.
    devices: `n`, along these axes; 0, without axes, where rows lie in their
      order, as `zenjax.from_checkpoint` saves them: `[R, D]`, then zeros up to
      equal ranges.
    seed: Of the hash.
    first_word: Rows of the tables before this one, which shift its hash.
    replicas: Further axes over which batches are split. Along these every
      device has the same rows.
    stack: `(T,)` of a stack, or more dimensions before that of rows.
  """

  value: Any
  num_rows: int
  axes: Axes
  devices: int
  seed: int
  first_word: int
  replicas: Axes = ()
  stack: tuple[int, ...] = ()

  @property
  def batch_axes(self) -> Axes:
    """Axes over which a batch is split, slowest first."""
    return self.replicas + self.axes

  @property
  def layout(self) -> Layout:
    """Who owns which row."""
    return Layout(
      num_rows=self.num_rows,
      groups=self.devices,
      seed=self.seed,
      first_word=self.first_word,
    )

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the whole table, `(R, D)`, or of the stack, `(T, R, D)`."""
    return *self.shape_of_rows, self.value.shape[-1]

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
    return len(self.stack) + 2

  @property
  def dtype(self) -> Any:
    return self.value.dtype

  @property
  def has_rows(self) -> bool:
    """Returns True if the value has something for each row.

    In an optimizer's state it may be a number for the whole table.
    """
    (size,) = jnp.shape(self.value)[:1] or (0,)
    if not self.devices:
      return size >= self.num_rows
    return size in (self.layout.slots, self.layout.slots * self.devices)

  def with_value(self, value: Any) -> "ShardedTable":
    """The same owners with something else in the place of the rows."""
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
      "A ShardedTable is no array: its rows lie on the devices that own them;"
      " `zenjax.tables.unshard` gives one, in the order of rows."
    )

  __jax_array__ = __array__


def is_sharded(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, ShardedTable)


@jax.tree_util.register_pytree_node_class
class NewValue(NoArray):
  """An update that says what a parameter is after it.

  Two leaves, of which one admits no arithmetic: a transformation that scales or
  adds up all updates raises, where it would scale the parameter itself.
  """

  __slots__ = ("_seal", "value")

  def __init__(self, value: Any):
    self._seal = seal(jnp.zeros(1, jnp.int32))
    self.value = value

  @property
  def shape(self) -> tuple[int, ...]:
    return self.value.shape

  @property
  def dtype(self) -> Any:
    return self.value.dtype

  def __radd__(self, old: Any) -> Any:
    """The parameter after the update, for `optax.apply_updates`."""
    del old
    return self.value

  def tree_flatten(self):
    return (self._seal, self.value), None

  @classmethod
  def tree_unflatten(cls, aux, children) -> "NewValue":
    del aux
    self = object.__new__(cls)
    self._seal, self.value = children
    return self


def refuse(tree: Any, argument: str, by: str) -> None:
  """Raises ValueError where a tree holds a sharded table.

  Args:
    tree: Any.
    argument: Its name.
    by: Who takes whole tables alone.
  """
  for name, leaf in leaf_util.named_leaves(tree, is_sharded):
    if is_sharded(leaf):
      raise ValueError(
        f"`{argument}` of {by} must hold no ShardedTable, and leaf {name!r} is"
        " one, whose rows lie on the devices that own them; take"
        " `zenjax.sharded_optimizer(tx, axis_name)` in the place of zen_sync"
        " and"
        " lazy_rows, or `zenjax.tables.unshard`."
      )


def types_of_part(params: Any) -> Any:
  """Parameters with types `[S, ...]` in the place of all devices' rows."""

  def part(node: Any) -> Any:
    if not is_sharded(node):
      return node
    shape = node.layout.slots, *node.value.shape[1:]
    return node.with_value(jax.ShapeDtypeStruct(shape, node.dtype))

  return jax.tree.map(part, params, is_leaf=is_sharded)


def specs(tree: Any, split: PartitionSpec) -> Any:
  """Specs of a tree: `split` for the rows of tables, whole for all else."""

  def spec(node: Any) -> Any:
    if not is_sharded(node):
      return PartitionSpec()
    return node.with_value(split if node.has_rows else PartitionSpec())

  return jax.tree.map(spec, tree, is_leaf=is_sharded)


def is_new_value(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, NewValue)


# Placing tables, and rows in their order again.


@dataclasses.dataclass(frozen=True)
class RowInitializer:
  """A table that `shard` makes row by row, where rows belong.

  Attributes:
    fun: Takes ids `[k] int32` in `[0, R)`, returns their rows `[k, D]`. Row `r`
      of table `t` of a stack has id `t * R + r`.
    shape: `(R, D)`, of a stack `(T, R, D)`.
    dtype: Of the rows.
  """

  fun: Callable[[jax.Array], jax.Array]
  shape: tuple[int, ...]
  dtype: Any

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return math.prod(self.shape)


# Ids of a call that is traced: no other dimension is likely to be as large.
_PROBE = 977


def _drawn_by_place(fun: Callable[..., Any], ids: Any) -> str:
  """The line at which numbers are drawn for each id, whatever it is, or ""."""
  traced = jaxprs.trace(fun, ids)
  of_ids = set(traced.inputs)
  for step in traced.steps:
    if not of_ids.isdisjoint(step.reads):
      of_ids.update(step.makes)
      continue
    # Numbers that NumPy has drawn are constants.
    drawn = [x for x in step.reads if x.constant is not None]
    if step.name == "random_bits":
      drawn = step.makes
    if any(_PROBE in x.shape for x in drawn):
      return step.place
  return ""


def init_by_rows(
  fun: Callable[[jax.Array], jax.Array], num_rows: int | Sequence[int]
) -> RowInitializer:
  """Describes a table by a function of its row ids, for `shard`.

  Each device makes the rows that it owns, some MiB at a time, and nothing else:
  where an initializer of the whole table takes several parts for itself. The
  table is the same for any number of devices.

  Args:
    fun: Takes ids `[k] int32` and returns rows `[k, D]`, each of its id alone.
    num_rows: `R`; of a stack of tables `(T, R)`, whose ids are `t * R + r` for
      row `r` of table `t`.

  Returns:
    A leaf of the parameters that are given to `shard`.

  Raises:
    ValueError: `fun` does not return floating rows `[k, D]`, draws numbers by
      the place of an id and not by the id, or `num_rows` are not integers whose
      product is from 1 to 2**31 - 1.

  Example:
    >>> import jax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> def rows(ids):
    ...   key = jax.random.key(0)
    ...   keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
    ...   return jax.vmap(lambda key: jax.random.normal(key, (16,)))(keys)
    >>> table = zenjax.tables.init_by_rows(rows, 2000)
    >>> zenjax.tables.shard({"table": table}, mesh, "data")["table"].shape
    (2000, 16)
  """
  one = not isinstance(num_rows, Sequence)
  rows = (num_rows,) if one else tuple(num_rows)
  whole = rows and all(isinstance(x, int | np.integer) for x in rows)
  if not whole or min(rows) < 1 or math.prod(map(int, rows)) >= 2**31:
    raise ValueError(
      "`num_rows` must be an integer from 1 to 2**31 - 1, or `(T, R)` of a"
      f" stack that has no more rows in all, got {num_rows!r}."
    )
  some = jax.ShapeDtypeStruct((_PROBE,), jnp.int32)
  found: Any = jax.eval_shape(fun, some)
  shape: Any = getattr(found, "shape", ())
  made = len(shape) == 2 and shape[0] == _PROBE
  if not made or not jnp.issubdtype(found.dtype, jnp.floating):
    raise ValueError(
      "`fun` of init_by_rows must return floating rows `[k, D]` of ids `[k]`,"
      f" got {found} of {_PROBE} ids."
    )
  if place := _drawn_by_place(fun, some):
    raise ValueError(
      "`fun` of init_by_rows must draw numbers by ids, and it draws some by"
      f" their place in a call, at {place}: rows would repeat; take"
      " `jax.random.fold_in(key, id)` of each id under `jax.vmap`."
    )
  return RowInitializer(fun, (*map(int, rows), shape[1]), found.dtype)


def shard(
  params: Any,
  mesh: jax.sharding.Mesh,
  axis_name: AxisName,
  *,
  tables: SparseSpec = None,
  replicas: AxisName | None = None,
  hash_seed: int = 0,
) -> Any:
  """Splits tables by rows over devices, each row to the device that owns it.

  Then `zenjax.value_and_grad(loss_fn)` fetches the rows that a batch looks up
  and `zenjax.sharded_optimizer(tx, axis_name)` updates rows where they lie: no
  device ever has more of a table, or of the optimizer's state, than its part.
  Models are written for the whole table.

  Inside `jit` nothing whole is made either: XLA makes each part of an
  initializer's numbers where it belongs. Rows then go to their owners some MiB
  at a time, within the memory that they have where the number of devices
  divides an owner's slots, as powers of two up to 32 do. For other numbers a
  device has its part twice; what an initializer takes for itself comes first.

  A leaf `[T, R, D]` that `tables` chooses is a stack of `T` tables: it is split
  as one of `T * R` rows. Models look up rows of its tables one by one, under
  `jax.vmap`, in `lax.scan`, or by `stack[t, ids]`, and ids are those of each
  table: one beyond `R` is out of range. It takes a part more inside `jit`
  unless the numbers of tables and of devices divide one another.

  Args:
    params: A tree of arrays. A table may be NumPy's, in the memory of the host,
      or of `init_by_rows`, made where its rows belong.
    mesh: The mesh that steps run on.
    axis_name: The axis over which owners lie.
    tables: Which leaves to split: a pytree prefix of bools or a callable
      `(name, leaf) -> bool`. By default all that `zen_sync` takes for tables,
      and no stacks.
    replicas: Further axes over which batches are split, those of slower links.
      Tables have a copy along each, and steps add up gradient rows over them:
      look-ups stay among the owners of one copy. Give `sharded_optimizer` both,
      `("pod", "chip")` where `axis_name="chip"` and `replicas="pod"`.
    hash_seed: Draws another hash; equal on all processes.

  Returns:
    `params` with a `ShardedTable` in the place of each table. Other leaves are
    placed whole on all devices, unless they lie on the mesh already.

  Raises:
    ValueError: No leaf is chosen, or one that has fewer than two dimensions or
      2**31 rows or more; `axis_name` is not one axis of the mesh, `replicas`
      are not others of it, or `hash_seed` does not fit 32 bits.
    TypeError: A chosen leaf is not floating.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> params = {"table": jnp.ones((2000, 16)), "w": jnp.ones(16)}
    >>> params = zenjax.tables.shard(params, mesh, "data")
    >>> params["table"].shape
    (2000, 16)
    >>> [x.data.shape for x in params["table"].value.addressable_shards]
    [(1024, 16), (1024, 16)]
  """
  axes = arguments.mesh_axes(axis_name, mesh)
  if len(axes) > 1:
    raise ValueError(
      f"`axis_name` must be one axis, got {axis_name!r}; make a mesh that has"
      " all devices along one, or give that of the fastest links, and the"
      " others as `replicas=`, along which tables have copies."
    )
  copies = replica_axes(replicas, axes, mesh)
  arguments.hash_seed(hash_seed)
  devices = math.prod([mesh.shape[axis] for axis in axes])
  named = leaf_util.named_leaves(params, is_sharded)
  chosen = leaf_util.select(params, tables, "row", argument="tables")
  if not any(chosen):
    shapes = {name: jnp.shape(leaf) for name, leaf in named[:8]}
    raise ValueError(
      "`tables` must choose a leaf, and it chooses none of"
      f" {shapes}{', ..' if len(named) > 8 else ''}; name tables by"
      " `tables=lambda name, leaf: ..`, as those of few rows are not taken by"
      " themselves, nor are stacks of tables."
    )
  found, first_word = [], 0
  for (name, leaf), wanted in zip(named, chosen, strict=True):
    if is_sharded(leaf):
      raise ValueError(
        f"`params` must hold arrays, and leaf {name!r} is split already; use"
        " it as it is, or `zenjax.tables.unshard` it first."
      )
    by_rows = isinstance(leaf, RowInitializer)
    if by_rows and not wanted:
      raise ValueError(
        f"`tables` must choose leaf {name!r}, which init_by_rows makes for the"
        " devices that own its rows."
      )
    if not wanted:
      found.append(_everywhere(leaf, mesh))
      continue
    if leaf.ndim < 2:
      raise ValueError(
        "`tables` must choose leaves of two dimensions, `[rows, columns]`, or"
        " stacks of tables, with further dimensions in front, and leaf"
        f" {name!r} has shape {leaf.shape}; leave it out, or reshape it."
      )
    *stack, rows, _ = leaf.shape
    num_rows = rows * math.prod(stack)
    if num_rows >= 2**31:
      raise ValueError(
        f"`tables` must choose leaves of fewer than 2**31 rows in all, and leaf"
        f" {name!r} has {num_rows}; make several leaves of it."
      )
    table = ShardedTable(
      value=None,
      num_rows=num_rows,
      axes=axes,
      devices=devices,
      seed=hash_seed,
      first_word=first_word,
      replicas=copies,
      stack=tuple(stack),
    )
    first_word = (first_word + table.num_rows) % 2**32
    if by_rows:
      value = _made(leaf, table, mesh)
    else:
      value = _placed(leaf, table, mesh, table.stack)
    found.append(table.with_value(value))
  return jax.tree.unflatten(jax.tree.structure(params), found)


def replica_axes(replicas: AxisName | None, axes: Axes, mesh: Any) -> Axes:
  """The axes along which tables have copies.

  Raises:
    ValueError: The mesh has not all of them, or one is an owner's.
  """
  if replicas is None:
    return ()
  copies = arguments.mesh_axes(replicas, mesh, "replicas")
  if set(copies) & set(axes):
    raise ValueError(
      "`replicas` must name other axes than `axis_name`, along which tables"
      f" have copies, got {replicas!r} for owners along {axes!r}."
    )
  return copies


def unshard(params: Any) -> Any:
  """The inverse of `shard`: tables as arrays, in the order of their rows.

  Each is split by ranges of rows over the same axes, so that no device has a
  whole table here either. Only where the number of devices does not divide the
  rows, an array lies whole on every device; `zenjax.to_checkpoint(params)` is
  the form to save that never does. A stack is split by its tables, or by the
  rows of each where devices divide those alone; rows then move, and the program
  takes two parts and more for itself, in the worst case the whole.

  Args:
    params: A tree with `ShardedTable` in it, such as parameters, or an
      optimizer's state of them.

  Returns:
    The same tree with arrays `[R, ...]`, of stacks `[T, R, ...]`.

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

  def whole(node: Any) -> Any:
    if not is_sharded(node):
      return node
    if not node.devices:
      rows = node.value[: node.num_rows]
      return rows.reshape(*node.shape_of_rows, *rows.shape[1:])
    mesh = _mesh_under(node)
    if mesh is None:
      raise ValueError(
        "`unshard` must be called outside of shard_map, where a table is that"
        " of all devices; return the table from the step and call it there."
      )
    divided = [not size % node.devices for size in node.shape_of_rows]
    at = next((k for k in (0, len(node.stack)) if divided[k]), None)
    spec = () if at is None else (*[None] * at, node.axes)
    lies = NamedSharding(mesh, PartitionSpec(*spec))
    ordered = _ordered(node, mesh)
    if node.stack:
      return _stacking(node.shape_of_rows, node.devices, lies)(ordered)
    return _resizing(node.num_rows, node.num_rows, lies)(ordered)

  return jax.tree.map(whole, params, is_leaf=is_sharded)


def in_order(table: ShardedTable, *, donate: bool = False) -> ShardedTable:
  """A table, or what a state has of one, with its rows in order, to save.

  Each device has a range of rows, of zeros where there are no more. With
  `donate` rows move within the memory that they have, if devices divide slots,
  and ranges are of as many rows as an owner has slots.
  """
  if not table.devices:
    return table

  def moved(x: Any) -> Any:
    node = table.with_value(x)
    if not node.has_rows:
      return x
    mesh = _mesh_under(node)
    split = NamedSharding(mesh, PartitionSpec(table.axes))
    if donate and _moves_in_place(table.layout, x):
      moving = _moving(_order_in_place, mesh, table.axes, table.layout, True)
      return jax.block_until_ready(moving(x))
    rows = -(-table.num_rows // table.devices) * table.devices
    made = _ranges(_ordered(node, mesh), table.num_rows, rows, split)
    return _instead(x, made) if donate else made

  value = jax.tree.map(moved, table.value)
  return dataclasses.replace(
    table, value=value, axes=(), devices=0, replicas=()
  )


def on_owners(
  table: ShardedTable,
  mesh: jax.sharding.Mesh,
  axes: Axes,
  replicas: Axes,
  *,
  donate: bool = False,
) -> ShardedTable:
  """A table, or what a state has of one, on as many owners as a mesh has.

  Arrays lie on the devices of the mesh, or in the memory of the host. With
  `donate` rows in order move within the memory that they have, if they came
  from `in_order` with it, on as many devices.
  """
  devices = math.prod([mesh.shape[axis] for axis in axes])
  new = dataclasses.replace(
    table, axes=axes, devices=devices, replicas=replicas
  )
  if table.devices == devices:
    return new
  table = in_order(table, donate=donate)
  layout, split = new.layout, NamedSharding(mesh, PartitionSpec(axes))

  def moved(x: Any) -> Any:
    if not table.with_value(x).has_rows:
      return x
    if not donate or not isinstance(x, jax.Array):
      return _placed(x, new, mesh)
    fits = x.shape[0] == devices * layout.slots
    fits = fits and _moves_in_place(layout, x)
    if fits and x.sharding.is_equivalent_to(split, x.ndim):
      moving = _moving(_owners_in_place, mesh, axes, layout, True)
      return jax.block_until_ready(moving(x))
    return _instead(x, _placed(x, new, mesh))

  return new.with_value(jax.tree.map(moved, table.value))


def _instead(old: jax.Array, new: jax.Array) -> jax.Array:
  """Returns `new`, and frees what it was made of."""
  jax.block_until_ready(new)
  if old is not new:
    old.delete()
  return new


def mesh_of(tables: Sequence[ShardedTable]) -> Any:
  """The mesh over which XLA spreads the program; None inside a `shard_map`.

  Raises:
    ValueError: No mesh is known, tables lie over several axes, or devices or
      the form of a table do not fit where this is called.
  """
  if not all(table.devices for table in tables):
    raise ValueError(
      "A ShardedTable must lie on the devices that own its rows, got one in the"
      " order of rows, as it is saved; call `zenjax.from_checkpoint(state,"
      " mesh,"
      " axis_name)` first."
    )
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
    if devices != table.devices:
      raise ValueError(
        "A ShardedTable must be used on as many devices as it was made for, got"
        f" one of {table.devices} on {devices}; call `zenjax.tables.unshard`,"
        " and"
        " `zenjax.tables.shard` for the new mesh."
      )
    wanted = table.layout.slots * (1 if mesh is None else devices)
    size = jnp.shape(table.value)[0]
    if size != wanted:
      raise ValueError(
        f"A ShardedTable must have {wanted} rows here, got {size}: its part"
        f" and the place that it is used in do not fit; {remedy}."
      )
  return mesh


def _mesh_under(table: ShardedTable) -> Any:
  """As `mesh_of`, with the devices of a table that lies on some."""
  mesh = mesh_of([table])
  sharding = getattr(table.value, "sharding", None)
  if isinstance(table.value, Tracer) or not isinstance(sharding, NamedSharding):
    return mesh
  return sharding.mesh


def _everywhere(leaf: Any, mesh: jax.sharding.Mesh) -> Any:
  """A leaf that is no table, on all devices, unless it is there already."""
  if isinstance(leaf, Tracer) or not leaf_util.is_array(leaf):
    return leaf
  sharding = getattr(leaf, "sharding", None)
  if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
    return leaf
  return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))


def _blocks(layout: Layout) -> int:
  """Blocks of `n` rows, a multiple of `n`: `[blocks, n]` are all rows."""
  return -(-layout.slots // layout.groups) * layout.groups


def _placed(
  x: Any, table: ShardedTable, mesh: Any, stack: tuple[int, ...] = ()
) -> jax.Array:
  """`[R, ...]` as `[n * S, ...]`, each row with its owner.

  Args:
    x: Rows in their order, `[*stack, R, ...]`.
    table: Says who owns them.
    mesh: Where owners are.
    stack: Dimensions in front of that of rows.
  """
  rows = _blocks(table.layout) * table.devices
  split = NamedSharding(mesh, PartitionSpec(table.axes))
  # What has another shape, or was the host's, shares no memory with `x`.
  fresh = not isinstance(x, jax.Array) or (not stack and x.shape[0] != rows)
  if not stack:
    x = _ranges(x, table.num_rows, rows, split)
  elif isinstance(x, jax.Array) and _lies_there(x, split):
    x = _resizing(table.num_rows, rows, split, stack, table.devices)(x)
  else:  # A view of the host's memory.
    x = np.asarray(x).reshape(table.num_rows, -1)
    x = _ranges(x, table.num_rows, rows, split)
  if _moves_in_place(table.layout, x):
    f = functools.partial(_moving, _owners_in_place, mesh)
    return f(table.axes, table.layout, fresh)(x)
  return _moving(_to_owners, mesh, table.axes, table.layout)(x)


def _made(leaf: RowInitializer, table: ShardedTable, mesh: Any) -> jax.Array:
  """`[n * S, D]`: each device makes the rows that it owns."""
  layout, width = table.layout, leaf.shape[-1]

  def move(slots: jax.Array, begin: Any, size: int) -> jax.Array:
    at = begin + jnp.arange(size, dtype=jnp.int32)
    ids = layout.row(jnp.full_like(at, lax.axis_index(table.axes)), at)
    rows = leaf.fun(jnp.minimum(ids, table.num_rows - 1))
    rows = jnp.where((ids < table.num_rows)[:, None], rows, 0)
    return lax.dynamic_update_slice_in_dim(slots, rows, begin, axis=0)

  def own() -> jax.Array:
    none = jnp.zeros((layout.slots, width), leaf.dtype)
    return _by_pieces(move, none, layout.slots)

  mapped = jax.shard_map(
    own,
    mesh=mesh,
    in_specs=(),
    out_specs=PartitionSpec(table.axes),
    axis_names={*table.axes},
    check_vma=False,
  )
  return jax.jit(mapped)()


def _ordered(table: ShardedTable, mesh: Any) -> jax.Array:
  """`[n * S, ...]` in the order of rows, then zeros: `[blocks * n, ...]`."""
  moving = _moving(_to_order, mesh, table.axes, table.layout)
  return moving(table.value)


def _ranges(
  x: Any, num_rows: int, rows: int, split: NamedSharding
) -> jax.Array:
  """The first `num_rows` of `x`, and zeros up to `rows`, split by ranges."""
  here = isinstance(x, jax.Array) and not isinstance(x, Tracer)
  if here and x.shape[0] == rows and x.sharding == split:
    return x
  if here and not _lies_there(x, split):
    x = np.asarray(x)
  if isinstance(x, jax.Array):
    return _resizing(num_rows, rows, split)(x)
  host = np.asarray(x)

  def part(index: Any) -> np.ndarray:
    begin, end, _ = index[0].indices(rows)
    own = host[begin : min(end, num_rows)]
    missing = end - begin - len(own)
    return np.pad(own, [(0, missing), *[(0, 0)] * (host.ndim - 1)])

  shape = rows, *host.shape[1:]
  return jax.make_array_from_callback(shape, split, part)


def _lies_there(x: jax.Array, lies: NamedSharding) -> bool:
  """True if a program over the devices of `lies` takes `x`."""
  if isinstance(x, Tracer):
    return True
  return x.sharding.device_set == lies.device_set


@functools.lru_cache(maxsize=64)
def _resizing(
  num_rows: int,
  rows: int,
  lies: NamedSharding,
  stack: tuple[int, ...] = (),
  devices: int = 1,
) -> Any:
  """Cuts off and fills up rows, of tables `[*stack, R, ...]` one by one."""

  def resized(x: jax.Array) -> jax.Array:
    if stack:
      x = _one_table(x, stack, devices)
    missing = rows - num_rows
    pads = [(0, missing), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x[:num_rows], pads)

  if compat.explicit_of(lies.mesh):
    # Where types say how arrays lie, devices must divide every dimension.
    resized = compat.on_automatic_axes(resized, lies.mesh, lies)
  return jax.jit(resized, out_shardings=lies)


def _one_table(x: jax.Array, stack: tuple[int, ...], devices: int) -> jax.Array:
  """`[*stack, R, ...]` as `[T * R, ...]`, to be split over devices."""
  count, last = math.prod(stack), len(stack)
  if count % devices and devices % count:
    # Where neither divides the other XLA reshapes what each device has whole.
    x = x.reshape(count, *x.shape[last:])
    return jnp.concatenate([x[t] for t in range(count)])
  return x.reshape(-1, *x.shape[last + 1 :])


@functools.lru_cache(maxsize=64)
def _stacking(rows: tuple[int, ...], devices: int, lies: NamedSharding) -> Any:
  """`[T * R, ...]`, split by ranges, as `[*stack, R, ...]`."""
  *stack, each = rows
  count = math.prod(stack)

  def stacked(x: jax.Array) -> jax.Array:
    x = x[: count * each]
    # XLA reshapes so many parts on each device; tables one by one take two
    # parts each.
    if devices // math.gcd(devices, count) > 2 * count:
      x = jnp.stack([x[t * each : (t + 1) * each] for t in range(count)])
      return x.reshape(*rows, *x.shape[2:])
    return x.reshape(*rows, *x.shape[1:])

  if compat.explicit_of(lies.mesh):
    stacked = compat.on_automatic_axes(stacked, lies.mesh, lies)
  return jax.jit(stacked, out_shardings=lies)


@functools.lru_cache(maxsize=64)
def _moving(
  f: Callable[..., Any],
  mesh: Any,
  axes: Axes,
  layout: Layout,
  donate: bool = False,
) -> Any:
  """`f` of the part of each device; a table is moved often, compiled once."""
  split = PartitionSpec(axes)
  mapped = jax.shard_map(
    functools.partial(f, axes=axes, layout=layout),
    mesh=mesh,
    in_specs=split,
    out_specs=split,
    axis_names={*axes},
    check_vma=False,
  )
  return jax.jit(mapped, donate_argnums=(0,) if donate else ())


# Bytes of a device that one exchange moves: beside the part that is read and
# the part that is written, a device has no more than a few times these.
_MOVED = 1 << 22
# Chunks that change places within a part, at most.
_MOST_CHUNKS = 1 << 17


def _to_owners(rows: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
  """A range of rows `[blocks, D]` of each device to slots `[S, D]`."""
  n = layout.groups
  blocks = rows.reshape(-1, n, *rows.shape[1:])
  shifts = _shifts(layout, axes, len(blocks))
  group = jnp.arange(n, dtype=jnp.int32)

  def move(slots: jax.Array, begin: Any, size: int) -> jax.Array:
    at = group[None] - _cut(shifts, begin, size)[:, None] + 2 * n
    some = _cut(blocks, begin, size)
    some = _each_block(some, lax.rem(at, lax.full_like(at, n)))
    some = collectives.all_to_all(jnp.swapaxes(some, 0, 1), axes)
    put = lambda j, slots: _put(slots, some[j], j * len(blocks) + begin)
    return lax.fori_loop(0, n, put, slots)

  # Of the result's own shape: a TPU copies where tiles of 8 rows do not fit.
  slots = jnp.zeros((layout.slots, *rows.shape[1:]), rows.dtype)
  return _by_pieces(move, slots, len(blocks))


def _put(slots: jax.Array, rows: jax.Array, begin: Any) -> jax.Array:
  """Writes `rows` from `begin` on, but for those that are beyond the end."""
  size = len(rows)
  at = jnp.minimum(begin, len(slots) - size)
  late = begin - at
  fresh = (jnp.arange(size) >= late).reshape(-1, *(1,) * (rows.ndim - 1))
  rows = jnp.where(fresh, jnp.roll(rows, late, axis=0), _cut(slots, at, size))
  return lax.dynamic_update_slice_in_dim(slots, rows, at, axis=0)


def _to_order(slots: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
  """The inverse of `_to_owners`."""
  n, blocks = layout.groups, _blocks(layout)
  pads = [(0, blocks - len(slots)), *[(0, 0)] * (slots.ndim - 1)]
  parts = jnp.pad(slots, pads).reshape(n, -1, *slots.shape[1:])
  shifts = _shifts(layout, axes, parts.shape[1])
  j = jnp.arange(n, dtype=jnp.int32)

  def move(rows: jax.Array, begin: Any, size: int) -> jax.Array:
    some = lax.dynamic_slice_in_dim(parts, begin, size, axis=1)
    some = jnp.swapaxes(collectives.all_to_all(some, axes), 0, 1)
    at = j[None] + _cut(shifts, begin, size)[:, None]
    some = _each_block(some, lax.rem(at, lax.full_like(at, n)))
    return lax.dynamic_update_slice_in_dim(rows, some, begin, axis=0)

  rows = jnp.zeros((parts.shape[1], n, *slots.shape[1:]), slots.dtype)
  rows = _by_pieces(move, rows, len(rows))
  return rows.reshape(-1, *slots.shape[1:])


# Rows in their order and rows at their owners in the same memory. A part is
# `n * q` chunks of `p` rows: of the slots that one exchange takes away, `p` for
# each device `t` times, the rows that it brings take the place. Chunk
# `(a, c)` of `[n, q]` then has rows that belong to chunk `c * n + a`, so that
# chunks change places.


def _moves_in_place(layout: Layout, x: jax.Array) -> bool:
  """Returns True if parts of `x` are whole blocks of rows, in few chunks.

  A program lists the places of chunks. Where the number of blocks has no
  divisor that is near what an exchange moves, they would be millions.
  """
  n, size = layout.groups, x.nbytes // len(x) * layout.slots
  if layout.slots % n:
    return False
  q, _, _ = _chunks(layout.slots, size, n)
  return n * q <= _MOST_CHUNKS


def _order_in_place(slots: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
  """Slots `[S, D]` of each device to a range of rows `[S, D]`."""
  n, (q, p, _) = layout.groups, _chunks(len(slots), slots.nbytes, layout.groups)
  j = jnp.arange(n, dtype=jnp.int32)

  def move(some: jax.Array, shift: jax.Array) -> jax.Array:
    some = jnp.swapaxes(collectives.all_to_all(some, axes), 0, 1)
    at = j[None] + shift[:, None]
    rows = _each_block(some, lax.rem(at, lax.full_like(at, n)))
    rows = rows.reshape(-1, n, p, *rows.shape[2:])
    return jnp.swapaxes(rows, 0, 1)

  rows = _exchanged_in_place(move, slots, axes, layout)
  there = np.arange(n * q).reshape(n, q).T.reshape(-1)
  return _chunks_moved(rows, there, p)


def _owners_in_place(rows: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
  """The inverse of `_order_in_place`."""
  n, (q, p, _) = layout.groups, _chunks(len(rows), rows.nbytes, layout.groups)
  group = jnp.arange(n, dtype=jnp.int32)

  def move(some: jax.Array, shift: jax.Array) -> jax.Array:
    some = some.reshape(n, -1, p, *some.shape[2:])
    some = jnp.swapaxes(some, 0, 1).reshape(-1, n, *some.shape[3:])
    at = group[None] - shift[:, None] + 2 * n
    some = _each_block(some, lax.rem(at, lax.full_like(at, n)))
    return collectives.all_to_all(jnp.swapaxes(some, 0, 1), axes)

  there = np.arange(n * q).reshape(q, n).T.reshape(-1)
  rows = _chunks_moved(rows, there, p)
  return _exchanged_in_place(move, rows, axes, layout)


def _chunks(rows: int, size: int, n: int) -> tuple[int, int, int]:
  """Returns `q` and `p`, and `t`, how many chunks one exchange moves.

  Args:
    rows: Of a part.
    size: Its bytes.
    n: Devices.
  """
  blocks = rows // n
  # Blocks of one exchange: of small parts little is moved at a time.
  most = max(1, min(_MOVED * blocks // size, blocks // 16))
  p = max(p for p in range(1, min(most, blocks) + 1) if blocks % p == 0)
  return blocks // p, p, min(blocks, most) // p


def _exchanged_in_place(
  move: Callable[[jax.Array, jax.Array], jax.Array],
  part: jax.Array,
  axes: Axes,
  layout: Layout,
) -> jax.Array:
  """`move` of `[n, t * p, ..]` of a part, in its place, after one another."""
  n = layout.groups
  q, p, t = _chunks(len(part), part.nbytes, n)
  shifts = _shifts(layout, axes, q * p)
  rest = part.shape[1:]

  def piece(begin: Any, size: int, part: jax.Array) -> jax.Array:
    # Where tiles of 8 rows do not fit, a TPU copies what is reshaped.
    at = lambda j: j * (q * p) + begin * p
    some = jnp.zeros((n, size * p, *rest), part.dtype)
    read = lambda j, some: some.at[j].set(_cut(part, at(j), size * p))
    some = move(
      lax.fori_loop(0, n, read, some), _cut(shifts, begin * p, size * p)
    ).reshape(n, size * p, *rest)
    put = lambda j, part: lax.dynamic_update_slice_in_dim(
      part, some[j], at(j), axis=0
    )
    return lax.fori_loop(0, n, put, part)

  part = lax.fori_loop(0, q // t, lambda i, x: piece(i * t, t, x), part)
  return piece(q - q % t, q % t, part) if q % t else part


def _chunks_moved(part: jax.Array, there: np.ndarray, p: int) -> jax.Array:
  """A part whose chunk `i` of `p` rows is the one that was `there[i]`."""
  swaps, done = [], np.zeros(len(there), bool)
  for first in range(len(there)):
    at = first
    while not done[at]:
      done[at] = True
      if there[at] != first:
        swaps.append((at, there[at]))
      at = there[at]
  if not swaps:
    return part
  pairs = jnp.asarray(np.array(swaps, np.int32) * p)

  def swap(i: Any, part: jax.Array) -> jax.Array:
    one, other = pairs[i, 0], pairs[i, 1]
    rows = _cut(part, one, p), _cut(part, other, p)
    # Both are read before either is written.
    rows = lax.optimization_barrier(rows)
    part = lax.dynamic_update_slice_in_dim(part, rows[1], one, axis=0)
    return lax.dynamic_update_slice_in_dim(part, rows[0], other, axis=0)

  return lax.fori_loop(0, len(swaps), swap, part)


def _by_pieces(
  move: Callable[[jax.Array, Any, int], jax.Array],
  into: jax.Array,
  blocks: int,
) -> jax.Array:
  """Fills `into` by `move(into, begin, size)`, some of its blocks at a time."""
  size = into.nbytes // blocks
  size = min(blocks, max(1, _MOVED // max(1, size)))
  # The last piece may begin within the one before it.
  begin = lambda i: jnp.minimum(i * size, blocks - size)
  one = lambda i, into: move(into, begin(i), size)
  return lax.fori_loop(0, -(-blocks // size), one, into)


def _cut(x: jax.Array, begin: Any, size: int) -> jax.Array:
  return lax.dynamic_slice_in_dim(x, begin, size)


def _shifts(layout: Layout, axes: Axes, blocks: int) -> jax.Array:
  """By how much this device's blocks are rotated: `[blocks]` in `[0, 2n)`."""
  first = lax.axis_index(axes) * blocks
  return layout.shift(first + jnp.arange(blocks, dtype=jnp.int32))


def _each_block(blocks: jax.Array, at: jax.Array) -> jax.Array:
  """`blocks[i, at[i]]`, of `[b, n, ...]` and `[b, n]`."""
  rest = (1,) * (blocks.ndim - 2)
  return jnp.take_along_axis(blocks, at.reshape(*at.shape, *rest), axis=1)


# Look-ups of a batch, by owner: rows come from there, gradients go there.

# Parts of the look-ups that a buffer may have room for, were owners to get
# equal shares: the least that holds what a batch needs is used. Batches repeat
# their ids, and by how much is known when they are there. Each size costs half
# a second of a core to compile for 8 CPU devices.
_PARTS = (0.04, 0.12, 0.2, 0.26, 0.33, 0.4, 0.47, 0.55, 0.64, 0.75, 0.9, 1.06)
_LAST = len(_PARTS) - 1


class _Asked(NamedTuple):
  """Look-ups of a table on a device, by owner."""

  owner: jax.Array  # [K] int32, of each look-up; n where it is of no row
  number: jax.Array  # [K] int32, of its row among the distinct ones
  # [K] int32, where distinct rows lie, `owner * S + slot`, ascending; the
  # rest is n * S.
  places: jax.Array
  first: jax.Array  # [n + 1] int32, where each owner's begin among `places`


def _ask(table: ShardedTable, ids: jax.Array) -> _Asked:
  """Sorts look-ups by owner and slot, and counts what stands twice once."""
  layout, n, count = table.layout, table.devices, len(ids)
  real = ids < table.num_rows
  owner, slot = layout.place(jnp.minimum(ids, table.num_rows - 1))
  owner = jnp.where(real, owner, n)
  place = jnp.where(real, owner * layout.slots + slot, n * layout.slots)
  iota = compat.cast_like(jnp.arange(count, dtype=jnp.int32), place)
  place, order = lax.sort((place, iota), num_keys=1)
  new = jnp.concatenate([jnp.ones(1, bool), place[1:] != place[:-1]])
  number = jnp.cumsum(new, dtype=jnp.int32) - 1
  places = jnp.full_like(place, n * layout.slots).at[number]
  places = places.set(place, indices_are_sorted=True)
  borders = jnp.arange(n + 1, dtype=jnp.int32) * layout.slots
  first = jnp.searchsorted(places, borders).astype(jnp.int32)
  back = (
    jnp.zeros_like(number)
    .at[order]
    .set(number, unique_indices=True, mode="promise_in_bounds")
  )
  return _Asked(owner, back, places, first)


class Counts(NamedTuple):
  """Counts of a table's look-ups: of a device, or joined over devices."""

  most: Any  # distinct rows of the owner that is asked the most; the largest
  rows: Any  # distinct rows, of all owners; the sum
  beyond: Any  # those that the largest buffers have no room for; the sum


def _own_counts(
  tables: Sequence[ShardedTable], asked: Sequence[_Asked]
) -> jax.Array:
  """The counts of this device: `[T, 3]`."""
  first = jnp.stack([a.first for a in asked])
  each, rooms = jnp.diff(first, axis=1), _Sizes.of(tables, asked).at(_LAST)
  beyond = jnp.maximum(each - jnp.array(rooms, jnp.int32)[:, None], 0)
  numbers = Counts(
    most=jnp.max(each, axis=1),
    rows=first[:, -1],
    beyond=jnp.sum(beyond, axis=1, dtype=jnp.int32),
  )
  return jnp.stack(numbers, axis=-1)


def _joined(counts: jax.Array) -> jax.Array:
  """Counts `[k, T, 3]` of `k` devices as those of all: `[T, 3]`."""
  most, rows, beyond = [counts[..., i] for i in range(counts.shape[-1])]
  sums = wire.sum_counts(rows), wire.sum_counts(beyond)
  return jnp.stack(Counts(jnp.max(most, axis=0), *sums), axis=-1)


def _of_all(x: jax.Array, axes: Axes) -> jax.Array:
  """`[k, ...]` of all devices along `axes`, by one sum of a few numbers."""
  each = jnp.zeros((collectives.size(axes), *x.shape), x.dtype)
  return collectives.psum(each.at[lax.axis_index(axes)].set(x), axes)


def _fullest(asked: _Asked) -> jax.Array:
  """Distinct rows that a device asks of the owner that it asks the most of."""
  return jnp.max(jnp.diff(asked.first))


def _rooms(look_ups: int, layout: Layout) -> list[int]:
  """Returns the sizes that buffers for one owner may have, of each level.

  They have room for the fullest of all pairs of devices, as a hash deals rows:
  ids that are all distinct fit the last.
  """
  n, most = layout.groups, min(look_ups, layout.slots)
  sizes = [buffer_sizes.fullest(look_ups * x, n, n * n) for x in _PARTS]
  return [min(most, math.ceil(size)) for size in sizes]


def words_of_step(
  look_ups: int, most: float, layout: Layout, width: int, dtype: Any
) -> tuple[int, int, int]:
  """Returns what a device sends in a step with one table.

  Args:
    look_ups: Of a device, all in one exchange.
    most: Distinct rows that any device looks up with any owner.
    layout: Of the table.
    width: Its columns.
    dtype: Its dtype.

  Returns:
    Words of 32 bits of the messages with ids, rows and gradient rows.
  """
  rooms = _rooms(look_ups, layout)
  room = next((room for room in rooms if room >= most), rooms[-1])
  return _words(room, rooms[-1], layout, width, dtype)


def _words(
  room: int, largest: int, layout: Layout, width: int, dtype: Any
) -> tuple[int, int, int]:
  """As `words_of_step`, of buffers for `room` rows a pair."""
  n, rows = layout.groups, wire.words_for(room * width, dtype)
  return n * (largest + len(Counts._fields)), n * rows, n * (room + rows)


class _Sizes(NamedTuple):
  """Rows that buffers for one owner may have, of each table and level."""

  rooms: list[list[int]]

  @classmethod
  def of(cls, tables: Sequence[ShardedTable], asked: Sequence[_Asked]):
    each = zip(tables, asked)
    return cls([_rooms(len(a.number), t.layout) for t, a in each])

  def at(self, level: int) -> list[int]:
    return [rooms[level] for rooms in self.rooms]

  def of_all(self, devices: int) -> "_Sizes":
    """Returns sizes for what so many devices have sent."""
    return _Sizes([[devices * room for room in rooms] for rooms in self.rooms])

  def level(self, most: jax.Array) -> jax.Array:
    """The first that holds `most: [T]`; `len(_PARTS)` if none does."""
    rooms = jnp.array(self.rooms, jnp.int32)
    return jnp.max(jnp.sum(rooms < most[:, None], axis=1, dtype=jnp.int32))

  def words(
    self, tables: Sequence[ShardedTable]
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words of messages with ids, rows and gradient rows, `[T, levels]`."""
    found = [
      [
        _words(room, rooms[_LAST], table.layout, table.shape[1], table.dtype)
        for room in rooms
      ]
      for table, rooms in zip(tables, self.rooms)
    ]
    ids, rows, pushed = np.moveaxis(np.array(found, np.float32), -1, 0)
    return ids, rows, pushed


class Fetched(NamedTuple):
  """Counts of a table's look-ups in a step, equal on all devices."""

  rows: Any  # distinct rows of a device, mean
  beyond: Any  # rows of all devices that the first buffers had no room for
  rounds: Any  # exchanges of ids and rows
  wire_bytes: Any  # that a device received in these


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("ids", "asked", "came", "counts"),
  meta_fields=("layouts",),
)
@dataclasses.dataclass(frozen=True)
class Ahead:
  """Look-ups of a batch whose ids have been with their owners.

  Devices have parts of all of it: of a whole batch it is split along each first
  dimension, as the batch is.
  """

  ids: list[jax.Array]  # [K] int32 of each table
  asked: list[_Asked]
  came: list[jax.Array]  # [n, C] int32, slots that others ask this device for
  counts: jax.Array  # [1, T, 3] int32, `Counts` of all devices
  layouts: tuple[Layout, ...]


def fetch_on(
  mesh: Any,
  tables: Sequence[ShardedTable],
  ids: Sequence[Sequence[jax.Array]],
  ahead: Ahead | None = None,
) -> tuple[list[list[jax.Array]], tuple[jax.Array, jax.Array]]:
  """As `fetch`, of a whole batch's look-ups where `mesh` is given.

  Args:
    mesh: As `mesh_of` returned it.
    tables: Likewise.
    ids: Of each table, arrays `[K]`, on a mesh those of all devices.
    ahead: Of the same look-ups, if their ids have been sent.
  """
  if mesh is None:
    return fetch(tables, ids, ahead)
  split = PartitionSpec(tables[0].batch_axes)
  return jax.shard_map(
    fetch,
    mesh=mesh,
    in_specs=(PartitionSpec(tables[0].axes), split, split),
    out_specs=(split, PartitionSpec()),
    axis_names={*tables[0].batch_axes},
    check_vma=False,
  )(list(tables), list(map(list, ids)), ahead)


def ask_on(
  mesh: Any,
  tables: Sequence[ShardedTable],
  ids: Sequence[Sequence[jax.Array]],
) -> Ahead:
  """Sends ids to owners, as `fetch_on` does before rows come back."""
  if mesh is None:
    return ask(tables, ids)
  split = PartitionSpec(tables[0].batch_axes)
  return jax.shard_map(
    ask,
    mesh=mesh,
    in_specs=(PartitionSpec(tables[0].axes), split),
    out_specs=split,
    axis_names={*tables[0].batch_axes},
    check_vma=False,
  )(list(tables), list(map(list, ids)))


def ask(
  tables: Sequence[ShardedTable], ids: Sequence[Sequence[jax.Array]]
) -> Ahead:
  """Sends the distinct ids of a device to their owners, as many as fit once."""
  joined = [jnp.concatenate(x) if len(x) > 1 else x[0] for x in ids]
  asked = [_ask(table, x) for table, x in zip(tables, joined)]
  layouts = tuple([table.layout for table in tables])
  if tables[0].devices == 1:
    came = [jnp.zeros((1, 0), jnp.int32)] * len(tables)
    counts = _own_counts(tables, asked)[None]
  else:
    # Every device has told all others its own counts.
    came, told = zip(*_ids_of(tables, asked, 0))
    counts = jnp.stack(told, axis=1)
  if replicas := tables[0].replicas:
    # So that all take the same branches, and rounds.
    counts = _of_all(counts, replicas).reshape(-1, *counts.shape[1:])
  counts = _joined(counts)
  return Ahead(joined, asked, list(came), counts[None], layouts)


def _ids_of(
  tables: Sequence[ShardedTable], asked: Sequence[_Asked], turn: Any
) -> list[list[jax.Array]]:
  """Asks owners; ids are few bytes beside rows, and have the most room.

  Returns:
    Of each table slots `[n, C]` and the counts of each device, `[n, 3]`.
  """
  n, rooms = tables[0].devices, _Sizes.of(tables, asked).at(_LAST)
  sent = []
  own = _own_counts(tables, asked)
  for table, a, room, counts in zip(tables, asked, rooms, own):
    slots = _slots(table, a, a.first[:-1] + turn * room, room)[1]
    sent.append([slots, jnp.broadcast_to(counts, (n, len(counts)))])
  return wire.exchange(sent, collectives.all_to_all, tables[0].axes)


def _of_this_batch(
  tables: Sequence[ShardedTable], ids: Sequence[Any], ahead: Ahead
) -> list[jax.Array]:
  """Returns for each table whether `ahead` is of `ids`.

  Raises:
    ValueError: It is of other tables, or another number of look-ups.
  """
  got = [(len(x), of) for x, of in zip(ahead.ids, ahead.layouts)]
  want = [(sum(map(len, x)), of.layout) for x, of in zip(ids, tables)]
  if got != want:
    raise ValueError(
      "`prefetched` must be what `zenjax.tables.prefetch` returned for this"
      f" function and batch, with look-ups a device and tables {want}, got"
      f" {got}."
    )
  joined = [jnp.concatenate(x) if len(x) > 1 else x[0] for x in ids]
  return [jnp.all(x == y) for x, y in zip(joined, ahead.ids)]


def fetch(
  tables: Sequence[ShardedTable],
  ids: Sequence[Sequence[jax.Array]],
  ahead: Ahead | None = None,
) -> tuple[list[list[jax.Array]], tuple[jax.Array, jax.Array]]:
  """Returns the rows that a device looks up, from the devices that own them.

  Distinct ids travel to their owners and rows come back, of all tables in one
  exchange. Buffers have the size that the batch needs, of a few that are
  compiled; what does not fit the largest follows in rounds.

  Args:
    tables: Parts `[S, D]`, inside a `shard_map`.
    ids: Of each table, arrays `[K] int32` in `[0, R]`; `R` is no row.
    ahead: Of the same look-ups, if their ids have been sent. Of others all
      rows are NaN.

  Returns:
    The same with rows `[K, D]`, zeros where there is none; and the most
    distinct rows that any device asked of any other, `[T] int32`, with
    `Fetched` of each table, `[T, 4] float32`.
  """
  n, same = tables[0].devices, None
  if ahead is None:
    ahead = ask(tables, ids)
  else:
    same = _of_this_batch(tables, ids, ahead)
  asked = ahead.asked
  counts = compat.agreed(ahead.counts[0], tables[0].batch_axes)
  most, sizes = counts[:, 0], _Sizes.of(tables, asked)
  if n == 1:
    rows = []
    for table, a in zip(tables, asked):
      own = _own_rows(table, a.places)[a.number]
      rows.append(jnp.where((a.owner < n)[:, None], own, 0))
    found = most, _fetched(tables, sizes, counts, jnp.int32(1))
    return _cut_up(rows, ids, same), found
  largest = sizes.at(_LAST)

  def turn(turn: Any, level: Any, slots: Any, rows: Sequence[Any]) -> list[Any]:
    got = _at_level(level, sizes, slots, functools.partial(_answers, tables))
    every = zip(tables, asked, got, largest, rows)
    return [_looked_up(*x, turn=turn) for x in every]

  rounds = jnp.max(-(-most // jnp.array(largest, jnp.int32)))
  rows = turn(0, sizes.level(most), ahead.came, [0] * len(tables))

  def more(r: Any, rows: list[Any]) -> list[Any]:
    slots = [x for x, _ in _ids_of(tables, asked, r)]
    return turn(r, None, slots, rows)

  rows = lax.fori_loop(1, rounds, more, rows)
  found = most, _fetched(tables, sizes, counts, jnp.maximum(rounds, 1))
  return _cut_up(rows, ids, same), found


def _fetched(
  tables: Sequence[ShardedTable],
  sizes: "_Sizes",
  counts: jax.Array,
  rounds: jax.Array,
) -> jax.Array:
  """Returns `Fetched` of each table, `[T, 4]`, of counts of all devices."""
  n = tables[0].devices
  ids, rows, _ = sizes.words(tables)
  level = jnp.minimum(sizes.level(counts[:, 0]), _LAST)
  rounds = rounds.astype(jnp.float32)
  words = ids[:, _LAST] + jnp.array(rows)[:, level]
  words += (rounds - 1) * (ids + rows)[:, _LAST]
  found = _looked_up_by_all(tables, counts)._replace(
    rounds=jnp.broadcast_to(rounds, len(tables)),
    wire_bytes=words * (4 * (n - 1) / n),
  )
  return jnp.stack(found, axis=-1)


def _looked_up_by_all(
  tables: Sequence[ShardedTable], counts: jax.Array
) -> Fetched:
  """Returns what counts `[T, 3]` of all devices tell, and NaN."""
  wide, unknown = counts.astype(jnp.float32), jnp.full(len(tables), jnp.nan)
  devices = collectives.size(tables[0].batch_axes)
  beyond = wide[:, 2] if tables[0].devices > 1 else jnp.zeros(len(tables))
  return Fetched(wide[:, 1] / devices, beyond, unknown, unknown)


def _cut_up(
  rows: Sequence[jax.Array],
  ids: Sequence[Sequence[jax.Array]],
  same: Sequence[jax.Array] | None,
) -> list[list[jax.Array]]:
  """Returns rows `[sum(K), D]` of each table by look-up; NaN if not `same`."""
  if same is not None:
    rows = [jnp.where(ok, x, jnp.nan) for ok, x in zip(same, rows)]
  return [_split(x, of) for x, of in zip(rows, ids)]


def _at_level(
  level: jax.Array | None,
  sizes: "_Sizes",
  buffers: Any,
  exchange: Callable[[Any], Any],
) -> Any:
  """Exchanges the first columns of `[n, room, ...]` that hold what is sent.

  Args:
    level: How many; None for all.
    sizes: Of each level.
    buffers: Of each table an array or a list of arrays.
    exchange: What one exchange makes of them, arrays of as many columns.

  Returns:
    What came, filled up with zeros to `[n, room, ...]`.
  """
  largest = sizes.at(_LAST)

  def cut(k: int, buffers: Any) -> Any:
    each = zip(buffers, sizes.at(k))
    return [jax.tree.map(lambda x, c=c: x[:, :c], b) for b, c in each]

  def filled(x: jax.Array, room: int) -> jax.Array:
    pads = [(0, 0), (0, room - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, pads)

  def way(k: int, buffers: Any) -> Any:
    each = zip(exchange(cut(k, buffers)), largest)
    return [jax.tree.map(lambda x, c=c: filled(x, c), b) for b, c in each]

  if level is None:
    return exchange(buffers)
  ways = [functools.partial(way, k) for k in range(len(_PARTS))]
  return lax.switch(jnp.minimum(level, _LAST), ways, buffers)


def _answers(
  tables: Sequence[ShardedTable], slots: Sequence[jax.Array]
) -> list[jax.Array]:
  """Sends rows that were asked for, `slots: [n, C]`; those that come back."""
  rows = [[_own_rows(table, x)] for table, x in zip(tables, slots)]
  back = wire.exchange(rows, collectives.all_to_all, tables[0].axes)
  return [x for (x,) in back]


def _looked_up(
  table: ShardedTable,
  asked: "_Asked",
  got: jax.Array,
  room: int,
  before: Any,
  turn: Any,
) -> jax.Array:
  """`[K, D]` of look-ups that were answered in this turn, else `before`."""
  n = table.devices
  owner = jnp.minimum(asked.owner, n - 1)
  at = asked.number - asked.first[owner] - turn * room
  here = (asked.owner < n) & (at >= 0) & (at < room)
  rows = got.reshape(n * room, -1)[owner * room + jnp.clip(at, 0, room - 1)]
  return jnp.where(here[:, None], rows, before)


def _slots(
  table: ShardedTable, asked: _Asked, begin: jax.Array, room: int
) -> tuple[jax.Array, jax.Array]:
  """Distinct rows from `begin: [n]` on, for each owner: numbers, and slots.

  Both are `[n, room]`; slots are `S` where an owner is asked for no more.
  """
  column = jnp.arange(room, dtype=jnp.int32)[None]
  at = jnp.minimum(begin[:, None] + column, len(asked.places) - 1)
  owner = jnp.arange(table.devices, dtype=jnp.int32)[:, None]
  slots = asked.places[at] - owner * table.layout.slots
  fresh = column < (asked.first[1:] - begin)[:, None]
  return at, jnp.where(fresh, slots, table.layout.slots)


def _own_rows(table: ShardedTable, slots: jax.Array) -> jax.Array:
  return table.value.at[slots].get(mode="fill", fill_value=0)


def _split(rows: jax.Array, ids: Sequence[jax.Array]) -> list[jax.Array]:
  """Cuts `[sum(K), D]` into `[K, D]` of each of `ids`."""
  if len(ids) == 1:
    return [rows]
  return jnp.split(rows, np.cumsum([len(x) for x in ids])[:-1].tolist())


class Sums(NamedTuple):
  """Gradient rows of some slots of each table, at the owner of these.

  All rows below `starts` have come, of all devices: every slot here is below.
  """

  slots: list[jax.Array]  # [C] int32, each once; S for none
  rows: list[jax.Array]  # [C, D]
  starts: jax.Array  # [T, n] int32, of every owner; S when all have come


@dataclasses.dataclass(frozen=True, slots=True)
class Push:
  """The gradient rows of a device, on their way to the owners of these.

  Attributes:
    tables: Parts, inside a `shard_map`.
    asked: Their rows, by owner.
    rows: `[K, D]` of each, every row summed over its look-ups.
    most: As `fetch` returned it. Where it were too few, gradients would come
      out as NaN, and not without rows.
    counts: `Counts` of all devices, `[T, 3]`; None where `fetch` has them.
  """

  tables: Sequence[ShardedTable]
  asked: Sequence[_Asked]
  rows: Sequence[jax.Array]
  most: jax.Array
  counts: jax.Array | None

  @classmethod
  def of(
    cls,
    tables: Sequence[ShardedTable],
    grads: Sequence[SparseRows],
    most: jax.Array | None,
  ) -> "Push":
    """Sums `grads` of a device by row.

    Args:
      tables: Parts, inside a `shard_map`.
      grads: SparseRows of the whole tables.
      most: As `fetch` returned it; None where look-ups are not those.
    """
    asked, rows = [], []
    for table, grad in zip(tables, grads):
      ids, values = grad.indices, grad.values
      if not grad.capacity:
        ids = jnp.full(1, table.num_rows, jnp.int32)
        values = jnp.zeros((1, table.shape[-1]), grad.dtype)
      ids = jnp.where(ids < 0, ids + table.num_rows, ids)
      ids = jnp.where(ids < 0, table.num_rows, ids)
      a = _ask(table, ids)
      wide = collectives.accumulator(grad.dtype)
      # What stands for no row may hold anything, NaN included.
      values = values.astype(wide)
      values = jnp.where((a.owner < table.devices)[:, None], values, 0)
      rows.append(jnp.zeros_like(values).at[a.number].add(values))
      asked.append(a)
    counts = None
    if most is None:
      axes = tables[0].batch_axes
      counts = _joined(_of_all(_own_counts(tables, asked), axes))
      counts = compat.agreed(counts, axes)
      most = counts[:, 0]
    return cls(tables, asked, rows, most, counts)

  def first(self) -> Sums:
    """Returns what one exchange brings: all, unless ids crowd at one owner."""
    if self.tables[0].devices == 1:
      slots = [a.places for a in self.asked]
      starts = jnp.broadcast_to(self._ends[:, None], (len(slots), 1))
      return self._of_replicas(Sums(slots, list(self.rows), starts), None)
    none = jnp.zeros((len(self.tables), self.tables[0].devices), jnp.int32)
    ends = jnp.broadcast_to(self._ends[:, None], none.shape)
    level = self._sizes.level(self.most)

    def all_fit() -> tuple[Any, jax.Array]:
      begin = [a.first[:-1] for a in self.asked]
      buffers = self._buffers(begin)
      return _at_level(level, self._sizes, buffers, self._exchange), ends

    some_fit = functools.partial(self._from, none)
    came, starts = lax.cond(level > _LAST, some_fit, all_fit)
    return self._of_replicas(self._sums(came, starts), level)

  def next(self, starts: jax.Array) -> Sums:
    """Returns what follows from `starts: [T, n]` on."""
    return self._of_replicas(self._sums(*self._from(starts)), None)

  def unsent(self, starts: jax.Array) -> jax.Array:
    """Returns True if rows are left to come, equal on all devices."""
    return jnp.any(starts < self._ends[:, None])

  def fetched(self, known: Sequence[jax.Array | None]) -> Fetched:
    """Counts of look-ups, `[T]` each: `known`, or of the push, and NaN."""
    own = jnp.full((len(self.tables), len(Fetched._fields)), jnp.nan)
    if self.counts is not None:
      own = jnp.stack(_looked_up_by_all(self.tables, self.counts), axis=-1)
    each = [own[k] if x is None else x for k, x in enumerate(known)]
    return Fetched(*jnp.stack(each, axis=-1))

  def count(self, sums: Sums) -> jax.Array:
    """Returns how many rows an owner has sums of: `[T] int32`."""
    each = zip(self.tables, sums.slots)
    real = [slots < table.layout.slots for table, slots in each]
    return jnp.stack([jnp.sum(x, dtype=jnp.int32) for x in real])

  @property
  def largest(self) -> list[int]:
    """Rows that the largest buffers have room for, of each pair."""
    return [
      0 if t.devices == 1 else room for t, room in zip(self.tables, self._rooms)
    ]

  @property
  def room(self) -> jax.Array:
    """Rows that the first buffers had room for, of each pair: `[T]`."""
    if self.tables[0].devices == 1:
      return jnp.zeros(len(self.tables), jnp.int32)
    level = jnp.minimum(self._sizes.level(self.most), _LAST)
    return jnp.array(self._sizes.rooms, jnp.int32)[:, level]

  def wire_bytes(self, exchanges: jax.Array) -> jax.Array:
    """Bytes that a device receives in so many exchanges: `[T]`."""
    table = self.tables[0]
    n, copies = table.devices, collectives.size(table.replicas)
    level = self._sizes.level(self.most)
    pushed = jnp.array(self._sizes.words(self.tables)[2])
    sent = pushed[:, jnp.minimum(level, _LAST)]
    # With what does not fit goes where it ends, and all are told that.
    ends = jnp.where(level > _LAST, n + n, 0).astype(jnp.float32)
    exchanges = exchanges.astype(jnp.float32)
    total = exchanges * (sent + ends) * (4 * (n - 1) / n)
    if copies > 1:
      each = jnp.array(self._copied)
      each = each[:, jnp.minimum(level, _LAST)]
      total += exchanges * each * (4 * (copies - 1))
    return total

  @property
  def _copied(self) -> np.ndarray:
    """Words that go to copies, `[T, levels]`."""
    found = []
    for table, rows, rooms in zip(self.tables, self.rows, self._sizes.rooms):
      n, width = table.devices, table.shape[1]
      sizes = [len(rows)] * len(rooms) if n == 1 else [n * x for x in rooms]
      words = [k + wire.words_for(k * width, rows.dtype) for k in sizes]
      found.append(words)
    return np.array(found, np.float32)

  @property
  def _sizes(self) -> _Sizes:
    return _Sizes.of(self.tables, self.asked)

  @property
  def _ends(self) -> jax.Array:
    return jnp.array([t.layout.slots for t in self.tables], jnp.int32)

  def _buffers(self, begin: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """For each table places `[n, room]`, one up, and rows `[n, room, D]`.

    Zeros are padding.
    """
    found = []
    of = self.tables, self.asked, self.rows, begin, self._rooms, self.most
    for table, asked, rows, first, room, most in zip(*of):
      at, slots = _slots(table, asked, first, room)
      real = slots < table.layout.slots
      fits = _fullest(asked) <= most
      values = jnp.where(fits, rows.astype(table.dtype)[at], jnp.nan)
      values = jnp.where(real[..., None], values, 0)
      found.append([jnp.where(real, slots + 1, 0), values])
    return found

  @property
  def _rooms(self) -> list[int]:
    return self._sizes.at(_LAST)

  def _exchange(self, buffers: Any) -> Any:
    axes = self.tables[0].axes
    return wire.exchange(buffers, collectives.all_to_all, axes)

  def _from(self, starts: jax.Array) -> tuple[Any, jax.Array]:
    """An exchange of what follows `starts`, and where the next one starts."""
    begin, limits = [], []
    every = zip(self.tables, self.asked, self._rooms, starts)
    for table, asked, room, start in every:
      owner = jnp.arange(table.devices, dtype=jnp.int32)
      wanted = owner * table.layout.slots + start
      begin.append(jnp.searchsorted(asked.places, wanted).astype(jnp.int32))
      # The first that does not fit: what is below has been sent.
      limits.append(_slots(table, asked, begin[-1] + room, 1)[1])
    buffers = [
      [*sections, limit]
      for sections, limit in zip(self._buffers(begin), limits)
    ]
    came = self._exchange(buffers)
    own = jnp.stack([jnp.min(limit) for *_, limit in came])
    axes, replicas = self.tables[0].axes, self.tables[0].replicas
    if replicas:
      own = -collectives.pmax(-own, replicas)
    starts = compat.agreed(collectives.all_gather(own, axes), axes).T
    # Of rows that not all devices have sent, none is summed yet.
    below = [
      [jnp.where(slots <= limit, slots, 0), values]
      for (slots, values, _), limit in zip(came, own)
    ]
    return below, starts

  def _sums(self, came: Any, starts: jax.Array) -> Sums:
    """Sums what came of each table, in the order of devices."""
    slots, sums = [], []
    for table, (places, values) in zip(self.tables, came):
      end = table.layout.slots
      flat = values.reshape(-1, values.shape[-1])
      flat = flat.astype(collectives.accumulator(flat.dtype))
      ids = jnp.where(places > 0, places - 1, end).reshape(-1)
      rows = SparseRows(ids, flat, end).combine()
      slots.append(rows.indices)
      sums.append(rows.values)
    return Sums(slots, sums, starts)

  def _of_replicas(self, sums: Sums, level: jax.Array | None) -> Sums:
    """Sums what owners of the same rows have, in the order of replicas.

    Args:
      sums: Of the devices along the owners' axis.
      level: Size of the buffers that brought them; None for the largest.
    """
    replicas = self.tables[0].replicas
    if not replicas:
      return sums
    buffers = []
    for table, slots, rows in zip(self.tables, sums.slots, sums.rows):
      places = jnp.where(slots < table.layout.slots, slots + 1, 0)
      buffers.append([places[None], rows[None]])
    gather = lambda x: wire.exchange(x, collectives.all_gather, replicas)
    sizes = self._sizes.of_all(self.tables[0].devices)
    came = _at_level(level, sizes, buffers, gather)
    return self._sums(came, sums.starts)
