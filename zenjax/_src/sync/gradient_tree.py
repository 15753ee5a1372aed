"""A tree of gradients: which leaves share the sparse exchange, which psum."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core import wire
from zenjax._src.core.arguments import Unit
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import DenseScheme
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import exchange
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import sync_state
from zenjax._src.sync import table_sources
from zenjax._src.sync.exchange import Target
from zenjax._src.sync.plans import require_tree
from zenjax._src.sync.sync_options import Options
from zenjax._src.sync.sync_state import LeafState
from zenjax._src.sync.table_sources import Appended

# Derivatives of an exchange: those of `psum` or `pmean`, which it equals.
#
# An exchange itself is made of bits, loops and look-ups of what is not zero:
# derivatives of these are errors of JAX or, of bits, zeros without a word. A
# sum is linear in its operands, whichever rows are zero: tangents are summed as
# arrays, by `lax.psum`, which JAX knows how to transpose.


def linear_as_psum(
  exchanged: Callable[[Any, Any], tuple[Any, Any]],
  options: Options,
  context: Context,
) -> Callable[[Any, Any], tuple[Any, Any]]:
  """Returns `exchanged(tree, state)` with the derivatives of a sum.

  Args:
    exchanged: Returns the synced tree and a new state; closes over no arrays.
    options: Of the transformation.
    context: Axes and operation.
  """
  call = jax.custom_jvp(exchanged)

  @call.defjvp
  def derivative(primals, tangents):
    tree, moved = primals[0], tangents[0]
    if not options.exact:
      raise NotImplementedError(
        "`on_overflow='carry'` keeps rows for later steps, by their number, and"
        " what comes out has no derivative; differentiate with"
        " `on_overflow='exact'`."
      )
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
  """The tangent of what comes out for a leaf."""
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
  """The tangent of what does not move."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    return jnp.zeros_like(x)
  return np.zeros(x.shape, jax.dtypes.float0)


# Leaves that travel as a whole: summed each by itself, or small ones in one.
#
# XLA joins the sums of a step, and TPUs and GPUs then send them as one. Gloo,
# which joins CPUs of several processes, takes the buffers of such a sum one
# after the other, each with all its latencies: 36 leaves of a recommender
# between four hosts took 220 ms more than one buffer of their size.


# A larger leaf takes longer to be copied twice than it has of latencies.
JOINED_BYTES = 1 << 20


def totals(
  leaves: Mapping[int, Any], options: Options, context: Context
) -> dict[int, Any]:
  """The sum or mean of each leaf, by `psum`, under the leaf's own key."""
  out = {}
  # Leaves of one type, that vary over the same axes, share a buffer. Where XLA
  # spreads programs over an axis itself, they lie there in ways of their own.
  joins = buffers_in_turn() and context.devices > 1
  joins = joins and not compat.automatic_axes()
  keys: dict[Any, list[int]] = {}
  for i, leaf in leaves.items():
    keys.setdefault((_kind(leaf) if joins else None) or i, []).append(i)
  for at in keys.values():
    if len(at) == 1:
      out[at[0]] = total(leaves[at[0]], DENSE["dense"], options, context)
      continue
    joined = lax.platform_dependent(
      *(leaves[i] for i in at),
      cpu=functools.partial(_in_one, context=context),
      default=functools.partial(_each, context=context),
    )
    out |= zip(at, joined)
  return out


def _kind(leaf: Any) -> tuple[jnp.dtype, frozenset[str]] | None:
  """Returns what must be alike to share a buffer; None for an own one."""
  if is_rows(leaf):
    return None
  wide = collectives.accumulator(leaf.dtype)
  if leaf.size * wide.itemsize > JOINED_BYTES:
    return None
  return wide, compat.varying_axes(leaf)


def buffers_in_turn() -> bool:
  """True if CPUs, if the program is for them, sum buffers over a network."""
  return jax.process_count() > 1


def _each(*leaves: jax.Array, context: Context) -> tuple[jax.Array, ...]:
  return tuple(DENSE["dense"].reduce(leaf, context) for leaf in leaves)


def _in_one(*leaves: jax.Array, context: Context) -> tuple[jax.Array, ...]:
  wide = collectives.accumulator(leaves[0].dtype)
  found = collectives.in_one(
    lambda flat: DENSE["dense"].reduce(flat, context),
    [leaf.astype(wide) for leaf in leaves],
  )
  return tuple(
    x.astype(leaf.dtype if wide != leaf.dtype else x.dtype)
    for leaf, x in zip(leaves, found)
  )


