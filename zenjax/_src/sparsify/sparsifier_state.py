"""The states of sparsifiers, and their statistics of a step."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
import numpy as np

from zenjax._src.core.folding import folded
from zenjax._src.sparsify import partitions

# Steps whose fullest selection is kept, for the advice on capacities.
HISTORY = 64


class SparsifierStats(NamedTuple):
  """Numbers of the last step, `[] float32` each; zeros before the first.

  `zenjax.stats` returns them as Python numbers.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.sparsify.micro("data", density=0.001)
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> state = zenjax.init_state(tx, {"w": jnp.zeros(50_000)}, mesh, "data")
    >>> float(state.stats.rounds)
    0.0
  """

  density_wanted: jax.Array
  density: jax.Array  # the part of the model that all devices selected
  threshold: jax.Array  # the threshold of the selection
  build_up: jax.Array  # the union of all selections over the number wanted
  imbalance: jax.Array  # the largest selection over the mean
  residual_norm: jax.Array  # of the residuals of all devices before the step
  wire_bytes: jax.Array  # received per device
  dense_bytes: jax.Array  # received per device in a ring all-reduce
  rounds: jax.Array


class SparsifierState(NamedTuple):
  """State of `exdyna` and `micro`; all but the residual equal on all devices.

  Threshold, drift, parts and counts are from the last step. The next step
  moves them first.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.sparsify.exdyna("data", density=0.001)
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> state = zenjax.init_state(tx, {"w": jnp.zeros(50_000)}, mesh, "data")
    >>> state.residual.shape, state.parts.tolist()  # of 1,024 blocks
    ((2, 50000), [512, 512])
  """

  step: jax.Array  # [] int32, steps taken
  # `N` under a fingerprint of the tree: keys are known when a step is traced
  # and when a checkpoint is restored.
  tree: dict[str, jax.Array]
  op: dict[str, jax.Array]  # 1 under "mean" or "sum"
  residual: jax.Array  # [1, N] on a device, [n, N] globally
  threshold: jax.Array  # [] float32, 0 before it is sampled
  drift: jax.Array  # [] float32, added to its logarithm in a step
  parts: jax.Array  # [n] int32, blocks (ExDyna) or elements (MiCRO)
  counts: jax.Array  # [n] int32, elements selected in each partition
  fullest: jax.Array  # [HISTORY] int32, the largest count of recent steps
  stats: SparsifierStats

  @property
  def devices(self) -> int:
    """The number of devices that a global state was made for."""
    return self.residual.shape[0]

  @property
  def averages(self) -> bool:
    """True if residuals will be averaged over devices, not summed."""
    return "mean" in self.op

  def specs(self, split: PartitionSpec) -> "SparsifierState":
    """Returns partition specs: each device has its own residual."""
    same = jax.tree.map(lambda _: PartitionSpec(), self)
    return same._replace(residual=split)

  def on_devices(self, devices: int, averages: Any) -> "SparsifierState":
    """Converts a state in host memory to another number of devices.

    Residuals are folded so that no gradient is lost. Partitions start evenly
    again, without counts. The threshold and its drift stay.
    """
    del averages  # The state has its own.
    old = self.devices
    if old == devices:
      return self
    if len(self.parts) != old:
      raise ValueError(
        f"`state` has residuals of {old} devices, and partitions of"
        f" {len(self.parts)}. Make it with the `axis_name` of the sparsifier:"
        " `zenjax.init_state(tx, params, mesh, axis_name)`."
      )
    return self._replace(
      step=np.zeros((), np.int32),
      residual=folded(self.residual, devices, averages=self.averages),
      parts=partitions.even(int(np.asarray(self.parts).sum()), devices),
      counts=np.zeros(devices, np.int32),
      fullest=np.zeros(HISTORY, np.int32),
    )


# In place of a threshold or a density that is not known. NaN in a state would
# stop users who look for their own NaN with `jax_debug_nans`.
UNKNOWN = -1.0


class FeedbackLeaf(NamedTuple):
  """The memory of `error_feedback` for one leaf; different on each device.

  As global arrays, all but `wanted` have a first dimension of `n` instead of 1.
  """

  residual: jax.Array | None  # [1, *shape]; None if all elements are sent
  momentum: jax.Array | None  # [1, *shape]; None without momentum correction
  threshold: jax.Array  # [1] float32, of the last step; or UNKNOWN
  selected: jax.Array  # [1] int32, elements that the last step selected
  wanted: jax.Array  # [] float32, part of the leaf; UNKNOWN if none was named

  @property
  def devices(self) -> int:
    """The number of devices that a global state was made for."""
    return self.selected.shape[0]

  def specs(self, split: PartitionSpec) -> "FeedbackLeaf":
    """Returns partition specs: each device has its own memory."""
    own = jax.tree.map(lambda _: split, self)
    return own._replace(wanted=PartitionSpec())


class ErrorFeedbackState(NamedTuple):
  """State of `error_feedback`.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.sparsify.error_feedback(zenjax.sparsify.top_k(0.01), "data")
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> state = zenjax.init_state(tx, {"w": jnp.zeros((400, 80))}, mesh, "data")
    >>> state.leaves["w"].residual.shape
    (2, 400, 80)
  """

  step: jax.Array  # [] int32, steps taken
  leaves: dict[str, FeedbackLeaf]  # by name; leaves with residual or momentum

  def specs(self, split: PartitionSpec) -> "ErrorFeedbackState":
    """Returns partition specs: each device has its own memory."""
    leaves = {name: leaf.specs(split) for name, leaf in self.leaves.items()}
    return self._replace(step=PartitionSpec(), leaves=leaves)

  def on_devices(
    self, devices: int, averages: Callable[[str], bool]
  ) -> "ErrorFeedbackState":
    """Converts a state in host memory to another number of devices.

    Residuals and momenta are folded so that no gradient is lost.

    Args:
      devices: The number of devices.
      averages: `(name) -> bool`, whether the residual of a leaf will be
        averaged over devices, not summed.
    """
    leaves = dict(self.leaves)
    for name, leaf in leaves.items():
      if leaf.devices != devices:
        mean = averages(name)
        fold = functools.partial(folded, devices=devices, averages=mean)
        leaves[name] = leaf._replace(
          residual=jax.tree.map(fold, leaf.residual),  # None stays None.
          momentum=jax.tree.map(fold, leaf.momentum),
          threshold=np.full(devices, UNKNOWN, np.float32),
          selected=np.zeros(devices, np.int32),
        )
    return self._replace(leaves=leaves)
