"""Reads statistics of a run from an optimizer state."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import jax
import numpy as np

from zenjax._src.compress import compress_state
from zenjax._src.compress.compress_state import CompressState
from zenjax._src.machine.cost import Profile
from zenjax._src.rows import norm
from zenjax._src.schemes import buffer_sizes
from zenjax._src.sync import sync_state
from zenjax._src.sync.sync_state import Last
from zenjax._src.sync.sync_state import LeafState
from zenjax._src.sync.sync_state import Sizes

# Numbers by leaf or compressor, and by the name of the statistic.
Stats = dict[str, dict[str, float]]


@overload
def stats(state: Any) -> Stats: ...


@overload
def stats(state: Any, *, flat: Literal[True]) -> dict[str, float]: ...


def stats(state: Any, *, flat: bool = False) -> Stats | dict[str, float]:
  """Returns statistics of the last step, by parameter and by compressor.

  Use it to log what each step sends. `zenjax.report` prints the same numbers.
  If the state holds residuals and its devices belong to several processes, call
  `stats` in all of them. The reference page "Statistics"
  defines every name.

  Args:
    state: An optimizer state with a `ZenSyncState`, `ShardedOptimizerState` or
      `CompressState` anywhere inside.
    flat: Whether to return one dictionary with keys such as
      "parameter/density", for metric writers, instead of one for each
      parameter.

  Returns:
    Statistics by parameter, empty before the first step:

    - Parameters that are sent sparsely: `num_rows`, `width`, `devices`,
      `density` and `union_density` (part of the rows that one device, or any
      device, touched), `growth` (their ratio), `push_imbalance` and
      `pull_imbalance` (fullest buffer over the mean), `rounds`, `wire_bytes`
      and `dense_bytes` (received per device, and what a dense all-reduce would
      take), `went_dense`, `scheme` (a number), and `column_groups`.
    - Tables of `zenjax.tables.shard`: the same, and `owners`, `room` (buffer
      size for gradients) and `fetch_rounds`.
    - "compressed", for `zenjax.compress.all_reduce` ("compressed 2" and so on
      for others, and for the groups of a plan): `leaves`, `steps`,
      `wire_bytes`, `dense_bytes`, `residual_norm`, and what the compressor
      counts, such as the `density` of a sparsifier.

  Raises:
    ValueError: `state` holds none of these states.
    TypeError: `stats` is called inside `jit`; call it on the state after the
      step.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = zenjax.zen_sync("data", sparse=True, unit="element")
    >>> def step(state, grads):
    ...   _, state = tx.update(grads[0], state)
    ...   return state, ()
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> grads = jnp.array([[7.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -7.0]])
    >>> state = zenjax.init_state(tx, grads[0], mesh, "data")
    >>> state, _ = step(state, grads)
    >>> found = zenjax.stats(state)["leaf"]
    >>> found["density"], found["growth"], found["rounds"]
    (0.25, 2.0, 1.0)
    >>> zenjax.stats(state, flat=True)["leaf/density"]
    0.25
  """
  sync_state.require_numbers(state, "stats")
  sync_state.require(state, CompressState)
  by_name: Stats = {}
  for part in synced_leaves, sharded_tables, compressed:
    by_name |= part(state)
  if not flat:
    return by_name
  return {
    f"{leaf}/{name}": number
    for leaf, numbers in by_name.items()
    for name, number in numbers.items()
  }


def _counted(
  state: Any, leaves_of: Callable[[sync_state.ZenSyncState], Any]
) -> Iterator[tuple[str, Sizes, Last]]:
  """Yields the numbers of leaves that have taken a step, by name."""
  for node in sync_state.find(state):
    for name, leaf in leaves_of(node).items():
      sizes, last = numbers_of(leaf)
      if sizes.num_rows:
        yield name, sizes, last


def synced_leaves(state: Any) -> Stats:
  """Returns `stats` of leaves that `zen_sync` sends sparsely."""
  return {
    name: _synced(sizes, last)
    for name, sizes, last in _counted(state, sync_state.whole_leaves)
  }


def sharded_tables(state: Any) -> Stats:
  """Returns `stats` of sharded tables, which `sharded_optimizer` counts."""
  return {
    name: _synced(sizes, last)
    | {
      "owners": sizes.row_groups,
      "room": sizes.push,
      "fetch_rounds": max(1.0, float(np.ceil(last.push_need / sizes.push))),
    }
    for name, sizes, last in _counted(state, sync_state.tables)
  }


def numbers_of(leaf: LeafState) -> tuple[Sizes, Last]:
  """Returns the numbers of a leaf as Python numbers."""
  return Sizes(*array(leaf.sizes).tolist()), Last(*array(leaf.last).tolist())


def array(x: Any) -> np.ndarray:
  """Returns numbers of a state as NumPy's, also from a `flax.nnx` variable."""
  (leaf,) = jax.tree.leaves(x)
  return np.asarray(leaf)


