"""Checks single arguments of public functions.

Each check raises an error with the argument, the rule, the value and a remedy.
"""

from collections.abc import Mapping
import numbers
from typing import Any, Literal, NamedTuple

import jax
from jax import core
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core.collectives import Axes

AxisName = str | tuple[str, ...]
SparseSpec = Any  # None, a pytree prefix of bools, or (name, leaf) -> bool
Capacities = tuple[int, int] | Mapping[str, tuple[int, int]] | None
SchemeName = Literal[
  "all_gather",
  "block_sparse",
  "dense",
  "dense_inside",
  "flat",
  "recursive_doubling",
  "split_all_gather",
  "split_dense_gather",
  "zen",
]
Unit = Literal["auto", "row", "element"] | int
Partition = Literal["hash", "columns"] | int
Kernels = Literal["xla", "pallas"]


class Capacity(NamedTuple):
  """Buffer sizes of one push and pull, in rows."""

  push: int  # C
  pull: int  # U


def axes(axis_name: AxisName, argument: str = "axis_name") -> Axes:
  """Returns `axis_name` as a tuple of different axes."""
  given = isinstance(axis_name, tuple | list)
  axes = tuple(axis_name) if given else (axis_name,)
  if not axes or not all(isinstance(axis, str) for axis in axes):
    raise ValueError(
      f"`{argument}` must be the name of an axis, or a tuple of at least one"
      f" name, got {axis_name!r}. Give the name of the axis in your mesh,"
      ' shard_map or pmap, for example "data".'
    )
  if len(set(axes)) != len(axes):
    raise ValueError(
      f"`{argument}` must name each axis once, got {axis_name!r}. List each"
      " axis once, from the slowest link to the fastest."
    )
  return axes


def mesh_axes(
  axis_name: AxisName, mesh: Any, argument: str = "axis_name"
) -> Axes:
  """Returns `axis_name` as a tuple of axes of `mesh`."""
  if not hasattr(mesh, "axis_names"):
    raise TypeError(
      f"`mesh` must be a jax.sharding.Mesh, got {type(mesh).__name__}."
    )
  wanted = axes(axis_name, argument)
  unknown = [axis for axis in wanted if axis not in mesh.axis_names]
  if unknown:
    raise ValueError(
      f"`{argument}` must name axes of the mesh, got {unknown}. The mesh has"
      f" {mesh.axis_names}."
    )
  return wanted


def one_of(name: str, value: Any, known: list[str]) -> str:
  """Returns the value; raises `ValueError` if it is not one of `known`."""
  if not isinstance(value, str) or value not in known:
    options = ", ".join(repr(k) for k in known)
    raise ValueError(f"`{name}` must be one of {options}, got {value!r}.")
  return value


def is_integer(value: Any) -> bool:
  """Returns True for integers of Python and NumPy, but not for bools."""
  return isinstance(value, int | np.integer) and not isinstance(value, bool)


def hash_seed(value: Any, name: str = "hash_seed") -> int:
  """Returns the value; raises `ValueError` if it is not a 32-bit integer."""
  if not is_integer(value) or not 0 <= value < 2**32:
    raise ValueError(
      f"`{name}` must be an integer in [0, 2**32), got {name}={value!r}."
    )
  return value


def number(name: str, value: Any) -> float:
  """Returns the value as a float; raises `TypeError` if it is not a number."""
  is_scalar = isinstance(value, jax.Array | np.ndarray) and not value.shape
  if isinstance(value, bool | core.Tracer) or not (
    is_scalar or isinstance(value, numbers.Real)
  ):
    raise TypeError(f"`{name}` must be a number, got {value!r}.")
  return float(value)


def optimizer(name: str, tx: Any) -> optax.GradientTransformation:
  """Returns the value; raises `TypeError` if it is not an optimizer."""
  if not (hasattr(tx, "init") and hasattr(tx, "update")):
    raise TypeError(
      f"`{name}` must be an optax optimizer, such as `optax.adagrad(0.1)`, got"
      f" {tx!r:.60}."
    )
  return tx


