"""Sparsifiers in the place of zen_sync: what makes one, what its steps gave."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal

import numpy as np
import optax
from train_loop import AXIS
from train_loop import History

import zenjax

# These agree on what is selected, and exchange it themselves.
EXCLUSIVE = {"exdyna": zenjax.sparsify.exdyna, "micro": zenjax.sparsify.micro}

# Of these every device selects for itself, and zen_sync sends the union.
LOCAL = {"top_k": zenjax.sparsify.top_k, "random_k": zenjax.sparsify.random_k}

KINDS = (*EXCLUSIVE, *LOCAL)


# Steps after which a threshold has settled.
SETTLED = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Sparsifier:
  """What sends a part of the whole model's gradient.

  Attributes:
    kind: Of `KINDS`.
    density: The part that a step is to send, of all devices together; of
      `LOCAL` each device.
    controller: What moves the threshold of `EXCLUSIVE`.
    scale: Gradients are multiplied by it before, and updates divided by it
      after: training is the same, and the threshold must be another.
    capacities: Of `LOCAL`, the sizes that zen_sync's first round has.
  """

  kind: str
  density: float
  controller: Literal["damped", "paper"] = "damped"
  scale: float = 1.0
  capacities: Mapping[str, tuple[int, int]] | None = None

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    """To stand first in a chain."""
    inner = self._inner()
    if self.scale == 1:
      return inner
    return optax.chain(
      optax.scale(self.scale), inner, optax.scale(1 / self.scale)
    )

  def _inner(self) -> optax.GradientTransformationExtraArgs:
    if self.kind in EXCLUSIVE:
      make = EXCLUSIVE[self.kind]
      return make(AXIS, self.density, controller=self.controller)
    # One vector, as `EXCLUSIVE` sees the model: the largest of all leaves.
    select = LOCAL[self.kind](self.density, sparse=True)
    sync = zenjax.zen_sync(
      AXIS, sparse=True, unit="element", capacities=self.capacities
    )
    return optax.flatten(
      optax.chain(zenjax.sparsify.error_feedback(select, AXIS), sync)
    )


def stats(opt_state: Any) -> dict[str, dict[str, float]]:
  """What a sparsifier of either form did in the last step.

  Returns:
    Under "sparsifier" numbers as `zenjax.stats` has them of `exdyna`.
  """
  (numbers,) = zenjax.stats(opt_state).values()
  return {"sparsifier": numbers}


def settled(history: History) -> dict[str, float]:
  """Means over the steps from `SETTLED` on, or over all where there are fewer.

  Args:
    history: A run with one sparsifier.

  Returns:
    The numbers of `zenjax.stats`, and `first`: the first step that counts.
  """
  first = SETTLED if len(history.stats) > SETTLED else 0
  steps = [last["sparsifier"] for last in history.stats[first:]]
  means = {key: float(np.mean([s[key] for s in steps])) for key in steps[0]}
  return means | {"first": float(first)}


def lines(history: History) -> Sequence[str]:
  """The same for a person."""
  s = settled(history)
  first, end = int(s["first"]), len(history.stats)
  dense = s["dense_bytes"] / s["wire_bytes"] if s["wire_bytes"] else 1.0
  return [
    f"mean of steps {first} to {end}: density {s['density']:.4%} of"
    f" {s['density_wanted']:.4%} wanted, build-up {s['build_up']:.3f},"
    f" imbalance {s['imbalance']:.3f},",
    f"threshold {s['threshold']:.3g}, residual norm {s['residual_norm']:.3g},"
    f" {s['rounds']:.2f} rounds, {s['wire_bytes'] / 1e6:.3f} MB received by a"
    f" device, {dense:.1f}x fewer than a dense mean",
  ]
