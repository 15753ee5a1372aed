"""Sparsifiers in the place of zen_sync: what makes one, what its steps gave."""

from collections.abc import Sequence
import dataclasses
from typing import Any, Literal

import numpy as np
import optax

from examples.studies.common.cluster import AXIS
from examples.studies.common.loop import Run
import zenjax

# These agree on what is selected, and exchange it themselves.
EXCLUSIVE = {"exdyna": zenjax.sparsify.exdyna, "micro": zenjax.sparsify.micro}

# Of these every device selects for itself, and zen_sync sends the union.
LOCAL = {"top_k": zenjax.sparsify.top_k, "random_k": zenjax.sparsify.random_k}

KINDS = (*EXCLUSIVE, *LOCAL)


# Steps after which a threshold has settled.
_SETTLED = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Sparsifier:
  """Says how a part of the whole model's gradient is sent.

  Attributes:
    kind: One of `KINDS`.
    density: The part that a step is to send: of all devices together, or of
      each device where the kind is one of `LOCAL`.
    controller: What moves the threshold of `EXCLUSIVE`.
    scale: Gradients are multiplied by it before, and updates divided by it
      after: training is the same, and the threshold must be another.
  """

  kind: str
  density: float
  controller: Literal["damped", "paper"] = "damped"
  scale: float = 1.0

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    """Makes what stands first in a chain."""
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
    sync = zenjax.zen_sync(AXIS, sparse=True, unit="element")
    return optax.flatten(
      optax.chain(zenjax.sparsify.error_feedback(select, AXIS), sync)
    )


def stats(opt_state: Any) -> dict[str, dict[str, float]]:
  """Returns what a sparsifier of either form did in the last step.

  Returns:
    Under "sparsifier" numbers as `zenjax.stats` has them of `exdyna`.
  """
  (numbers,) = zenjax.stats(opt_state).values()
  return {"sparsifier": numbers}


def settled(run: Run) -> dict[str, float]:
  """Returns means over the steps from the 100th on, or over all of a short run.

  Args:
    run: One with a sparsifier.

  Returns:
    The numbers of `zenjax.stats`, and `first`: the first step that counts.
  """
  first = _SETTLED if len(run.stats) > _SETTLED else 0
  steps = [last["sparsifier"] for last in run.stats[first:]]
  means = {key: float(np.mean([s[key] for s in steps])) for key in steps[0]}
  return means | {"first": float(first)}


def lines(run: Run) -> Sequence[str]:
  """Returns the same for a person."""
  s = settled(run)
  dense = s["dense_bytes"] / s["wire_bytes"] if s["wire_bytes"] else 1.0
  return [
    f"mean of steps {s['first']:.0f} to {len(run.stats)}: density"
    f" {s['density']:.4%} of {s['density_wanted']:.4%} wanted, build-up"
    f" {s['build_up']:.3f}, imbalance {s['imbalance']:.3f},",
    f"threshold {s['threshold']:.3g}, residual norm {s['residual_norm']:.3g},"
    f" {s['rounds']:.2f} rounds, {s['wire_bytes'] / 1e6:.3f} MB received by a"
    f" device, {dense:.1f}x fewer than a dense mean",
  ]
