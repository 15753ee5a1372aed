"""Defines the state of `zen_sync`: recent counts, and the plan made from them.

Every array is small, of fixed shape and equal on all devices, so the state
checkpoints as it is. The plan that `zenjax.tune` makes is static metadata of
the node: a step compiles once more when it changes, and never otherwise.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple, TypeVar

import jax
from jax import core
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import compat
from zenjax._src.core.arguments import Capacity
from zenjax._src.schemes import base
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import processes
from zenjax._src.sync.exchange import Counts
from zenjax._src.sync.sync_options import Options

# `zenjax.tune` sees the needs of this many steps.
HISTORY = 64
# Instead of the needs of a step that was all-reduced, or not taken yet.
DENSE_STEP, NO_STEP = -1, -2
# States keep the index of a scheme in this list.
SCHEMES = (DENSE, *SPARSE)

Node = TypeVar("Node")


class Sizes(NamedTuple):
  """Static facts of a leaf, as numbers, so that a report needs only them."""

  num_rows: Any = 0
  width: Any = 0
  devices: Any = 0
  row_groups: Any = 0
  column_groups: Any = 0
  push: Any = 0  # buffer sizes of a round
  pull: Any = 0
  scheme: Any = 0  # index in `SCHEMES`
  joined: Any = 0  # number of the first leaf that is sent in the same table


# These sizes decide who gets which rows. If they change, needs of earlier steps
# say nothing about the next.
_GROUPING = ("devices", "row_groups", "column_groups", "scheme")
_MAY_CHANGE = np.array([name not in _GROUPING for name in Sizes._fields])


class Last(NamedTuple):
  """Counts of the last step, NaN for rows that were not counted."""

  local_rows: Any = math.nan  # nonzero rows of a device, mean
  union_rows: Any = math.nan  # rows of the sum
  push_need: Any = math.nan  # of the fullest pair of device and row group
  pull_need: Any = math.nan  # rows of the sum in the fullest row group
  rounds: Any = 0
  wire_bytes: Any = 0  # received by a device
  dense_bytes: Any = 0  # received by a device in a ring all-reduce
  went_dense: Any = 0  # 1 if the leaf was all-reduced


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeafState:
  """Counts of recent steps for one sparse leaf.

  `sharded` is True for a sharded table, whose sums are not pulled.
  """

  sizes: jax.Array  # [len(Sizes)] int32
  last: jax.Array  # [len(Last)] float32
  # [HISTORY, 2] int32: push and pull needed, or DENSE_STEP, or NO_STEP.
  history: jax.Array
  sharded: bool = dataclasses.field(default=False, metadata={"static": True})

  def on_devices(self, devices: int) -> "LeafState":
    """Returns the state for this many devices.

    It forgets what other devices have counted, because theirs were other
    batches and other owners.
    """
    (sizes,) = jax.tree.leaves(self.sizes)
    if int(Sizes(*sizes).devices) in (0, devices):
      return self
    empty = empty_leaf(devices=devices, sharded=self.sharded)
    # In `nnx.Optimizer` each array is inside of a variable.
    filled = lambda field, array: jax.tree.map(lambda _: np.array(array), field)
    return dataclasses.replace(
      self,
      sizes=filled(self.sizes, empty.sizes),
      last=filled(self.last, empty.last),
      history=filled(self.history, empty.history),
    )


class LeafChoice(NamedTuple):
  """The static choice of `zenjax.tune` for one leaf."""

  scheme: str
  capacities: Capacity | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZenSyncState:
  """State of `zen_sync`: the number of steps and what they counted.

  You rarely need its fields. `zenjax.stats` and `zenjax.report` show the
  counts, and `zenjax.tune` plans from them. It is equal on all devices, so save
  it like any other pytree.

  Attributes:
    step: `[] int32`, the number of steps.
    leaves: For each leaf that is sent sparse, by name, what recent steps
      counted. In a `sharded_optimizer` also for sharded tables.
    mean: `[] int32`, 1 if the last step averaged gradients, 0 if it summed.
      Before the first step, what `op` says.
    tuned: `(name, choice)` of the leaves that `zenjax.tune` planned. Static.
    fixed: Names of leaves whose buffer sizes you gave. Static.
    keeps_schemes: Whether `zenjax.tune` keeps the schemes, which you, a plan or
      a `sharded_optimizer` chose. Static.

  Example:
    >>> import zenjax
    >>> params = {"table": jnp.zeros((600, 32)), "bias": jnp.zeros(32)}
    >>> state = zenjax.zen_sync("data").init(params)
    >>> int(state.step), sorted(state.leaves)
    (0, ['table'])
  """

  step: jax.Array
  leaves: dict[str, Any]
  mean: jax.Array
  tuned: tuple[tuple[str, LeafChoice], ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )
  fixed: frozenset[str] = dataclasses.field(
    default=frozenset(), metadata={"static": True}
  )
  keeps_schemes: bool = dataclasses.field(
    default=False, metadata={"static": True}
  )

  def replace(self, **changes: Any) -> "ZenSyncState":
    """Returns the state with some fields changed."""
    return dataclasses.replace(self, **changes)


def empty(
  names: Sequence[str],
  options: Options,
  *,
  owners: bool = False,
  devices: int = 0,
  sharded: bool = False,
) -> ZenSyncState:
  """Returns the state before the first step, with a leaf for each name."""
  compat.serialize_with_flax(ZenSyncState, LeafState)
  fixed = names if options.capacities else ()
  if isinstance(options.capacities, dict):
    fixed = options.capacities
  return ZenSyncState(
    step=jnp.zeros((), jnp.int32),
    # No two leaves share an array, because a step may donate the state.
    leaves={
      name: empty_leaf(devices=devices, sharded=sharded) for name in names
    },
    mean=jnp.asarray(options.mean, jnp.int32),
    fixed=frozenset(fixed),
    keeps_schemes=owners or options.plan is not None or options.scheme != "zen",
  )


def empty_leaf(*, devices: int = 0, sharded: bool = False) -> LeafState:
  """Returns the state of a leaf before the first step."""
  return LeafState(
    sizes=jnp.array(Sizes(devices=devices), jnp.int32),
    last=jnp.zeros(len(Last._fields), jnp.float32),
    history=jnp.full((HISTORY, 2), NO_STEP, jnp.int32),
    sharded=sharded,
  )


def next_state(
  state: ZenSyncState,
  leaves: dict[str, Any],
  by: str,
  options: Options,
  updates: Any,
) -> ZenSyncState:
  """Returns the state after a step, in which processes compare the exchange.

  Args:
    state: The state before.
    leaves: The new states of its leaves.
    by: Name of the transformation.
    options: Its options.
    updates: The gradients.
  """
  step = processes.compared(state.step + 1, by, options, updates, state.tuned)
  mean = jnp.full_like(state.mean, options.mean)
  return state.replace(step=step, leaves=leaves, mean=mean)


def after_step(
  leaves: Mapping[str, LeafState],
  step: jax.Array,
  counts: Counts,
  plan: ExchangePlan,
  scheme: Scheme,
  context: Context,
  other_bytes: jax.Array | float = 0.0,
) -> dict[str, LeafState]:
  """Returns the states of the leaves of one table after step number `step`.

  Leaves that are sent as one table are counted together. Counts of pairs and
  owners, bytes and buffers are divided in proportion to the rows of their sums.
  `other_bytes` are the bytes that each leaf received outside of this exchange.
  """
  dense = counts.dense.astype(jnp.float32)
  messages = scheme.messages([plan], context)
  round_bytes = base.received_bytes(messages, context)
  wire_bytes = counts.rounds.astype(jnp.float32) * round_bytes
  total, number = jnp.sum(counts.union), len(plan.tables)
  shares = jnp.where(total, counts.union / jnp.maximum(total, 1), 1 / number)

  def part(x: Any, share: jax.Array) -> Any:
    """Returns a leaf's part of rows, rounded up; just a whole stays whole."""
    return x if number == 1 else jnp.ceil(x * share * (1 - 1e-6))

  states = {}
  for table, union, share in zip(plan.tables, counts.union, shares):
    dense_bytes = base.dense_bytes(table, context.devices)
    last = Last(
      local_rows=counts.pushed * share / context.devices,
      union_rows=union,
      push_need=counts.fullest * share,
      pull_need=counts.owner * share,
      rounds=counts.rounds,
      wire_bytes=wire_bytes * share + dense * dense_bytes + other_bytes,
      dense_bytes=dense_bytes,
      went_dense=dense,
    )
    sizes = Sizes(
      num_rows=table.num_rows,
      width=table.width,
      devices=context.devices,
      row_groups=plan.layout.groups,
      column_groups=plan.column_groups,
      push=part(plan.push, share),
      pull=part(plan.pull, share),
      scheme=SCHEMES.index(scheme.name),
      joined=list(leaves).index(plan.tables[0].name),
    )
    need = jnp.stack([part(x, share) for x in (counts.fullest, counts.owner)])
    need = jnp.where(counts.dense, DENSE_STEP, need.astype(jnp.int32))
    place = lax.rem(step, jnp.asarray(HISTORY, step.dtype))
    sizes = jnp.stack([jnp.asarray(x, jnp.int32) for x in sizes])
    # Rows for an owner and rows for all devices are different needs.
    same = jnp.all((leaves[table.name].sizes == sizes) | _MAY_CHANGE)
    history = jnp.where(same, leaves[table.name].history, NO_STEP)
    states[table.name] = dataclasses.replace(
      leaves[table.name],
      sizes=sizes,
      last=jnp.stack([jnp.asarray(x, jnp.float32) for x in last]),
      history=lax.dynamic_update_index_in_dim(history, need, place, axis=0),
    )
  return states


