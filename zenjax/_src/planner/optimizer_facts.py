"""Finds the properties of an optimizer that the choice of forms depends on."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax._src.rows import lazy
from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_analysis
from zenjax._src.sync import sync_state


class Optimizer:
  """Properties of an optimizer that the choice of forms depends on.

  Attributes:
    sums: True if `tx` sums over all rows, as clipping by a norm does, or may do
      so. Owners hold only some rows, so `tx` then has no form with owners.
    sums_all: True if updates depend on sums over all gradients, either in `tx`
      or by `clip_norm`.
    resting: Names of the tables whose rows do not change without a gradient.
    clip_norm: Norm to which gradients are clipped before `tx`, if any.
    mixing: Why rows of a table cannot be updated by themselves, by name.

  Raises:
    ValueError: `tx` synchronizes or accumulates gradients.
  """

  def __init__(
    self, tx: optax.GradientTransformation, params: Any, clip_norm: float | None
  ):
    self._tx = optax.with_extra_args_support(tx)
    types = jax.tree.map(row_analysis.type_of, params)
    self._structure = jax.tree.structure(types)
    self._named = leaf_util.named_leaves(types)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    tables = [
      i for i, (_, x) in enumerate(self._named) if x.ndim == 2 and is_float(x)
    ]
    state = jax.eval_shape(self._tx.init, types)
    lazy.require_no_accumulation(state, "tx")
    if sync_state.nodes(state, sync_state.ZenSyncState):
      raise ValueError(
        "`tx` must be the optimizer as for one device, but it synchronizes"
        " gradients. Leave zen_sync, lazy_rows and sharded_optimizer out: the"
        " plan adds them."
      )
    rows = dict.fromkeys(tables, 2)
    analysis = row_analysis.analysis_of(self._tx, types, state, types, {}, rows)
    self.sums = analysis.wants_more or analysis.sums is not None
    self.clip_norm = clip_norm
    self.sums_all = self.sums or clip_norm is not None
    name_of = lambda i: self._named[i][0]
    self.resting = {name_of(i) for i in analysis.rests}
    self.mixing = {name_of(i): why for i, why in analysis.refusals.items()}

  def state_row(self, name: str) -> float:
    """Returns bytes of the optimizer state for one row of a table."""
    shape = dict(self._named)[name].shape
    added = self._state_bytes({name: shape[0] + 1}) - self._state_bytes({})
    return added / math.prod(shape[1:-1])

  def bytes_beside(self, tables: Sequence[str]) -> float:
    """Returns bytes of parameters, gradients and state except for tables."""
    rest = [leaf for name, leaf in self._named if name not in tables]
    held = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in rest)
    return held + self._state_bytes(dict.fromkeys(tables, 1))

  def _state_bytes(self, rows: Mapping[str, int]) -> float:
    """Returns bytes of the state if the tables in `rows` had so many rows."""
    leaves = [
      jax.ShapeDtypeStruct((rows[name], *x.shape[1:]), x.dtype)
      if name in rows
      else x
      for name, x in self._named
    ]
    params = jax.tree.unflatten(self._structure, leaves)
    state = jax.eval_shape(self._tx.init, params)
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)))
