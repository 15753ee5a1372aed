"""Plans the next steps statically, with the counts of earlier steps."""

import collections
from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np

from zenjax._src.core.arguments import Capacity
from zenjax._src.machine.cost import CostModel
from zenjax._src.machine.link_models import Link
from zenjax._src.report import stats
from zenjax._src.rows import leaf_util
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import plans
from zenjax._src.sync import sync_state
from zenjax._src.sync.sharded_optimizer import ShardedOptimizerState
from zenjax._src.sync.sync_state import LeafChoice
from zenjax._src.sync.sync_state import LeafState
from zenjax._src.sync.sync_state import ZenSyncState
from zenjax._src.tables.sharded_table import ShardedTable

# Candidates for a buffer size: these percentiles of recent needs.
_PERCENTILES = (50, 75, 90, 95, 100)
# The latency of a round, expressed as bytes sent to each device.
_ROUND_BYTES = 32 << 10
# Over two levels a round has five collectives instead of two.
_OF_LEVELS = 2.5
# A smaller gain does not justify another compilation.
_LEAST_GAIN = 1.1


def tune(tree: Any, *, link: Link | None = None) -> Any:
  """Sets buffer sizes to what recent steps needed.

  Call it after about 20 steps, and again when batches change. `tune` sets the
  buffer sizes of `zen_sync` and `sharded_optimizer` to what the last 64 steps
  needed, and a little more. Parameters whose gradients were mostly too dense
  take a dense all-reduce from then on. The plan is static metadata of the
  state, so your step compiles once more. Numbers in the state do not change.
  All processes have the same counts, so all of them make the same plan.

  Buffer sizes are not saved in checkpoints. After a restore, run some 20 steps
  and call `tune` again. It changes buffers only if that saves a tenth of what a
  step costs: its bytes, and 32 KiB for the time of each round. So small tables
  may go on with padding, or with a second round in some steps.

  `tune` keeps what you gave to `zen_sync` as `capacities` or `scheme`. Of a
  `plan` it keeps the schemes, but not the buffer sizes.

  Args:
    tree: Anything that holds states of zenjax: an optimizer state, a
      `TrainState`, or the state of an `nnx.Optimizer`. With sharded tables pass
      `(params, opt_state)`, because tables carry their buffer sizes.
    link: The connection between devices. If given, `tune` compares all
      schemes by predicted time. Without it, `tune` considers two other schemes:
      a dense all-reduce, and `all_gather` if there are only two devices.

  Returns:
    The same tree with the new plan, or `tree` itself if no change would pay, or
    if it holds no state of zenjax, with a warning.

  Raises:
    TypeError: `tune` is called inside `jit`; call it on the state after a step.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.zen_sync("data", sparse=True)
    >>> grads = jnp.zeros((4, 4096, 16)).at[:, :100].set(1.0)
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
    >>> _, state = jax.jit(step)(grads)
    >>> state = zenjax.tune(jax.tree.map(lambda x: x[0], state))
    >>> dict(state.tuned)["leaf"].capacities
    Capacity(push=30, pull=30)
  """
  sync_state.require_numbers(tree, "tune")
  nodes = sync_state.find(tree)
  if not nodes:
    warnings.warn(
      "`tree` of zenjax.tune holds no state that it can tune, got"
      f" {type(tree).__name__}. Give the optimizer's state after some steps.",
      stacklevel=2,
    )
  names = [name for node in nodes for name in sync_state.tables(node)]
  sizes = {name: size for node in nodes for name, size in _table_sizes(node)}
  changed, applied = False, set()

  def planned(name: str, node: Any) -> Any:
    nonlocal changed
    if isinstance(node, ShardedOptimizerState):
      return node._replace(sync=planned(name, node.sync))
    if isinstance(node, ZenSyncState):
      choices = {change.name: change.choice for change in changes(node, link)}
      changed |= bool(choices)
      return node.replace(tuned=tuple((dict(node.tuned) | choices).items()))
    if isinstance(node, ShardedTable):
      # The state names a table by its path in the parameters, which is the end
      # of its path in `tree`.
      known = [x for x in names if name == x or name.endswith(f".{x}")]
      if not known and names == [leaf_util.ONLY]:
        known = [leaf_util.ONLY]
      table = max(known, key=len, default="")
      if table in sizes:
        applied.add(table)
        if sizes[table] != node.sizes:
          changed = True
          return dataclasses.replace(node, sizes=sizes[table])
    return node

  kinds = ShardedOptimizerState | ZenSyncState | ShardedTable
  is_leaf = lambda node: isinstance(node, kinds)
  named = leaf_util.named_leaves(tree, is_leaf)
  tuned = [planned(*leaf) for leaf in named]
  if missing := sorted(sizes.keys() - applied):
    warnings.warn(
      f"`tree` of zenjax.tune lacks the sharded tables {missing}, which carry"
      " their buffer sizes. Write `params, opt_state = zenjax.tune((params,"
      " opt_state))`.",
      stacklevel=2,
    )
  structure = jax.tree.structure(tree, is_leaf=is_leaf)
  return structure.unflatten(tuned) if changed else tree