def floating(name: str, dtype: Any, others: str = "") -> jnp.dtype | None:
  """Returns the dtype; raises `TypeError` if it is not a floating dtype.

  Args:
    name: The argument.
    dtype: Its value.
    others: Other values that are accepted, in words.
  """
  if dtype is None:
    return None
  try:
    known = jnp.dtype(dtype)
  except TypeError:  # an unknown name
    known = None
  if known is None or not jnp.issubdtype(known, jnp.floating):
    raise TypeError(
      f"`{name}` must be {others}a floating dtype such as jnp.bfloat16, got"
      f" {dtype!r}."
    )
  return known


def row_wire_dtype(name: str, dtype: Any) -> jnp.dtype | None:
  """Returns the dtype; raises if rows cannot be sent in it."""
  integers = [jnp.dtype(jnp.int8), jnp.dtype(jnp.int4)]
  if dtype in (jnp.int8, jnp.int4, *integers, *[x.name for x in integers]):
    return jnp.dtype(dtype)
  wire = floating(name, dtype, "jnp.int8, jnp.int4, or ")
  info = wire and jnp.finfo(wire)
  if info and (info.bits < 8 or float(info.min) >= 0):
    raise ValueError(
      f"`{name}` must have 8 bits or more, and a sign, got {wire}. Give"
      " jnp.float8_e4m3fn or jnp.int4."
    )
  return wire


def wire_dtype(name: str, dtype: Any) -> jnp.dtype | None:
  """Returns the dtype; raises if single values cannot be sent in it."""
  wire = floating(name, dtype)
  if wire is not None and wire.itemsize < 2:
    raise ValueError(
      f"`{name}` must have 16 bits or more, got {wire.name}. Values are not"
      " scaled, so a step could send no more than"
      f" {float(jnp.finfo(wire).max):g} of a number. Give jnp.bfloat16."
    )
  return wire


def check_unit(unit: Unit) -> Unit:
  """Returns the unit; raises `ValueError` if it is not valid."""
  block = is_integer(unit) and int(unit) > 0
  if not block and unit not in ("auto", "row", "element"):
    raise ValueError(
      "`unit` must be 'auto', 'row', 'element' or a block size of at least 1,"
      f" got {unit!r}."
    )
  return unit


def check_partition(partition: Partition) -> Partition:
  """Returns the partition; raises `ValueError` if it is not valid."""
  grid = is_integer(partition) and int(partition) > 0
  if not grid and partition not in ("hash", "columns"):
    raise ValueError(
      "`partition` must be 'hash', 'columns', or a number of column groups that"
      f" divides the number of devices, got {partition!r}."
    )
  return partition


def capacities_of(
  capacities: Capacities,
) -> Capacity | dict[str, Capacity] | None:
  """Returns buffer sizes for all leaves or by leaf name; None if not given."""
  if isinstance(capacities, Mapping):
    return pins(capacities)
  return None if capacities is None else _capacity(capacities, "")


def pins(
  capacities: Mapping[str, tuple[int, int]] | None,
) -> dict[str, Capacity]:
  """Returns buffer sizes by leaf name; empty if none are given."""
  if not isinstance(capacities, Mapping | None):
    raise TypeError(
      "`capacities` must map parameter names to pairs (push, pull), got"
      f" {capacities!r}. Give for example {{'table': (64, 256)}}."
    )
  given = (capacities or {}).items()
  return {name: _capacity(sizes, f"[{name!r}]") for name, sizes in given}


def _capacity(value: Any, where: str) -> Capacity:
  what = f"`capacities{where}`"
  if not isinstance(value, tuple | list) or len(value) != 2:
    raise ValueError(
      f"{what} must be a pair (push, pull) of rows, for example (64, 256), got"
      f" {value!r}."
    )
  if not all(map(is_integer, value)):
    raise TypeError(f"{what} must hold integers, got {value!r}.")
  push, pull = map(int, value)
  if push < 1 or pull < 1:
    raise ValueError(f"{what} must be positive, got {value!r}.")
  if push > pull:
    raise ValueError(
      f"{what} must have push <= pull, got {value!r}, because a device that"
      " receives rows returns at least as many as any one device sends it."
    )
  return Capacity(push, pull)