def total(
  leaf: Any, scheme: DenseScheme, options: Options, context: Context
) -> Any:
  """The sum or mean of a leaf that travels as a whole.

  SparseRows are made an array for it: of a table that is judged small, or for
  a scheme that knows no rows. A last column counts the devices that hold a row,
  so that all rows that were looked up come back, also those whose sum is zero.
  """
  if not is_rows(leaf):
    return scheme.reduce(leaf, context)
  merged = leaf.combine()
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
  return _held_rows(total[:, :-1], total[:, -1])


def _held_rows(table: jax.Array, held: jax.Array) -> SparseRows:
  """All rows of a sum `[R, D]`, as padding those with `held: [R]` of zero."""
  row = jnp.arange(table.shape[0], dtype=jnp.int32)
  row = jnp.where(held > 0, row, table.shape[0])
  return SparseRows(row, table, table.shape[0]).as_unique()


# Rows that wait for the next step: `on_overflow="carry"`.
#
# Where nothing waits, which is nearly always, the table is not read for it:
# every pass is a loop that turns once or not at all, in place.


def carried_rows(leaf: LeafState, unit: Unit) -> table_sources.Carried:
  """Returns the rows that wait from earlier steps as a table."""
  residual = _residual_of(leaf)
  return table_sources.Carried(
    leaf_util.as_table(residual[0], unit), leaf.waiting
  )


def keep(
  table: jax.Array,
  leaf: LeafState,
  first: Arrived,
  plan: TablePlan,
  unit: Unit,
) -> LeafState:
  """`leaf` with the rows that were not exchanged.

  Args:
    table: `[R, D]` as it entered the exchange, or as it came back: rows that
      were not exchanged hold this device's values in both, for sums are written
      over no others.
    leaf: What waited until now.
    first: What the round brought; slots from its limit on were not summed.
    plan: Of the table.
    unit: How a leaf is seen as rows.
  """

  # The same shape in and out: XLA then writes in place.
  def body(carry):
    flag, late = carry
    zero = jnp.zeros((), late.dtype)
    waits = jnp.where(_done(first, plan), zero, late + table)
    return jnp.zeros_like(flag), compat.cast_like(waits, late)

  residual = _residual_of(leaf)
  waiting = exchange.unfinished(first.tally, plan)
  # Where nothing waits and nothing did, it is zero and stays so.
  late = leaf_util.as_table(residual[0], unit)
  carry = (waiting | leaf.waiting, late)
  late = lax.while_loop(lambda c: c[0], body, carry)[1]
  residual = leaf_util.from_table(late, residual)
  return leaf._replace(residual=residual)


def withhold(table: jax.Array, first: Arrived, plan: TablePlan) -> jax.Array:
  """`table` after the exchange with zeros in the rows that wait."""

  def body(carry):
    flag, table = carry
    zero = jnp.zeros((), table.dtype)
    return jnp.zeros_like(flag), jnp.where(_done(first, plan), table, zero)

  carry = (exchange.unfinished(first.tally, plan), table)
  return lax.while_loop(lambda c: c[0], body, carry)[1]


def _residual_of(leaf: LeafState) -> jax.Array:
  if leaf.residual is None:
    raise AssertionError("carry keeps a residual for every leaf")
  return leaf.residual


def _done(first: Arrived, plan: TablePlan) -> jax.Array:
  """Rows that the round summed, `[R, 1] bool`."""
  row = jnp.arange(plan.table.num_rows, dtype=jnp.int32)
  group, slot = plan.layout.place(row)
  return (slot < first.tally.limit[group])[:, None]


# SparseRows that travel as arrays, and come out as rows.


def _as_arrays(
  group: Sequence[tuple[str, Any]], context: Context
) -> tuple[list[tuple[str, jax.Array]], jax.Array]:
  """Returns the tables of SparseRows, and which of their rows they hold.

  Args:
    group: `(name, SparseRows)` each.
    context: Axes and operation.

  Returns:
    The local tables, and `[k] int32`, of which the sum over devices counts for
    each row those that hold it: see `_counts_of`. A row that somebody holds
    comes out even if its sum is zero.
  """
  found = [_table_of_rows(rows) for _, rows in group]
  held = jnp.concatenate([is_held for _, is_held in found])
  words = wire.to_words(held[None].astype(_count_dtype(context)))
  tables = [(name, table) for (name, _), (table, _) in zip(group, found)]
  return tables, lax.bitcast_convert_type(words[0], jnp.int32)


def _count_dtype(context: Context) -> np.dtype:
  """Returns in what devices are counted, several counts to a word.

  None is more than the devices, so that sums of words carry nothing over.
  """
  return np.min_scalar_type(context.devices)


