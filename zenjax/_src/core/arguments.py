"""The types and rules of single arguments, for every function of users.

Each rule raises with the argument, what it may be, what it is and the remedy.
"""

from collections.abc import Mapping
import numbers
from typing import Any, get_args, Literal, NamedTuple

import jax.numpy as jnp

from zenjax._src.core.collectives import Axes

AxisName = str | tuple[str, ...]
SparseSpec = Any  # None, a pytree prefix of bools, or (name, leaf) -> bool
Capacities = tuple[int, int] | Mapping[str, tuple[int, int]] | None
SchemeName = Literal[
  "all_gather",
  "block_sparse",
  "dense",
  "recursive_doubling",
  "split_all_gather",
  "split_dense_gather",
  "zen",
]
Unit = Literal["auto", "row", "element"] | int
Partition = Literal["hash", "columns"] | int
Kernels = Literal["auto", "xla", "pallas"]


class Capacity(NamedTuple):
  """Rows that the buffers of one push and pull hold."""

  push: int  # C
  pull: int  # U


def axes(axis_name: AxisName, argument: str = "axis_name") -> Axes:
  """`axis_name` as a tuple, checked: each axis once."""
  given = isinstance(axis_name, tuple | list)
  axes = tuple(axis_name) if given else (axis_name,)
  if not axes:
    raise ValueError(
      f"`{argument}` must name at least one axis, got an empty tuple; give the"
      ' name that shard_map or pmap binds, say "data".'
    )
  for axis in axes:
    if not isinstance(axis, str):
      raise ValueError(
        f"`{argument}` must be the name of an axis, or a tuple of names, got"
        f" {type(axis).__name__} {axis!r}; give the name that shard_map or pmap"
        ' binds, say "data".'
      )
  if len(set(axes)) != len(axes):
    raise ValueError(
      f"`{argument}` must name each axis once, got {axis_name!r}; list each"
      " axis once, from the slowest link to the fastest."
    )
  return axes


def mesh_axes(
  axis_name: AxisName, mesh: Any, argument: str = "axis_name"
) -> Axes:
  """`axis_name` as a tuple of axes that `mesh` has."""
  wanted = axes(axis_name, argument)
  unknown = [axis for axis in wanted if axis not in mesh.axis_names]
  if unknown:
    raise ValueError(
      f"`{argument}` must name axes of the mesh, got {unknown}; it has"
      f" {mesh.axis_names}."
    )
  return wanted


def one_of(name: str, value: Any, known: list[str]) -> str:
  """Returns the value; raises `ValueError` where it is none of those known."""
  if not isinstance(value, str) or value not in known:
    options = ", ".join(repr(k) for k in known)
    raise ValueError(f"`{name}` must be one of {options}, got {value!r}.")
  return value


def check_kernels(value: Any) -> Kernels:
  """The value; raises `ValueError` where it is no choice of kernels."""
  one_of("kernels", value, list(get_args(Kernels)))
  return value


def hash_seed(value: Any, name: str = "hash_seed") -> int:
  """The value; raises `ValueError` where it is no integer of 32 bits."""
  whole = isinstance(value, int) and not isinstance(value, bool)
  if not whole or not 0 <= value < 2**32:
    raise ValueError(
      f"`{name}` must be an integer in [0, 2**32), got {name}={value!r}."
    )
  return value


def number(name: str, value: Any) -> float:
  """The value as a float; raises `TypeError` where it is no number."""
  if not isinstance(value, numbers.Real):
    raise TypeError(f"`{name}` must be a number, got {value!r}.")
  return float(value)


def floating(name: str, dtype: Any) -> jnp.dtype | None:
  """The dtype; raises `TypeError` where it is no floating one."""
  if dtype is None:
    return None
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
      f"`{name}` must be a floating dtype such as jnp.bfloat16, got {dtype!r}."
    )
  return jnp.dtype(dtype)


def wire_dtype(name: str, dtype: Any) -> jnp.dtype | None:
  """The dtype; raises where values may not be rounded to it on the wire."""
  wire = floating(name, dtype)
  if wire is not None and wire.itemsize < 2:
    raise ValueError(
      f"`{name}` must be of 16 bits or more, got {wire.name}: values are not"
      f" scaled, and what is beyond {float(jnp.finfo(wire).max):g} would be"
      " lost; give jnp.bfloat16."
    )
  return wire


def check_unit(unit: Unit) -> Unit:
  """Returns it; raises `ValueError` where it is no way to see rows."""
  block = isinstance(unit, int) and not isinstance(unit, bool) and unit > 0
  if not block and unit not in ("auto", "row", "element"):
    raise ValueError(
      "`unit` must be 'auto', 'row', 'element' or a block size of at least 1,"
      f" got {unit!r}."
    )
  return unit


def check_partition(partition: Partition) -> Partition:
  """Returns it; raises `ValueError` where it cannot share out a table."""
  grid = (
    isinstance(partition, int)
    and not isinstance(partition, bool)
    and partition > 0
  )
  if not grid and partition not in ("hash", "columns"):
    raise ValueError(
      "`partition` must be 'hash', 'columns' or a number of column"
      f" groups that divides the devices, got {partition!r}."
    )
  return partition


def capacities_of(
  capacities: Capacities,
) -> Capacity | dict[str, Capacity] | None:
  """Those of all leaves or by leaf, checked; None where nothing is pinned."""
  if capacities is None:
    return None
  if isinstance(capacities, Mapping):
    return {name: _capacity(c, f"[{name!r}]") for name, c in capacities.items()}
  return _capacity(capacities, "")


def pins(
  capacities: Mapping[str, tuple[int, int]] | None,
) -> dict[str, tuple[int, int]]:
  """Capacities by leaf, checked."""
  if not isinstance(capacities, Mapping | None):
    raise TypeError(
      "`capacities` must map leaf names to pairs (push, pull), got"
      f" {capacities!r}; give (push, pull) by leaf name."
    )
  found = {}
  for name, value in (capacities or {}).items():
    push, pull = _capacity(value, f"[{name!r}]")
    found[name] = push, pull
  return found


def _capacity(value: Any, where: str) -> Capacity:
  what = f"`capacities{where}`"
  if not isinstance(value, tuple | list) or len(value) != 2:
    raise ValueError(
      f"{what} must be a pair (push, pull) of rows, as `zenjax.report` prints"
      f" it, got {value!r}."
    )
  if not all(isinstance(c, int) and not isinstance(c, bool) for c in value):
    raise TypeError(f"{what} must hold integers, got {value!r}.")
  push, pull = value
  if push < 1 or pull < 1:
    raise ValueError(f"{what} must be positive, got {value!r}.")
  if push > pull:
    raise ValueError(
      f"{what} must be increasing, push <= pull, since an owner's union holds"
      f" every row that one source sends it, got {value!r}."
    )
  return Capacity(push, pull)
