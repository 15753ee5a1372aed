"""Synchronizes a tree: sparse leaves are exchanged, others all-reduced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows import sparse_rows
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import exchange
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import sync_state
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_state import LeafChoice
from zenjax._src.sync.sync_state import ZenSyncState

# An exchange has the derivatives of `psum` or `pmean`, which it equals.
#
# JAX cannot differentiate its loops, and takes the derivative of its bit
# operations for zero. But a sum is linear, whichever rows are zero. So tangents
# are summed as arrays by `lax.psum`, which JAX can transpose.


def linear_as_psum(
  exchanged: Callable[[Any, Any], tuple[Any, Any]], context: Context
) -> Callable[[Any, Any], tuple[Any, Any]]:
  """Returns `exchanged(leaves, state)` with the derivatives of a sum.

  Args:
    exchanged: Returns synced leaves and a new state; closes over no arrays.
    context: Axes and operation.
  """
  call = jax.custom_jvp(exchanged)

  @call.defjvp
  def derivative(primals, tangents):
    sums, new = call(*primals)
    moved = [
      _tangent_of_sum(leaf, tangent, total, context)
      for leaf, tangent, total in zip(primals[0], tangents[0], sums)
    ]
    return (sums, new), (moved, jax.tree.map(_zero, new))

  return call


def _tangent_of_sum(leaf: Any, tangent: Any, out: Any, context: Context) -> Any:
  """Returns the tangent of `out`, the sum of a leaf."""
  if not jnp.issubdtype(leaf.dtype, jnp.inexact):
    return _zero(out)
  if is_rows(out) and not is_rows(leaf):
    raise NotImplementedError(
      "You cannot differentiate `output='rows'` of an array, because rows that"
      " are zero would lose their derivatives. Give `output='dense'`."
    )
  if is_rows(leaf):
    wide = collectives.accumulator(leaf.dtype)
    rows = SparseRows(leaf.indices, tangent.values.astype(wide), leaf.num_rows)
    tangent = rows.to_dense().astype(leaf.dtype)
  total = dense_sum.all_reduce(tangent, context)
  if not is_rows(out):
    return total
  values = total.at[out.indices].get(mode="fill", fill_value=0)
  (ids, _), structure = jax.tree.flatten(out)
  return structure.unflatten([_zero(ids), values])


def _zero(x: Any) -> Any:
  """Returns a zero tangent."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    return jnp.zeros_like(x)
  return np.zeros(x.shape, jax.dtypes.float0)


# XLA combines small all-reduces for TPUs and GPUs. Gloo, which connects CPU
# processes, runs them one after another: 36 leaves of a recommender took 220 ms
# longer between four hosts. So small leaves are combined here for CPUs.

# Copying a larger leaf into a shared buffer costs more than the latency it
# saves.
JOINED_BYTES = 1 << 20


def totals(
  leaves: Mapping[Any, Any], options: Options, context: Context
) -> dict[Any, Any]:
  """All-reduces each leaf; returns sums or means under the same keys."""
  joins = jax.process_count() > 1 and context.devices > 1
  # Automatic axes shard leaves in ways of their own.
  joins = joins and not compat.automatic_axes()
  kinds: dict[Any, list[Any]] = {}
  for key, leaf in leaves.items():
    kinds.setdefault((_kind(leaf) if joins else None) or key, []).append(key)
  out = {}
  for keys in kinds.values():
    if len(keys) == 1:
      out[keys[0]] = total(leaves[keys[0]], options, context)
      continue
    together = lax.platform_dependent(
      [leaves[key] for key in keys],
      cpu=lambda parts: in_one_buffer(parts, context),
      default=lambda parts: [dense_sum.all_reduce(x, context) for x in parts],
    )
    out |= zip(keys, together)
  return out


def _kind(leaf: Any) -> tuple[jnp.dtype, frozenset[str]] | None:
  """Returns what leaves in a shared buffer have in common; None for large."""
  if is_rows(leaf):
    return None
  wide = collectives.accumulator(leaf.dtype)
  if leaf.size * wide.itemsize > JOINED_BYTES:
    return None
  return wide, compat.varying_axes(leaf)


def in_one_buffer(
  leaves: Sequence[jax.Array], context: Context
) -> list[jax.Array]:
  """All-reduces leaves of one kind in a shared buffer."""
  wide = collectives.accumulator(leaves[0].dtype)
  buffer = jnp.concatenate([leaf.astype(wide).reshape(-1) for leaf in leaves])
  ends = np.cumsum([leaf.size for leaf in leaves])[:-1].tolist()
  sums = jnp.split(dense_sum.all_reduce(buffer, context), ends)
  # Means of integers are floating, as JAX makes them.
  return [
    x.reshape(leaf.shape).astype(leaf.dtype if wide != leaf.dtype else x.dtype)
    for leaf, x in zip(leaves, sums)
  ]


