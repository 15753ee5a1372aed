"""What a run has shown of its tables, for `scheme="auto"`."""

from typing import Any

import numpy as np

from zenjax import _plan
from zenjax import _state
from zenjax._cost import Profile


def profile(state: Any) -> dict[str, Profile]:
  """Densities of the last step, to choose schemes by.

  Args:
    state: An optimizer state with a `ZenSyncState` anywhere inside.

  Returns:
    By leaf name what `zen_sync(scheme="auto", profile=...)` takes. Leaves that
    were not looked at are left out: those summed dense from the start, and all
    before the first step.

  Raises:
    ValueError: There is no `ZenSyncState` in `state`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.zen_sync("data", sparse=True)
    >>> grads = jnp.zeros((2, 8, 4)).at[:, 3].set(1.0)
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
    >>> _, state = jax.jit(step)(grads)
    >>> state = jax.tree.map(lambda x: x[0], state)
    >>> zenjax.profile(state)["leaf"].union
    1.0
  """
  _state.require_numbers(state, "profile")
  found = {}
  for node in _state.require(state):
    for name, leaf in node.leaves.items():
      sizes = _state.Sizes(*(int(x) for x in np.asarray(leaf.sizes)))
      last = _state.Last(*(float(x) for x in np.asarray(leaf.last)))
      if sizes.num_rows and np.isfinite(last.local_rows):
        found[name] = _of(sizes, last)
  return found


def _of(sizes: _state.Sizes, last: _state.Last) -> Profile:
  groups, n = sizes.row_groups, sizes.devices
  # The fullest pair is fuller than the mean by chance, and because a device
  # has more rows than the others: what chance does not explain.
  chance = _plan.fullest(last.local_rows, groups, n * groups)
  skewed = max(last.push_need / chance, 1.0) if chance else 1.0
  return Profile(
    rows=last.local_rows,
    fullest=min(last.local_rows * skewed, sizes.num_rows),
    union=last.union_rows,
    devices=n,
  )
