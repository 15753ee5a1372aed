"""Hides differences between JAX versions, and uses of private functions.

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


def varying_axes(x: jax.Array) -> frozenset[str]:
  """Returns the mesh axes over which `x` varies, according to its type.

  The result is empty under `pmap`, `vmap` and `shard_map(check_vma=False)`,
  whose types do not record variation.
  """
  manual = getattr(jax.typeof(x), "mat", None)
  return frozenset(manual.varying) if manual is not None else frozenset()


def automatic_axes() -> frozenset[str]:
  """Returns the axes of the current mesh over which XLA partitions programs.

  The result is empty in a `shard_map` over all axes of its mesh, and without a
  mesh.
  """
  around = jax.sharding.get_abstract_mesh()
  return frozenset(around.axis_names) - frozenset(around.manual_axes)


def device_kind() -> str:
  """Returns the kind of device that a program is traced for: "NVIDIA H200".

  The mesh around the trace tells. Without a mesh, it is the default backend's.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return (device or jax.devices()[0]).device_kind


def explicit_axes(x: jax.Array | None = None) -> frozenset[str]:
  """Returns the explicit axes, over which types say how arrays are sharded.

  Args:
    x: An array whose type has a mesh; None for the mesh around a trace.
  """
  around = jax.sharding.get_abstract_mesh()
  return explicit_of(around if x is None else jax.typeof(x).sharding.mesh)


def explicit_of(mesh: Any) -> frozenset[str]:
  """Returns the explicit axes of a mesh, which may be empty."""
  kinds = zip(mesh.axis_names, mesh.axis_types)
  return frozenset(
    [axis for axis, kind in kinds if kind == jax.sharding.AxisType.Explicit]
  )


def explicit_spec(x: jax.Array) -> tuple[Any, ...]:
  """Returns the explicit axes of each dimension, None if it has none."""
  if not explicit_axes(x):
    return (None,) * x.ndim
  spec = jax.typeof(x).sharding.spec
  # JAX 0.10 has no `partitions`, but there the spec itself is iterable.
  spec = tuple(getattr(spec, "partitions", spec))
  return (*spec, *[None] * (x.ndim - len(spec)))


def on_automatic_axes(
  f: Callable[..., Any], mesh: Any, specs: Any
) -> Callable[..., Any]:
  """Returns `f` as a function of arrays on automatic axes.

  `jax.sharding.auto_axes` uses the mesh of the context. Without one it does
  nothing, even if the types of the arrays have a mesh, so this sets it.

  Args:
    f: The function.
    mesh: The mesh of the arrays; None inside `shard_map`.
    specs: How results are sharded, as PartitionSpecs.
  """
  if mesh is None or not explicit_of(mesh):
    return f
  explicit = explicit_of(mesh)

  def over_explicit(spec: Any) -> Any:
    each = [x if isinstance(x, tuple) else (x,) for x in spec]
    kept = [tuple([axis for axis in x if axis in explicit]) for x in each]
    spec = jax.sharding.PartitionSpec(*[x or None for x in kept])
    return jax.sharding.NamedSharding(mesh, spec)

  is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)
  out_sharding = jax.tree.map(over_explicit, specs, is_leaf=is_spec)
  automatic = jax.sharding.auto_axes(f, out_sharding=out_sharding)

  def of_automatic(*args: Any) -> Any:
    if not jax.sharding.get_abstract_mesh().empty:
      return automatic(*args)
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
      return automatic(*args)

  return of_automatic


def records_varying(axis_name: str) -> bool:
  """Returns True if types record variation over `axis_name` (`check_vma=True`).

  The index of a device always varies, so its type shows it.
  """
  return bool(varying_axes(jax.lax.axis_index(axis_name)))


_as_invariant_p = jex_core.Primitive("zenjax_as_invariant")


