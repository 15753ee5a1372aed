"""Which implementation of its operations a program runs.

The platform decides when a program is lowered, so the program itself says what
it runs: a number in the state, two bits an operation.
"""

from collections.abc import Collection, Iterable, Sequence
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._state import LeafState
from zenjax._state import Sizes
from zenjax.kernels._dispatch import Call
from zenjax.kernels._dispatch import EVERYWHERE
from zenjax.kernels.operations import EXCHANGES
from zenjax.kernels.operations import OPERATIONS

_NAMES = (*OPERATIONS, *EXCHANGES)
_XLA, _PALLAS = 1, 2


def number(calls: Sequence[Call]) -> jax.Array | int:
  """What `decode` reads, for the platform that the program is lowered for."""
  platforms = frozenset().union(*(call.kernels for call in calls))
  named = sorted(platforms - {EVERYWHERE})
  if not named:
    return _encode(calls, EVERYWHERE)
  on = lambda name: functools.partial(jnp.int32, _encode(calls, name))
  return lax.platform_dependent(
    default=on(EVERYWHERE), **{name: on(name) for name in named}
  )


def _encode(calls: Sequence[Call], platform: str) -> int:
  code = 0
  places = {name: 2 * i for i, name in enumerate(_NAMES)}
  for call in calls:
    kernel = not call.kernels.isdisjoint((platform, EVERYWHERE))
    code |= (_PALLAS if kernel else _XLA) << places[call.name]
  return code


def decode(code: int) -> dict[str, list[str]]:
  """Operations by who ran them: "XLA" and "Pallas"; some of both."""
  ran = {"XLA": _XLA, "Pallas": _PALLAS}
  return {
    by: [name for i, name in enumerate(_NAMES) if code >> 2 * i & bit]
    for by, bit in ran.items()
  }


def counts(code: int) -> dict[str, int]:
  """For `stats`: how many operations ran by each; some by both."""
  ran = decode(code)
  return {"by_xla": len(ran["XLA"]), "by_pallas": len(ran["Pallas"])}


def lines(leaves: Iterable[LeafState]) -> list[str]:
  """For a report: who ran which operations, and nothing where none ran."""
  together = 0
  for leaf in leaves:
    together |= int(Sizes(*np.asarray(leaf.sizes)).ran)
  return [
    *_told("local operations", together, OPERATIONS),
    *_told("remote copies", together, EXCHANGES),
  ]


def _told(what: str, code: int, operations: Collection[str]) -> list[str]:
  parts = []
  for by, names in decode(code).items():
    some = [name for name in names if name in operations]
    if some:
      parts.append(f"{', '.join(some)} by {by}")
  return [f"{what}: {'; '.join(parts)}"] if parts else []
