"""A tree of gradients: sparse leaves are exchanged, others all-reduced."""

from collections.abc import Callable, Mapping, Sequence
import functools
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
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.dense_sum import Dense
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import exchange
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import sync_state
from zenjax._src.sync.plans import require_tree
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_state import LeafState
from zenjax._src.sync.sync_state import ZenSyncState

# An exchange has the derivatives of `psum` or `pmean`, which it equals.
#
# JAX cannot differentiate its loops, and takes the derivative of its bit
# operations for zero. But a sum is linear, whichever rows are zero. So tangents
# are summed as arrays by `lax.psum`, which JAX can transpose.


def linear_as_psum(
  exchanged: Callable[[Any, Any], tuple[Any, Any]],
  context: Context,
) -> Callable[[Any, Any], tuple[Any, Any]]:
  """Returns `exchanged(tree, state)` with the derivatives of a sum.

  Args:
    exchanged: Returns the synced tree and a new state; closes over no arrays.
    context: Axes and operation.
  """
  call = jax.custom_jvp(exchanged)

  @call.defjvp
  def derivative(primals, tangents):
    tree, moved = primals[0], tangents[0]
    out, new = call(*primals)
    given, moved = (jax.tree.leaves(x, is_leaf=is_rows) for x in (tree, moved))
    found, structure = jax.tree.flatten(out, is_leaf=is_rows)
    moved = [
      _moved(leaf, tangent, x, context)
      for leaf, tangent, x in zip(given, moved, found)
    ]
    return (out, new), (structure.unflatten(moved), jax.tree.map(_zero, new))

  return call


def _moved(leaf: Any, tangent: Any, out: Any, context: Context) -> Any:
  """Returns the tangent of the sum of a leaf."""
  if not jnp.issubdtype(leaf.dtype, jnp.inexact):
    return _zero(out)
  if is_rows(out) and not is_rows(leaf):
    raise NotImplementedError(
      "SparseRows that come out hold the rows of a sum that are not zero, and"
      " derivatives of the others would be lost; differentiate with"
      " `output='dense'`."
    )
  if is_rows(leaf):
    wide = collectives.accumulator(leaf.dtype)
    rows = SparseRows(leaf.indices, tangent.values.astype(wide), leaf.num_rows)
    tangent = rows.to_dense().astype(leaf.dtype)
  reduce = collectives.pmean if context.mean else collectives.psum
  total = reduce(tangent, context.axes)
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
  leaves: Mapping[int, Any], options: Options, context: Context
) -> dict[int, Any]:
  """Returns the sum or mean of each leaf, under the leaf's own key."""
  out, reduce = {}, functools.partial(DENSE["dense"].reduce, context=context)
  joins = jax.process_count() > 1 and context.devices > 1
  # Automatic axes spread leaves in ways of their own.
  joins = joins and not compat.automatic_axes()
  kinds: dict[Any, list[int]] = {}
  for i, leaf in leaves.items():
    kinds.setdefault((_kind(leaf) if joins else None) or i, []).append(i)
  for at in kinds.values():
    if len(at) == 1:
      out[at[0]] = total(leaves[at[0]], options, context)
      continue
    together = lax.platform_dependent(
      [leaves[i] for i in at],
      cpu=functools.partial(_in_one, reduce),
      default=lambda parts: [reduce(x) for x in parts],
    )
    out |= zip(at, together)
  return out


def _kind(leaf: Any) -> tuple[jnp.dtype, frozenset[str]] | None:
  """Returns a key that leaves in a shared buffer have in common, or None."""
  if is_rows(leaf):
    return None
  wide = collectives.accumulator(leaf.dtype)
  if leaf.size * wide.itemsize > JOINED_BYTES:
    return None
  return wide, compat.varying_axes(leaf)


