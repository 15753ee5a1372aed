"""Holds the memory of zen_sync: statistics, what is dense, residuals.

Every array is small, of fixed shape and equal on all devices, residuals
excepted, so the state checkpoints as it is and never causes a recompile.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import core
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from zenjax._src.core import indexing
from zenjax._src.machine import cost
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync.exchange import Outcome
from zenjax._src.sync.leaf_tables import Choice
from zenjax._src.sync.owner_rows import Owned

# Steps whose needs are kept, for the advice on capacities.
HISTORY = 64
# In place of the needs of a step above break-even.
DENSE_STEP = -1
# Names of which a state keeps the place. A new one renumbers those behind it:
# until its next step a state that was saved before is reported by other names.
SCHEMES = (*SPARSE, *DENSE)
# Names of which a state keeps the time: one more is another shape of state.
PREDICTED = cost.CANDIDATES

Node = TypeVar("Node")


class Sizes(NamedTuple):
  """Static facts of a leaf, kept as numbers so that a report needs no more."""

  num_rows: Any
  width: Any
  devices: Any
  row_groups: Any
  column_groups: Any
  push: Any  # capacity of the first round, or a guess where it follows steps
  pull: Any
  mean: Any  # 1 for op="mean", 0 for op="sum"
  scheme: Any  # index in `SCHEMES`


class Last(NamedTuple):
  """Numbers of the last step."""

  local_rows: Any  # nonzero rows of a device, mean
  union_rows: Any
  push_need: Any  # rows of the fullest (source, group) pair
  pull_need: Any  # rows of the fullest group's union
  push_mean: Any  # rows of a pair, mean
  rounds: Any
  overflow_rows: Any
  wire_bytes: Any
  dense_bytes: Any
  went_dense: Any
  withheld: Any  # 1 where rows wait for the next step


class LeafState(NamedTuple):
  """Memory of one sparse leaf."""

  sizes: jax.Array  # [len(Sizes)] int32
  last: jax.Array  # [len(Last)] float32
  history: jax.Array  # [HISTORY, 2] int32, push and pull needed or DENSE_STEP
  predicted: jax.Array  # [len(PREDICTED)] float32, seconds, of scheme="auto"
  dense: jax.Array  # [] bool, travels dense next time
  residual: jax.Array | None  # [1, *leaf.shape] on a device, or None

  @property
  def waiting(self) -> jax.Array:
    """Returns True if some residual is not zero: `[] bool`."""
    return self.last[Last._fields.index("withheld")] > 0

  def with_counts(
    self, *, local_rows: jax.Array, union_rows: jax.Array, more_bytes: float
  ) -> "LeafState":
    """Replaces the counts of rows in `last`, and scales the needs with them.

    The exchange counted rows that are not zero, or a sample of them. These were
    counted by a message of `more_bytes`.
    """
    seen = Last(*[self.last[i] for i in range(len(Last._fields))])
    local, union = [
      new / jnp.where(old > 0, old, 1)
      for new, old in (
        (local_rows, seen.local_rows),
        (union_rows, seen.union_rows),
      )
    ]
    seen = seen._replace(
      local_rows=local_rows,
      union_rows=union_rows,
      push_need=seen.push_need * local,
      push_mean=seen.push_mean * local,
      pull_need=seen.pull_need * union,
      wire_bytes=seen.wire_bytes + more_bytes,
    )
    return self._replace(last=indexing.stacked(seen))

  def specs(self, split: PartitionSpec) -> "LeafState":
    """Returns how it lies on devices, of which each has its own residual."""
    same = jax.tree.map(lambda _: PartitionSpec(), self)
    return same if self.residual is None else same._replace(residual=split)


class LastOfTable(NamedTuple):
  """Numbers of the last step of a sharded table, those that all devices have.

  NaN where gradients came without what is known of their look-ups.
  """

  local_rows: Any  # distinct rows that a device looked up, mean
  push_need: Any  # distinct rows of the fullest pair of devices
  rounds: Any  # exchanges of gradient rows that were summed at once
  fetch_rounds: Any  # exchanges of ids and rows
  overflow_rows: Any
  room: Any  # of the buffers for gradient rows, of each pair
  wire_bytes: Any
  dense_bytes: Any


class TableState(NamedTuple):
  """Memory of a table of `zenjax.tables.shard`, of `sharded_optimizer`."""

  # [len(Sizes)] int32, of the last step; groups of rows are owners, `push` is
  # the largest room, and nothing is pulled.
  sizes: jax.Array
  last: jax.Array  # [len(LastOfTable)] float32
  updated: Owned  # [1] float32 on a device, rows that this owner updated


def empty_table(*, mean: bool, devices: int) -> TableState:
  """Returns the state of a sharded table before the first step."""
  nothing = Sizes(*[0] * len(Sizes._fields))
  sizes = nothing._replace(mean=int(mean), devices=devices)
  return TableState(
    sizes=jnp.array(sizes, jnp.int32),
    last=jnp.zeros(len(LastOfTable._fields), jnp.float32),
    updated=Owned(jnp.zeros(1, jnp.float32)),
  )


class ZenSyncState(NamedTuple):
  """State of `zen_sync`: the number of steps and the memory of each leaf.

  Example:
    >>> import zenjax
    >>> params = {"table": jnp.zeros((600, 32)), "bias": jnp.zeros(32)}
    >>> state = zenjax.zen_sync("data").init(params)
    >>> int(state.step), sorted(state.leaves)
    (0, ['table'])
  """

  step: jax.Array  # [] int32
  # By name, leaves that travel sparse; of `sharded_optimizer` sharded tables
  # too, each a `TableState`.
  leaves: dict[str, Any]


def empty_leaf(
  residual: jax.Array | None, *, mean: bool, devices: int
) -> LeafState:
  """The state of a leaf before the first step, `devices` 0 if unknown."""
  nothing = Sizes(*[0] * len(Sizes._fields))
  sizes = nothing._replace(mean=int(mean), devices=devices)
  return LeafState(
    sizes=jnp.array(sizes, jnp.int32),
    last=jnp.zeros(len(Last._fields), jnp.float32),
    history=jnp.zeros((HISTORY, 2), jnp.int32),
    predicted=jnp.zeros(len(PREDICTED), jnp.float32),
    dense=jnp.zeros((), bool),
    residual=residual,
  )


def read_by_a_step(
  state: ZenSyncState, may_be_dense: Collection[str], exact: bool
) -> ZenSyncState:
  """`state` with None for all that a step writes and does not read.

  Args:
    state: Before the step.
    may_be_dense: Names of leaves that may travel dense, if that is remembered.
    exact: Whether no rows wait; else `last` tells whether some do.
  """
  leaves = {}
  for name, leaf in state.leaves.items():
    written = ["sizes", "predicted"]
    written += ["last"] * exact
    written += ["dense"] * (not exact or name not in may_be_dense)
    leaves[name] = leaf._replace(**dict.fromkeys(written))
  return ZenSyncState(state.step, leaves)


# Steps by whose needs the next one's first round is sized.
_RECENT = 4


def needed(
  leaves: Sequence[LeafState], step: jax.Array, plan: TablePlan
) -> jax.Array:
  """Rows that a push and a pull of these leaves needed of late: `[2] f32`.

  The most of a few steps; `plan.guess` where these sent nothing or there were
  none. Of leaves that travel as one table their sum.
  """
  at = (step - 1 - jnp.arange(_RECENT, dtype=jnp.int32)) % HISTORY
  recent = [jnp.max(leaf.history[at], axis=0) for leaf in leaves]
  total = sum([jnp.maximum(x, 0).astype(jnp.float32) for x in recent])
  known = (step > 0) & jnp.all(total > 0)
  return jnp.where(known, total, np.array(plan.guess, np.float32))


def with_rest(
  leaves: dict[str, LeafState], state: ZenSyncState
) -> dict[str, LeafState]:
  """Leaves of which a step has left something None: that stays as it was."""
  filled = {}
  for name, leaf in leaves.items():
    old = state.leaves[name]._asdict()
    left = {k: x for k, x in old.items() if getattr(leaf, k) is None}
    filled[name] = leaf._replace(**left)
  return filled


def after_step(
  leaves: Sequence[LeafState],
  count: jax.Array,
  outcome: Outcome,
  plan: TablePlan,
  context: Context,
  choices: Sequence[Choice],
) -> list[LeafState]:
  """States of the leaves that travelled as one, after step number `count`."""
  seen = [jnp.asarray(getattr(outcome, x), jnp.float32) for x in Last._fields]
  last = indexing.stacked([jnp.broadcast_to(x, len(plan.tables)) for x in seen])
  need = indexing.stacked([outcome.push_need, outcome.pull_need])
  need = jnp.where(outcome.above[:, None], DENSE_STEP, need.astype(jnp.int32))
  dense = outcome.dense_next
  if plan.members:  # Or each leaf would compute them anew.
    last, need, dense = lax.optimization_barrier((last, need, dense))
  after = []
  at = lax.rem(count, jnp.asarray(HISTORY, count.dtype))
  numbers = indexing.numbers(len(plan.tables))
  for i, leaf, own, choice in zip(
    numbers, leaves, plan.members or (plan,), choices
  ):
    sizes = Sizes(
      num_rows=own.table.num_rows,
      width=own.table.width,
      devices=context.devices,
      row_groups=own.layout.groups,
      column_groups=own.column_groups,
      push=(own.guess or own.first).push,
      pull=(own.guess or own.first).pull,
      mean=int(context.mean),
      scheme=SCHEMES.index(choice.scheme),
    )
    after.append(
      leaf._replace(
        sizes=jnp.array(sizes, jnp.int32),
        last=indexing.nth(last, i),
        history=lax.dynamic_update_index_in_dim(
          leaf.history, indexing.nth(need, i), at, axis=0
        ),
        dense=indexing.nth(dense, i),
        predicted=_predicted(choice),
      )
    )
  return after


def after_dense_step(
  leaf: LeafState, table: Table, context: Context, choice: Choice
) -> LeafState:
  """The state of a leaf that was summed as it is, and not looked at."""
  dense = dense_sum.received_bytes(table, context.devices)
  sizes = Sizes(
    num_rows=table.num_rows,
    width=table.width,
    devices=context.devices,
    row_groups=1,
    column_groups=1,
    push=0,
    pull=0,
    mean=int(context.mean),
    scheme=SCHEMES.index(choice.scheme),
  )
  last = Last(*[float("nan")] * len(Last._fields))
  last = last._replace(
    rounds=0.0,
    overflow_rows=0.0,
    withheld=0.0,
    wire_bytes=dense,
    dense_bytes=dense,
    went_dense=1.0,
  )
  return leaf._replace(
    sizes=jnp.array(sizes, jnp.int32),
    last=jnp.array(last, jnp.float32),
    predicted=_predicted(choice),
    # Nothing was counted: there is nothing to advise.
    dense=jnp.ones((), bool),
  )


def _predicted(choice: Choice) -> jax.Array:
  """The best of every candidate, zero where none was predicted."""
  best: dict[str, float] = dict.fromkeys(PREDICTED, 0.0)
  for prediction in reversed(choice.predictions):
    best[prediction.scheme] = prediction.seconds
  return jnp.array([best[name] for name in PREDICTED], jnp.float32)


def require_numbers(state: Any, function: str) -> None:
  """Raises `TypeError` inside a trace, where there is nothing to read yet."""
  if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(state)):
    raise TypeError(
      "`state` must hold numbers, and inside `jit`, `shard_map` or `pmap` there"
      f" are none yet; call `zenjax.{function}` on the state that the step"
      " returned, outside of it."
    )


def require(state: Any) -> list[ZenSyncState]:
  """As `find`; raises `ValueError` where there is none."""
  found = find(state)
  if not found:
    raise ValueError(
      "`state` must hold a ZenSyncState, got"
      f" {type(state).__name__}; give the state that"
      " `optax.chain(zen_sync(..), ..)` returned."
    )
  return found


def whole_leaves(node: ZenSyncState) -> dict[str, LeafState]:
  """Leaves that are whole on every device, by name."""
  return {k: x for k, x in node.leaves.items() if isinstance(x, LeafState)}


def tables(node: ZenSyncState) -> dict[str, TableState]:
  """Tables of `zenjax.tables.shard`, by name."""
  return {k: x for k, x in node.leaves.items() if isinstance(x, TableState)}


def find(state: Any) -> list[ZenSyncState]:
  """Every `ZenSyncState` inside an optimizer state, in order."""
  return nodes(state, ZenSyncState)


def nodes(state: Any, kind: type[Node]) -> list[Node]:
  """Every node of a kind inside an optimizer state, in order."""
  is_one = lambda node: isinstance(node, kind)
  return [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]
