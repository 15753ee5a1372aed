"""Checks the arguments of a sparsifier, and derives sizes from them."""

from collections.abc import Callable, Sequence
import dataclasses
import numbers
from typing import Any
import warnings

import jax.numpy as jnp
import numpy as np

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.collectives import Axes
from zenjax._src.sparsify import flat_vector
from zenjax._src.sparsify import thresholds
from zenjax._src.sparsify.partitions import Division
from zenjax._src.sparsify.thresholds import Controller
from zenjax._src.sync import sync_options
from zenjax._src.sync.sync_options import Options

# Indices that a device sends in the first round, over those of a fair share.
_SLACK = 1.25
# From there on a sparsifier saves little: 1 for 1 % is the usual slip. Models
# of fewer bytes are for trying out.
_MUCH = 0.25
_MUCH_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
  """Checked arguments of `exdyna` and `micro`; see there."""

  name: str
  options: Options
  density: float
  controller: str
  start: float | None
  capacity: int | None
  residual_dtype: jnp.dtype | None
  wire_dtype: jnp.dtype | None
  division: Callable[[int, int], Division]  # of a size, over n devices


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
  """Static facts of one model on some devices."""

  settings: Settings
  tree: str  # its fingerprint
  size: int
  k: int  # elements that a step is to select
  dtype: jnp.dtype  # of the vector
  division: Division
  controller: Controller
  capacity: int  # indices that a device sends in a round


def plan(tree: Any, settings: Settings, n: int) -> Plan:
  """Sizes for the leaves of `tree` on `n` devices.

  Raises:
    ValueError: There is nothing to select, or no element of it.
  """
  size = flat_vector.size(tree)
  if not size:
    raise ValueError(
      f"`params` must have elements for {settings.name} to select, got none;"
      " leave it out where `optax.masked` or `optax.multi_transform` gives it"
      " no leaf."
    )
  k = int(settings.density * size)
  if k == 0:
    raise ValueError(
      "`density` must select an element at least, got int(density * size) ="
      f" int({settings.density} * {size}) = 0; give one of at least"
      f" {1 / size:.3g}."
    )
  division = settings.division(size, n)
  kind = thresholds.KINDS[settings.controller]
  capacity = settings.capacity or int(_SLACK * k / n) + 1
  capacity = min(capacity, division.longest)
  if size + n * capacity >= 2**31:
    raise ValueError(
      f"`params` must have fewer than 2**31 elements, got {size} and room for"
      f" {n * capacity} indices; give parts of the model a sparsifier each,"
      " by `optax.multi_transform`."
    )
  return Plan(
    settings=settings,
    tree=flat_vector.fingerprint(tree),
    size=size,
    k=k,
    dtype=flat_vector.dtype(tree, settings.residual_dtype),
    division=division,
    controller=kind(k, settings.start),
    capacity=capacity,
  )


def devices(by: str, axes: Axes) -> int:
  """How many devices keep a residual.

  Raises:
    ValueError: An axis is not bound.
  """
  try:
    return collectives.size(axes)
  except NameError as error:
    raise ValueError(
      f"`{by}` keeps a residual on each device, so its state must be made where"
      f" `axis_name` is bound, and {axes} is not; call"
      " `zenjax.init_state(tx, params, mesh, axis_name)` instead of `tx.init`."
    ) from error


def check(
  name: str,
  axis_name: AxisName,
  density: float,
  *,
  controller: str,
  op: str,
  start: float | None,
  capacity: int | None,
  residual_dtype: Any,
  wire_dtype: Any,
  division: Callable[[int, int], Division],
) -> Settings:
  """Raises `ValueError` or `TypeError` where an argument cannot be meant."""
  arguments.one_of("controller", controller, sorted(thresholds.KINDS))
  check_density(density)
  if start is not None and not (is_number(start) and 0 < start < np.inf):
    raise ValueError(
      "`start` must be a positive threshold that float32 holds, got"
      f" {start!r}; leave it out, and the controller finds one."
    )
  if capacity is not None and (
    not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1
  ):
    raise ValueError(
      "`capacity` must be a positive number of indices that a device sends in"
      f" a round, got {capacity!r}; leave it out for {_SLACK} fair shares."
    )
  return Settings(
    name=name,
    options=sync_options.check(axis_name, op=op),
    density=float(density),
    controller=controller,
    start=start,
    capacity=capacity,
    residual_dtype=arguments.floating("residual_dtype", residual_dtype),
    wire_dtype=arguments.wire_dtype("wire_dtype", wire_dtype),
    division=division,
  )


def check_density(density: Any) -> None:
  """Raises `ValueError` where it is no part of a model."""
  if not is_number(density) or not 0 < density <= 1:
    raise ValueError(
      "`density` must be in (0, 1], the part of the model that a step sends,"
      f" got {density!r}; give 0.01 for 1 %."
    )


def warn_of_much(by: str, density: Any, leaves: Sequence[Any]) -> None:
  """Warns of a density that is no small part of what is selected from."""
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
  if callable(density) or density < _MUCH or size < _MUCH_BYTES:
    return
  warnings.warn(
    f"`density` of {by} should be a small part of the model, in any case below"
    f" {_MUCH}, got {density:g}, which is {density:.0%} in each step: indices"
    " travel beside values, and it may take more bytes than a dense sum; for"
    f" {density:g} % give {density / 100:g}.",
    stacklevel=3,
  )


def is_number(x: Any) -> bool:
  """Returns True if it is a real number; True and False are none."""
  return isinstance(x, numbers.Real) and not isinstance(x, bool)
