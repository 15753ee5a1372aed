"""What a run has shown, in numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core.text import columns
from zenjax._src.machine.cost import Profile
from zenjax._src.schemes import buffer_sizes
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState
from zenjax._src.sparsify.sparsifier_state import FeedbackLeaf
from zenjax._src.sparsify.sparsifier_state import SparsifierState
from zenjax._src.sync import sync_state

# What a run with sparsifiers has shown: numbers, and lines of a report.


# Of recent steps whose fullest selection a capacity should hold: what does not
# fit costs a whole round more.
_PERCENTILE = 90

_SPARSIFIER_HEADINGS = (
  "",
  "wanted",
  "density",
  "threshold",
  "build-up",
  "imbalance",
  "residual",
  "rounds",
  "MB sent",
  "MB dense",
  "bytes",
  "pin",
)

LEGEND = (
  "of the last step. density: elements that all devices selected over those of"
  " the model; build-up: these over",
  "the number wanted; imbalance: the largest selection over the mean; residual:"
  " norm of what waits, all devices;",
  "rounds: exchanges it took; MB: received by a device; bytes: beside a dense"
  " all-reduce; pin: `capacity=` that",
  "held the largest selection of 90 % of the last 64 steps.",
)


def find(state: Any) -> list[SparsifierState]:
  """Every `SparsifierState` inside an optimizer state, in order."""
  return sync_state.nodes(state, SparsifierState)


def numbers(state: Any) -> dict[str, dict[str, float]]:
  """By name, of sparsifiers that have taken a step."""
  found: dict[str, dict[str, float]] = {}
  for i, node in enumerate(find(state)):
    steps = int(np.asarray(node.step))
    if steps:
      name = f"sparsifier {i + 1}" if i else "sparsifier"
      found[name] = {
        "devices": float(np.shape(node.parts)[-1]),
        "steps": float(steps),
        "capacity": _capacity(node, steps),
        **{
          field: float(np.asarray(value))
          for field, value in node.stats._asdict().items()
        },
      }
  return found


def _capacity(node: SparsifierState, steps: int) -> float:
  recent = np.asarray(node.fullest)
  recent = recent[: min(steps, len(recent))]
  needed = np.percentile(recent, _PERCENTILE, method="higher")
  return float(max(1, needed))


def rows(known: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
  """Cells of a table, headings first."""
  return [
    _SPARSIFIER_HEADINGS,
    *(_sparsifier_row(name, s) for name, s in known.items()),
  ]


def _sparsifier_row(name: str, s: dict[str, float]) -> tuple[str, ...]:
  gain = s["dense_bytes"] / s["wire_bytes"] if s["wire_bytes"] else 1.0
  less = f"{gain:.1f}x fewer" if gain > 1 else f"{1 / gain:.2f}x as many"
  return (
    name,
    f"{s['density_wanted']:.3%}",
    f"{s['density']:.3%}",
    f"{s['threshold']:.3g}",
    f"{s['build_up']:.2f}",
    f"{s['imbalance']:.2f}",
    f"{s['residual_norm']:.3g}",
    f"{s['rounds']:.0f}",
    f"{s['wire_bytes'] / 1e6:.3f}",
    f"{s['dense_bytes'] / 1e6:.3f}",
    less,
    f"{s['capacity']:.0f}",
  )


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
  sync_state.require_numbers(state, "stats")
  nodes = sync_state.find(state) if find(state) else sync_state.require(state)
  return of_leaves(nodes) | numbers(state)


def of_leaves(
  nodes: list[sync_state.ZenSyncState],
) -> dict[str, dict[str, float]]:
  """`stats` of leaves that travel sparse."""
  found: dict[str, dict[str, float]] = {}
  for node in nodes:
    for name, leaf in node.leaves.items():
      if int(np.asarray(leaf.sizes)[0]):
        found[name] = _numbers(leaf)
  return found


def _numbers(leaf: sync_state.LeafState) -> dict[str, float]:
  sizes = sync_state.Sizes(*(int(x) for x in np.asarray(leaf.sizes)))
  last = sync_state.Last(*(float(x) for x in np.asarray(leaf.last)))
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
  sync_state.require_numbers(state, "advise")
  advice: dict[str, tuple[int, int]] = {}
  for node in sync_state.require(state):
    steps = min(int(node.step), sync_state.HISTORY)
    for name, leaf in node.leaves.items():
      num_rows = int(np.asarray(leaf.sizes)[0])
      needs = np.asarray(leaf.history)[:steps]
      needs = needs[needs[:, 0] != sync_state.DENSE_STEP]
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


# What a run has shown of its tables, for `scheme="auto"`.


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
    >>> zenjax.planner.profile(state)["leaf"].union
    1.0
  """
  sync_state.require_numbers(state, "profile")
  found = {}
  for node in sync_state.require(state):
    for name, leaf in node.leaves.items():
      sizes = sync_state.Sizes(*(int(x) for x in np.asarray(leaf.sizes)))
      last = sync_state.Last(*(float(x) for x in np.asarray(leaf.last)))
      if sizes.num_rows and np.isfinite(last.local_rows):
        found[name] = _of(sizes, last)
  return found


