"""What a sparsifier remembers, and what it tells of a step."""

from typing import NamedTuple

import jax

# Steps whose fullest selection is kept, for the advice on capacities.
HISTORY = 64


class SparsifierStats(NamedTuple):
  """Numbers of the last step, `[] float32` each; zeros before the first.

  `zenjax.sparsifier_stats` has them as Python's.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.micro("data", density=0.001)
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> state = zenjax.init(tx, {"w": jnp.zeros(50_000)}, mesh, "data")
    >>> float(state.stats.rounds)
    0.0
  """

  density_wanted: jax.Array
  density: jax.Array  # what all devices selected over the size of the model
  threshold: jax.Array  # that the step selected with
  build_up: jax.Array  # the union of all selections over the `k` wanted
  imbalance: jax.Array  # the largest selection times n over their sum
  residual_norm: jax.Array  # of all devices' residuals as the step began
  wire_bytes: jax.Array  # received by a device
  dense_bytes: jax.Array  # those of a ring all-reduce
  rounds: jax.Array


class SparsifierState(NamedTuple):
  """State of `exdyna` and `micro`; all but the residual equal on all devices.

  Threshold, drift, parts and counts are those that the last step worked with.
  The next one moves them first.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.exdyna("data", density=0.001)
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> state = zenjax.init(tx, {"w": jnp.zeros(50_000)}, mesh, "data")
    >>> state.residual.shape, state.parts.tolist()  # of 1,024 blocks
    ((2, 50000), [512, 512])
  """

  step: jax.Array  # [] int32, steps taken
  # `N` under a fingerprint of the tree: a key is there when a step is traced,
  # and when a checkpoint is restored into a state.
  tree: dict[str, jax.Array]
  op: dict[str, jax.Array]  # 1 under "mean" or "sum", a key as in `tree`
  residual: jax.Array  # [1, N] on a device, [n, N] globally
  threshold: jax.Array  # [] float32, 0 where it is still to be sampled
  drift: jax.Array  # [] float32, what its logarithm moves by a step
  parts: jax.Array  # [n] int32, blocks (ExDyna) or elements (MiCRO)
  counts: jax.Array  # [n] int32, what was selected in each partition
  fullest: jax.Array  # [HISTORY] int32, the largest count of recent steps
  stats: SparsifierStats


class FeedbackLeaf(NamedTuple):
  """What `error_feedback` remembers of one leaf, on each device its own.

  Globally all but `wanted` have `n` in the place of the first 1.
  """

  residual: jax.Array | None  # [1, *shape]; None where all of it is sent
  momentum: jax.Array | None  # [1, *shape]; None without momentum correction
  threshold: jax.Array  # [1] float32, of the last step; NaN where there is none
  selected: jax.Array  # [1] int32, elements that the last step selected
  wanted: jax.Array  # [] float32, part of the leaf; NaN where none was named


class ErrorFeedbackState(NamedTuple):
  """State of `error_feedback`.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.error_feedback(zenjax.top_k(0.01), "data")
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> state = zenjax.init(tx, {"w": jnp.zeros((400, 80))}, mesh, "data")
    >>> state.leaves["w"].residual.shape
    (2, 400, 80)
  """

  step: jax.Array  # [] int32, steps taken
  leaves: dict[str, FeedbackLeaf]  # by name; those that are remembered
