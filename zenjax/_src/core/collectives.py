"""Wraps the collectives of `jax.lax` by which gradients are exchanged.

Schemes call these and none of `jax.lax`. Only `sync/whole_batch.py` (statistics
of parts) and `training/global_values.py` (a weighted mean) call `jax.lax`
themselves.

An axis here is a tuple of mesh or mapped axis names, slowest first; ranks
count in that order.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import compat

Axes = tuple[str, ...]


def size(axes: Axes) -> int:
  """Devices along `axes`: static."""
  return math.prod(lax.axis_size(a) for a in axes)


def mesh_around(axes: Axes, tree: Any, given: jax.sharding.Mesh | None) -> Any:
  """Returns the mesh over whose axes XLA spreads the program.

  Args:
    axes: Wanted.
    tree: Arrays; their types may tell a mesh.
    given: By the user, if any.

  Returns:
    A mesh that has all `axes`; None where one of them is bound, as `shard_map`,
    `pmap` and `vmap` bind them, or no mesh with them is known.
  """
  for axis in axes:
    try:
      lax.axis_size(axis)
      return None
    except NameError:
      pass
  known = [given, jax.sharding.get_abstract_mesh()]
  for x in jax.tree.leaves(tree):
    placed = x if not isinstance(x, Tracer) else jax.typeof(x)
    known.append(getattr(getattr(placed, "sharding", None), "mesh", None))
  for mesh in known:
    if mesh is not None and set(axes) <= set(mesh.axis_names):
      return mesh
  return None


def all_to_all(x: jax.Array, axes: Axes) -> jax.Array:
  """Sends `x[p]` to rank `p`; row `s` of the result came from rank `s`."""
  return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def all_gather(x: jax.Array, axes: Axes) -> jax.Array:
  """`[...]` on each device to `[n, ...]` on all, typed as equal on all.

  One axis at a time (tuples fail under nested `vmap`) and never tiled (TPUs
  turn tiled gathers of odd lengths into all-reduces).
  """
  shape = x.shape
  if shape[:1] == (1,):  # One part of a buffer, without its dimension.
    x = x.reshape(shape[1:])
  for axis in reversed(axes):
    x = lax.all_gather(x, axis, axis=0, tiled=False)
  return compat.as_invariant(x.reshape(-1, *shape), axes)


def permute(
  x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]
) -> jax.Array:
  """Sends `x` from source to destination of each pair.

  Devices that no pair names get what they need not read: `vmap` takes whole
  permutations only, so the others are completed to one.
  """
  n = lax.axis_size(axis)
  sources, destinations = ({p[i] for p in pairs} for i in (0, 1))
  idle = [i for i in range(n) if i not in sources]
  deaf = [i for i in range(n) if i not in destinations]
  # Those that are both keep their own; the rest answers whom it hears.
  alone = [i for i in idle if i in deaf]
  rest = zip(
    [i for i in idle if i not in alone], [i for i in deaf if i not in alone]
  )
  return lax.ppermute(x, axis, [*pairs, *((i, i) for i in alone), *rest])


def psum(x: jax.Array, axes: Axes) -> jax.Array:
  """`lax.psum`, dtypes included; narrow floats are summed in float32."""
  wide = accumulator(x.dtype)
  total = lax.psum(x.astype(wide), axes)
  # Integers and bools come out as JAX makes them.
  return total if wide == x.dtype else total.astype(x.dtype)


def pmean(x: jax.Array, axes: Axes) -> jax.Array:
  """`lax.pmean`, dtypes included; narrow floats are averaged in float32."""
  wide = accumulator(x.dtype)
  mean = lax.pmean(x.astype(wide), axes)
  # Integers and bools come out as JAX makes them: their means are floating.
  return mean if wide == x.dtype else mean.astype(x.dtype)


def pmax(x: jax.Array, axes: Axes) -> jax.Array:
  """The largest of all devices."""
  return lax.pmax(x, axes)


def in_one(
  reduce: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
  """Reduces arrays of one dtype in one buffer; returns them in their shapes."""
  flat = reduce(jnp.concatenate([x.reshape(-1) for x in arrays]))
  ends = np.cumsum([x.size for x in arrays])[:-1].tolist()
  return [
    part.reshape(x.shape) for x, part in zip(arrays, jnp.split(flat, ends))
  ]


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
  """The dtype in which values of `dtype` are summed."""
  narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
  return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)
