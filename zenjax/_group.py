"""A tree of gradients: which leaves share the sparse exchange, which psum."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax import _compat
from zenjax import _plan
from zenjax import _residual
from zenjax import _select
from zenjax import _state
from zenjax import _sync
from zenjax._collectives import Axes
from zenjax._options import Options
from zenjax._rows._sparse_rows import SparseRows
from zenjax._schemes import DENSE
from zenjax._schemes import SPARSE
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import DenseScheme
from zenjax._schemes.base import Scheme


def as_varying(tree: Any, axes: Axes) -> Any:
  """Casts leaves to vary over those of `axes` that types record."""
  recorded = frozenset(a for a in axes if _compat.records_varying(a))

  def cast(x):
    missing = tuple(recorded - _compat.varying_axes(jnp.asarray(x)))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def sync_tree(
  tree: Any, state: _state.ZenSyncState | None, options: Options
) -> tuple[Any, dict[str, _state.LeafState]]:
  """Synchronizes every leaf; `state=None` is without memory.

  Returns:
    The tree, synced, and the new state of its sparse leaves.
  """
  context = _context(options)
  leaves = _select.named_leaves(tree)
  for name, leaf in leaves:
    _check_local(name, leaf, context.axes)
  scheme = SPARSE.get(options.scheme)
  chosen = _select.select(tree, options.sparse, options.unit)
  # One device has nothing to exchange, unless rows wait in a residual.
  alone = context.devices == 1 and options.exact and not options.rows_out
  if alone:
    chosen = [False] * len(leaves)
  out = [
    None if sparse else _sum(leaf, DENSE["dense"], context)
    for (_, leaf), sparse in zip(leaves, chosen)
  ]
  at = [i for i, sparse in enumerate(chosen) if sparse]
  new_leaves = dict(state.leaves) if state else {}
  if at:
    group = [leaves[i] for i in at]
    if scheme is None:
      reduce = DENSE[options.scheme]
      synced = [_sum(leaf, reduce, context) for _, leaf in group]
    else:
      _check_state(leaves, chosen, state)
      synced, new_leaves = _sync_group(group, state, scheme, options, context)
    for i, value in zip(at, synced):
      out[i] = value
  return jax.tree.unflatten(jax.tree.structure(tree), out), new_leaves


def _context(options: Options) -> Context:
  sizes = []
  for axis in options.axes:
    try:
      sizes.append(int(lax.axis_size(axis)))
    except NameError as error:
      raise NameError(
        f"`axis_name` must be bound where gradients are synchronized, and"
        f" {axis!r} is not; call update inside shard_map, pmap or vmap over"
        f" {axis!r}, or wrap the step in `zenjax.data_parallel`."
      ) from error
  return Context(axes=options.axes, sizes=tuple(sizes), mean=options.mean)


def _check_local(name: str, leaf: jax.Array, axes: Axes) -> None:
  """Refuses a gradient that autodiff has summed already.

  Types tell only under check_vma; elsewhere gradients are local anyway.
  """
  if leaf.dtype == jax.dtypes.float0:
    return
  varying = _compat.varying_axes(leaf)
  for axis in axes:
    if axis not in varying and _compat.records_varying(axis):
      raise ValueError(
        f"`updates` must be local gradients, and leaf {name!r} does not vary"
        f" over axis {axis!r}: under shard_map(check_vma=True) autodiff sums"
        " gradients of replicated parameters by itself. Differentiate with"
        f" respect to `zenjax.as_varying(params, {axis!r})`, or pass"
        " check_vma=False to shard_map."
      )


def _check_state(
  leaves: Sequence[tuple[str, Any]],
  chosen: Sequence[bool],
  state: _state.ZenSyncState | None,
) -> None:
  names = {name for (name, _), sparse in zip(leaves, chosen) if sparse}
  if state is not None and names != set(state.leaves):
    raise ValueError(
      "`state` must be made for these gradients: it remembers sparse leaves"
      f" {sorted(state.leaves)}, these have {sorted(names)}; call init with"
      " parameters of the same structure and shapes."
    )


def _sum(leaf: jax.Array, scheme: DenseScheme, context: Context) -> jax.Array:
  if leaf.dtype == jax.dtypes.float0:
    return leaf
  return scheme.reduce(leaf, context)


def _sync_group(
  group: Sequence[tuple[str, jax.Array]],
  state: _state.ZenSyncState | None,
  scheme: Scheme,
  options: Options,
  context: Context,
) -> tuple[list[Any], dict[str, _state.LeafState]]:
  table_plans = plans(group, scheme, options, context)
  old = [state.leaves[name] for name, _ in group] if state else None
  tables = [_select.as_table(leaf, options.unit) for _, leaf in group]
  carried = None
  if old and not options.exact:
    carried = [_residual.carried(leaf, options.unit) for leaf in old]
  result = _sync.sync(
    tables,
    table_plans,
    scheme,
    context,
    remembered=[leaf.dense for leaf in old] if old else None,
    exact=options.exact,
    carried=carried,
    rows_only=options.rows_out and not options.exact,
  )
  if old and not options.exact:
    # Rows to come out leave the table unwritten: what waits is in both.
    sources = tables if options.rows_out else result.tables
    old = [
      _residual.keep(*k, options.unit)
      for k in zip(sources, old, result.first, table_plans)
    ]
  if options.rows_out:
    out = [
      _rows(*r, options) for r in zip(result.tables, result.first, table_plans)
    ]
  else:
    synced = result.tables
    if not options.exact:
      synced = [
        _residual.withhold(*w) for w in zip(synced, result.first, table_plans)
      ]
    out = [
      _select.from_table(table, leaf) for table, (_, leaf) in zip(synced, group)
    ]
  new = {}
  if state and old:
    for i, (name, _) in enumerate(group):
      new[name] = _state.after_step(
        old[i], state.step, result.outcomes[i], table_plans[i], context
      )
  return out, new


def _rows(
  table: jax.Array, first: Arrived, plan: _plan.TablePlan, options: Options
) -> SparseRows:
  """Rows of a synced table: one round's, or as many as there can be."""
  num_rows = plan.table.num_rows
  if not options.exact:
    return SparseRows(first.row, first.values, num_rows)
  return SparseRows.in_place(table)