def total(leaf: Any, options: Options, context: Context) -> Any:
  """Returns the sum or mean of a leaf by an all-reduce.

  SparseRows, as of a small table, are summed as arrays. One more column counts
  the devices that hold a row, so that all rows that were looked up come back,
  also those whose sum is zero.
  """
  if not is_rows(leaf):
    return dense_sum.all_reduce(leaf, context)
  merged = sparse_rows.merged(leaf)
  dense = options.output == "dense"
  if context.devices == 1 or not leaf.capacity:
    as_equal = lambda x: compat.as_invariant(x, context.axes)
    merged = jax.tree.map(as_equal, merged).as_unique()
    return merged.to_dense() if dense else merged
  if dense:
    return dense_sum.all_reduce(merged.to_dense(), context)
  held = jnp.ones_like(merged.values[:, :1])
  counted = jnp.concatenate([merged.values, held], axis=1)
  counted = SparseRows(merged.indices, counted, leaf.num_rows).to_dense()
  counted = dense_sum.all_reduce(counted, context)
  row = jnp.arange(leaf.num_rows, dtype=jnp.int32)
  row = jnp.where(counted[:, -1] > 0, row, leaf.num_rows)
  rows = SparseRows(row, counted[:, :-1], leaf.num_rows)
  return rows.as_unique()


def as_output(summed: Any, leaf: Any, options: Options) -> Any:
  """Converts the sum of a leaf to the type that `output` names."""
  if is_rows(summed):
    return summed.to_dense() if options.output == "dense" else summed
  if options.output == "rows":
    return SparseRows.in_place(summed)
  return leaf_util.from_table(summed, leaf)


def as_varying(tree: Any, axes: Axes) -> Any:
  """Casts leaves to vary over `axes`, where types record that."""
  rank = lax.axis_index(axes)
  return jax.tree.map(lambda x: compat.cast_like(x, rank), tree)


def sync_tree(tree: Any, state: Any, options: Options) -> tuple[Any, Any]:
  """Synchronizes every leaf, and returns the tree and the new state.

  `state` is a `ZenSyncState`, or None to count nothing.
  """
  context = context_of(options)
  named = local_leaves(tree, context)
  sparse: list[tuple[str, Any]] = []
  # One device has nothing to exchange.
  if context.devices > 1 or options.output == "rows":
    chosen = leaf_util.select(tree, options.sparse, options.unit)
    sparse = [leaf for leaf, is_sparse in zip(named, chosen) if is_sparse]
    if options.scheme != DENSE:
      require_sparse([name for name, _ in sparse], state, options)
  tuned = dict(state.tuned) if state else {}
  dense, exchanges = _exchanges(sparse, tuned, options, context)
  sent = {t.name for _, plans in exchanges for p in plans for t in p.tables}

  def exchanged(leaves, memory):
    leaves = {name: leaf for (name, _), leaf in zip(named, leaves)}
    states = dict(memory.leaves) if memory else {}
    others = {name: x for name, x in leaves.items() if name not in sent}
    out = totals(others, options, context)
    for table in dense:
      if options.output == "rows" and not is_rows(out[table.name]):
        out[table.name] = SparseRows.in_place(out[table.name])
      if leaf := states.get(table.name):
        states[table.name] = sync_state.after_dense_step(leaf, table, context)
    for scheme, plans in exchanges:
      if len(context.axes) > 1:
        # Collectives over different groups of devices run in one order.
        leaves, out = lax.optimization_barrier((leaves, out))
        # JAX 0.10 types all results as varying.
        out = jax.tree.map(lambda x: compat.as_invariant(x, context.axes), out)
      parts = [
        [leaf_util.as_table(leaves[t.name], options.unit) for t in plan.tables]
        for plan in plans
      ]
      sums, counts, _ = exchange.exchange(plans, parts, scheme, context)
      for plan, summed, count in zip(plans, sums, counts):
        for table, x in zip(plan.tables, summed):
          out[table.name] = as_output(x, leaves[table.name], options)
        if memory:
          states |= sync_state.after_step(
            states, memory.step, count, plan, scheme, context
          )
    return [out[name] for name, _ in named], states

  leaves, structure = jax.tree.flatten(tree, is_leaf=is_rows)
  sums, states = linear_as_psum(exchanged, context)(leaves, state)
  if state is not None:
    state = sync_state.next_state(state, states, "zen_sync", options, tree)
  return structure.unflatten(sums), state


