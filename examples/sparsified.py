"""Sparsifiers in the place of zen_sync: what makes one, what its steps gave."""

from collections.abc import Sequence
import dataclasses
from typing import Literal

import numpy as np
import optax
from train_loop import AXIS
from train_loop import History

import zenjax

KINDS = {"exdyna": zenjax.exdyna, "micro": zenjax.micro}

# Steps after which a threshold has settled.
SETTLED = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Sparsifier:
  """What sends a part of the whole model's gradient.

  Attributes:
    kind: Of `KINDS`.
    density: The part that a step is to send.
    controller: What moves the threshold.
    scale: Gradients are multiplied by it before, and updates divided by it
      after: training is the same, and the threshold must be another.
  """

  kind: str
  density: float
  controller: Literal["damped", "paper"] = "damped"
  scale: float = 1.0

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    """To stand first in a chain."""
    inner = KINDS[self.kind](AXIS, self.density, controller=self.controller)
    if self.scale == 1:
      return inner
    return optax.chain(
      optax.scale(self.scale), inner, optax.scale(1 / self.scale)
    )


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
    f" {s['density_wanted']:.4%} wanted ({s['build_up']:.3f} of it), imbalance"
    f" {s['imbalance']:.3f},",
    f"threshold {s['threshold']:.3g}, residual norm {s['residual_norm']:.3g},"
    f" {s['rounds']:.2f} rounds, {s['wire_bytes'] / 1e6:.3f} MB received by a"
    f" device, {dense:.1f}x fewer than a dense mean",
  ]
