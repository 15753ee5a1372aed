"""Joins lookups of a whole batch without moving them between devices.

Outside of `shard_map`, an array of lookups belongs to all devices. If two such
arrays were concatenated, or flattened with the steps of a scan in front, parts
would belong to other devices, and XLA would gather them everywhere. Here each
device joins its own parts, because the order of rows does not matter.
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
  """How the first dimension of lookups is sharded.

  Attributes:
    devices: The devices over which it may be sharded; 1 if it is not.
    axes: The explicit axes over which it is sharded.
  """

  devices: int
  axes: tuple[str, ...]


def spread_of(arrays: Sequence[jax.Array]) -> Spread:
  """Returns how a batch is spread, read off the types of `arrays: [K, ...]`."""
  for x in arrays:
    axes = _axes(compat.explicit_spec(x)[0])
    if axes:
      return Spread(_devices(x, axes), axes)
  meshes = [jax.typeof(x).sharding.mesh for x in arrays]
  meshes = [jax.sharding.get_abstract_mesh(), *meshes]
  mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
  return Spread(1 if mesh.empty or mesh.manual_axes else mesh.size, ())


def joined(parts: Sequence[jax.Array], spread: Spread) -> jax.Array:
  """Concatenates `parts: [K, ...]`; `spread.devices` divides each `K`."""
  if spread.devices == 1:
    return jnp.concatenate(parts)
  entry, blocks = spread.axes or None, []
  for x in parts:
    if compat.explicit_axes(x):
      spec = PartitionSpec(entry, *compat.explicit_spec(x)[1:])
      x = jax.sharding.reshard(x, _sharding(x, spec))
    blocks.append(_cut(x, [spread.devices], [entry]))
  return _merged(jnp.concatenate(blocks, axis=1), 2, spread.axes)


def _cut(x: jax.Array, devices: Sequence[int], spec: Sequence[Any]) -> Any:
  """Splits each first dimension in two: over devices, and on a device."""
  parts = [(n, size // n) for size, n in zip(x.shape, devices)]
  shape = (*itertools.chain(*parts), *x.shape[len(devices) :])
  cut = itertools.chain(*[(entry, None) for entry in spec])
  return _reshaped(x, shape, (*cut, *compat.explicit_spec(x)[len(devices) :]))


def _merged(x: jax.Array, dims: int, axes: tuple[str, ...]) -> jax.Array:
  """Merges the first `dims` dimensions to one, sharded over `axes`."""
  shape = (math.prod(x.shape[:dims]), *x.shape[dims:])
  return _reshaped(x, shape, (axes or None, *compat.explicit_spec(x)[dims:]))


def _reshaped(x: jax.Array, shape: Sequence[int], spec: Sequence[Any]) -> Any:
  """Reshapes `x`; on explicit axes, to an array that is sharded by `spec`."""
  is_typed = bool(compat.explicit_axes(x))
  place = _sharding(x, PartitionSpec(*spec)) if is_typed else None
  return lax.reshape(x, shape, out_sharding=place)


def flattened(
  ids: jax.Array, values: jax.Array, turns: int
) -> tuple[jax.Array, jax.Array]:
  """Flattens lookups of any shape, so that devices keep their parts.

  Args:
    ids: `[*turns, *batch]`.
    values: `[*turns, *batch, D]`.
    turns: The number of dimensions that scans put in front of the batch.

  Returns:
    `[K]` and `[K, D]`, in the same order.
  """
  dims = ids.ndim
  spec = compat.explicit_spec(values)[:dims]
  if any(spec):
    ids = jax.sharding.reshard(ids, _sharding(values, PartitionSpec(*spec)))
    return _by_device(ids, spec), _by_device(values, spec)
  if 0 < turns < dims and spread_of([values, ids]).devices > 1:
    # The batch is sharded, so it comes first.
    ids, values = jnp.moveaxis(ids, turns, 0), jnp.moveaxis(values, turns, 0)
  return _merged(ids, dims, ()), _merged(values, dims, ())


def flat_ids(
  ids: jax.Array, turns: int, devices: int, padding: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """Flattens ids of any shape, padded so that `devices` divides them.

  Args:
    ids: `[*turns, *batch]`, on automatic axes or on one device.
    turns: The number of dimensions that scans put in front of the batch.
    devices: The devices over which they may be sharded.
    padding: The id of no row.

  Returns:
    `[K]`, at least one for each device, and a function that reshapes rows `[K,
    D]` to `[*turns, *batch, D]`.
  """
  moved = 0 < turns < ids.ndim and devices > 1
  first = jnp.moveaxis(ids, turns, 0) if moved else ids
  flat = first.reshape(-1)
  count = flat.size
  missing = -count % devices if count else devices
  flat = jnp.pad(flat, (0, missing), constant_values=padding)

  def back(rows: jax.Array) -> jax.Array:
    rows = rows[:count].reshape(*first.shape, -1)
    return jnp.moveaxis(rows, 0, turns) if moved else rows

  return flat, back


def _by_device(x: jax.Array, spec: Sequence[Any]) -> jax.Array:
  """Merges the dimensions of `spec` to one, ordered by device."""
  x = _cut(x, [_devices(x, _axes(entry)) for entry in spec], spec)
  cut = 2 * len(spec)
  order = *range(0, cut, 2), *range(1, cut, 2), *range(cut, x.ndim)
  axes = tuple([axis for entry in spec for axis in _axes(entry)])
  return _merged(jnp.transpose(x, order), cut, axes)


def _sharding(x: jax.Array, spec: PartitionSpec) -> NamedSharding:
  """Returns a sharding on the mesh of an array, which may not be set."""
  return NamedSharding(jax.typeof(x).sharding.mesh, spec)


def _axes(entry: Any) -> tuple[str, ...]:
  """Returns the axes of an entry of a PartitionSpec."""
  if entry is None:
    return ()
  return entry if isinstance(entry, tuple) else (entry,)


def _devices(x: jax.Array, axes: Sequence[str]) -> int:
  sizes = jax.typeof(x).sharding.mesh.shape
  return math.prod([sizes[axis] for axis in axes])