def as_invariant(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """Declares that `x` is equal on all devices along `axes`.

  `shard_map(check_vma=True)` cannot see that a buffer is replicated if all of
  its rows were overwritten with gathered rows. The caller has to ensure it, and
  tests compare all replicas. Only the type changes, so nothing is computed.
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


def agreed(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """Does what `as_invariant` does, and `vmap` over `axes` keeps one copy.

  The value must be equal on all devices, as results of `lax.all_gather` are. If
  a condition had a value for each device, `vmap` would run both branches, and
  would select between tables in every iteration of a loop.
  """
  return as_invariant(_first_copy_p.bind(x, axes=tuple(axes)), axes)


def _keep_first(axis_data, args, dims, *, axes):
  (x,), (dim,) = args, dims
  if axis_data.name in axes and dim is not None:
    return jax.lax.index_in_dim(x, 0, dim, keepdims=False), None
  return _first_copy_p.bind(x, axes=axes), dim


_first_copy_p.def_impl(lambda x, *, axes: x)
_first_copy_p.def_abstract_eval(lambda aval, *, axes: aval)
mlir.register_lowering(_first_copy_p, lambda ctx, x, *, axes: [x])
batching.fancy_primitive_batchers[_first_copy_p] = _keep_first


def varying_over(x: Any, axes: frozenset[str]) -> Any:
  """Returns `x` typed as varying over `axes`, too.

  `pcast` raises for axes over which a value varies already, and where types
  record no variation.
  """
  missing = tuple(axes - varying_axes(x))
  return jax.lax.pcast(x, missing, to="varying") if missing else x


def cast_like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Returns `x` typed as varying over the axes that `like` varies over.

  Branches and loop carries need equal types.
  """
  return varying_over(x, varying_axes(like))


def cast_alike(values: Sequence[Any]) -> list[Any]:
  """Returns the values, all typed as varying over the union of their axes."""
  joined = frozenset().union(*map(varying_axes, values))
  return [varying_over(x, joined) for x in values]


def struct(
  shape: Sequence[int], dtype: DTypeLike, like: jax.Array
) -> jax.ShapeDtypeStruct:
  """Returns the type of a kernel's result, varying as `like` varies."""
  kind = getattr(jax.typeof(like), "mat", None)
  return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=kind)


class KeyValueStore:
  """The store that all processes of `jax.distributed` share."""

  def __init__(self, client: Any):
    self.client = client

  def set(self, key: str, value: str) -> None:
    self.client.key_value_set(key, value, allow_overwrite=True)

  def get(self, key: str, seconds: float) -> str | None:
    """Waits so long for a value; returns None if it does not come."""
    deadline = time.monotonic() + seconds
    while True:
      # Short waits, because Ctrl-C has an effect only between them.
      left = min(1.0, max(0.001, deadline - time.monotonic()))
      try:
        return self.client.blocking_key_value_get(key, int(1000 * left) or 1)
      except Exception as error:
        late = time.monotonic() >= deadline
        if late or "DEADLINE_EXCEEDED" not in str(error):
          return None


def key_value_store() -> KeyValueStore | None:
  """Returns the store, or None if `jax.distributed` is not initialized."""
  client = distributed.global_state.client
  return KeyValueStore(client) if client is not None else None


def serialize_with_flax(*kinds: type) -> None:
  """Registers dataclass nodes with `flax.serialization`, if it is imported.

  Flax does not use JAX's pytree registry. It saves arrays; static fields come
  from the target that a state is restored into.
  """
  serialization = sys.modules.get("flax.serialization")
  if serialization is None:
    return

  def arrays(node: Any) -> dict[str, Any]:
    fields = dataclasses.fields(node)
    names = [x.name for x in fields if not x.metadata.get("static")]
    return {name: getattr(node, name) for name in names}

  def saved(node: Any) -> Any:
    return serialization.to_state_dict(arrays(node))

  def restored(node: Any, saved: Any) -> Any:
    new = serialization.from_state_dict(arrays(node), saved)
    return dataclasses.replace(node, **new)

  for kind in kinds:
    serialization.register_serialization_state(
      kind, saved, restored, override=True
    )