def _counts_of(
  words: jax.Array, group: Sequence[tuple[str, Any]], context: Context
) -> list[jax.Array]:
  """Returns how many devices hold each row of SparseRows, `[R]` integers."""
  ends = np.cumsum([rows.num_rows for _, rows in group]).tolist()
  words = lax.bitcast_convert_type(words, jnp.uint32)
  counts = wire.from_words(words[None], ends[-1:], _count_dtype(context))
  return jnp.split(counts[0], ends[:-1])


def _table_of_rows(rows: SparseRows) -> tuple[jax.Array, jax.Array]:
  """The table that SparseRows are of, and which rows they hold: `[R] bool`."""
  ids, num_rows = rows.indices, rows.num_rows
  values = compat.from_memory(rows.values)  # As `indexing.put` does.
  if not rows.capacity:
    none = rows.to_dense(), jnp.zeros(num_rows, bool)
    table, is_held = [compat.cast_like(x, values) for x in none]
    return table, is_held
  wide = collectives.accumulator(values.dtype)
  ids = jnp.where(ids < 0, ids + num_rows, ids)
  here = jnp.arange(ids.shape[0], dtype=jnp.int32)
  # Padding must differ, too.
  ids = jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows + here)
  nowhere = jnp.full(num_rows, len(here), jnp.int32)
  nowhere = compat.cast_like(nowhere, ids)
  unique = rows.unique
  at = nowhere.at[ids].set(here, mode="drop", unique_indices=unique)
  # A table of zeros to add to would be written twice.
  table = indexing.take_or(values, at, 0).astype(wide)
  if not unique:
    again = indexing.take_or(at, ids, -1) != here
    rest = jnp.where(again, ids, num_rows)
    table = table.at[rest].add(values.astype(wide), mode="drop")
  return table.astype(values.dtype), at < len(here)


def _as_rows(
  table: jax.Array, held: jax.Array, leaf: LeafState | None, context: Context
) -> tuple[SparseRows, LeafState | None]:
  """Returns a sum as SparseRows, and the counts of its rows in `leaf`."""
  n = context.devices
  if leaf is not None:
    leaf = leaf.with_counts(
      local_rows=jnp.sum(held.astype(jnp.float32)) / n,
      union_rows=jnp.sum(held > 0, dtype=jnp.float32),
      more_bytes=2 * (n - 1) / n * held.nbytes,
    )
  return _held_rows(table, held), leaf


# Sparse leaves that share an exchange, and what comes out for each.


class SharedExchange(NamedTuple):
  """Leaves that share an exchange."""

  scheme: str
  at: list[int]  # which of the sparse leaves
  leaves: list[tuple[str, jax.Array | SparseRows]]
  choices: list[leaf_tables.Choice]


def split(
  group: Sequence[tuple[str, jax.Array | SparseRows]],
  options: Options,
  context: Context,
) -> list[SharedExchange]:
  """Splits sparse leaves into exchanges, one for each scheme and group.

  All share one, unless `scheme="auto"`, a plan or `overlap` says otherwise.
  """
  tables = [leaf_tables.table_of(name, leaf, options) for name, leaf in group]
  if isinstance(options.capacities, dict):
    known = [table.name for table in tables]
    unknown = sorted(set(options.capacities) - set(known))
    if unknown:
      raise ValueError(
        f"`capacities` must name leaves that travel sparse, got {unknown};"
        f" they are {known}."
      )
  choices = leaf_tables.choose(tables, options, context)
  parts = []
  keys = [(choice.scheme, choice.group) for choice in choices]
  for key in dict.fromkeys(keys):
    at = [i for i, other in enumerate(keys) if other == key]
    part = ([group[i] for i in at], [choices[i] for i in at])
    parts.append(SharedExchange(key[0], at, *part))
  return parts


