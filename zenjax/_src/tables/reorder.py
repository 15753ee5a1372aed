"""Moves rows between the order of a table and the devices that own them.

Of `n` consecutive rows, each owner has exactly one. So one `all_to_all` changes
one form into the other, without indices or padding. It moves a few MiB at a
time: a device needs memory for its part in both forms, and little more.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.collectives import Axes
from zenjax._src.core.partition import Layout
from zenjax._src.tables import sharded_table
from zenjax._src.tables import table_update
from zenjax._src.tables.sharded_table import ShardedTable

# How many bytes of a device one exchange moves.
_MOVED = 1 << 22


def on_host(x: Any) -> Any:
  """Returns a global array as NumPy's; keys of `jax.random` are unchanged."""
  if isinstance(x, jax.Array):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return x
    if not x.is_fully_addressable:
      return multihost_utils.process_allgather(x, tiled=True)
  return jax.device_get(x)


def to_order(table: ShardedTable, *, donate: bool = False) -> ShardedTable:
  """Returns a table, or a state of a table, with its rows in order.

  Args:
    table: A table on its owners.
    donate: Whether to delete each array after it was moved.

  Returns:
    A table sharded by ranges of rows, padded with zeros.
  """
  if not table.devices:
    return table

  def moved(x: Any) -> Any:
    mesh = sharded_table.mesh_under(table.with_value(x))
    split = NamedSharding(mesh, PartitionSpec(table.axes))
    rows = -(-table.num_rows // table.devices) * table.devices
    ordered = _on_mesh(_to_order, mesh, table.axes, table.layout)(x)
    made = _ranges(ordered, table, rows, split)
    return _instead(x, made) if donate else made

  value = table.map_rows(moved)
  return dataclasses.replace(
    table, value=value, axes=(), devices=0, replicas=()
  )


def to_owners(
  table: ShardedTable,
  mesh: jax.sharding.Mesh,
  axes: Axes,
  replicas: Axes = (),
  *,
  donate: bool = False,
) -> ShardedTable:
  """Returns a table, or a state of a table, on the owners of a mesh.

  Args:
    table: A table on other owners, or with its rows in order, on devices or on
      the host.
    mesh: The mesh with the owners.
    axes: Axes over which rows are sharded.
    replicas: Axes along which tables have copies.
    donate: Whether to delete each array after it was moved.
  """
  devices = math.prod([mesh.shape[axis] for axis in axes])
  new = dataclasses.replace(
    table, axes=axes, devices=devices, replicas=replicas
  )
  split = NamedSharding(mesh, PartitionSpec(axes))
  if table.devices == devices:
    return new.with_value(table.map_rows(lambda x: placed(x, split)))
  table = to_order(table, donate=donate)

  def moved(x: Any) -> Any:
    made = rows_to_owners(x, new, mesh)
    return _instead(x, made) if donate and isinstance(x, jax.Array) else made

  return new.with_value(table.map_rows(moved))


def rows_to_owners(
  x: Any, table: ShardedTable, mesh: Any, stack: tuple[int, ...] = ()
) -> jax.Array:
  """Returns `[*stack, R, ...]` as `[n * S, ...]` on the owners.

  Without a stack, rows may be padded.
  """
  split = NamedSharding(mesh, PartitionSpec(table.axes))
  rows = _blocks(table.layout) * table.devices
  x = _ranges(x, table, rows, split, stack)
  return _on_mesh(_to_owners, mesh, table.axes, table.layout)(x)


def rows_of(table: ShardedTable) -> Any:
  """Returns a table as an array `[R, ...]` with its rows in order.

  The array is sharded by rows if the number of devices divides them, and
  replicated otherwise. A stack is sharded by tables, or by the rows of each
  table.
  """

  def whole(x: Any) -> Any:
    if not table.devices:
      return x[: table.num_rows].reshape(*table.shape_of_rows, *x.shape[1:])
    mesh = sharded_table.mesh_under(table.with_value(x))
    divided = [not size % table.devices for size in table.shape_of_rows]
    at = next((k for k in (0, len(table.stack)) if divided[k]), None)
    spec = () if at is None else (*[None] * at, table.axes)
    place = NamedSharding(mesh, PartitionSpec(*spec))
    ordered = _on_mesh(_to_order, mesh, table.axes, table.layout)(x)
    return _stacking(table.shape_of_rows, table.devices, place)(ordered)

  return table.map_rows(whole)


def made_by_rows(initializer: Any, table: ShardedTable, mesh: Any) -> jax.Array:
  """Returns `[n * S, D]`, where each device makes the rows that it owns.

  Args:
    initializer: A `RowInitializer`.
    table: The table.
    mesh: The mesh with the owners.
  """
  layout, width = table.layout, initializer.shape[-1]

  def move(slots: jax.Array, begin: Any, size: int) -> jax.Array:
    at = begin + jnp.arange(size, dtype=jnp.int32)
    ids = layout.row(jnp.full_like(at, lax.axis_index(table.axes)), at)
    rows = initializer.fun(jnp.minimum(ids, table.num_rows - 1))
    rows = jnp.where((ids < table.num_rows)[:, None], rows, 0)
    return lax.dynamic_update_slice_in_dim(slots, rows, begin, axis=0)

  def own() -> jax.Array:
    none = jnp.zeros((layout.slots, width), initializer.dtype)
    return _by_pieces(move, none, layout.slots)

  split = PartitionSpec(table.axes)
  mapped = table_update.on_devices(own, mesh, table.axes, (), split)
  return _under(mesh, jax.jit(mapped))()


def placed(x: Any, split: NamedSharding) -> jax.Array:
  """Runs `jax.device_put`, also for arrays of other processes' devices."""
  if isinstance(x, Tracer):
    return x
  is_far = isinstance(x, jax.Array) and not x.is_fully_addressable
  if is_far and not _is_there(x, split):
    x = on_host(x)
  return jax.device_put(x, split)


def _instead(old: jax.Array, new: jax.Array) -> jax.Array:
  """Returns `new`, and deletes the array that it was made of."""
  jax.block_until_ready(new)
  if old is not new:
    old.delete()
  return new


def _blocks(layout: Layout) -> int:
  """Returns the number of blocks of `n` rows, a multiple of `n`."""
  return -(-layout.slots // layout.groups) * layout.groups


def _ranges(
  x: Any,
  table: ShardedTable,
  rows: int,
  split: NamedSharding,
  stack: tuple[int, ...] = (),
) -> jax.Array:
  """Returns the rows of `[*stack, R, ...]`, padded to `rows`, by ranges."""
  if isinstance(x, jax.Array) and not _is_there(x, split):
    x = on_host(x)
  if isinstance(x, jax.Array):
    is_placed = not isinstance(x, Tracer) and x.sharding == split
    if is_placed and len(x) == rows and not stack:
      return x
    return _resizing(table.num_rows, rows, split, stack, table.devices)(x)
  host = np.asarray(x)
  if stack:  # The reshaped array is a view, so the host needs no second copy.
    host = host.reshape(table.num_rows, *host.shape[len(stack) + 1 :])

  def part(index: Any) -> np.ndarray:
    begin, end, _ = index[0].indices(rows)
    own = host[begin : min(end, table.num_rows)]
    missing = end - begin - len(own)
    return np.pad(own, [(0, missing), *[(0, 0)] * (host.ndim - 1)])

  shape = rows, *host.shape[1:]
  return jax.make_array_from_callback(shape, split, part)


def _is_there(x: jax.Array, place: NamedSharding) -> bool:
  """Returns True if a program over the devices of `place` accepts `x`.

  JAX requires the same devices in the same order.
  """
  if isinstance(x, Tracer):
    return True
  if isinstance(x.sharding, NamedSharding) and x.sharding.num_devices > 1:
    here: Any = x.sharding.mesh.devices
    there: Any = place.mesh.devices
    return [*here.flat] == [*there.flat]
  return x.sharding.device_set == place.device_set


@functools.lru_cache(maxsize=64)
def _resizing(
  num_rows: int,
  rows: int,
  place: NamedSharding,
  stack: tuple[int, ...],
  devices: int,
) -> Any:
  """Returns a function that truncates or pads rows, jitted and cached."""

  def resized(x: jax.Array) -> jax.Array:
    if stack:
      x = _one_table(x, stack, devices)
    missing = rows - num_rows
    pads = [(0, missing), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x[:num_rows], pads)

  return _jitted(resized, place)


def _one_table(x: jax.Array, stack: tuple[int, ...], devices: int) -> jax.Array:
  """Reshapes `[*stack, R, ...]` to `[T * R, ...]`, to be sharded."""
  count, last = math.prod(stack), len(stack)
  if count % devices and devices % count:
    # If neither number divides the other, XLA replicates the array to reshape
    # it. A concatenation of tables avoids that.
    x = x.reshape(count, *x.shape[last:])
    return jnp.concatenate([x[t] for t in range(count)])
  return x.reshape(-1, *x.shape[last + 1 :])


@functools.lru_cache(maxsize=64)
def _stacking(rows: tuple[int, ...], devices: int, place: NamedSharding) -> Any:
  """Returns a function that reshapes `[T * R, ...]` to `[*stack, R, ...]`."""
  *stack, each = rows
  count = math.prod(stack)

  def stacked(x: jax.Array) -> jax.Array:
    x = x[: count * each]
    # A reshape needs memory for as many parts on each device as the left side
    # says. One table at a time needs two parts per table.
    if stack and devices // math.gcd(devices, count) > 2 * count:
      x = jnp.stack([x[t * each : (t + 1) * each] for t in range(count)])
      return x.reshape(*rows, *x.shape[2:])
    return x.reshape(*rows, *x.shape[1:])

  return _jitted(stacked, place)


def _jitted(f: Callable[..., Any], place: NamedSharding) -> Any:
  """Returns `f` jitted, with its result placed there."""
  # On explicit axes, the number of devices would have to divide all dimensions.
  f = compat.on_automatic_axes(f, place.mesh, place.spec)
  return _under(place.mesh, jax.jit(f, out_shardings=place))


@functools.lru_cache(maxsize=64)
def _on_mesh(
  f: Callable[..., Any], mesh: Any, axes: Axes, layout: Layout
) -> Any:
  """Returns `f` mapped over devices, jitted and cached."""
  split = PartitionSpec(axes)
  f = functools.partial(f, axes=axes, layout=layout)
  mapped = jax.jit(table_update.on_devices(f, mesh, axes, split, split))
  return _under(mesh, mapped)


def _under(mesh: Any, f: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `f` for arrays on `mesh`, even if another mesh is set."""

  def called(*args: jax.Array) -> jax.Array:
    around = jax.sharding.get_abstract_mesh()
    # In a trace all arrays are on one mesh, which is set already.
    traced = any(isinstance(x, Tracer) for x in args)
    if traced or around.empty or around == mesh.abstract_mesh:
      return f(*args)
    with jax.set_mesh(mesh):
      return f(*args)

  return called


def _to_owners(rows: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
  """Moves each device's range of rows `[blocks, D]` to slots `[S, D]`."""
  n = layout.groups
  blocks = rows.reshape(-1, n, *rows.shape[1:])
  shifts = _shifts(layout, axes, len(blocks))

  def move(slots: jax.Array, begin: Any, size: int) -> jax.Array:
    some = _rotated(_cut(blocks, begin, size), -_cut(shifts, begin, size))
    some = collectives.all_to_all(jnp.swapaxes(some, 0, 1), axes)
    put = lambda j, slots: _put(slots, some[j], j * len(blocks) + begin)
    return lax.fori_loop(0, n, put, slots)

  # The result is filled in its final shape. On a TPU, cutting it off afterwards
  # would copy it unless tiles of 8 rows fit.
  slots = jnp.zeros((layout.slots, *rows.shape[1:]), rows.dtype)
  return _by_pieces(move, slots, len(blocks))


def _put(slots: jax.Array, rows: jax.Array, begin: Any) -> jax.Array:
  """Writes `rows` from `begin` on, and drops rows beyond the end."""
  size = len(rows)
  at = jnp.minimum(begin, len(slots) - size)
  late = begin - at
  fresh = (jnp.arange(size) >= late).reshape(-1, *(1,) * (rows.ndim - 1))
  rows = jnp.where(fresh, jnp.roll(rows, late, axis=0), _cut(slots, at, size))
  return lax.dynamic_update_slice_in_dim(slots, rows, at, axis=0)


def _to_order(slots: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
  """Moves slots back to ranges of rows: the inverse of `_to_owners`."""
  n, blocks = layout.groups, _blocks(layout)
  pads = [(0, blocks - len(slots)), *[(0, 0)] * (slots.ndim - 1)]
  parts = jnp.pad(slots, pads).reshape(n, -1, *slots.shape[1:])
  shifts = _shifts(layout, axes, parts.shape[1])

  def move(rows: jax.Array, begin: Any, size: int) -> jax.Array:
    some = lax.dynamic_slice_in_dim(parts, begin, size, axis=1)
    some = jnp.swapaxes(collectives.all_to_all(some, axes), 0, 1)
    some = _rotated(some, _cut(shifts, begin, size))
    return lax.dynamic_update_slice_in_dim(rows, some, begin, axis=0)

  rows = jnp.zeros((parts.shape[1], n, *slots.shape[1:]), slots.dtype)
  rows = _by_pieces(move, rows, len(rows))
  return rows.reshape(-1, *slots.shape[1:])


def _by_pieces(
  move: Callable[[jax.Array, Any, int], jax.Array],
  into: jax.Array,
  blocks: int,
) -> jax.Array:
  """Fills `into` by `move(into, begin, size)`, a few MiB at a time."""
  size = into.nbytes // blocks
  size = min(blocks, max(1, _MOVED // max(1, size)))
  # The last piece may overlap the one before it.
  begin = lambda i: jnp.minimum(i * size, blocks - size)
  one = lambda i, into: move(into, begin(i), size)
  return lax.fori_loop(0, -(-blocks // size), one, into)


def _cut(x: jax.Array, begin: Any, size: int) -> jax.Array:
  return lax.dynamic_slice_in_dim(x, begin, size)


def _shifts(layout: Layout, axes: Axes, blocks: int) -> jax.Array:
  """Returns the rotation of this device's blocks: `[blocks]` in `[0, 2n)`."""
  first = lax.axis_index(axes) * blocks
  return layout.shift(first + jnp.arange(blocks, dtype=jnp.int32))


def _rotated(blocks: jax.Array, by: jax.Array) -> jax.Array:
  """Returns `blocks[i, (k + by[i]) mod n]` for each `k`.

  Args:
    blocks: `[b, n, ...]`.
    by: `[b]` in `(-2n, 2n)`.
  """
  n, rest = blocks.shape[1], (1,) * (blocks.ndim - 2)
  at = jnp.arange(n, dtype=jnp.int32)[None] + by[:, None] + 2 * n
  at = lax.rem(at, lax.full_like(at, n))
  return jnp.take_along_axis(blocks, at.reshape(*at.shape, *rest), axis=1)
