"""Sparsifiers in the place of zen_sync: what makes one, what its steps gave."""

from collections.abc import Sequence
import dataclasses
from typing import Any, Literal

import numpy as np
import optax

from examples.studies.common.cluster import AXIS
from examples.studies.common.loop import Run
import zenjax
from zenjax import compress

# Devices agree on what is selected.
EXCLUSIVE = {"exdyna": compress.ExDyna, "micro": compress.MiCRO}

# Each device sends a part of its own gradient.
LOCAL = {"top_k": compress.TopK, "random_k": compress.RandomK}

KINDS = (*EXCLUSIVE, *LOCAL)

# The name of a sparsifier's numbers in the statistics of a run.
STATS = "compressed"

# Steps after which a threshold has settled.
_SETTLED = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Sparsifier:
  """Says how a part of the whole model's gradient is sent.

  Attributes:
    kind: One of `KINDS`.
    density: The part to send in a step: by all devices together, or by each
      device if the kind is one of `LOCAL`.
    controller: What moves the threshold of `EXCLUSIVE`.
    scale: Gradients are multiplied by it before, and updates divided by it
      after: training is the same, and the threshold must be another.
  """

  kind: str
  density: float
  controller: Literal["sampled", "paper"] = "sampled"
  scale: float = 1.0

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    """Makes the first transformation of a chain."""
    # One vector, so that `LOCAL` selects the largest of all leaves, too.
    inner = optax.flatten(
      compress.all_reduce(self._compressor(), AXIS, leaves=True)
    )
    if self.scale == 1:
      return inner
    return optax.chain(
      optax.scale(self.scale), inner, optax.scale(1 / self.scale)
    )

  def stats(self, opt_state: Any) -> dict[str, dict[str, float]]:
    """Returns `zenjax.stats`, with the density that was asked for."""
    numbers = zenjax.stats(opt_state)[STATS]
    # `RandomK` counts nothing, because it always sends its density.
    wanted = {"density": self.density, "density_wanted": self.density}
    return {STATS: wanted | numbers}

  def _compressor(self) -> compress.Compressor:
    if self.kind in EXCLUSIVE:
      make = EXCLUSIVE[self.kind]
      return make(self.density, controller=self.controller)
    return LOCAL[self.kind](self.density)


def settled(run: Run) -> dict[str, float]:
  """Returns means over the steps from the 100th on, or over all of a short run.

  Args:
    run: A run with a sparsifier.

  Returns:
    The numbers of `Sparsifier.stats`, and `first`: the first step that counts.
  """
  first = _SETTLED if len(run.stats) > _SETTLED else 0
  steps = [last[STATS] for last in run.stats[first:]]
  means = {key: float(np.mean([s[key] for s in steps])) for key in steps[0]}
  return means | {"first": float(first)}


def lines(run: Run) -> Sequence[str]:
  """Returns the same numbers as text."""
  s = settled(run)
  dense = s["dense_bytes"] / s["wire_bytes"] if s["wire_bytes"] else 1.0
  counted = [
    f"{name.replace('_', '-')} {s[name]:.3g}"
    for name in ("build_up", "imbalance", "threshold", "rounds")
    if name in s
  ]
  return [
    f"mean of steps {s['first']:.0f} to {len(run.stats)}: density"
    f" {s['density']:.4%} of {s['density_wanted']:.4%} wanted, residual norm"
    f" {s['residual_norm']:.3g},",
    f"{s['wire_bytes'] / 1e6:.3f} MB received by a device, {dense:.1f}x fewer"
    " than a dense mean",
    *([", ".join(counted)] if counted else []),
  ]