def after_dense_step(
  leaf: LeafState, table: Table, context: Context
) -> LeafState:
  """Returns the state of a leaf that was all-reduced without counting rows."""
  nbytes = base.dense_bytes(table, context.devices)
  sizes = Sizes(
    num_rows=table.num_rows,
    width=table.width,
    devices=context.devices,
    row_groups=1,
    column_groups=1,
    scheme=SCHEMES.index(DENSE),
  )
  last = Last(wire_bytes=nbytes, dense_bytes=nbytes, went_dense=1)
  return dataclasses.replace(
    leaf, sizes=jnp.array(sizes, jnp.int32), last=jnp.array(last, jnp.float32)
  )


def require_numbers(state: Any, function: str) -> None:
  """Raises `TypeError` inside a trace, where a state has no numbers yet."""
  if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(state)):
    raise TypeError(
      "`state` must hold numbers, but inside `jit`, `shard_map` or `pmap` there"
      f" are none yet. Call `zenjax.{function}` outside, on the state that the"
      " step returned."
    )


def require(state: Any, *others: Any) -> list[ZenSyncState]:
  """Returns every `ZenSyncState`.

  Raises:
    ValueError: There is none, and no state of one of the `others` either.
  """
  if not any(nodes(state, kind) for kind in (ZenSyncState, *others)):
    raise ValueError(
      "`state` must hold a state of `zen_sync`, `sharded_optimizer` or"
      f" `compress.all_reduce`, got {type(state).__name__}. A plan that sends"
      " nothing by rows has none. With nnx, pass `optimizer.opt_state`, because"
      " `nnx.state` forgets types."
    )
  return find(state)


def whole_leaves(node: ZenSyncState) -> dict[str, LeafState]:
  """Returns the leaves that are replicated, by name."""
  return {k: x for k, x in node.leaves.items() if not x.sharded}


def tables(node: ZenSyncState) -> dict[str, LeafState]:
  """Returns the tables of `zenjax.tables.shard`, by name."""
  return {k: x for k, x in node.leaves.items() if x.sharded}


def find(state: Any) -> list[ZenSyncState]:
  """Returns every `ZenSyncState` inside an optimizer state, in order."""
  return nodes(state, ZenSyncState)


def nodes(state: Any, kind: type[Node]) -> list[Node]:
  """Returns every node of a kind inside an optimizer state, in order."""
  is_kind = lambda node: isinstance(node, kind)
  return list(filter(is_kind, jax.tree.leaves(state, is_leaf=is_kind)))
