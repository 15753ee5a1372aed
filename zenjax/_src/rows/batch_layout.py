"""Joins look-ups of a whole batch without moving them between devices.

Outside of `shard_map` an array of look-ups is that of all devices. One behind
the other, or with the turns of a scan in front, parts of a device would come to
lie on others, and XLA gathers them everywhere. Here each device joins its own,
for the order of rows means nothing.
"""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from zenjax._src.core import compat


class Spread(NamedTuple):
  """How the first dimension of look-ups lies on devices.

  Attributes:
    devices: Over which it may lie; 1 where it is one device's.
    axes: Explicit axes over which it does.
  """

  devices: int
  axes: tuple[str, ...]


def spread_of(arrays: Sequence[jax.Array]) -> Spread:
  """Reads it from the types of `arrays: [K, ...]` and the mesh around them."""
  for x in arrays:
    axes = _axes(compat.explicit_spec(x)[0])
    if axes:
      return Spread(_devices(x, axes), axes)
  around = jax.sharding.get_abstract_mesh()
  for mesh in [around, *(jax.typeof(x).sharding.mesh for x in arrays)]:
    if mesh.manual_axes:
      return Spread(1, ())
    if not mesh.empty:
      return Spread(mesh.size, ())
  return Spread(1, ())


def joined(parts: Sequence[jax.Array], spread: Spread) -> jax.Array:
  """All of `parts: [K, ...]` in one; `spread.devices` divides each `K`."""
  if spread.devices == 1:
    return jnp.concatenate(parts)
  entry, blocks = spread.axes or None, []
  for x in parts:
    if compat.explicit_axes(x):
      spec = PartitionSpec(entry, *compat.explicit_spec(x)[1:])
      x = jax.sharding.reshard(x, _lies(x, spec))
    blocks.append(_cut(x, [spread.devices], [entry]))
  return _merged(jnp.concatenate(blocks, axis=1), 2, spread.axes)


def _cut(x: jax.Array, devices: Sequence[int], spec: Sequence[Any]) -> Any:
  """`x` with each first dimension in two: over devices, and in one of them."""
  parts = [(n, size // n) for size, n in zip(x.shape, devices)]
  shape = (*itertools.chain(*parts), *x.shape[len(devices) :])
  if not compat.explicit_axes(x):
    return x.reshape(shape)
  cut = itertools.chain(*[(entry, None) for entry in spec])
  rest = compat.explicit_spec(x)[len(devices) :]
  lies = _lies(x, PartitionSpec(*cut, *rest))
  return lax.reshape(x, shape, out_sharding=lies)


def _merged(x: jax.Array, dims: int, axes: tuple[str, ...]) -> jax.Array:
  """`x` with its first `dims` dimensions in one, that lies over `axes`."""
  shape = (math.prod(x.shape[:dims]), *x.shape[dims:])
  if not compat.explicit_axes(x):
    return x.reshape(shape)
  spec = PartitionSpec(axes or None, *compat.explicit_spec(x)[dims:])
  return lax.reshape(x, shape, out_sharding=_lies(x, spec))


def flattened(
  ids: jax.Array, values: jax.Array, turns: int
) -> tuple[jax.Array, jax.Array]:
  """Look-ups of any shape in one dimension, each device's beside each other.

  Args:
    ids: `[*turns, *batch]`.
    values: `[*turns, *batch, D]`.
    turns: Dimensions that scans have put in front of the batch's.

  Returns:
    `[K]` and `[K, D]`, in the same order.
  """
  dims = ids.ndim
  spec = compat.explicit_spec(values)[:dims]
  if any(spec):
    ids = jax.sharding.reshard(ids, _lies(values, PartitionSpec(*spec)))
    return _each_own(ids, spec), _each_own(values, spec)
  if 0 < turns < dims and spread_of([values, ids]).devices > 1:
    # Devices share the batch.
    ids, values = jnp.moveaxis(ids, turns, 0), jnp.moveaxis(values, turns, 0)
  return _merged(ids, dims, ()), _merged(values, dims, ())


def flat_ids(
  ids: jax.Array, turns: int, devices: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """Look-ups of any shape in one dimension that `devices` divides.

  Args:
    ids: `[*turns, *batch]`, on automatic axes or of one device.
    turns: Dimensions that scans have put in front of the batch's.
    devices: Over which they may lie.

  Returns:
    `[K]`, the last of them -1 where there were too few, or none, and what makes
    of rows `[K, D]` the shape `[*turns, *batch, D]`.
  """
  moved = 0 < turns < ids.ndim and devices > 1
  first = jnp.moveaxis(ids, turns, 0) if moved else ids
  flat = first.reshape(-1)
  count = flat.size
  missing = -count % devices if count else devices
  flat = jnp.pad(flat, (0, missing), constant_values=-1)

  def back(rows: jax.Array) -> jax.Array:
    rows = rows[:count].reshape(*first.shape, -1)
    return jnp.moveaxis(rows, 0, turns) if moved else rows

  return flat, back


def _each_own(x: jax.Array, spec: Sequence[Any]) -> jax.Array:
  """`x` with the dimensions of `spec` in one: by device, then by look-up."""
  x = _cut(x, [_devices(x, _axes(entry)) for entry in spec], spec)
  cut = 2 * len(spec)
  order = *range(0, cut, 2), *range(1, cut, 2), *range(cut, x.ndim)
  axes = tuple([axis for entry in spec for axis in _axes(entry)])
  return _merged(jnp.transpose(x, order), cut, axes)


def _lies(x: jax.Array, spec: PartitionSpec) -> NamedSharding:
  """Returns a spec on the mesh of an array, which may be around no program."""
  return NamedSharding(jax.typeof(x).sharding.mesh, spec)


def _axes(entry: Any) -> tuple[str, ...]:
  """The axes of an entry of a PartitionSpec."""
  if entry is None:
    return ()
  return entry if isinstance(entry, tuple) else (entry,)


def _devices(x: jax.Array, axes: Sequence[str]) -> int:
  sizes = jax.typeof(x).sharding.mesh.shape
  return math.prod([sizes[axis] for axis in axes])
