"""`sharded_optimizer`: owners of rows update them, and hold the state alone."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import Capacities
from zenjax._src.core.arguments import Kernels
from zenjax._src.core.arguments import Partition
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import by_rows
from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_program
from zenjax._src.rows import sharded_tables
from zenjax._src.rows.sharded_tables import is_sharded
from zenjax._src.rows.sharded_tables import NewValue
from zenjax._src.rows.sharded_tables import ShardedTable
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes import base
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import chains
from zenjax._src.sync import exchange
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import owner_rows
from zenjax._src.sync import processes
from zenjax._src.sync import sync_options
from zenjax._src.sync import sync_state
from zenjax._src.sync import whole_batch
from zenjax._src.sync.sync_options import Options

# The transformation of `sharded_optimizer`, and its state.


class ShardedOptimizerState(NamedTuple):
  """State of `sharded_optimizer`.

  Attributes:
    sync: Statistics, as of `zen_sync`.
    inner: Of the optimizer within, with `Owned` parts of tables.
    owners: What these parts were made for: devices, hash and columns. None
      where nothing is kept of tables.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx = zenjax.sharded_optimizer(optax.adam(1e-3), "data")
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> params = {"table": jnp.zeros((600, 32))}
    >>> state = zenjax.init_state(tx, params, mesh, "data")
    >>> int(state.sync.step), sorted(state.sync.leaves)
    (0, ['table'])
  """

  sync: sync_state.ZenSyncState
  inner: Any
  owners: Any  # a `Holding`, or None


@dataclasses.dataclass(frozen=True)
class Owners:
  """Devices that each update the rows that they sum."""

  inner: optax.GradientTransformationExtraArgs
  options: Options
  op: str | None = None  # as it was given
  mesh: Any = None
  # Leaves whose gradients XLA has summed.
  summed: frozenset[str] = frozenset()

  @functools.cached_property
  def _programs(self) -> by_rows.Programs:
    return by_rows.Programs(self.inner)

  def init(self, params: Any) -> ShardedOptimizerState:
    mesh = collectives.mesh_around(self.options.axes, params, self.mesh)
    if mesh is not None:
      return self._init_on(mesh, params)
    for axis in self.options.axes:
      try:
        lax.axis_size(axis)
      except NameError as error:
        raise ValueError(
          "`sharded_optimizer` keeps a part of the state on each device, so it"
          " must"
          f" be made where its axis {axis!r} is bound or a mesh has it; call"
          " `zenjax.init_state(tx, params, mesh, axis_name)` instead of"
          " `tx.init`,"
          " with one axis_name for both, or in plain jit give `mesh=`."
        ) from error
    chains.will_sync("sharded_optimizer", params, self.options)
    make = lambda params: self.inner.init(params)
    by_rows.require_no_accumulation(jax.eval_shape(make, params), "tx")
    context = gradient_tree.context_of(self.options)
    sharded = _sharded_in(params)
    axis, devices = self._owner_axis(sharded, context)
    if sharded:
      self._require_usual()
    chosen = self._chosen(params, sharded)
    leaf_util.warn_of_none(params, self.options.sparse, chosen, "sparse")
    plans, partition = self._plans(params, chosen, sharded, context, {})
    rows: tuple[int | None, ...] = ()
    if plans:
      program = self._program_of(params, chosen, sharded)
      rows = program.state_rows
      names = [name for name, _ in leaf_util.named_leaves(params)]
      by_rows.warn_of_decay(program, names, plans)
    leaves, structure = jax.tree.flatten(params)
    empty = list(leaves)
    for i, plan in plans.items():
      if i not in sharded:
        slots = jnp.arange(plan.layout.slots, dtype=jnp.int32)
        table = leaf_util.as_table(leaves[i], self.options.unit)
        table = gradient_tree.as_varying(table, context.axes)
        leaves[i] = owner_rows.own_rows(table, slots, plan, axis)
      # A column more tells which dimensions are columns.
      wider = plan.layout.slots, plan.block_width + 1
      empty[i] = jnp.zeros(wider, plan.table.dtype)
    inner = self.inner.init(structure.unflatten(leaves))
    inner = self._wrapped(inner, plans, rows, context)
    empty = self.inner.init(structure.unflatten(empty))
    owners = self._holding(inner, empty, plans, rows, partition, devices)
    owners = gradient_tree.as_varying(owners, context.axes)
    known: Any = dict(mean=context.mean, devices=context.devices)
    if sharded:
      new = sync_state.empty_table(**known)
      own = gradient_tree.as_varying(new.updated, context.axes)
      new = new._replace(updated=own)
    else:
      new = sync_state.empty_leaf(mean=context.mean)
    memory = dict.fromkeys([p.table.name for p in plans.values()], new)
    sync = sync_state.empty(memory)
    return ShardedOptimizerState(sync, inner, owners)

  def update(
    self, updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, ShardedOptimizerState]:
    mesh = collectives.mesh_around(self.options.axes, updates, self.mesh)
    if mesh is not None:
      return self._update_on(mesh, updates, state, params, extra)
    options, context = self.options, gradient_tree.context_of(self.options)
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    leaves = gradient_tree.local_leaves(updates, context)
    names = [name for name, _ in leaves]
    sharded = _sharded_in(updates)
    axis, devices = self._owner_axis(sharded, context)
    chosen = self._chosen(updates, sharded)
    gradient_tree.check_state(leaves, chosen, state.sync)
    _check_tables([names[i] for i in sharded], state.sync)
    tuned = dict(state.sync.tuned)
    plans, _ = self._plans(updates, chosen, sharded, context, tuned)
    owner_rows.require(state.owners, plans.values(), devices)
    dense = dataclasses.replace(options, output="dense")
    whole = {
      i: leaf
      for i, (name, leaf) in enumerate(leaves)
      if i not in plans and name not in self.summed
    }
    summed = gradient_tree.totals(whole, dense, context)
    grads = [summed.get(i, leaf) for i, (_, leaf) in enumerate(leaves)]
    program = self._program_of(updates, chosen, sharded, params, state, extra)
    owner = owner_rows.Owner(
      inner=self.inner,
      program=program,
      structure=structure,
      plans=plans,
      grads=grads,
      params=self._tables(params, structure, plans, sharded),
      extra=extra,
      axis=axis,
      scaled=context.scaled,
      sharded=frozenset(sharded),
    )
    inner = owner_rows.unwrapped(state.inner)
    out, sync = [None] * len(leaves), state.sync
    tables: dict[int, Any] = {}
    if sharded:
      tables, inner, sync, owner = self._deliver(
        leaves, owner, inner, state.sync, sharded, context
      )
    elif plans:
      tables, inner, sync, owner = self._exchange(
        leaves, owner, inner, state.sync, context
      )
      for i, value in tables.items():
        out[i] = value
    rest, inner = owner.finish(inner)
    out = [rest[i] if i not in plans else x for i, x in enumerate(out)]
    by = "sharded_optimizer"
    step = processes.compared(sync.step + 1, by, options, updates, sync.tuned)
    sync = sync.replace(step=step)
    for i in sharded:
      out[i] = NewValue(tables[i])
    inner = self._wrapped(inner, plans, program.state_rows, context)
    new = ShardedOptimizerState(sync, inner, state.owners)
    return structure.unflatten(out), new

  def _init_on(self, mesh, params):
    """The state where XLA spreads the program over `mesh`."""
    _require_whole(params)
    axes, make = self.options.axes, self.init
    for axis in reversed(axes):
      make = jax.vmap(
        make, in_axes=None, axis_name=axis, axis_size=mesh.shape[axis]
      )
    local = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[len(axes) :], x.dtype),
      jax.eval_shape(make, sharded_tables.types_of_part(params)),
    )
    # Owners lie along the last axis; along others they have copies.
    specs = _specs(local, axes[-1])
    given = sharded_tables.specs(params, PartitionSpec(axes[-1]))
    made = whole_batch.mapped(self.init, mesh, axes, (given,), specs)
    return jax.jit(made)(params)

  def _update_on(self, mesh, updates, state, params, extra):
    """The update of a whole batch's gradients."""
    if self.op == "mean":
      raise ValueError(whole_batch.NO_MEAN)
    _require_whole(params)
    parts = whole_batch.parts_of(updates, mesh, self.options)
    of_arrays = frozenset(
      [name for (name, _), mine in zip(parts.named, parts.mine) if not mine]
    )
    sharded = _sharded_in(updates)
    if (sent := sorted(parts.sparse & of_arrays)) and not sharded:
      raise ValueError(
        "`updates` must hold SparseRows or unreduced arrays for leaves that"
        f" travel sparse, and XLA has summed {sent} already; give gradients of"
        " `zenjax.value_and_grad`, or leave these out by `sparse=`."
      )
    options = dataclasses.replace(
      self.options, mean=False, sparse=lambda name, _: name in parts.sparse
    )
    owners = dataclasses.replace(self, options=options, summed=of_arrays)
    axis = self.options.axes[-1]
    devices = mesh.shape[axis]
    for key, tables in state.owners.tables.items() if state.owners else ():
      # Or shard_map says that nothing divides.
      if key == owner_rows.IN_ROWS:
        raise ValueError(owner_rows.in_rows_message("state"))
      if tables.shape[0] != devices:
        by, had = "sharded_optimizer", tables.shape[0]
        raise ValueError(owner_rows.others_message("state", by, had, devices))
    for table in sync_state.tables(state.sync).values():
      if (had := table.updated.part.shape[0]) != devices:
        by = "sharded_optimizer"
        raise ValueError(owner_rows.others_message("state", by, had, devices))

    def step(given, summed, state, params):
      grads = parts.tree(given, summed)
      return owners.update(grads, state, params, **extra)

    everywhere = PartitionSpec()
    specs = _specs(state, axis)
    # Rows of a leaf that does not travel sparse come out as an array.
    unreduced = [x for x, mine in zip(parts.named, parts.mine) if mine]
    synced = [
      jax.tree.leaves(lies.synced)[-1]
      if is_rows(x) and not is_sharded(x) and name not in parts.sparse
      else lies.synced
      for (name, x), lies in zip(unreduced, parts.lie)
    ]
    out = parts.tree(synced, [everywhere] * len(of_arrays))
    for_new = lambda node: node.with_value(PartitionSpec(axis))
    out = jax.tree.map(
      lambda node: for_new(node) if is_sharded(node) else node,
      out,
      is_leaf=is_sharded,
    )
    given = [x.given for x in parts.lie]
    tables = sharded_tables.specs(params, PartitionSpec(axis))
    return whole_batch.mapped(
      step,
      mesh,
      self.options.axes,
      (given, everywhere, specs, tables),
      (out, specs),
    )(parts.given, parts.summed, state, params)

  def _owner_axis(self, sharded, context):
    """Returns the axis along which owners lie, and how many there are."""
    axes = self.options.axes
    for node in sharded.values():
      if node.batch_axes != axes:
        raise ValueError(
          "`axis_name` of sharded_optimizer must name the axes over which a"
          " batch of"
          " sharded tables is split: `replicas` of `zenjax.tables.shard`, then"
          f" its `axis_name`, here {node.batch_axes!r}, got {axes!r}."
        )
    if not sharded and len(axes) > 1:
      raise ValueError(
        "`axis_name` must be one axis for sharded_optimizer where tables are"
        " whole"
        f" on every device, got {axes!r}; give the axis of the fastest links,"
        " and average over the others before, use `zen_sync` and `lazy_rows`,"
        " or shard tables by `zenjax.tables.shard(.., replicas=)`."
      )
    return context.axes[-1], context.sizes[-1]

  def _tables(self, params, structure, plans, sharded):
    """Leaves, those that travel sparse as `[R, D]`, of parts `[S, D]`."""
    if params is None:
      if sharded:
        raise ValueError(
          "`params` must be given to `update` of sharded_optimizer where"
          " tables are"
          " sharded: it returns what they are after the step."
        )
      return None
    leaves = structure.flatten_up_to(params)
    return [
      leaf_util.as_table(x, self.options.unit)
      if i in plans and i not in sharded
      else x
      for i, x in enumerate(leaves)
    ]

  def _require_usual(self):
    """Raises ValueError for options that sharded tables know nothing of."""
    options = self.options
    given = dict(
      sparse=options.sparse is not None,
      partition=options.partition != "hash",
      capacities=bool(options.capacities),
      wire_dtype=options.wire_dtype is not None,
      hash_seed=bool(options.hash_seed),
      kernels=options.kernels == "pallas",
    )
    if wrong := [f"`{name}`" for name, is_given in given.items() if is_given]:
      raise ValueError(
        f"{', '.join(wrong)} of sharded_optimizer must be left out where"
        " tables are"
        " sharded: `zenjax.tables.shard` decided who owns which row, rows"
        " travel"
        " in their own dtype, buffers are as large as the batch needs, and"
        " there are no kernels for them."
      )

  def _chosen(self, tree, sharded):
    """Which leaves have owners; with sharded tables these alone.

    Raises:
      ValueError: Of a large table that is not sharded there are SparseRows.
    """
    if not sharded:
      return leaf_util.select(tree, self.options.sparse, self.options.unit)
    named = leaf_util.named_leaves(tree, is_rows)
    for i, (name, leaf) in enumerate(named):
      if is_rows(leaf) and i not in sharded and leaf_util.is_table(leaf):
        raise ValueError(
          "`params` of sharded_optimizer must have all large tables sharded or"
          " none,"
          f" and leaf {name!r}, of which there are SparseRows, is whole on"
          " every device; choose it by `tables=` of `zenjax.tables.shard`, have"
          " its gradient as an array by `tables=` of `zenjax.value_and_grad`,"
          " or give it another transformation by `optax.partition`."
        )
    return [i in sharded for i in range(len(named))]

  def _deliver(self, leaves, owner, inner, sync, sharded, context):
    """Sharded tables after a step, by the leaf's number, state, statistics."""
    nodes, grads = list(sharded.values()), [leaves[i][1] for i in sharded]
    most = [x[0] for x in _lookups(grads)]
    unknown = any(x is None for x in most)
    with jax.named_scope("zenjax/push"):
      push = sharded_tables.Push.of(
        nodes, grads, None if unknown else jnp.stack(most)
      )
      sums = push.first()

    def more(sums):
      # A push changes nothing that it reads: XLA may not run it before.
      starts = lax.optimization_barrier(sums.starts)
      return push.next(starts)

    for level in range(owner.depth):

      def turn(flow, level=level, owner=owner):
        parts, sums = flow
        sums = more(sums)
        held = owner_rows.pushed(sums)
        return owner.reduced(level, parts, held, inner), sums

      held = owner_rows.pushed(sums)
      parts = owner.reduced(level, owner.nothing(level), held, inner)
      parts, _ = lax.while_loop(
        lambda flow: push.unsent(flow[1].starts), turn, (parts, sums)
      )
      owner = owner.agreed(parts)

    def step(flow):
      _, sums, inner, tables, rounds, updated = flow
      inner, tables = owner.on_own_tables(sums, inner, tables)
      unsent = push.unsent(sums.starts)
      updated = updated + push.count(sums)
      sums = lax.cond(unsent, more, lambda sums: sums, sums)
      return unsent, sums, inner, tables, rounds + 1, updated

    tables = {i: owner.params[i] for i in sharded}
    none = jnp.zeros_like(push.count(sums))
    first = jnp.ones((), bool), sums, inner, tables, jnp.int32(0), none
    with jax.named_scope("zenjax/owners"):
      flow = lax.while_loop(lambda flow: flow[0], step, first)
    *_, inner, tables, rounds, updated = flow
    # For each value of all rows, what does not fit was sent once more.
    exchanges = 1 + (rounds - 1) * (1 + owner.depth)
    plans = owner.plans.values()
    last = _last_of_tables(push, plans, grads, rounds, exchanges, context)
    memory = {}
    for k, (i, plan) in enumerate(owner.plans.items()):
      sizes = sync_state.Sizes(
        num_rows=plan.table.num_rows,
        width=plan.table.width,
        devices=context.devices,
        row_groups=plan.layout.groups,
        column_groups=1,
        push=push.largest[k],
        pull=0,
        mean=int(context.mean),
        scheme=0,
      )
      memory[leaves[i][0]] = sync_state.TableState(
        sizes=jnp.array(sizes, jnp.int32),
        last=last[k],
        updated=owner_rows.Owned(updated[k : k + 1].astype(jnp.float32)),
      )
    return tables, inner, sync.replace(leaves=memory), owner

  def _exchange(self, leaves, owner, inner, sync, context):
    """Updates of tables by the leaf's number, the state, statistics."""
    plans, scheme = owner.plans, SPARSE["zen"]
    if owner.depth:
      raise ValueError(
        "`tx` of sharded_optimizer needs values of all rows, such as a norm,"
        " before it can update one, and owners update rows as they come; clip"
        " by `zenjax.zen_sync(..)` and `zenjax.lazy_rows(..)` instead."
      )
    entered = []
    for i, plan in plans.items():
      rows = leaf_util.as_table(leaves[i][1], self.options.unit)
      entered.append(exchange.Local(plan, [rows]))
    sums = dataclasses.replace(context, mean=False)
    found, inner = exchange.exchange(
      entered, scheme, sums, owner=owner, owned=inner
    )
    tables, memory = {}, dict(sync.leaves)
    for i, table in zip(plans, found):
      name = table.plan.table.name
      (rows,) = table.rows
      tables[i] = gradient_tree.as_asked(rows, leaves[i][1], self.options)
      (memory[name],) = sync_state.after_step(
        [memory[name]], sync.step, table.counts, table.plan, scheme, context
      )
    return tables, inner, sync.replace(leaves=memory), owner

  def _plans(self, tree, chosen, sharded, context, tuned):
    """Returns sizes of the leaves that travel sparse, by number, and owners.

    Owners are those of arrays, whatever form gradients have: the state is laid
    out by them.
    """
    named = leaf_util.named_leaves(tree, is_rows)
    at = [i for i, sparse in enumerate(chosen) if sparse]
    if not at:
      return {}, "hash"
    if sharded:
      return self._plans_of(sharded, named), owner_rows.SHARDED
    by_columns = self._program_of(tree, chosen, {}).splits_columns
    if not by_columns:
      self._require_tables([named[i] for i in at])
    if not by_columns and self.options.partition != "hash":
      raise ValueError(
        "`partition` must be 'hash' where `tx` needs whole rows, as"
        f" rowwise_adagrad does, got {self.options.partition!r}."
      )
    wanted = self.options.partition if by_columns else "hash"
    groups = buffer_sizes.column_groups_of(wanted, context.sizes[-1])
    group = [named[i] for i in at]
    tables = [leaf_tables.table_of(*one, self.options) for one in group]
    choices = leaf_tables.choose(tables, self.options, tuned, context)
    choices = [
      choice._replace(scheme="zen", column_groups=groups) for choice in choices
    ]
    plans = leaf_tables.plans(
      tables, choices, SPARSE["zen"], self.options, context, owners=True
    )
    return dict(zip(at, plans)), wanted

  def _plans_of(self, sharded, named):
    """Sizes of sharded tables, whose owners these say themselves."""
    found = {}
    for i, node in sharded.items():
      name, leaf = named[i]
      shape: Any = jax.ShapeDtypeStruct(node.table_shape, leaf.dtype)
      given = leaf if is_rows(leaf) else shape
      table = leaf_tables.table_of(name, given, self.options)
      found[i] = owner_rows.plan_of_sharded(
        table, node.devices, node.seed, node.first_word
      )
    return found

  def _require_tables(self, named):
    """Refuses leaves that `tx` sees in another shape, if that matters to it."""
    for name, leaf in named:
      if leaf.ndim != 2 or self.options.unit != "row":
        raise ValueError(
          "`tx` of sharded_optimizer must update single elements, or leaves of"
          " two"
          f" dimensions by rows: it takes rows of leaf {name!r} together, which"
          f" has shape {leaf.shape}; leave that leaf out by `sparse=`."
        )

  def _program_of(
    self, tree, chosen, sharded, params=None, state=None, extra=None
  ):
    """The update of whole tables; without a state, as for a first step.

    Raises:
      ValueError: It does not update tables by rows.
    """
    types = self._table_types(tree, chosen, sharded)
    if params is not None:
      params = self._table_types(params, chosen, sharded)
    make = lambda params: self.inner.init(params)
    whole = jax.eval_shape(make, types if params is None else params)
    if state is not None:
      own = jax.tree.leaves(owner_rows.unwrapped(state.inner))
      leaves, structure = jax.tree.flatten(whole)
      whole = structure.unflatten(
        [
          row_program.type_of(x).update(shape=w.shape)
          for x, w in zip(own, leaves)
        ]
      )
    given = types if state is None else params
    try:
      program = self._programs.of(types, whole, given, extra or {}, chosen)
    except NameError as error:
      raise ValueError(
        f"`tx` must not synchronize devices, but it wants an axis of them"
        f" ({error}); sharded_optimizer is in the place of zen_sync."
      ) from error
    names = [name for name, _ in leaf_util.named_leaves(tree, is_rows)]
    by_rows.require(program, names, "tx", by_rows.REMEDY)
    return program

  def _table_types(self, tree, chosen, sharded):
    """Types of leaves; of those that travel sparse as `[R, D]`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_rows)
    found = []
    for i, (leaf, is_table) in enumerate(zip(leaves, chosen)):
      kind = row_program.type_of(leaf)
      if i in sharded:
        kind = kind.update(shape=sharded[i].table_shape)
      elif is_table:
        shape = leaf_util.table_shape(kind, self.options.unit)
        kind = kind.update(shape=shape)
      found.append(kind)
    return structure.unflatten(found)

  def _wrapped(self, inner, plans, rows, context):
    """The state with what has rows of a table marked as a part.

    `rows` says of each leaf whose these are, as `RowProgram.state_rows`.
    """
    if not plans:
      return inner
    leaves, structure = jax.tree.flatten(inner)
    own = lambda x: owner_rows.Owned(gradient_tree.as_varying(x, context.axes))
    return structure.unflatten(
      [x if of is None else own(x) for x, of in zip(leaves, rows, strict=True)]
    )

  def _holding(self, inner, empty, plans, rows, partition, devices):
    """Describes the owners of a new state's parts; None where it has none.

    `empty` is of tables of zeros that have a column more.
    """
    if not plans:
      return None
    number = {None: -1} | dict(zip(plans, range(len(plans))))
    structure = jax.tree.structure(owner_rows.unwrapped(inner))
    tables = structure.unflatten([number[of] for of in rows])
    if jax.tree.structure(empty) != structure:
      raise ValueError(
        "`tx` must keep the same of a table whatever its shape, as owners of"
        " more devices have less of it, but with a column more it keeps other"
        " arrays; choose leaves by their names, not by shapes, as in"
        " `optax.masked` and `optax.multi_transform`."
      )
    nodes, parted = jax.tree.flatten(inner, is_leaf=owner_rows.is_owned)
    each = zip(nodes, parted.flatten_up_to(tables), parted.flatten_up_to(empty))
    parts = [one for one in each if owner_rows.is_owned(one[0])]
    if not parts:
      return None
    lies = [
      owner_rows.Lies(table, int(node.part.shape[1:2] != fill.shape[1:2]))
      for node, table, fill in parts
    ]
    padding = [fill.reshape(-1)[0].astype(jnp.float32) for *_, fill in parts]
    facts = [owner_rows.facts_of(p, devices, partition) for p in plans.values()]
    facts = jnp.asarray(np.array([facts], np.uint32))
    return owner_rows.Holding(
      tables={owner_rows.key_of(plans.values(), devices): facts},
      leaves=jnp.asarray(np.array([lies], np.uint32)),
      padding=jnp.stack(padding)[None],
    )


def _sharded_in(tree: Any) -> dict[int, ShardedTable]:
  """The tables of which devices have parts, by the number of the leaf."""
  either = lambda x: is_rows(x) or is_sharded(x)
  leaves = jax.tree.leaves(tree, is_leaf=either)
  return {i: x for i, x in enumerate(leaves) if is_sharded(x)}


def _check_tables(names: Sequence[str], sync: Any) -> None:
  """Raises ValueError where a state is of whole tables, or not split."""
  tables = sync_state.tables(sync)
  if sorted(tables) != sorted(names):
    raise ValueError(
      "`state` of sharded_optimizer must be made for the tables that are"
      " sharded,"
      f" {sorted(names)}, got one where these are {sorted(tables)}; shard"
      " tables before `zenjax.init_state`."
    )
  for name, table in tables.items():
    if (size := table.updated.part.shape[0]) != 1:
      raise ValueError(
        "`state` of sharded_optimizer must be split over devices, got counts of"
        f" {size} owners of {name!r} on each; give `zenjax.state_specs(state,"
        " axis_name)` to shard_map."
      )


def _lookups(grads: Sequence[Any]) -> list[tuple[Any, Any]]:
  """Returns what fetching rows has shown; gradients made anew do not know."""
  return [grad.lookups or (None, None) for grad in grads]


def _last_of_tables(push, plans, grads, rounds, exchanges, context):
  """The numbers of a step of each table, `[T, len(LastOfTable)]`."""
  fetched = push.fetched([x[1] for x in _lookups(grads)])
  dense = [base.dense_bytes(x.table, context.devices) for x in plans]
  last = sync_state.LastOfTable(
    local_rows=fetched.rows,
    push_need=push.most,
    rounds=jnp.broadcast_to(rounds, len(dense)),
    fetch_rounds=fetched.rounds,
    overflow_rows=fetched.beyond,
    room=push.room,
    wire_bytes=fetched.wire_bytes + push.wire_bytes(exchanges),
    dense_bytes=jnp.array(dense, jnp.float32),
  )
  return jnp.stack([x.astype(jnp.float32) for x in last], axis=-1)


def _specs(state: Any, axis: str) -> Any:
  """Specs of a state, of which devices along `axis` have parts."""
  own = owner_rows.Owned | owner_rows.Holding
  is_own = lambda node: isinstance(node, own)

  def spec(node):
    split = PartitionSpec(axis) if is_own(node) else PartitionSpec()
    return jax.tree.map(lambda _: split, node)

  return jax.tree.map(spec, state, is_leaf=is_own)


def _require_whole(params: Any) -> None:
  """Raises where a type says that a parameter is spread over devices."""
  for name, leaf in leaf_util.named_leaves(params, is_sharded):
    if not is_sharded(leaf) and any(compat.explicit_spec(leaf)):
      raise ValueError(
        "`params` must lie whole on every device for sharded_optimizer, and"
        " leaf"
        f" {name!r} is spread by {jax.typeof(leaf).sharding.spec}; give that"
        " leaf another transformation by `optax.partition`."
      )


def sharded_optimizer(
  tx: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  sparse: SparseSpec = None,
  op: str | None = None,
  partition: Partition = "hash",
  wire_dtype: Any = None,
  capacities: Capacities = None,
  mesh: Any = None,
  kernels: Kernels = "auto",
  hash_seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Synchronizes gradients and runs `tx` at the owner of each row.

  In the place of `chain(zen_sync(axis_name), lazy_rows(tx))`. There every
  device gets all sums and updates all of them, with a state of its own of every
  table. Here the owner of a row, who sums its gradients, also updates it, and
  sends the update back in the place of the sum: as many bytes, an n-th of the
  optimizer's work and of its memory on each of `n` devices, as in ZeRO. Losses
  are the same. Leaves that do not travel sparse take `pmean` and `tx` on every
  device. A zen_sync of the same axis before it would be a second:
  `zenjax.init_state` refuses that.

  In plain `jit` over a mesh it takes what `zen_sync` takes there, sums it, and
  wants parameters whole on every device; those that are not, as of FSDP, go to
  another transformation by `optax.partition`. There `tx.init` makes the state,
  given a mesh by `jax.set_mesh`, by parameters that lie on it, or by `mesh=`.

  The state differs between devices: make it with `zenjax.init_state`, and
  place it by `zenjax.state_specs`. It says for which owners it was made, and a
  step refuses it where rows have others; `zenjax.from_checkpoint` moves it to
  another number of devices, and to the form to save, in the order of rows.
  Rows that no device touched keep state and parameters, as in `lazy_rows`.

  Args:
    tx: What updates a row by that row's gradient, state and parameters, and
      by values of all gradients, as for `lazy_rows`. For such values, a norm
      say, owners reduce the rows of every push before the first is updated, and
      exchange the results: one small collective for each norm that needs
      another, and pushes of a further round are sent once more.
    axis_name: One axis that devices are mapped over. Of sharded tables with
      `replicas` all axes of the batch, slowest first, owners along the last.
    sparse: As for `zen_sync`, like all that follow.
    op: See there.
    partition: See there. Optimizers that mix the columns of a row, such as
      `rowwise_adagrad`, need whole rows, and `"hash"`.
    wire_dtype: See there; updates are cast too.
    capacities: See there.
    mesh: See there.
    kernels: See there.
    hash_seed: See there.

  Returns:
    A transformation from local gradients, arrays or SparseRows, to updates that
    are equal on all devices, for `zenjax.apply_updates`.

  Raises:
    ValueError: An argument is out of range; `axis_name` is more than one axis,
      or not those of sharded tables; `tx` updates rows by others (see
      `lazy_rows`), accumulates gradients (`optax.MultiSteps`), needs whole rows
      with a `partition` by columns or of a leaf that has not two dimensions;
      the state was not made by `zenjax.init_state`, or for other owners.
    NotImplementedError: `kernels="pallas"` cannot serve what it was
      given, see `zen_sync`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> adagrad = optax.adagrad(1.0, initial_accumulator_value=0.0)
    >>> tx = zenjax.sharded_optimizer(adagrad, "data", sparse=True)
    >>> table = jnp.zeros((1000, 8))
    >>> opt_state = zenjax.init_state(tx, table, mesh, "data")
    >>> squares = opt_state.inner[0].sum_of_squares.part
    >>> squares.addressable_shards[0].data.size, table.size  # half, padded
    (4096, 8000)
    >>> def step(state, ids):
    ...   table, opt_state = state
    ...   loss, grads = zenjax.value_and_grad(lambda t: t[ids].sum())(table)
    ...   updates, opt_state = tx.update(grads, opt_state, table)
    ...   return (zenjax.apply_updates(table, updates), opt_state), loss
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> ids = jnp.array([3, 3, 5, 9])
    >>> (table, opt_state), _ = step((table, opt_state), ids)
    >>> table[jnp.array([3, 4, 5]), 0].round(3).tolist()
    [-1.0, 0.0, -1.0]

  References:
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", SC 2020, stage 1.
  """
  options = sync_options.check(
    axis_name,
    sparse=sparse,
    op=op,
    partition=partition,
    wire_dtype=wire_dtype,
    capacities=capacities,
    mesh=mesh,
    kernels=kernels,
    hash_seed=hash_seed,
  )
  owners = Owners(optax.with_extra_args_support(tx), options, op, mesh)
  return optax.GradientTransformationExtraArgs(owners.init, owners.update)
