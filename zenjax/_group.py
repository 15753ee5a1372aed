"""A tree of gradients: which leaves share the sparse exchange, which psum."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _auto
from zenjax import _compat
from zenjax import _plan
from zenjax import _residual
from zenjax import _select
from zenjax import _state
from zenjax import _sync
from zenjax import _tables
from zenjax._collectives import Axes
from zenjax._options import Options
from zenjax._rows._sparse_rows import is_rows
from zenjax._rows._sparse_rows import SparseRows
from zenjax._schemes import DENSE
from zenjax._schemes import SPARSE
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context
from zenjax._schemes.base import DenseScheme


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
  _check_dense(tree)
  leaves = _select.named_leaves(tree)
  for name, leaf in leaves:
    _check_local(name, leaf, context.axes)
  chosen = _select.select(tree, options.sparse, options.unit)
  # One device has nothing to exchange, unless rows wait in a residual.
  alone = context.devices == 1 and options.exact and not options.rows_out
  if alone:
    chosen = [False] * len(leaves)
  elif options.scheme not in DENSE:
    _check_state(leaves, chosen, state)
  out = [
    None if sparse else _sum(leaf, DENSE["dense"], context)
    for (_, leaf), sparse in zip(leaves, chosen)
  ]
  at = [i for i, sparse in enumerate(chosen) if sparse]
  new_leaves = dict(state.leaves) if state else {}
  for part in _parts([leaves[i] for i in at], options, context):
    synced, new = _sync_part(part, state, options, context)
    new_leaves |= new
    for i, value in zip(part.at, synced):
      out[at[i]] = value
  return jax.tree.unflatten(jax.tree.structure(tree), out), new_leaves


def _check_dense(tree: Any) -> None:
  for name, leaf in _select.named_leaves(tree, is_rows):
    if is_rows(leaf):
      raise TypeError(
        f"zen_sync takes dense gradients, got SparseRows for {name!r}; give it"
        " `.to_dense()`, of which it sends the rows that are not zero, or take"
        " gradients with `jax.grad`."
      )


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


class _Part(NamedTuple):
  """Leaves that share an exchange."""

  scheme: str
  at: list[int]  # which of the sparse leaves
  leaves: list[tuple[str, jax.Array]]
  choices: list[_auto.Choice]


def _parts(
  group: Sequence[tuple[str, jax.Array]], options: Options, context: Context
) -> list[_Part]:
  """The sparse leaves by scheme: all in one but for `scheme="auto"`."""
  tables = [_tables.table_of(name, leaf, options) for name, leaf in group]
  _tables.check_names(tables, options)
  choices = _auto.choose(tables, options, context)
  parts = []
  for scheme in dict.fromkeys(choice.scheme for choice in choices):
    at = [i for i, choice in enumerate(choices) if choice.scheme == scheme]
    part = ([group[i] for i in at], [choices[i] for i in at])
    parts.append(_Part(scheme, at, *part))
  return parts


def _sync_part(
  part: _Part,
  state: _state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> tuple[list[Any], dict[str, _state.LeafState]]:
  if part.scheme in SPARSE:
    return _sync_rows(part, state, options, context)
  reduce = DENSE[part.scheme]
  out = [_sum(leaf, reduce, context) for _, leaf in part.leaves]
  new = {}
  if state and options.scheme == "auto":
    for (name, leaf), choice in zip(part.leaves, part.choices):
      table = _tables.table_of(name, leaf, options)
      new[name] = _state.after_dense_step(
        state.leaves[name], table, context, choice
      )
  return out, new


def _sync_rows(
  part: _Part,
  state: _state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> tuple[list[Any], dict[str, _state.LeafState]]:
  scheme, group = SPARSE[part.scheme], part.leaves
  columns = [choice.column_groups for choice in part.choices]
  table_plans = _tables.plans(group, scheme, options, context, columns)
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
        old[i],
        state.step,
        result.outcomes[i],
        table_plans[i],
        context,
        part.choices[i],
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
