"""Tells a zen_sync of which leaves a sparsifier before it sends elements.

Nothing that transformations of a chain are given names their neighbours, but a
chain hands the same arrays on: to every `init` the parameters, and to each
`update` what the one before returned. A sparsifier therefore notes which it
selects from, and zen_sync asks. Notes live as long as the arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
import weakref

import jax
import jax.numpy as jnp

from zenjax._collectives import Axes


class Note(NamedTuple):
  """What is known of an array."""

  by: str
  wire: jnp.dtype | None  # to which what is selected was rounded
  synced: set[str]  # axes that a zen_sync was to sum it over since


class _Notes:
  """Notes on objects, for as long as these live."""

  def __init__(self):
    self._found: dict[int, tuple[Callable[[], Any], Note]] = {}

  def put(self, x: Any, note: Note) -> None:
    key = id(x)
    try:
      alive = weakref.ref(x, lambda _: self._found.pop(key, None))
    except TypeError:
      if not isinstance(x, jax.ShapeDtypeStruct):
        return
      alive = lambda: x
    self._found[key] = alive, note

  def get(self, x: Any) -> Note | None:
    alive, note = self._found.get(id(x), (lambda: None, None))
    return note if alive() is x else None

  def drop(self, x: Any) -> None:
    self._found.pop(id(x), None)


_given = _Notes()  # Parameters, by `init`.
_sent = _Notes()  # Updates, by `update`.


def will_send(by: str, param: Any, wire: jnp.dtype | None = None) -> None:
  """Called by a sparsifier's `init` for each leaf that it selects from."""
  _given.put(param, Note(by, wire, set()))


def will_sum(param: Any, axes: Axes) -> Note | None:
  """Called by the `init` of zen_sync: what stands before it in its chain.

  A leaf is summed once along an axis. Where that was done since, the note is of
  another chain that was given the same parameters.
  """
  note = _given.get(param)
  if note is None:
    return None
  if note.synced & set(axes):
    _given.drop(param)
    return None
  note.synced.update(axes)
  return note


def send(by: str, update: Any, wire: jnp.dtype | None = None) -> Any:
  """Called by a sparsifier's `update` for what it selected; returns it."""
  _sent.put(update, Note(by, wire, set()))
  return update


def hand_on(update: Any, same: Any) -> None:
  """Notes of another array of the same update what is known of the first."""
  note = _sent.get(update)
  if note is not None:
    _sent.put(same, note)


def sent(update: Any) -> Note | None:
  """What a sparsifier noted of an update; None where it is another array."""
  return _sent.get(update)
