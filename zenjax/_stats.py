"""What a run has shown, in numbers."""

from typing import Any

import numpy as np

from zenjax import _state
from zenjax._sparsify import _told

# Percentiles of recent needs that pinned sizes should hold. A push that
# overflows costs another and a pull, so it is sized for most steps; a pull
# goes on in small chunks, so it is sized for what nearly every step fills.
_PUSH_PERCENTILE = 90
_PULL_PERCENTILE = 10


def stats(state: Any) -> dict[str, dict[str, float]]:
  """Numbers of the last step for each leaf that travels sparse.

  Args:
    state: An optimizer state with a `ZenSyncState` or `SparsifierState`
      anywhere inside.

  Returns:
    By leaf name: `num_rows`, `width`, `devices`, `density` (nonzero rows of a
    device over all, mean), `union_density` (those of any device over all),
    `growth` (their ratio), `push_imbalance` (fullest pair over the mean),
    `pull_imbalance` (fullest owner over the mean), `rounds`, `overflow_rows`
    (of all devices, beyond the first push), `wire_bytes` and `dense_bytes`
    (received by a device; a ring all-reduce's), `went_dense` and `withheld`.
    Empty before the first step. Remote copies send no padding: `wire_bytes` are
    then those of the rows that there were and of their ids, a mean over
    devices.

    With `on_overflow="carry"` `density` counts rows that waited too. Where
    `withheld` is 1 some wait again: `union_density` then counts those that
    came back, and `growth` is NaN.

    Of `exdyna` and `micro` under "sparsifier" (of a second one "sparsifier 2"),
    the fields of `SparsifierStats`, `devices`, `steps`, and `capacity`: what
    held the largest selection of 90 % of the last 64 steps.

  Raises:
    ValueError: There is neither in `state`.
    TypeError: It is called inside `jit`; call it on the state after the step.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.zen_sync("data", sparse=True)
    >>> grads = jnp.zeros((2, 8, 4)).at[:, 3].set(1.0)
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
    >>> _, state = jax.jit(step)(grads)
    >>> zenjax.stats(jax.tree.map(lambda x: x[0], state))["leaf"]["density"]
    0.125
  """
  _state.require_numbers(state, "stats")
  nodes = _state.find(state) if _told.find(state) else _state.require(state)
  return of_leaves(nodes) | _told.numbers(state)


def of_leaves(nodes: list[_state.ZenSyncState]) -> dict[str, dict[str, float]]:
  """`stats` of leaves that travel sparse."""
  found: dict[str, dict[str, float]] = {}
  for node in nodes:
    for name, leaf in node.leaves.items():
      if int(np.asarray(leaf.sizes)[0]):
        found[name] = _numbers(leaf)
  return found


def _numbers(leaf: _state.LeafState) -> dict[str, float]:
  sizes = _state.Sizes(*(int(x) for x in np.asarray(leaf.sizes)))
  last = _state.Last(*(float(x) for x in np.asarray(leaf.last)))
  # The union of some rows says nothing of how all of them overlap.
  growth = ratio(last.union_rows, last.local_rows)
  growth = float("nan") if last.withheld else growth
  mean_owner = last.union_rows / sizes.row_groups
  return {
    "num_rows": sizes.num_rows,
    "width": sizes.width,
    "devices": sizes.devices,
    "scheme": sizes.scheme,
    "column_groups": sizes.column_groups,
    "density": last.local_rows / sizes.num_rows,
    "union_density": last.union_rows / sizes.num_rows,
    "growth": growth,
    "push_imbalance": ratio(last.push_need, last.push_mean),
    "pull_imbalance": ratio(last.pull_need, mean_owner),
    "rounds": last.rounds,
    "overflow_rows": last.overflow_rows,
    "wire_bytes": last.wire_bytes,
    "dense_bytes": last.dense_bytes,
    "went_dense": last.went_dense,
    "withheld": last.withheld,
  }


def ratio(a: float, b: float) -> float:
  """1 where there is nothing to compare with."""
  return a / b if b else 1.0


def advise(
  state: Any,
  percentiles: tuple[float, float] = (_PUSH_PERCENTILE, _PULL_PERCENTILE),
) -> dict[str, tuple[int, int]]:
  """Capacities to pin, from what recent steps needed.

  Args:
    state: An optimizer state with a `ZenSyncState` anywhere inside.
    percentiles: Of the push and of the pull. With `on_overflow="carry"` what
      does not fit waits: pin `(100, 100)` of steps taken without it.

  Returns:
    By leaf name `(push, pull)` for `zen_sync(capacities=...)`: of what the last
    64 steps needed, the 90th percentile of the push and the 10th of the pull,
    which goes on in small chunks. Steps above break-even do not count: they
    take the dense path whatever is pinned, and a first round large enough for
    them would cost the others as much. Leaves without another step, those that
    travel dense, and all before the first step are left out. Where
    `on_overflow="carry"` withheld rows, the pull is one of the rows that came
    back and may be too small.

    The sizes are for the scheme that took these steps: in another's first round
    they may move more than break-even, of which zen_sync warns.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.zen_sync("data", sparse=True)
    >>> grads = jnp.zeros((2, 8, 4)).at[:, 3].set(1.0)
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
    >>> _, state = jax.jit(step)(grads)
    >>> zenjax.advise(jax.tree.map(lambda x: x[0], state))
    {'leaf': (1, 1)}
  """
  _state.require_numbers(state, "advise")
  advice: dict[str, tuple[int, int]] = {}
  for node in _state.require(state):
    steps = min(int(node.step), _state.HISTORY)
    for name, leaf in node.leaves.items():
      num_rows = int(np.asarray(leaf.sizes)[0])
      needs = np.asarray(leaf.history)[:steps]
      needs = needs[needs[:, 0] != _state.DENSE_STEP]
      if num_rows and len(needs) and not bool(leaf.dense):
        advice[name] = capacity(needs[:, 0], needs[:, 1], num_rows, percentiles)
  return advice


def capacity(
  pushes: np.ndarray,
  pulls: np.ndarray,
  num_rows: int,
  percentiles: tuple[float, float] = (_PUSH_PERCENTILE, _PULL_PERCENTILE),
) -> tuple[int, int]:
  """`(push, pull)` to pin for a table whose recent steps needed these."""
  push = max(1, int(np.percentile(pushes, percentiles[0])))
  pull = int(np.percentile(pulls, percentiles[1]))
  return min(push, num_rows), min(max(push, pull), num_rows)
