"""Refuses chains that average a leaf twice, or select from it after that."""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
import itertools
from typing import Any, NamedTuple
import warnings

from zenjax import _select
from zenjax._collectives import Axes


class _Synced(NamedTuple):
  """What one transformation will synchronize, or select from before that."""

  by: str
  axes: Axes | None  # None where it is not told
  selects: bool
  leaves: list[tuple[str, Any]]  # what `optax.masked` leaves out is no leaf
  picked: Sequence[Any] = ()  # those that it selects from


_found: contextvars.ContextVar[list[_Synced] | None] = contextvars.ContextVar(
  "synced", default=None
)


def will_sync(by: str, params: Any, axes: Axes) -> None:
  """Called by the `init` of whatever synchronizes."""
  _note(_Synced(by, axes, False, _select.named_leaves(params)))


def will_select(
  by: str, params: Any, axes: Axes | None, picked: Sequence[Any]
) -> None:
  """Called by the `init` of what needs gradients that are not yet averaged."""
  _note(_Synced(by, axes, True, _select.named_leaves(params), picked))


def _note(synced: _Synced) -> None:
  found = _found.get()
  if found is not None:
    found.append(synced)


@contextlib.contextmanager
def required() -> Iterator[None]:
  """Of the transformations whose `init` is called meanwhile.

  Raises:
    ValueError: Two average the same leaf, and have an axis in common; or one
      selects from a leaf that is averaged already.
  """
  found: list[_Synced] = []
  token = _found.set(found)
  try:
    yield
  finally:
    _found.reset(token)
  for first, second in itertools.combinations(found, 2):
    if not first.selects and not second.selects:
      _require_apart(first, second)
  for i, one in enumerate(found):
    if one.selects:
      _require_before(one, found[:i], found[i + 1 :])
      _warn_of_whole(one, found[i + 1 :])


# What synchronizes, by what else it does.
_LEAST_FIRST = ("zen_sync", "exdyna", "micro", "owner_update")


def _require_apart(first: _Synced, second: _Synced) -> None:
  axes = _common_axes(first, second)
  both = _common_leaves(first, second)
  if not axes or not both:
    return
  kinds = {first.by, second.by}
  remedy = "leave one of them out"
  if len(kinds) == 2:
    gone, stays = sorted(kinds, key=_LEAST_FIRST.index)
    remedy = f"leave {gone} out, for {stays} synchronizes by itself"
  raise ValueError(
    "`tx` must synchronize a leaf once along an axis, but leaf"
    f" {_named(both)} is given to {first.by} and to {second.by} along"
    f" {axes[0]!r}; {remedy}, or give them other axes, or leaves by"
    " `optax.multi_transform`."
  )


def _require_before(
  one: _Synced, before: list[_Synced], after: list[_Synced]
) -> None:
  """One without axes is in its place where a sum of the leaf follows."""
  sums = [other for other in before if not other.selects]
  if one.axes is None:
    late = [other for other in after if not other.selects]
    followed = {name for other in late for name in _common_leaves(other, one)}
  else:
    followed = set()
    sums = [other for other in sums if _common_axes(other, one)]
  for other in sums:
    both = [n for n in _common_leaves(other, one) if n not in followed]
    if both:
      raise ValueError(
        f"`tx` must give local gradients to {one.by}, but leaf {_named(both)}"
        f" was averaged by {other.by} before it, along {other.axes}; write"
        f" `optax.chain(zenjax.{one.by}(..), zenjax.{other.by}(..), ..)`."
      )


def _warn_of_whole(one: _Synced, after: list[_Synced]) -> None:
  """Where what synchronizes does not see the leaf that was selected from."""
  sums = [other for other in after if not other.selects]
  zen = [other for other in sums if other.by == "zen_sync"]
  taken = {id(leaf) for other in zen for _, leaf in other.leaves}
  picked = {id(leaf) for leaf in one.picked} - taken
  names = [name for name, leaf in one.leaves if id(leaf) in picked]
  if sums and names:
    warnings.warn(
      f"A zen_sync should follow {one.by} in `tx` for leaf {_named(names)}, and"
      " none is given that leaf: what something between makes of it, or another"
      " sum, sends all of it. Put zenjax.zen_sync right behind, or give it"
      " `unit='element'`.",
      stacklevel=3,
    )


def _common_axes(first: _Synced, second: _Synced) -> list[str]:
  return [a for a in first.axes or () if a in (second.axes or ())]


def _common_leaves(first: _Synced, second: _Synced) -> list[str]:
  # Leaves by themselves: one that is tried on other arrays is no second.
  taken = {id(leaf) for _, leaf in first.leaves}
  return [name for name, leaf in second.leaves if id(leaf) in taken]


def _named(leaves: list[str]) -> str:
  more = f" (and {len(leaves) - 1} more)" if len(leaves) > 1 else ""
  return f"{leaves[0]!r}{more}"
