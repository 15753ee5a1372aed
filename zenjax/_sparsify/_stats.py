"""What sparsifiers did in a step, in numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenjax import _state
from zenjax._sparsify._state import ErrorFeedbackState
from zenjax._sparsify._state import FeedbackLeaf
from zenjax._sparsify._state import SparsifierState


def sparsifier_stats(state: Any) -> dict[str, dict[str, float]]:
  """Numbers of the last step of every sparsifier, beside `zenjax.stats`.

  Args:
    state: An optimizer state with that of `error_feedback`, `exdyna` or `micro`
      anywhere inside, of all devices, as `zenjax.init` makes it. With several
      processes all call this.

  Returns:
    By name of the leaf, and by `"all"` for `exdyna` and `micro`, which see one
    vector (`"all 2"` and so on where there are more of these):
    `density_wanted`, `density` (what a device selected over the size, mean; of
    `exdyna` and `micro` what all selected), `threshold` (mean over devices),
    `build_up` (the union of all selections over what one device should select:
    up to the number of devices), `imbalance` (the largest selection times
    devices over the sum), `residual_norm` (of all devices, as it is now; of
    `exdyna` and `micro` as the step began). NaN for what is not known: a
    threshold of `top_k` by `method="exact"`, the union where no
    `zen_sync(unit="element")` counted it.

  Raises:
    ValueError: There is no sparsifier's state in `state`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> import optax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> top = zenjax.top_k(0.25, sparse=True)
    >>> tx = optax.chain(
    ...   zenjax.error_feedback(top, "data"),
    ...   zenjax.zen_sync("data", sparse=True, unit="element"),
    ... )
    >>> def step(w, state, grads):
    ...   updates, state = tx.update(grads[0], state)
    ...   return w - updates, state, 0.0
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> grads = jnp.array([[7.0, 2.0, 0.0, 3.0], [1.0, 1.0, 1.0, -7.0]])
    >>> state = zenjax.init(tx, grads[0], mesh, "data")
    >>> _, state, _ = step(grads[0], state, grads)
    >>> stats = zenjax.sparsifier_stats(state)["leaf"]
    >>> stats["density"], stats["build_up"], stats["residual_norm"]
    (0.25, 2.0, 4.0)
  """
  _state.require_numbers(state, "sparsifier_stats")
  kinds = ErrorFeedbackState | SparsifierState
  nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
  nodes = [node for node in nodes if isinstance(node, kinds)]
  if not nodes:
    raise ValueError(
      "`state` must hold the state of a sparsifier, got"
      f" {type(state).__name__}; give the state that"
      " `optax.chain(error_feedback(..), ..)` returned."
    )
  unions = _unions(state)
  found: dict[str, dict[str, float]] = {}
  vectors = 0
  for node in nodes:
    if isinstance(node, SparsifierState):
      told = node.stats._asdict()
      vectors += 1
      name = f"all {vectors}" if vectors > 1 else "all"
      found[name] = {key: float(told[key]) for key in _KEYS}
    else:
      found |= _of_leaves(node, unions)
  return found


def of_feedback(state: Any) -> dict[str, dict[str, float]]:
  """Those of `error_feedback` alone."""
  found: dict[str, dict[str, float]] = {}
  unions = _unions(state)
  for node in find_feedback(state):
    found |= _of_leaves(node, unions)
  return found


def find_feedback(state: Any) -> list[ErrorFeedbackState]:
  """Every `ErrorFeedbackState` inside an optimizer state, in order."""
  return _state.nodes(state, ErrorFeedbackState)


def _of_leaves(
  node: ErrorFeedbackState, unions: dict[str, tuple[int, float]]
) -> dict[str, dict[str, float]]:
  return {
    name: _numbers(leaf, unions.get(name))
    for name, leaf in node.leaves.items()
    if leaf.residual is not None
  }


_KEYS = (
  "density_wanted",
  "density",
  "threshold",
  "build_up",
  "imbalance",
  "residual_norm",
)


def _numbers(leaf: FeedbackLeaf, union: tuple[int, float] | None):
  assert leaf.residual is not None
  size = int(np.prod(leaf.residual.shape[1:]))
  told = {key: float(x) for key, x in _reduced(leaf).items()}
  devices, wanted = leaf.selected.shape[0], float(leaf.wanted)
  density = told.pop("selected") / (devices * size)
  elements = float("nan")
  if devices == 1:
    elements = density * size
  elif union is not None and union[0] == size:
    elements = union[1]
  return {
    "density_wanted": wanted,
    "density": density,
    "build_up": elements / (wanted * size),
  } | told


@jax.jit
def _reduced(leaf: FeedbackLeaf) -> dict[str, jax.Array]:
  """Numbers of all devices; no device has all that they are made of."""
  assert leaf.residual is not None
  count = leaf.selected.astype(jnp.float32)
  total = jnp.sum(count)
  even = jnp.max(count) * count.shape[0] / jnp.maximum(total, 1.0)
  return {
    "selected": total,
    "threshold": jnp.mean(leaf.threshold),
    "imbalance": jnp.where(total > 0, even, 1.0),
    "residual_norm": jnp.sqrt(
      jnp.sum(jnp.square(leaf.residual.astype(jnp.float32)))
    ),
  }


def _unions(state: Any) -> dict[str, tuple[int, float]]:
  """By leaf, what `zen_sync` sends as a whole: how many, and of how many."""
  found = {}
  for node in _state.find(state):
    for name, leaf in node.leaves.items():
      sizes = _state.Sizes(*np.asarray(leaf.sizes).tolist())
      last = _state.Last(*np.asarray(leaf.last).tolist())
      if not last.withheld:
        found[name] = sizes.num_rows, last.union_rows
  return found