def _exchanges(
  leaves: Sequence[tuple[str, Any]],
  tuned: Mapping[str, LeafChoice],
  options: Options,
  context: Context,
) -> tuple[list[Table], list[tuple[Scheme, list[ExchangePlan]]]]:
  """Plans sparse leaves.

  Returns:
    The leaves that the plan, `tune` or `scheme` has all-reduced; and the
    exchanges of all others, in order.
  """
  dense, groups = [], {}
  for name, leaf in leaves:
    table = leaf_tables.table_of(name, leaf, options)
    choice = leaf_tables.choose(table, options, tuned, context)
    if choice.scheme == DENSE:
      dense.append(table)
    else:
      key = choice.scheme, choice.group
      groups.setdefault(key, []).append((table, choice))
  exchanges = []
  for (name, _), members in groups.items():
    tables, choices = zip(*members)
    plans = leaf_tables.plans(tables, choices, SPARSE[name], options, context)
    exchanges.append((SPARSE[name], plans))
  return dense, exchanges


def require_sparse(
  names: Sequence[str], state: ZenSyncState | None, options: Options
) -> None:
  """Raises ValueError if `capacities` or a state are of other sparse leaves."""
  if isinstance(options.capacities, dict):
    unknown = sorted(set(options.capacities) - set(names))
    if unknown:
      raise ValueError(
        f"`capacities` must name leaves that are sent sparse, got {unknown}."
        f" These are sent sparse: {list(names)}."
      )
  if state is not None and set(names) != set(state.leaves):
    raise ValueError(
      "`state` must be made for these gradients, but it is for sparse leaves"
      f" {sorted(state.leaves)}, and here these are {sorted(names)}. Make it"
      " with `zenjax.init_state(tx, params, mesh, axis_name)` or"
      " `tx.init(params)` for parameters like these."
    )


def context_of(options: Options) -> Context:
  """Returns the devices of an exchange, once all of its axes are bound.

  Raises:
    NameError: An axis is not bound.
  """
  sizes = []
  for axis in options.axes:
    try:
      sizes.append(int(lax.axis_size(axis)))
    except NameError as error:
      mesh_axes = jax.sharding.get_abstract_mesh().axis_names
      what = f"{axis!r} is not"
      if axis in mesh_axes:
        what = f"nothing is mapped over {axis!r}"
      remedy = (
        "Call `update` inside shard_map, pmap or vmap over it, or wrap the step"
        f" in `zenjax.data_parallel(step, mesh, {axis!r})`. For row gradients"
        " in plain jit, give zen_sync `mesh=`."
      )
      if mesh_axes and axis not in mesh_axes:
        remedy = f"Your mesh has {mesh_axes}. Give the batch's axis."
      raise NameError(
        "`axis_name` must be bound where gradients are synchronized, but"
        f" {what}. {remedy}"
      ) from error
  return Context(axes=options.axes, sizes=tuple(sizes), mean=options.mean)


def local_leaves(tree: Any, context: Context) -> list[tuple[str, Any]]:
  """Returns `(name, leaf)` of each gradient.

  Raises:
    ValueError: Autodiff has summed a gradient. Types tell so only under
      check_vma; elsewhere gradients are local anyway.
    TypeError: A gradient is float0.
  """
  leaves = leaf_util.named_leaves(tree, is_rows)
  for name, leaf in leaves:
    if is_rows(leaf):
      require_one(f"leaf {name!r} of `updates`", leaf)
    if leaf.dtype == jax.dtypes.float0:
      raise TypeError(
        f"`updates` must be gradients, but leaf {name!r} is float0, which"
        " jax.grad(.., allow_int=True) gives for integers. Leave it out by"
        " `optax.partition`, and apply updates by `zenjax.apply_updates`."
      )
    varying = compat.varying_axes(leaf.values if is_rows(leaf) else leaf)
    for axis in context.axes:
      if axis not in varying and compat.records_varying(axis):
        axes = context.axes[0] if len(context.axes) == 1 else context.axes
        raise ValueError(
          f"`updates` must be local gradients, but leaf {name!r} has been"
          f" summed over axis {axis!r}: by autodiff, as in"
          " shard_map(check_vma=True), or by you. Differentiate with respect to"
          f" `zenjax.unreduced(params, {axes!r})`, and leave out any `pmean` of"
          " gradients. Gradients and loss are then local: clip after this"
          f" transformation, and return `jax.lax.pmean(loss, {axes!r})`."
        )
  return leaves