def _of(sizes: sync_state.Sizes, last: sync_state.Last) -> Profile:
  groups, n = sizes.row_groups, sizes.devices
  # The fullest pair is fuller than the mean by chance, and because a device
  # has more rows than the others: what chance does not explain.
  chance = buffer_sizes.fullest(last.local_rows, groups, n * groups)
  skewed = max(last.push_need / chance, 1.0) if chance else 1.0
  return Profile(
    rows=last.local_rows,
    fullest=min(last.local_rows * skewed, sizes.num_rows),
    union=last.union_rows,
    devices=n,
  )


# What sparsifiers did in a step, in numbers.


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
    >>> top = zenjax.sparsify.top_k(0.25, sparse=True)
    >>> tx = optax.chain(
    ...   zenjax.sparsify.error_feedback(top, "data"),
    ...   zenjax.zen_sync("data", sparse=True, unit="element"),
    ... )
    >>> def step(w, state, grads):
    ...   updates, state = tx.update(grads[0], state)
    ...   return w - updates, state, 0.0
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> grads = jnp.array([[7.0, 2.0, 0.0, 3.0], [1.0, 1.0, 1.0, -7.0]])
    >>> state = zenjax.init(tx, grads[0], mesh, "data")
    >>> _, state, _ = step(grads[0], state, grads)
    >>> stats = zenjax.sparsify.sparsifier_stats(state)["leaf"]
    >>> stats["density"], stats["build_up"], stats["residual_norm"]
    (0.25, 2.0, 4.0)
  """
  sync_state.require_numbers(state, "sparsifier_stats")
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
  return sync_state.nodes(state, ErrorFeedbackState)


def _of_leaves(
  node: ErrorFeedbackState, unions: dict[str, tuple[int, float]]
) -> dict[str, dict[str, float]]:
  return {
    name: _sparsifier_numbers(leaf, unions.get(name))
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


def _sparsifier_numbers(leaf: FeedbackLeaf, union: tuple[int, float] | None):
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
  for node in sync_state.find(state):
    for name, leaf in node.leaves.items():
      sizes = sync_state.Sizes(*np.asarray(leaf.sizes).tolist())
      last = sync_state.Last(*np.asarray(leaf.last).tolist())
      if not last.withheld:
        found[name] = sizes.num_rows, last.union_rows
  return found


# What a run with `error_feedback` has shown: lines of a report.


_FEEDBACK_HEADINGS = (
  "",
  "wanted",
  "density",
  "threshold",
  "build-up",
  "imbalance",
  "residual",
)

_LEGEND = (
  "of the last step. density: elements that a device selected over those of the"
  " leaf, mean; threshold: mean; build-up:",
  "the union of all selections over the number wanted; imbalance: the largest"
  " selection over the mean; residual: norm of",
  "what waits, all devices; -: not known.",
)


def lines(state: Any) -> list[str]:
  """None where there is no state of `error_feedback`.

  A report may be of one process, and numbers of other processes' devices need
  them all: then it says so.
  """
  nodes = find_feedback(state)
  if not nodes:
    return []
  steps = max(int(np.asarray(node.step)) for node in nodes)
  if not steps:
    return ["error_feedback: no step was taken yet."]
  leaves = [leaf for node in nodes for leaf in node.leaves.values()]
  counts = [leaf.selected for leaf in leaves if leaf.residual is not None]
  if not counts:
    return ["error_feedback: it selects from no leaf."]
  title = f"error_feedback after {steps} steps on {len(counts[0])} devices"
  if not all(_is_here(count) for count in counts):
    return [
      f"{title} of several processes: zenjax.sparsify.sparsifier_stats has"
      " its numbers,"
      " where all of them call it."
    ]
  known = of_feedback(state)
  rows = [
    _FEEDBACK_HEADINGS,
    *(_feedback_row(name, s) for name, s in known.items()),
  ]
  return [title, *columns(rows), *_LEGEND]


def _is_here(x: Any) -> bool:
  return not isinstance(x, jax.Array) or x.is_fully_addressable


def _feedback_row(name: str, s: dict[str, float]) -> tuple[str, ...]:
  return (
    name,
    _cell(s["density_wanted"], ".3%"),
    _cell(s["density"], ".3%"),
    _cell(s["threshold"], ".3g"),
    _cell(s["build_up"], ".2f"),
    _cell(s["imbalance"], ".2f"),
    _cell(s["residual_norm"], ".3g"),
  )


def _cell(x: float, form: str) -> str:
  return format(x, form) if np.isfinite(x) else "-"
