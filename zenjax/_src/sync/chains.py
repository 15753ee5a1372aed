"""Refuses chains that synchronize a leaf twice along an axis.

A transformation doesn't know the chain that it is in. While
`zenjax.init_state` calls the `init` of a chain, the transformations that
synchronize or select say which leaves they are given.
"""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
import itertools
from typing import Any, NamedTuple
import warnings

import jax

from zenjax._src.core.collectives import Axes


class _Call(NamedTuple):
  """A call of `init`."""

  by: str
  axes: Axes
  unit: Any  # in which leaves are sent; None for what only selects
  # Identities of parameters: a chain gives the same arrays to each `init`. The
  # arrays themselves would be leaks to `jax.checking_leaks`.
  leaves: frozenset[int]


_calls: contextvars.ContextVar[list[_Call] | None] = contextvars.ContextVar(
  "calls", default=None
)


def will_sync(by: str, params: Any, options: Any) -> None:
  """Called by the `init` of a transformation that synchronizes."""
  leaves = frozenset(map(id, jax.tree.leaves(params)))
  _say(_Call(by, options.axes, options.unit, leaves))


def will_select(by: str, picked: Sequence[Any], axes: Axes) -> None:
  """Called by the `init` of a sparsifier with the leaves it selects from."""
  _say(_Call(by, axes, None, frozenset(map(id, picked))))


def _say(call: _Call) -> None:
  calls = _calls.get()
  if calls is not None:
    calls.append(call)


@contextlib.contextmanager
def required() -> Iterator[None]:
  """Raises ValueError if the `init` that is called meanwhile is of no use."""
  calls: list[_Call] = []
  token = _calls.set(calls)
  try:
    yield
  finally:
    _calls.reset(token)
  for first, second in itertools.combinations(calls, 2):
    if not first.leaves & second.leaves:
      continue
    axes = set(first.axes) & set(second.axes)
    if first.unit is None and second.unit == "row":
      warnings.warn(
        f"{second.by} sends whole rows, although {first.by} before it selects"
        f" elements. Give `unit='element'` to zenjax.{second.by}.",
        stacklevel=4,
      )
    elif axes and first.unit is not None and second.unit is None:
      raise ValueError(
        f"`tx` gives {second.by} gradients that {first.by} has averaged"
        f" already. Write `optax.chain(zenjax.sparsify.{second.by}(..),"
        f" zenjax.{first.by}(..), ..)`."
      )
    elif axes and first.unit is not None:
      raise ValueError(
        f"`tx` synchronizes a leaf twice along {sorted(axes)}, by {first.by}"
        f" and by {second.by}. Leave one of them out: sharded_optimizer, exdyna"
        " and micro synchronize by themselves. Or give them other axes, or"
        " other leaves by `optax.masked`."
      )