def plans(
  group: Sequence[tuple[str, jax.Array]],
  scheme: Scheme,
  options: Options,
  context: Context,
) -> tuple[_plan.TablePlan, ...]:
  """Static sizes for the sparse leaves of `group`, `(name, leaf)` each."""
  tables = [table_of(name, leaf, options) for name, leaf in group]
  pinned = [_pinned(table, options) for table in tables]
  _check_names(tables, options)
  sizes = context.sizes
  groups = []
  for table in tables:
    wanted = _plan.choose_column_groups(table, sizes[-1], options.partition)
    if sizes[-1] % wanted:
      raise ValueError(
        "`partition` as a number of column groups must divide the devices"
        f" along {context.axes[-1]!r}, got {wanted} for {sizes[-1]} devices."
      )
    groups.append(scheme.groups(sizes, wanted))
  planned = _plan.plan_group(
    tables,
    row_groups=[m for m, _ in groups],
    column_groups=[g for _, g in groups],
    pinned=pinned,
    seed=options.seed,
    contiguous=scheme.contiguous,
  )
  return tuple(scheme.fitted(plan) for plan in planned)


# Rows, padding and out-of-range markers must fit int32 together.
_MAX_ROWS = np.iinfo(np.int32).max // 2


def table_of(name: str, leaf: jax.Array, options: Options) -> _plan.Table:
  rows, width = _select.table_shape(leaf, options.unit)
  if rows > _MAX_ROWS:
    raise ValueError(
      f"Leaf {name!r} of shape {leaf.shape} has {rows} rows with"
      f" `unit={options.unit!r}`, more than the {_MAX_ROWS} that int32 slots"
      " count; choose a larger `unit`, split the leaf, or leave it out of"
      " `sparse`."
    )
  dtype = jnp.dtype(leaf.dtype)
  wire = options.wire_dtype or dtype
  if wire.itemsize > dtype.itemsize:
    raise ValueError(
      f"`wire_dtype` must not be wider than the leaf, got {wire} for leaf"
      f" {name!r} of {dtype}; leave it out for that leaf's own dtype."
    )
  return _plan.Table(
    name=name, num_rows=rows, width=width, dtype=dtype, wire_dtype=wire
  )


def _pinned(table: _plan.Table, options: Options) -> _plan.Capacity | None:
  sizes = options.capacities
  if isinstance(sizes, dict):
    sizes = sizes.get(table.name)
  if sizes is not None and sizes.pull > table.num_rows:
    raise ValueError(
      f"`capacities` must not exceed the {table.num_rows} rows of leaf"
      f" {table.name!r}, got {tuple(sizes)}; see `zenjax.report`."
    )
  return sizes


def _check_names(tables: Sequence[_plan.Table], options: Options) -> None:
  if isinstance(options.capacities, dict):
    known = [table.name for table in tables]
    unknown = sorted(set(options.capacities) - set(known))
    if unknown:
      raise ValueError(
        f"`capacities` must name leaves that travel sparse, got {unknown};"
        f" they are {known}."
      )
