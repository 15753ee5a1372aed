"""What the choice of a table's form depends on of an optimizer.

Sizes are those of its state's shapes. What it does is seen by running it, on a
miniature of the parameters with few rows and columns.
"""

from collections.abc import Mapping, Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.rows import leaf_util

# Rows and columns of the miniature, at most.
_FEW = 4
# Steps without a gradient, and how far counts of steps are set ahead: learning
# rates may begin at zero, or end there.
_STEPS = 8
_AHEAD = 0, 1_000, 100_000


class Optimizer:
  """Reads off an optimizer what the choice of forms depends on."""

  def __init__(self, tx: optax.GradientTransformation, params: Any):
    self._tx = optax.with_extra_args_support(tx)
    self._types = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
    )
    self._named = leaf_util.named_leaves(self._types)

  def state_row(self, name: str) -> float:
    """Returns bytes of the state that one more row of a table would add."""
    shape = dict(self._named)[name].shape
    added = self._state_bytes({name: shape[0] + 1}) - self._state_bytes({})
    return added / math.prod(shape[1:-1])

  def bytes_beside(self, tables: Sequence[str]) -> float:
    """Returns bytes of parameters, gradients and state without tables."""
    rest = [leaf for name, leaf in self._named if name not in tables]
    held = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in rest)
    return held + self._state_bytes(dict.fromkeys(tables, 1))

  def rests(self, name: str) -> bool:
    """Returns True if rows of a table stay as they are without a gradient."""
    return self._seen[0].get(name, False)

  @property
  def sums_all(self) -> bool:
    """True if updates depend on sums over all gradients, as clipping does."""
    return self._seen[1]

  def _state_bytes(self, rows: Mapping[str, int]) -> float:
    """Returns bytes of the state if tables had so many rows."""
    leaves = [
      jax.ShapeDtypeStruct((rows[name], *x.shape[1:]), x.dtype)
      if name in rows
      else x
      for name, x in self._named
    ]
    state = jax.eval_shape(self._tx.init, self._tree(leaves))
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)))

  def _tree(self, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(self._types), leaves)

  def _draw(self, seed: int) -> Any:
    """Returns random values of the miniature's parameters."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _, x in self._named:
      shape = [min(d, _FEW) for d in x.shape]
      drawn.append(jnp.asarray(1 + rng.random(shape), x.dtype))
    return self._tree(drawn)

  @functools.cached_property
  def _seen(self) -> tuple[dict[str, bool], bool]:
    """Returns which leaves rest, and whether updates sum over all gradients.

    An optimizer that cannot be run by gradients alone is taken for the worst.
    """
    try:
      with jax.debug_nans(False), jax.debug_infs(False):
        return self._resting(), self._spreads()
    except Exception:  # pylint: disable=broad-except
      return {}, True

  def _stepped(self) -> tuple[Any, Any]:
    """Returns parameters and a state after some steps."""
    params = self._draw(0)
    state = self._tx.init(params)
    for seed in range(1, 3):
      updates, state = self._tx.update(self._draw(seed), state, params)
      params = optax.apply_updates(params, updates)
    return params, state

  def _resting(self) -> dict[str, bool]:
    """Returns which leaves no step moves whose gradient is zero."""
    params, state = self._stepped()
    zeros = jax.tree.map(jnp.zeros_like, params)
    rests = {name: True for name, _ in self._named}
    for ahead in _AHEAD:
      own = jax.tree.map(functools.partial(_set_ahead, by=ahead), state)
      for _ in range(_STEPS):
        updates, own = self._tx.update(zeros, own, params)
        for name, x in leaf_util.named_leaves(updates):
          rests[name] &= not bool(jnp.any(x != 0))
    return rests

  def _spreads(self) -> bool:
    """Says whether one row that is NaN changes updates of other rows."""
    params, state = self._stepped()
    usual = self._draw(5)
    broken = jax.tree.map(
      lambda x: x.at[:1].set(jnp.nan) if x.ndim else x, usual
    )
    outs = [self._tx.update(g, state, params)[0] for g in (usual, broken)]
    return any(
      bool(jnp.any(a[1:] != b[1:]) if a.ndim else jnp.any(a != b))
      for a, b in zip(*map(jax.tree.leaves, outs))
    )


def _set_ahead(x: Any, by: int) -> Any:
  return x + by if jnp.issubdtype(jnp.result_type(x), jnp.integer) else x
