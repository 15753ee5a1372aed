"""Checks that several sparsifiers share."""

from collections.abc import Callable, Sequence
import numbers
from typing import Any
import warnings

# A density above this saves little; 1 for 1 % is the usual slip. Models of
# fewer bytes are for trying out.
_MUCH = 0.25
_MUCH_BYTES = 1 << 16


def number(
  name: str, value: Any, fits: Callable[[Any], bool], interval: str, remedy: str
) -> None:
  """Raises `ValueError` unless an argument is a real number that fits."""
  real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not real or not fits(value):
    raise ValueError(f"`{name}` must be {interval}, got {value!r}. {remedy}")


def density(value: Any) -> float:
  """Returns a density; raises `ValueError` outside of (0, 1]."""
  fits = lambda x: 0 < x <= 1
  number("density", value, fits, "in (0, 1]", "Give 0.01 for 1 % of the model.")
  return float(value)


def warn_of_much(by: str, density: Any, leaves: Sequence[Any]) -> None:
  """Warns of a density too large to save anything."""
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
  if callable(density) or density < _MUCH or size < _MUCH_BYTES:
    return
  warnings.warn(
    f"`density` of {by} is {density:g}, so {density:.0%} of the model is sent"
    " in each step, which can take longer than a dense all-reduce. For"
    f" {density:g} % give {density / 100:g}.",
    stacklevel=3,
  )
