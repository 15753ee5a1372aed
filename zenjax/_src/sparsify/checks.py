"""What every sparsifier asks of its arguments and of its state."""

from collections.abc import Mapping, Sequence
import numbers
from typing import Any
import warnings

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes

# From there on a sparsifier saves little: 1 for 1 % is the usual slip. Models
# of fewer bytes are for trying out.
_MUCH = 0.25
_MUCH_BYTES = 1 << 16


def is_number(x: Any) -> bool:
  """Returns True if it is a real number; True and False are none."""
  return isinstance(x, numbers.Real) and not isinstance(x, bool)


def density(value: Any) -> float:
  """Returns the value; raises `ValueError` where it is no part of a model."""
  if not is_number(value) or not 0 < value <= 1:
    raise ValueError(
      "`density` must be in (0, 1], the part of the model that a step sends,"
      f" got {value!r}; give 0.01 for 1 %."
    )
  return float(value)


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


def devices(by: str, axes: Axes) -> int:
  """How many devices keep a residual; raises where an axis is not bound."""
  try:
    return collectives.size(axes)
  except NameError as error:
    raise ValueError(
      f"`{by}` keeps a residual on each device, so its state must be made where"
      f" `axis_name` is bound, and {axes} is not; call"
      " `zenjax.init_state(tx, params, mesh, axis_name)` instead of `tx.init`."
    ) from error


def require_made_for(
  by: str, devices: int, got: Mapping[str, Any], needed: Mapping[str, Any]
) -> None:
  """Raises where a state was made for other gradients, devices or options.

  Args:
    by: Whose state it is.
    devices: How many there are.
    got: What the state holds, by what is told of it.
    needed: What it must hold.
  """
  for name in sorted(got.keys() | needed.keys()):
    have, want = got.get(name, "nothing"), needed.get(name, "nothing")
    if have != want:
      raise ValueError(
        f"`state` of {by} must be made by `zenjax.init_state` for these"
        f" gradients, these options and {devices} devices: its {name} is"
        f" {have}, and {want} is needed; call `zenjax.from_checkpoint(state,"
        " mesh, axis_name)` for a state of another number of devices, or"
        " `zenjax.init_state(tx, params, mesh, axis_name)`, and give"
        " `zenjax.state_specs(state, axis_name)` to shard_map."
      )
