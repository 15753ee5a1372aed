"""Wraps the collectives of `jax.lax` that exchange gradients.

Schemes call these wrappers instead of `jax.lax`. Only
`training/global_values.py` (a weighted mean) calls collectives of `jax.lax`
itself.

`axes` are names of mesh axes or mapped axes, slowest first. Ranks count in that
order.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
import jax.numpy as jnp

from zenjax._src.core import compat

Axes = tuple[str, ...]


def size(axes: Axes) -> int:
  """Returns the number of devices along `axes`, a static integer."""
  return math.prod(lax.axis_size(a) for a in axes)


def size_in_init(axes: Axes, by: str) -> int:
  """Returns `size` in the `init` of a state that differs between devices.

  Raises:
    ValueError: The axes are not bound, as where Flax calls `tx.init`.
  """
  try:
    return size(axes)
  except NameError as error:
    axis_name = axes[0] if len(axes) == 1 else axes
    in_pmap = f" For `pmap`, call `jax.pmap(tx.init, axis_name={axis_name!r})`."
    raise ValueError(
      f"`{by}` keeps a part of the state on each device, and `tx.init(params)`"
      " doesn't know the devices. Call `opt_state = zenjax.init_state(tx,"
      f" params, mesh, {axis_name!r})`, on a mesh with this axis."
      f"{in_pmap if len(axes) == 1 else ''} In place of `TrainState.create`,"
      " write `TrainState(step=0, apply_fn=model.apply, params=params, tx=tx,"
      " opt_state=opt_state)`. In place of"
      " `nnx.Optimizer`, take `params = nnx.state(model, nnx.Param)`, and write"
      " them back with `nnx.update(model, params)`."
    ) from error


def shapes_on_device(
  f: Callable[[Any], Any], x: Any, mesh: jax.sharding.Mesh, axes: Axes
) -> Any:
  """Returns the shapes of `f(x)` on one device, where `axes` are bound."""
  for axis in reversed(axes):
    size = mesh.shape[axis]
    f = jax.vmap(f, in_axes=None, axis_name=axis, axis_size=size)
  shape = lambda y: jax.ShapeDtypeStruct(y.shape[len(axes) :], y.dtype)
  return jax.tree.map(shape, jax.eval_shape(f, x))


def mesh_around(axes: Axes, tree: Any, given: jax.sharding.Mesh | None) -> Any:
  """Returns the mesh over which XLA partitions the program.

  Args:
    axes: Axes that the mesh must have.
    tree: Arrays, whose types may contain a mesh.
    given: The mesh that the user gave, if any.

  Returns:
    A mesh that has all `axes`. None if `shard_map`, `pmap` or `vmap` binds one
    of them, or if no such mesh is known.
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


def reduce_scatter(x: jax.Array, axes: Axes) -> jax.Array:
  """Sums `x: [n, ...]` over devices; rank `p` gets the sum of all `x[p]`."""
  return lax.psum_scatter(x, axes, scatter_dimension=0, tiled=False)


def all_gather(x: jax.Array, axes: Axes) -> jax.Array:
  """Gathers `[...]` of each device to `[n, ...]`, typed as equal on all.

  It gathers along one axis at a time, because tuples of axes fail under nested
  `vmap`, and along the slowest first, because each axis repeats what came along
  those before it. It never tiles, because XLA:TPU turns tiled gathers of odd
  lengths into all-reduces.
  """
  shape = x.shape
  if shape[:1] == (1,):  # A leading dimension of 1 is not sent.
    x = x.reshape(shape[1:])
  for axis in axes:
    x = lax.all_gather(x, axis, axis=0, tiled=False)
  ranks = range(len(axes))
  x = x.transpose(*reversed(ranks), *range(len(axes), x.ndim))
  return compat.as_invariant(x.reshape(-1, *shape), axes)


def permute(
  x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]
) -> jax.Array:
  """Sends `x` from source to destination of each pair.

  A device that is not a destination receives an arbitrary value.
  `vmap` supports full permutations only, so further pairs are added.
  """
  devices = set(range(lax.axis_size(axis)))
  idle = devices - {source for source, _ in pairs}
  deaf = devices - {destination for _, destination in pairs}
  # A device in no pair sends to itself. The other idle devices send to those
  # that nobody sends to.
  itself = [(i, i) for i in sorted(idle & deaf)]
  completed = zip(sorted(idle - deaf), sorted(deaf - idle))
  return lax.ppermute(x, axis, [*pairs, *itself, *completed])


def psum(x: jax.Array, axes: Axes) -> jax.Array:
  """Sums as `lax.psum` does, but narrow floats in float32."""
  wide = accumulator(x.dtype)
  total = lax.psum(x.astype(wide), axes)
  # Results of integers and bools keep the dtype that JAX gives them.
  return total if wide == x.dtype else total.astype(x.dtype)


def pmean(x: jax.Array, axes: Axes) -> jax.Array:
  """Averages as `lax.pmean` does, but narrow floats in float32."""
  wide = accumulator(x.dtype)
  mean = lax.pmean(x.astype(wide), axes)
  # Means of integers and bools are floating, and keep JAX's dtype.
  return mean if wide == x.dtype else mean.astype(x.dtype)


def pmax(x: jax.Array, axes: Axes) -> jax.Array:
  """Returns the largest value of all devices."""
  return lax.pmax(x, axes)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
  """Returns the dtype in which values of `dtype` are summed."""
  narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
  return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)