def _in_one(
  reduce: Callable[[jax.Array], jax.Array], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
  wide = collectives.accumulator(leaves[0].dtype)
  found = collectives.in_one(reduce, [leaf.astype(wide) for leaf in leaves])
  # Means of integers are floating, as JAX makes them.
  return [
    x.astype(leaf.dtype) if wide != leaf.dtype else x
    for leaf, x in zip(leaves, found)
  ]


def total(leaf: Any, options: Options, context: Context) -> Any:
  """Returns the sum or mean of a leaf by an all-reduce.

  SparseRows, as of a small table, are summed as arrays. One more column counts
  the devices that hold a row, so that all rows that were looked up come back,
  also those whose sum is zero.
  """
  scheme: Dense = DENSE["dense"]
  if not is_rows(leaf):
    return scheme.reduce(leaf, context)
  merged = sparse_rows.merged(leaf)
  dense = options.output == "dense"
  if context.devices == 1 or not leaf.capacity:
    as_equal = lambda x: compat.as_invariant(x, context.axes)
    row, values = as_equal(merged.indices), as_equal(merged.values)
    merged = SparseRows(row, values, leaf.num_rows).as_unique()
    return merged.to_dense() if dense else merged
  if dense:
    return scheme.reduce(merged.to_dense(), context)
  held = jnp.ones_like(merged.values[:, :1])
  counted = jnp.concatenate([merged.values, held], axis=1)
  counted = SparseRows(merged.indices, counted, leaf.num_rows).to_dense()
  total = scheme.reduce(counted, context)
  row = jnp.arange(leaf.num_rows, dtype=jnp.int32)
  row = jnp.where(total[:, -1] > 0, row, leaf.num_rows)
  rows = SparseRows(row, total[:, :-1], leaf.num_rows)
  return rows.as_unique()


# Leaves of one exchange.


def _exchanged(
  group: Sequence[tuple[str, Any]],
  choices: Sequence[leaf_tables.Choice],
  state: ZenSyncState | None,
  options: Options,
  context: Context,
) -> tuple[dict[str, Any], dict[str, LeafState]]:
  """Returns the sums of leaves of one scheme by name, and their new states."""
  leaves, scheme = dict(group), SPARSE[choices[0].scheme]
  tables = [leaf_tables.table_of(name, leaf, options) for name, leaf in group]
  plans = leaf_tables.plans(tables, choices, scheme, options, context)
  entered = []
  for plan in plans:
    parts = [
      leaf_util.as_table(leaves[table.name], options.unit)
      for table in plan.tables
    ]
    entered.append(exchange.Local(plan, parts))
  found, _ = exchange.exchange(entered, scheme, context)
  out, new = {}, {}
  for table in found:
    names = [one.name for one in table.plan.tables]
    for name, rows in zip(names, table.rows):
      out[name] = as_asked(rows, leaves[name], options)
    if state:
      old = [state.leaves[name] for name in names]
      after = sync_state.after_step(
        old, state.step, table.counts, table.plan, scheme, context
      )
      new |= zip(names, after)
  return out, new


def _all_reduced(
  group: Sequence[tuple[str, Any]],
  state: ZenSyncState | None,
  options: Options,
  context: Context,
) -> tuple[dict[str, Any], dict[str, LeafState]]:
  """Like `_exchanged`, for leaves that a plan or `tune` has all-reduced."""
  keyed = dict(enumerate([leaf for _, leaf in group]))
  summed = totals(keyed, options, context)
  out, new = {}, {}
  for i, (name, leaf) in enumerate(group):
    out[name] = summed[i]
    if not is_rows(leaf) and options.output == "rows":
      out[name] = SparseRows.in_place(summed[i])
    if state and name in state.leaves:
      table = leaf_tables.table_of(name, leaf, options)
      new[name] = sync_state.after_dense_step(
        state.leaves[name], table, context, "dense"
      )
  return out, new


def as_asked(summed: Any, leaf: Any, options: Options) -> Any:
  """Converts the sum of a leaf to the type that `output` names."""
  if is_rows(summed):
    return summed.to_dense() if options.output == "dense" else summed
  if options.output == "rows":
    return SparseRows.in_place(summed)
  return leaf_util.from_table(summed, leaf)


def as_varying(tree: Any, axes: Axes) -> Any:
  """Casts leaves to vary over `axes`, where types record that."""
  recorded = frozenset(a for a in axes if compat.records_varying(a))

  def cast(x):
    missing = tuple(recorded - compat.varying_axes(jnp.asarray(x)))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def sync_tree(
  tree: Any, state: ZenSyncState | None, options: Options
) -> tuple[Any, dict[str, LeafState]]:
  """Synchronizes every leaf; `state=None` keeps no statistics.

  Returns:
    The tree, synchronized, and the new states of its sparse leaves.
  """
  context = context_of(options)
  leaves = local_leaves(tree, context)
  if options.plan:
    require_tree(options.plan, leaf_util.shapes(leaves))
  chosen = [False] * len(leaves)
  # One device has nothing to exchange.
  if context.devices > 1 or options.output == "rows":
    chosen = leaf_util.select(tree, options.sparse, options.unit)
    if options.scheme not in DENSE:
      check_state(leaves, chosen, state)
  names = [name for (name, _), sparse in zip(leaves, chosen) if sparse]
  tables = [
    leaf_tables.table_of(name, leaf, options)
    for (name, leaf), sparse in zip(leaves, chosen)
    if sparse
  ]
  require_named(options.capacities, names)
  tuned = dict(state.tuned) if state else {}
  choices = leaf_tables.choose(tables, options, tuned, context)
  exchanges: dict[Any, list[int]] = {}
  for i, choice in enumerate(choices):
    exchanges.setdefault((choice.scheme, choice.group), []).append(i)

  def exchanged(tree, memory):
    leaves = leaf_util.named_leaves(tree, is_rows)
    whole = {i: x for i, (_, x) in enumerate(leaves) if not chosen[i]}
    out: dict[str, Any] = {}
    for i, x in totals(whole, options, context).items():
      out[leaves[i][0]] = x
    sparse = [leaf for leaf, is_sparse in zip(leaves, chosen) if is_sparse]
    new = dict(memory.leaves) if memory else {}
    for (scheme, _), at in exchanges.items():
      group, ways = [sparse[i] for i in at], [choices[i] for i in at]
      if len(context.axes) > 1:
        # Collectives over different groups of devices run in one order.
        values = [leaf for _, leaf in group]
        values, out = lax.optimization_barrier((values, out))
        group = [(name, leaf) for (name, _), leaf in zip(group, values)]
        # JAX 0.10 types all as what varies.
        out = jax.tree.map(lambda x: compat.as_invariant(x, context.axes), out)
      if scheme in DENSE:
        synced, after = _all_reduced(group, memory, options, context)
      else:
        synced, after = _exchanged(group, ways, memory, options, context)
      out |= synced
      new |= after
    structure = jax.tree.structure(tree, is_leaf=is_rows)
    ordered = [out[name] for name, _ in leaves]
    return jax.tree.unflatten(structure, ordered), new

  return linear_as_psum(exchanged, context)(tree, state)


def require_named(capacities: Any, names: Sequence[str]) -> None:
  """Raises ValueError where `capacities` names a leaf that is not sparse."""
  if isinstance(capacities, dict):
    unknown = sorted(set(capacities) - set(names))
    if unknown:
      raise ValueError(
        f"`capacities` must name leaves that are sent sparse, got {unknown};"
        f" they are {list(names)}."
      )


def context_of(options: Options) -> Context:
  """Axes with their sizes; raises NameError where one is not bound."""
  sizes = []
  for axis in options.axes:
    try:
      sizes.append(int(lax.axis_size(axis)))
    except NameError as error:
      raise NameError(
        "`axis_name` must be bound where gradients are synchronized, and"
        f" {axis!r} is not; {_way_to_bind(axis)}."
      ) from error
  return options.context(sizes)


def _way_to_bind(axis: str) -> str:
  known = jax.sharding.get_abstract_mesh().axis_names
  if axis in known:
    return (
      "the mesh has it, but nothing is mapped over it here; call update inside"
      " shard_map, or wrap the step in `zenjax.data_parallel`"
    )
  if known:
    return f"give a name that the mesh has, of {known}"
  return (
    f"call update inside shard_map, pmap or vmap over {axis!r}, wrap the step"
    " in `zenjax.data_parallel`, or give zen_sync of row gradients in plain jit"
    " the `mesh=` that they lie on"
  )


def local_leaves(tree: Any, context: Context) -> list[tuple[str, Any]]:
  """`(name, leaf)` of each gradient; ValueError where autodiff has summed one.

  Types tell only under check_vma; elsewhere gradients are local anyway.
  """
  leaves = leaf_util.named_leaves(tree, is_rows)
  for name, leaf in leaves:
    if is_rows(leaf):
      require_one(f"leaf {name!r} of `updates`", leaf)
    if leaf.dtype == jax.dtypes.float0:
      raise TypeError(
        f"`updates` must be gradients, and leaf {name!r} is float0, which"
        " jax.grad(.., allow_int=True) gives for integers: there is nothing to"
        " average; keep it out by `optax.partition`, and apply updates by"
        " `zenjax.apply_updates`, which leaves such a parameter as it is."
      )
    varying = compat.varying_axes(leaf.values if is_rows(leaf) else leaf)
    for axis in context.axes:
      if axis not in varying and compat.records_varying(axis):
        raise ValueError(
          f"`updates` must be local gradients, and leaf {name!r} does not vary"
          f" over axis {axis!r}: under shard_map(check_vma=True) autodiff sums"
          " gradients of replicated parameters by itself. Differentiate with"
          f" respect to `zenjax.unreduced(params, {_as_given(context.axes)})`,"
          " or pass check_vma=False to shard_map."
        )
  return leaves


def _as_given(axes: Axes) -> str:
  return repr(axes[0] if len(axes) == 1 else axes)


def check_state(
  leaves: Sequence[tuple[str, Any]],
  chosen: Sequence[bool],
  state: sync_state.ZenSyncState | None,
) -> None:
  """Raises ValueError where a state remembers other leaves than these."""
  names = {name for (name, _), sparse in zip(leaves, chosen) if sparse}
  if state is not None and names != set(state.leaves):
    raise ValueError(
      "`state` must be made for these gradients: it remembers sparse leaves"
      f" {sorted(state.leaves)}, these have {sorted(names)}; call init with"
      " parameters of the same structure and shapes."
    )
