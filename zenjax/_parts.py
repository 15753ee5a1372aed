"""Sparse leaves that share an exchange, and what comes out for each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from zenjax import _auto
from zenjax import _plan
from zenjax import _residual
from zenjax import _select
from zenjax import _state
from zenjax import _sync
from zenjax import _tables
from zenjax import _totals
from zenjax._arguments import Unit
from zenjax._listed import Appended
from zenjax._options import Options
from zenjax._progress import Target
from zenjax._rows._sparse_rows import is_rows
from zenjax._rows._sparse_rows import SparseRows
from zenjax._schemes import DENSE
from zenjax._schemes import SPARSE
from zenjax._schemes.base import Arrived
from zenjax._schemes.base import Context


class Part(NamedTuple):
  """Leaves that share an exchange."""

  scheme: str
  at: list[int]  # which of the sparse leaves
  leaves: list[tuple[str, jax.Array | SparseRows]]
  choices: list[_auto.Choice]


def split(
  group: Sequence[tuple[str, jax.Array | SparseRows]],
  options: Options,
  context: Context,
) -> list[Part]:
  """The sparse leaves by scheme and group: all in one unless one is chosen."""
  tables = [_tables.table_of(name, leaf, options) for name, leaf in group]
  _tables.check_names(tables, options)
  choices = _auto.choose(tables, options, context)
  parts = []
  keys = [(choice.scheme, choice.group) for choice in choices]
  for key in dict.fromkeys(keys):
    at = [i for i, other in enumerate(keys) if other == key]
    part = ([group[i] for i in at], [choices[i] for i in at])
    parts.append(Part(key[0], at, *part))
  return parts


class Begun(NamedTuple):
  """Rows of a part on their way: the first push is sent."""

  exchange: _sync.Exchange
  tables: list[Any]  # arrays or SparseRows, as they were sent
  sent: _sync.Begun

  @property
  def mark(self) -> jax.Array | None:
    """Tells when that push has arrived, if anything of it is left to do."""
    return self.exchange.scheme.mark(self.sent.received)


def begin(
  part: Part,
  state: _state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> Begun | None:
  """Sends the first push of a part; None where it travels dense.

  Args:
    part: The leaves, local.
    state: Statistics before this step; None where there is no memory.
    options: Of the transformation.
    context: Axes and operation.
  """
  if part.scheme in DENSE:
    return None
  scheme, group = SPARSE[part.scheme], part.leaves
  columns = [choice.column_groups for choice in part.choices]
  plans = _tables.plans(group, scheme, options, context, columns)
  old = [state.leaves[name] for name, _ in group] if state else None
  tables = [as_table(leaf, options.unit_of(name)) for name, leaf in group]
  carried = None
  if old and not options.exact:
    carried = [
      _residual.carried(leaf, options.unit_of(name))
      for leaf, (name, _) in zip(old, group)
    ]
  exchange = _sync.Exchange(
    plans,
    scheme,
    context,
    remembered=[leaf.dense for leaf in old] if old else None,
    exact=options.exact,
  )
  rows_only = options.rows_out and not options.exact
  sent = exchange.begin(tables, carried=carried, rows_only=rows_only)
  return Begun(exchange, tables, sent)


def finish(
  part: Part,
  begun: Begun | None,
  state: _state.ZenSyncState | None,
  options: Options,
  context: Context,
  after: jax.Array | None = None,
) -> tuple[list[Any], dict[str, _state.LeafState]]:
  """Synchronizes the leaves of a part.

  Args:
    part: The leaves, local.
    begun: What `begin` returned for it.
    state: Statistics before this step; None where there is no memory.
    options: Of the transformation.
    context: Axes and operation.
    after: What is to arrive before any of it is summed.

  Returns:
    What comes out for each leaf, in order, and the new statistics of those
    leaves that have any, by name.
  """
  if begun:
    return _sync_rows(part, begun, state, options, after)
  reduce = DENSE[part.scheme]
  out = [
    _totals.total(leaf, reduce, options, context) for _, leaf in part.leaves
  ]
  new = {}
  if state and options.scheme == "auto":
    for (name, leaf), choice in zip(part.leaves, part.choices):
      table = _tables.table_of(name, leaf, options)
      new[name] = _state.after_dense_step(
        state.leaves[name], table, context, choice
      )
  return out, new


def _sync_rows(
  part: Part,
  begun: Begun,
  state: _state.ZenSyncState | None,
  options: Options,
  after: jax.Array | None,
) -> tuple[list[Any], dict[str, _state.LeafState]]:
  group, exchange = part.leaves, begun.exchange
  old = [state.leaves[name] for name, _ in group] if state else None
  result = exchange.finish(begun.sent, after=after)
  if old and not options.exact:
    # Rows to come out leave the table unwritten: what waits is in both.
    written = [_table_of(target) for target in result.targets]
    sources = begun.tables if options.rows_out else written
    old = [
      _residual.keep(*k, options.unit_of(k[-1].table.name))
      for k in zip(sources, old, result.first, exchange.plans)
    ]
  out = [
    leave(*r, options)
    for r in zip(group, result.targets, result.first, exchange.plans)
  ]
  new = {}
  if state and old:
    for i, (name, _) in enumerate(group):
      new[name] = _state.after_step(
        old[i],
        state.step,
        result.outcomes[i],
        exchange.plans[i],
        exchange.context,
        part.choices[i],
      )
  return out, new


def as_table(leaf: Any, unit: Unit) -> Any:
  """What is exchanged of a leaf: `[R, D]`, or SparseRows as they are."""
  return leaf if is_rows(leaf) else _select.as_table(leaf, unit)


def leave(
  named: tuple[str, Any],
  target: Target,
  first: Arrived,
  plan: _plan.TablePlan,
  options: Options,
) -> jax.Array | SparseRows:
  """What comes out for a leaf: as it came, unless `output` says otherwise."""
  num_rows, leaf = plan.table.num_rows, named[1]
  if isinstance(target, Appended):
    rows = target.rows(num_rows)
    return rows.to_dense() if options.output == "dense" else rows
  if not options.rows_out:
    table = target.table
    if not options.exact:
      table = _residual.withhold(table, first, plan)
    return _select.from_table(table, leaf)
  if not options.exact:
    return SparseRows(first.row, first.values, num_rows)
  return SparseRows.in_place(target.table)


def _table_of(target: Target) -> jax.Array:
  if isinstance(target, Appended):
    raise AssertionError("SparseRows do not wait")
  return target.table