def _locals(
  part: SharedExchange,
  state: sync_state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> list[exchange.Local]:
  """Returns the leaves of a part as tables, with what is remembered of each."""
  columns = [choice.column_groups for choice in part.choices]
  scheme = SPARSE[part.scheme]
  fits = bool(state) and leaf_tables.first_rounds_fit(scheme, options, context)
  plans = leaf_tables.plans(
    part.leaves, scheme, options, context, columns, fits=fits
  )
  leaves, found = dict(part.leaves), []
  for plan in plans:
    names = [table.name for table in plan.tables]
    tables = [leaf_util.as_table(leaves[name], options.unit) for name in names]
    remembered, carried, needed = None, None, None
    if state:
      old = [state.leaves[name] for name in names]
      if plan.guess is not None:
        needed = sync_state.needed(old, state.step, plan)
      if options.exact and plan.table.look_ups is None:
        remembered = jnp.stack([leaf.dense for leaf in old])
      if not options.exact:
        carried = carried_rows(old[0], options.unit)
    found.append(exchange.Local(plan, tables, remembered, carried, needed))
  return found


def _summed_whole(
  part: SharedExchange,
  state: sync_state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> tuple[list[Any], dict[str, sync_state.LeafState]]:
  """Sums the leaves of a part that travels dense: see `_results`."""
  reduce = DENSE[part.scheme]
  out = [total(leaf, reduce, options, context) for _, leaf in part.leaves]
  new = {}
  if state and options.scheme == "auto":
    for (name, leaf), choice in zip(part.leaves, part.choices):
      table = leaf_tables.table_of(name, leaf, options)
      new[name] = sync_state.after_dense_step(
        state.leaves[name], table, context, choice
      )
  return out, new


def _begun(
  part: SharedExchange,
  state: sync_state.ZenSyncState | None,
  options: Options,
  context: Context,
  counts: jax.Array | None,
) -> exchange.Exchange:
  """Sends the first push of a part, and `counts` as `exchange.begin` does."""
  return exchange.begin(
    _locals(part, state, options, context),
    SPARSE[part.scheme],
    context,
    exact=options.exact,
    rows_only=options.output == "rows" and not options.exact,
    counts=counts,
  )


def _results(
  part: SharedExchange,
  tables: Sequence[exchange.Synced],
  state: sync_state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> tuple[list[Any], dict[str, sync_state.LeafState]]:
  """Reads the exchange of a part.

  Args:
    part: The leaves, local.
    tables: The same, exchanged.
    state: Statistics before this step; None where there is no memory.
    options: Of the transformation.
    context: Axes and operation.

  Returns:
    What comes out for each leaf, in order, and the new statistics of those
    leaves that have any, by name.
  """
  leaves, out, new = dict(part.leaves), {}, {}
  choices = dict(zip(leaves, part.choices))
  for table in tables:
    names = [one.name for one in table.plan.tables]
    out |= zip(names, leave([leaves[name] for name in names], table, options))
    if not state:
      continue
    old = [state.leaves[name] for name in names]
    if not options.exact:
      # Where rows come out nobody reads a written table: the one that entered
      # holds what waits, too.
      rows = table.entered if options.output == "rows" else table.target
      unit = options.unit
      old = [keep(_table_of(rows), old[0], table.first, table.plan, unit)]
    after = sync_state.after_step(
      old,
      state.step,
      table.outcome,
      table.plan,
      context,
      [choices[name] for name in names],
    )
    new |= zip(names, after)
  return [out[name] for name in leaves], new


def leave(
  leaves: Sequence[Any], table: exchange.Synced, options: Options
) -> list[Any]:
  """Returns what comes out: as it came, unless `output` says otherwise."""
  plan, target = table.plan, table.target
  if isinstance(target, Appended):
    rows = target.rows(plan)
    return [x.to_dense() for x in rows] if options.output == "dense" else rows
  if options.output != "rows":
    synced = list(target.tables)
    if not options.exact:
      synced = [withhold(_table_of(target), table.first, plan)]
    return [leaf_util.from_table(x, leaf) for x, leaf in zip(synced, leaves)]
  if not options.exact:
    first = table.first
    return [SparseRows(first.row, first.values, plan.table.num_rows)]
  return [SparseRows.in_place(x) for x in target.tables]


def _table_of(target: Target) -> jax.Array:
  """The one table of an exchange whose rows may wait."""
  if isinstance(target, Appended):
    raise AssertionError("SparseRows do not wait")
  (table,) = target.tables
  return table


def as_varying(tree: Any, axes: Axes) -> Any:
  """Casts leaves to vary over those of `axes` that types record."""
  recorded = frozenset(a for a in axes if compat.records_varying(a))

  def cast(x):
    missing = tuple(recorded - compat.varying_axes(jnp.asarray(x)))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def sync_tree(
  tree: Any, state: sync_state.ZenSyncState | None, options: Options
) -> tuple[Any, dict[str, sync_state.LeafState]]:
  """Synchronizes every leaf; `state=None` is without memory.

  Returns:
    The tree, synced, and the new state of its sparse leaves.
  """
  context = context_of(options)
  leaves = local_leaves(tree, context)
  if options.plan:
    require_tree(options.plan, leaf_util.shapes(leaves))
  # One device has nothing to exchange, unless rows wait in a residual.
  chosen = [False] * len(leaves)
  if context.devices > 1 or not options.exact or options.output == "rows":
    chosen = leaf_util.select(tree, options.sparse, options.unit)
    if options.scheme not in DENSE:
      check_state(leaves, chosen, state)
  at = [i for i, sparse in enumerate(chosen) if sparse]
  as_arrays = leaf_tables.go_as_arrays(
    [leaf_tables.table_of(*leaves[i], options) for i in at], options, context
  )
  # Of the exchange itself.
  inner = options
  if as_arrays:
    inner = dataclasses.replace(options, output="dense")
  # What a step writes and never reads is no operand of `exchanged`: the program
  # would read all of these.
  memory = state
  if state:
    may = {name for name, leaf in leaves if as_arrays or not is_rows(leaf)}
    memory = sync_state.read_by_a_step(state, may, options.exact)

  def exchanged(tree, memory):
    leaves = leaf_util.named_leaves(tree, is_rows)
    _check_residuals(leaves, memory, options, context)
    whole = {i: x for i, (_, x) in enumerate(leaves) if not chosen[i]}
    summed = totals(whole, options, context)
    out: list[Any] = [summed.get(i) for i in range(len(leaves))]
    new = dict(memory.leaves) if memory else {}
    group, own, counts = [leaves[i] for i in at], None, None
    if as_arrays:
      group, held = _as_arrays(group, context)
      own = held if options.output != "dense" else None
    parts = split(group, inner, context)
    # The first part takes the counts of all leaves.
    given = [own, *[None] * len(parts)]
    # Beside the backward pass all pushes leave before the first sum.
    overlaps = options.plan.overlap if options.plan else options.tuning.overlap
    together, begun, after = overlaps and len(parts) > 1, {}, None
    for k, part in enumerate(parts):
      if together and part.scheme in SPARSE:
        begun[k] = _begun(part, memory, inner, context, given[k])
    marks = [x.mark for x in begun.values() if x.mark is not None]
    if len(marks) > 1:
      after = functools.reduce(jnp.maximum, marks)
    for k, part in enumerate(parts):
      if part.scheme in DENSE:
        synced, more = _summed_whole(part, memory, inner, context)
      else:
        sent = begun.get(k) or _begun(part, memory, inner, context, given[k])
        found = exchange.finish(sent, after=after)
        if found.counts is not None:
          counts = found.counts
        synced, more = _results(part, found.tables, memory, inner, context)
      new |= more
      for i, value in zip(part.at, synced):
        out[at[i]] = value
    if counts is not None:
      held = _counts_of(counts, [leaves[i] for i in at], context)
      for i, count in zip(at, held):
        name = leaves[i][0]
        out[i], new[name] = _as_rows(out[i], count, new.get(name), context)
    structure = jax.tree.structure(tree, is_leaf=is_rows)
    return jax.tree.unflatten(structure, out), new

  call = linear_as_psum(exchanged, options, context)
  synced, new_leaves = call(tree, memory)
  return synced, sync_state.with_rest(new_leaves, state) if state else {}


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


def _check_residuals(
  leaves: Sequence[tuple[str, Any]],
  state: sync_state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> None:
  """Raises ValueError where what waits is not that of a device."""
  shapes = {name: tuple(leaf.shape) for name, leaf in leaves}
  for name, leaf in state.leaves.items() if state else ():
    if name not in shapes or (leaf.residual is None and options.exact):
      continue
    if leaf.residual is None or options.exact:
      made, used = ("exact", "carry")[:: 1 if leaf.residual is None else -1]
      raise ValueError(
        f"`state` must be made with `on_overflow={used!r}`, as it is used, got"
        f" one of {made!r} for leaf {name!r}; "
        + (
          "call `zenjax.init_state(tx, params, mesh, axis_name)`."
          if leaf.residual is None
          else "rows that wait in its residual would be lost; go on with"
          " `on_overflow='carry'`."
        )
      )
    parts, *shape = leaf.residual.shape
    if tuple(shape) != shapes[name]:
      raise ValueError(
        f"`state` must keep a residual of shape {(1, *shapes[name])} of leaf"
        f" {name!r} on a device, got {leaf.residual.shape}; call"
        " `zenjax.init_state("
        "tx, params, mesh, axis_name)` with these parameters."
      )
    if parts != 1:
      raise ValueError(
        "`state` of on_overflow='carry' must keep one residual of leaf"
        f" {name!r} on each of {context.devices} devices, got {parts}, as of"
        f" {parts * context.devices} devices; call"
        " `zenjax.from_checkpoint(state, mesh,"
        " axis_name)`, and give `zenjax.state_specs(state, axis_name)` to"
        " shard_map."
      )


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
