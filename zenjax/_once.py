"""Refuses a chain that synchronizes a leaf twice along one axis."""

from collections.abc import Iterator
import contextlib
import contextvars
import itertools
from typing import Any, NamedTuple

from zenjax import _select
from zenjax._collectives import Axes


class _Synced(NamedTuple):
  """What one transformation will synchronize."""

  by: str
  axes: Axes
  leaves: list[tuple[str, Any]]  # what `optax.masked` leaves out is no leaf


_found: contextvars.ContextVar[list[_Synced] | None] = contextvars.ContextVar(
  "synced", default=None
)


def will_sync(by: str, params: Any, axes: Axes) -> None:
  """Called by the `init` of whatever synchronizes."""
  found = _found.get()
  if found is not None:
    found.append(_Synced(by, axes, _select.named_leaves(params)))


@contextlib.contextmanager
def required() -> Iterator[None]:
  """Of the transformations whose `init` is called meanwhile.

  Raises:
    ValueError: Two are given the same leaf, and have an axis in common.
  """
  found: list[_Synced] = []
  token = _found.set(found)
  try:
    yield
  finally:
    _found.reset(token)
  for first, second in itertools.combinations(found, 2):
    _require_apart(first, second)


def _require_apart(first: _Synced, second: _Synced) -> None:
  axes = [axis for axis in first.axes if axis in second.axes]
  # Leaves by themselves: one that is tried on other arrays is no second.
  taken = {id(leaf) for _, leaf in first.leaves}
  both = [name for name, leaf in second.leaves if id(leaf) in taken]
  if not axes or not both:
    return
  more = f" (and {len(both) - 1} more)" if len(both) > 1 else ""
  kinds = sorted({first.by, second.by})
  remedy = "leave one of them out"
  if len(kinds) == 2:
    remedy = "leave zen_sync out, for owner_update synchronizes by itself"
  raise ValueError(
    "`tx` must synchronize a leaf once along an axis, but leaf"
    f" {both[0]!r}{more} is given to {first.by} and to {second.by} along"
    f" {axes[0]!r}; {remedy}, or give them other axes, or leaves by"
    " `optax.multi_transform`."
  )