def _synced(sizes: Sizes, last: Last) -> dict[str, float]:
  mean_pair = last.local_rows / sizes.row_groups
  mean_owner = last.union_rows / sizes.row_groups
  return {
    "num_rows": sizes.num_rows,
    "width": sizes.width,
    "devices": sizes.devices,
    "density": last.local_rows / sizes.num_rows,
    "union_density": last.union_rows / sizes.num_rows,
    "growth": ratio(last.union_rows, last.local_rows),
    "push_imbalance": ratio(last.push_need, mean_pair),
    "pull_imbalance": ratio(last.pull_need, mean_owner),
    "rounds": last.rounds,
    "wire_bytes": last.wire_bytes,
    "dense_bytes": last.dense_bytes,
    "went_dense": last.went_dense,
    "scheme": sizes.scheme,
    "column_groups": sizes.column_groups,
  }


def ratio(a: float, b: float) -> float:
  """Returns `a / b`, or 1 if `b` is zero."""
  return a / b if b else 1.0


def compressed(state: Any) -> Stats:
  """Returns `stats` of `compress.all_reduce`, if it has taken a step."""
  by_name: Stats = {}
  for i, node in enumerate(compress_state.nodes(state)):
    if steps := int(array(node.step)):
      residuals = jax.tree.leaves(node.residuals)
      by_name[f"compressed {i + 1}" if i else "compressed"] = {
        "leaves": float(len(node.leaves)),
        "steps": float(steps),
        "wire_bytes": float(array(node.wire_bytes)),
        "dense_bytes": float(array(node.dense_bytes)),
        "residual_norm": float(_global_norm(residuals)),
        **{name: float(array(x)) for name, x in node.stats.items()},
      }
  return by_name


# In `jit`, because no device has all residuals.
_global_norm = jax.jit(norm.global_norm)


def profile(state: Any) -> dict[str, Profile]:
  """Returns the row densities of the last step, for the planner.

  Use it to plan for another machine with densities of your own program: pass
  the result as `profile=` to `planner.plan` or `planner.utility`.

  Of tables that are sent as one, only the union of each is counted. Its rows on
  a device are estimated in proportion to the unions, which can be far off.

  Args:
    state: An optimizer state with a `ZenSyncState` anywhere inside.

  Returns:
    A `Profile` for each parameter, also for tables of `zenjax.tables.shard`.
    Parameters that are never sent sparsely are left out. Before the first step
    the result is empty.

  Raises:
    ValueError: `state` holds no `ZenSyncState`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.zen_sync("data", sparse=True)
    >>> grads = jnp.zeros((2, 8, 4)).at[:, 3].set(1.0)
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
    >>> _, state = jax.jit(step)(grads)
    >>> state = jax.tree.map(lambda x: x[0], state)
    >>> zenjax.planner.profile(state)["leaf"].union
    1.0
  """
  sync_state.require_numbers(state, "planner.profile")
  sync_state.require(state)
  return {
    name: profile_of(sizes, last)
    for name, sizes, last in _counted(state, lambda node: node.leaves)
    if np.isfinite(last.local_rows)
  }


def profile_of(sizes: Sizes, last: Last) -> Profile:
  groups, n = sizes.row_groups, sizes.devices
  # The fullest pair exceeds the mean for two reasons: the hash is random, and
  # one device has more rows than the others. Only the second reason belongs to
  # the data, so the part that chance explains is divided out.
  chance = buffer_sizes.fullest(last.local_rows, groups, n * groups)
  skewed = max(last.push_need / chance, 1.0) if chance else 1.0
  return Profile(
    rows=last.local_rows,
    fullest=min(last.local_rows * skewed, sizes.num_rows),
    union=last.union_rows,
    devices=n,
  )
