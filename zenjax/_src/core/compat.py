"""Holds what differs between JAX versions, or is not public, with the reason.

Supported and tested: JAX 0.10 (Python 3.11) and the newest (3.12 and later).
"""

from collections.abc import Callable, Sequence
import dataclasses
import sys
import time
from typing import Any

import jax
from jax._src import distributed
from jax.extend import core as jex_core
from jax.interpreters import batching
from jax.interpreters import mlir
from jax.typing import DTypeLike

# From 0.12 on JAX warns, of every kernel that Pallas compiles with Triton, that
# it will not for long.
TRITON_GOES = jax.__version_info__ >= (0, 12)


def varying_axes(x: jax.Array) -> frozenset[str]:
  """Mesh axes over which the type of `x` says it varies.

  Empty under `pmap`, `vmap` and `shard_map(check_vma=False)`, which keep no
  such record. The attribute was `.vma` before JAX 0.10.
  """
  manual = getattr(jax.typeof(x), "mat", None)
  return frozenset(manual.varying) if manual is not None else frozenset()


def automatic_axes() -> frozenset[str]:
  """Axes of the mesh around a trace over which XLA spreads programs itself.

  None in a `shard_map` over all axes of its mesh, and none where no mesh is.
  """
  around = jax.sharding.get_abstract_mesh()
  return frozenset(around.axis_names) - frozenset(around.manual_axes)


def device_kind() -> str:
  """Returns which devices the program being traced is for, as "NVIDIA H200".

  As the mesh around a trace says; where there is none, the default backend.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return (device or jax.devices()[0]).device_kind


def explicit_axes(x: jax.Array | None = None) -> frozenset[str]:
  """Axes over which types say how arrays are spread.

  Args:
    x: An array by whose type to tell; None for the mesh around a trace.
  """
  if x is None:
    mesh = jax.sharding.get_abstract_mesh()
  else:
    mesh = jax.typeof(x).sharding.mesh
  return explicit_of(mesh)


def explicit_of(mesh: Any) -> frozenset[str]:
  """The explicit axes of a mesh, which may be empty."""
  kinds = zip(mesh.axis_names, mesh.axis_types)
  return frozenset(
    [axis for axis, kind in kinds if kind == jax.sharding.AxisType.Explicit]
  )


def explicit_spec(x: jax.Array) -> tuple[Any, ...]:
  """How explicit sharding spreads each dimension, None where it does not."""
  if not explicit_axes(x):
    return (None,) * x.ndim
  spec = jax.typeof(x).sharding.spec
  # JAX 0.10 has no `partitions`; later ones iterate over nothing else.
  spec = tuple(getattr(spec, "partitions", spec))
  return (*spec, *[None] * (x.ndim - len(spec)))


def on_automatic_axes(
  f: Callable[..., Any], mesh: Any, out_sharding: Any
) -> Callable[..., Any]:
  """`f` as of arrays whose types do not say how they lie on an explicit mesh.

  `jax.sharding.auto_axes` takes the mesh of the context, and does nothing where
  there is none, though the types of arrays have one.
  """
  explicit = explicit_of(mesh)

  def over_explicit(lies: Any) -> Any:
    each = [x if isinstance(x, tuple) else (x,) for x in lies.spec]
    kept = [tuple([axis for axis in x if axis in explicit]) for x in each]
    spec = jax.sharding.PartitionSpec(*[x or None for x in kept])
    return jax.sharding.NamedSharding(lies.mesh, spec)

  out_sharding = jax.tree.map(over_explicit, out_sharding)
  automatic = jax.sharding.auto_axes(f, out_sharding=out_sharding)

  def of_automatic(*args: Any) -> Any:
    if not jax.sharding.get_abstract_mesh().empty:
      return automatic(*args)
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
      return automatic(*args)

  return of_automatic


def records_varying(axis_name: str) -> bool:
  """Returns True if types record variation over `axis_name` (`check_vma=True`).

  The device's own index varies by definition, so its type tells.
  """
  return bool(varying_axes(jax.lax.axis_index(axis_name)))


_as_invariant_p = jex_core.Primitive("zenjax_as_invariant")


def as_invariant(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """Declares that `x` is equal on all devices along `axes`, at no cost.

  `shard_map(check_vma=True)` has no way to see that a buffer whose rows were
  all overwritten with gathered ones is replicated. The caller proves it (the
  tests compare every replica bit for bit); this changes the type alone.
  """
  varying = varying_axes(x)
  dropped = tuple([a for a in axes if a in varying])
  return _as_invariant_p.bind(x, axes=dropped) if dropped else x


def _abstract_eval(aval, *, axes):
  kept = aval.mat.varying - frozenset(axes)
  return aval.update(manual_axis_type=aval.mat.update(varying=kept))


_as_invariant_p.def_impl(lambda x, *, axes: x)
_as_invariant_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(_as_invariant_p, lambda ctx, x, *, axes: [x])
batching.defvectorized(_as_invariant_p)


_first_copy_p = jex_core.Primitive("zenjax_first_copy")


def one_copy(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """`x`, equal on all devices along `axes`; `vmap` over one keeps one copy.

  As it does of what `lax.all_gather` returns. By a flag of each device `vmap`
  would run all branches, and select between tables after every turn of a loop.
  """
  return _first_copy_p.bind(x, axes=tuple(axes))


def agreed(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """Declares as `as_invariant` does, and keeps `one_copy`."""
  return as_invariant(one_copy(x, axes), axes)


def _keep_first(axis_data, args, dims, *, axes):
  (x,), (dim,) = args, dims
  if axis_data.name in axes and dim is not None:
    return jax.lax.index_in_dim(x, 0, dim, keepdims=False), None
  return _first_copy_p.bind(x, axes=axes), dim


_first_copy_p.def_impl(lambda x, *, axes: x)
_first_copy_p.def_abstract_eval(lambda aval, *, axes: aval)
mlir.register_lowering(_first_copy_p, lambda ctx, x, *, axes: [x])
batching.fancy_primitive_batchers[_first_copy_p] = _keep_first


def cast_like(x: jax.Array, like: jax.Array) -> jax.Array:
  """`x` typed as varying over the axes that `like` varies over.

  Branches and loop carries must agree in type; `pcast` raises on axes that
  vary already and where no types are kept.
  """
  missing = tuple(varying_axes(like) - varying_axes(x))
  return jax.lax.pcast(x, missing, to="varying") if missing else x


def cast_alike(values: Sequence[Any]) -> list[Any]:
  """Returns values that all vary over the axes that any of them varies over."""
  axes = [varying_axes(x) for x in values]
  joined = frozenset().union(*axes)
  return [
    jax.lax.pcast(x, tuple(joined - own), to="varying") if joined - own else x
    for x, own in zip(values, axes)
  ]


def struct(
  shape: Sequence[int], dtype: DTypeLike, like: jax.Array
) -> jax.ShapeDtypeStruct:
  """Returns the type of a kernel's result, varying as `like` varies."""
  kind = getattr(jax.typeof(like), "mat", None)
  return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=kind)


