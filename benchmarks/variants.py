"""Ways of synchronizing that are compared, as optax transformations."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Literal

import jax
import optax

import zenjax

AXIS = "data"
LEAF = "table"

# (push, pull) rows of the first round, as `zenjax.advise` gives them.
Capacities = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
  """A way to synchronize one table.

  Attributes:
    name: As in the first column.
    volume: Bytes on the wire: "none", those of a ring all-reduce ("dense"), or
      what zenjax counts ("counted").
    make: Builds the transformation, with or without pinned capacities.
    pinned: Whether capacities are found by an unpinned run and pinned.
    warm_steps: Steps run before the first timed one, state fed back.
    keeps_state: Whether timed steps feed the state back. Without it each one
      is a first step.
  """

  name: str
  volume: Literal["none", "dense", "counted"] = "counted"
  make: Callable[[Capacities | None], optax.GradientTransformation]
  pinned: bool = False
  warm_steps: int = 0
  keeps_state: bool = True


def _none(capacities):
  del capacities
  return optax.identity()


def _pmean(capacities):
  del capacities
  return optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))


def _zen(**options):
  def make(capacities):
    return zenjax.zen_sync(AXIS, sparse=True, capacities=capacities, **options)

  return make


BASELINES = (
  Variant(name="none", volume="none", make=_none),
  Variant(name="pmean", volume="dense", make=_pmean),
)
SPARSE = (
  Variant(name="all_gather", make=_zen(scheme="all_gather")),
  Variant(name="zen", make=_zen(partition="auto")),
  Variant(name="zen-hash", make=_zen(partition="hash")),
  Variant(name="zen-columns", make=_zen(partition="columns")),
)
PINNED = tuple(
  dataclasses.replace(variant, name=f"{variant.name}-pinned", pinned=True)
  for variant in SPARSE
  if variant.name != "all_gather"
)
# At density 100 % the first step finds out what later ones remember.
DENSE = (
  Variant(name="zen-first", make=_zen(), keeps_state=False),
  Variant(name="zen-remembered", make=_zen(), warm_steps=8),
)


def chosen(
  variants: Sequence[Variant], names: Sequence[str] | None
) -> list[Variant]:
  """Those of `variants` that are called for; all if `names` is None.

  Raises:
    ValueError: A name is none of any variant.
  """
  known = [v.name for v in (*BASELINES, *SPARSE, *PINNED, *DENSE)]
  for name in names or ():
    if name not in known:
      raise ValueError(
        f"`--variants` must be among {', '.join(known)}, got {name!r}."
      )
  return [v for v in variants if not names or v.name in names]