def _table_sizes(
  node: ZenSyncState,
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Yields sharded tables with better buffer sizes than they have now."""
  for name, table in sync_state.tables(node).items():
    sizes, history = _recent(table)
    if len(history):
      # One owner is sent all rows. Copies exchange their unions.
      copies = sizes.devices > sizes.row_groups
      which = [i for i in (0, 1) if (sizes.row_groups > 1, copies)[i]]
      needs, row_bytes = np.maximum(history[:, which], 1), 4 * sizes.width
      now, best = [np.array([sizes.push, sizes.pull]) for _ in range(2)]
      best[which] = _cheapest(needs, row_bytes)
      cost_now = _cost(needs, now[which].tolist(), row_bytes)
      if cost_now > _LEAST_GAIN * _cost(needs, best[which].tolist(), row_bytes):
        yield name, tuple(best[: 1 + copies].tolist())


def _recent(leaf: LeafState) -> tuple[sync_state.Sizes, np.ndarray]:
  """Returns the sizes of a leaf and what each recent step needed, `[steps, 2]`.

  Dense leaves count nothing and one device exchanges nothing: no steps then.
  """
  sizes, _ = stats.numbers_of(leaf)
  history = stats.array(leaf.history)
  counted = history[:, 0] != sync_state.NO_STEP
  exchanged = sizes.devices > 1 and sizes.push
  return sizes, history[counted if exchanged else slice(0)]


class Change(NamedTuple):
  """A change that `tune` makes to the plan of one leaf."""

  name: str
  choice: LeafChoice
  gain: float  # ratio of bytes, or of predicted time with a link


def told(state: Any) -> list[str]:
  """Returns lines of a report that say what `tune` would change."""
  nodes = sync_state.find(state)
  leaf_changes = [x for node in nodes for x in changes(node, None)]
  sizes = [x for node in nodes for x in _table_sizes(node)]
  if not leaf_changes and not sizes:
    return []
  given = "(params, opt_state)" if sizes else "opt_state"
  lines = [f"zenjax.tune({given}) would change:"]
  for name, (rows, *_) in sizes:
    lines.append(f"  {name}: buffers of {rows} rows for each pair of devices")
  for name, choice, fewer in leaf_changes:
    action, gain = "dense all-reduce", "faster"
    if choice.capacities:
      push, pull = choice.capacities
      buffers = f"buffers of {push} rows to push, {pull} to pull"
      action, gain = f"{choice.scheme}, {buffers}", "fewer rounds"
    if fewer > _LEAST_GAIN:
      gain = f"{fewer:.1f}x fewer bytes"
    lines.append(f"  {name}: {action}, {gain}")
  return lines


def changes(node: ZenSyncState, link: Link | None) -> Iterator[Change]:
  """Yields the changes that `tune` makes to the plan of a state."""
  tuned, joined = dict(node.tuned), collections.defaultdict(list)
  for name, leaf in sync_state.whole_leaves(node).items():
    sizes, history = _recent(leaf)
    if not len(history) or name in node.fixed:
      continue
    by_time = None
    if link is not None and not node.keeps_schemes:
      by_time = _by_time(name, leaf, link)
    if by_time is None:
      member = _Leaf(name, sizes, history, node.keeps_schemes)
      joined[sizes.joined, len(history)].append(member)
    elif tuned.get(name) != by_time.choice:
      yield by_time
  for members in joined.values():
    for change in _by_counts(members):
      if tuned.get(change.name) != change.choice:
        yield change


class _Leaf(NamedTuple):
  """A leaf whose plan may change."""

  name: str
  sizes: sync_state.Sizes
  history: np.ndarray  # [steps, 2], what recent steps needed
  stays: bool  # whether it keeps its scheme


def _by_counts(members: Sequence[_Leaf]) -> Iterator[Change]:
  """Yields the changes that send fewest bytes.

  Args:
    members: Leaves that are sent as one table. They share its buffers, so only
      what they need together says how many rounds there are.
  """
  sizes, stays = members[0].sizes, members[0].stays
  scheme = sync_state.SCHEMES[sizes.scheme]
  dense = members[0].history[:, 0] == sync_state.DENSE_STEP
  if np.mean(dense) > 0.5:
    for member in members if not stays else ():
      yield Change(member.name, LeafChoice("dense"), 1.0)
    return
  each = np.array([member.history[~dense] for member in members])
  needs = np.maximum(each.sum(0), 1)
  row_bytes = 4 * sizes.width / sizes.column_groups
  round_bytes = _round_bytes(sizes, scheme, row_bytes)
  now = [sum(x.sizes.push for x in members), sum(x.sizes.pull for x in members)]
  margin = SPARSE[scheme].union_margin
  if math.isinf(margin):  # Nothing is pulled.
    needs, now, margin = needs[:, [0, 0]], [now[0], now[0]], 1.0
  # What has fitted so far. Better sizes have room for all of `needs`.
  fitted = np.maximum(needs / [1, margin], 1)
  cost_now = _cost(fitted, now, row_bytes, round_bytes)
  rows_now = _rows(fitted, now)
  shares = each.sum(1) / needs.sum(0)  # [members, 2]
  divided = list(zip(members, shares))
  if scheme == "zen" and sizes.devices == 2 and not stays:
    # Owners save nothing between two devices: each pushes half of its rows and
    # pulls half of the union, which is at least as much as all rows once.
    whole = _sizes_for(np.max(needs, axis=0) * sizes.row_groups)
    if cost_now > _LEAST_GAIN * (whole[0] * 4 * sizes.width + _ROUND_BYTES):
      for member, share in divided:
        choice = LeafChoice("all_gather", _part(whole * share, member))
        gain = rows_now / (whole[0] * sizes.column_groups)
        yield Change(member.name, choice, gain)
      return
  best = _cheapest(needs, row_bytes, round_bytes)
  rows = _rows(needs, best)
  staying = []
  for member, share in divided:
    # SparseRows have no dense path within a step. Rows to one owner:
    dense_rows = 2 * member.sizes.num_rows / sizes.row_groups
    part = SPARSE[scheme].break_even * dense_rows / rows
    if scheme == "zen" and not stays and np.mean(share) > part:
      gain = np.mean(share) * rows_now / dense_rows
      yield Change(member.name, LeafChoice("dense"), gain)
    else:
      staying.append(member)
  if staying and len(staying) < len(members):
    yield from _by_counts(staying)
  elif staying and cost_now > _LEAST_GAIN * _cost(
    needs, best, row_bytes, round_bytes
  ):
    for member, share in divided:
      choice = LeafChoice(scheme, _part(best * share, member))
      yield Change(member.name, choice, rows_now / rows)


def _part(size: np.ndarray, member: _Leaf) -> Capacity:
  """Returns a leaf's part of buffers, in whole rows."""
  rows = np.clip(np.ceil(size), 1, member.sizes.num_rows).astype(int)
  push, pull = rows.tolist()
  return Capacity(push, max(push, pull))


def _round_bytes(
  sizes: sync_state.Sizes, scheme: str, row_bytes: float
) -> float:
  """Returns the cost of a round besides its buffers, in bytes."""
  nbytes = _ROUND_BYTES
  if 1 < sizes.row_groups * sizes.column_groups < sizes.devices:
    nbytes *= _OF_LEVELS
  if SPARSE[scheme].dense_push:  # Each round sums the whole table.
    nbytes += sizes.num_rows * row_bytes
  return nbytes


def _cheapest(
  needs: np.ndarray, row_bytes: float, round_bytes: float = _ROUND_BYTES
) -> list[int]:
  """Returns the buffer sizes that cost least for needs `[steps, buffers]`."""
  wanted = _sizes_for(np.percentile(needs, _PERCENTILES, axis=0))
  candidates = itertools.product(*wanted.T.astype(int).tolist())
  cost = lambda size: _cost(needs, size, row_bytes, round_bytes)
  return list(min(candidates, key=cost))


def _sizes_for(needs: np.ndarray) -> np.ndarray:
  """Returns buffer sizes for needs, with room for batches that need more.

  One standard deviation of a random count is added. A fixed share would be too
  little for small tables, and if one of many tables overflows, the rows of all
  of them are sent in a second round.
  """
  return np.ceil(needs + np.sqrt(needs))


def _cost(
  needs: np.ndarray,
  size: Sequence[int],
  row_bytes: float,
  round_bytes: float = _ROUND_BYTES,
) -> float:
  """Returns the mean cost of a step for a device, in bytes."""
  return _rounds(needs, size) * (sum(size) * row_bytes + round_bytes)


def _rows(needs: np.ndarray, size: Sequence[int]) -> float:
  """Returns how many rows a step sends to and gets from another device."""
  return _rounds(needs, size) * sum(size)


def _rounds(needs: np.ndarray, size: Sequence[int]) -> float:
  """Returns how many rounds a step took on average."""
  return float(np.mean(np.max(np.ceil(needs / np.array(size)), axis=1)))


def _by_time(name: str, leaf: LeafState, link: Link) -> Change | None:
  """Returns a change to the scheme predicted to be fastest, if it differs."""
  sizes, last = stats.numbers_of(leaf)
  profile = stats.profile_of(sizes, last)
  dtype = np.dtype(np.float32)
  table = Table(
    name=name,
    num_rows=sizes.num_rows,
    width=sizes.width,
    dtype=dtype,
    wire_dtype=dtype,
  )
  context = Context(axes=("data",), sizes=(sizes.devices,), mean=True)
  with jax.ensure_compile_time_eval():
    predicted = CostModel(context, {"data": link}).of_ways(table, profile)
  now = sync_state.SCHEMES[sizes.scheme]
  seconds = [x.seconds for way, x in predicted.items() if way.scheme == now]
  best_way = min(predicted, key=lambda way: predicted[way].seconds)
  best = best_way.scheme
  gain = min(seconds, default=np.inf) / predicted[best_way].seconds
  if best == now or gain < 1 + plans.ERROR:
    return None
  if best == "dense":
    return Change(name, LeafChoice("dense"), gain)
  rows = [profile.fullest, profile.union]
  groups = sizes.devices if best == "zen" else 1
  wanted = _sizes_for(np.array(rows) / groups).astype(int).tolist()
  size = Capacity(*[min(max(x, 1), sizes.num_rows) for x in wanted])
  return Change(name, LeafChoice(best, size), gain)