class KeyValueStore:
  """A store that processes joined by `jax.distributed` share."""

  def __init__(self, client: Any):
    self.client = client

  def set(self, key: str, value: str) -> None:
    self.client.key_value_set(key, value, allow_overwrite=True)

  def get(self, key: str, seconds: float) -> str | None:
    """The value, waited for so long; None if it did not come."""
    deadline = time.monotonic() + seconds
    while True:
      # In turns, for Ctrl-C comes between them.
      left = min(1.0, max(0.001, deadline - time.monotonic()))
      try:
        return self.client.blocking_key_value_get(key, int(1000 * left) or 1)
      except Exception as error:
        late = time.monotonic() >= deadline
        if late or "DEADLINE_EXCEEDED" not in str(error):
          return None


def key_value_store() -> KeyValueStore | None:
  """None where `jax.distributed` was not initialized."""
  client = distributed.global_state.client
  return KeyValueStore(client) if client is not None else None


def serialize_with_flax(*kinds: type) -> None:
  """Tells `flax.serialization` of dataclass nodes, if the user imported it.

  It reads no pytree registry. Arrays are saved; static fields are those of the
  target that a state is restored into.
  """
  if serialization := sys.modules.get("flax.serialization"):
    for kind in kinds:
      serialization.register_serialization_state(
        kind, _to_state_dict, _from_state_dict, override=True
      )


def _data_fields(node: Any) -> list[str]:
  fields = dataclasses.fields(node)
  return [x.name for x in fields if not x.metadata.get("static")]


def _to_state_dict(node: Any) -> dict[str, Any]:
  from flax import serialization

  return {
    name: serialization.to_state_dict(getattr(node, name))
    for name in _data_fields(node)
  }


def _from_state_dict(node: Any, saved: dict[str, Any]) -> Any:
  from flax import serialization

  found = {
    name: serialization.from_state_dict(getattr(node, name), saved[name])
    for name in _data_fields(node)
  }
  return dataclasses.replace(node, **found)
